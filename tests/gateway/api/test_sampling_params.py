"""One validation for HTTP and Python: every bad value is refused by name."""

from __future__ import annotations

import pytest

from baton.protocol.messages.requests import TO_ENGINE, Submit
from baton.protocol.params.sampling import LogitBias
from baton.protocol.params.sampling_params import (
    InvalidParameter,
    SamplingParams,
    make_params,
    resolve,
)
from baton.protocol.rules.seeds import choice_seed


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.max_tokens) == (1, 1.0, 1.0, 16)
    assert params.stop == ()
    assert params.stop_token_ids == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 1.5),
        ("n", 129),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", True),
        pytest.param("temperature", 10**400, id="temperature-huge"),
        ("temperature", 1e39),  # (infinite in the float32 of the sampler)
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 2.0),
        ("min_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-46),  # (0 in float32)
        ("repetition_penalty", 1e39),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {5: 101}),
        ("logit_bias", {5: 1.0, 6: float("nan")}),
        ("logit_bias", {-5: 1}),
        ("logit_bias", [1]),
        ("stop", ""),
        ("stop", ["x", ""]),
        ("stop", [1]),
        ("stop", 7),
        ("stop", ["x"] * 65),
        ("stop", "x" * 4097),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 3),
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("seed", 1 << 64),
        ("seed", 0.5),
        ("logprobs", -2),
        ("logprobs", 1 << 31),
        ("prompt_logprobs", -2),
        ("ignore_eos", 1),
        ("skip_special_tokens", "no"),
    ],
)
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(InvalidParameter, match=f"^{field}: ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    with pytest.raises(ValueError, match=field):
        SamplingParams().replace(**{field: value})


def test_stop_needs_text():
    with pytest.raises(InvalidParameter, match=r"^stop: needs text"):
        SamplingParams(stop="x", detokenize=False)


def test_what_was_given_overrides_the_models_defaults():
    defaults = {"temperature": 0.6, "top_k": 20, "pad_token_id": 0, "top_p": None}
    params = make_params(defaults, {"top_k": 5, "seed": None})
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 5, 1.0, 16)
    assert make_params({}, {}, max_tokens=None).max_tokens is None
    assert make_params({"max_tokens": 9}, {}, max_tokens=None).max_tokens == 9
    with pytest.raises(InvalidParameter, match=r"^best_of: "):
        make_params({}, {"best_of": 2})


def wire(params, **changes):
    settings = {"seed": 5, "room": 100, "eos_token_ids": (2, 7), "vocab_size": 50, **changes}
    return resolve(params, **settings)


def test_the_wire_has_every_default_resolved():
    params = SamplingParams(top_k=-1, stop_token_ids=[9], max_tokens=None, logit_bias={"3": -1}, min_tokens=2)
    sampling, stopping = wire(params)
    assert (sampling.seed, sampling.top_k, sampling.logit_bias) == (5, 0, LogitBias.of({3: -1.0}))
    assert (stopping.max_tokens, stopping.min_tokens, stopping.stop_token_ids) == (100, 2, (2, 7, 9))
    assert wire(SamplingParams(ignore_eos=True))[1].stop_token_ids == ()
    assert wire(SamplingParams(max_tokens=500, min_tokens=300))[1].max_tokens == 100
    assert wire(SamplingParams(max_tokens=500, min_tokens=300))[1].min_tokens == 100


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
def test_ids_outside_the_vocabulary_are_refused(field):
    value = [50] if field == "stop_token_ids" else {50: 1}
    with pytest.raises(InvalidParameter, match=f"^{field}: token id 50"):
        wire(SamplingParams(**{field: value}))


def test_any_seed_fits_the_wire():
    for seed in (-(1 << 63), -1, 0, (1 << 64) - 1):
        sampling, stopping = wire(SamplingParams(), seed=choice_seed(seed, 0))
        submit = Submit(1, "r", b"\0\0\0\0", sampling, stopping)
        assert TO_ENGINE.decode(TO_ENGINE.encode(submit)) == submit
        assert 0 <= sampling.seed < 1 << 64


def test_choices_have_seeds_of_their_own():
    assert choice_seed(42, 0) == 42
    seeds = {choice_seed(seed, choice) for seed in range(20) for choice in range(20)}
    assert len(seeds) == 400
