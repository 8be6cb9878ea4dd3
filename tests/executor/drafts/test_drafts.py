"""Answers with drafts are those without, bit for bit, on every CPU backend and in every form of numbers.

Requests are greedy, drawn, penalized, bound to a grammar, wish for log-probabilities or routes, stop at
tokens, or want a vector or labels of their prompt and no token; they run together, are preempted and lack
blocks.  BATON_DRAFTS=1000 tries so many groups of each.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from baton.executor.base import Int32Array
from baton.executor.torch_executor import TorchExecutor
from baton.grammar.checking import Checker
from baton.grammar.compiled import Grammars, Promise
from baton.grammar.description import Regex, Structure
from baton.grammar.masks import Masks, Ready
from baton.grammar.vocabulary import Vocabulary
from baton.model.cpu.sampling import sampling_kernel
from baton.model.layers.int8 import why_not_int8
from baton.protocol.codec import pack_int32
from baton.protocol.config import Speculation
from baton.protocol.params.pooling import Pooling
from baton.protocol.params.sampling import Constraint, LogitBias, Sampling, Stopping
from tests.executor.serving import Request, Serving, plant
from tests.executor.test_torch_parity import config_for
from tests.model.checkpoints import VOCAB, make_checkpoint
from tests.model.cuts import BACKENDS, backend

FORMS = (("float32", None), ("bfloat16", None), ("bfloat16", "int8"), ("bfloat16", "kv int8"))
SHAPES = {
    "groups": ("llama3", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "windows": ("qwen2-window", {"sliding_window": 24}),
    "sinks": ("gpt-oss", {"sliding_window": 24, "num_local_experts": 4}),
}
LONGEST = 160
ROUNDS = int(os.environ.get("BATON_DRAFTS", "0"))
SPECIAL = {"</s>": 1}
KINDS = ("plain", "plain", "penalties", "bias", "grammar", "pooled")
POOLINGS = (Pooling("last"), Pooling("mean"), Pooling("first"), Pooling("labels", labels=(17, 5, 190)))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, (variant, changes) in SHAPES.items():
        found[name] = tmp_path_factory.mktemp(name)
        make_checkpoint(found[name], variant, num_hidden_layers=2, **changes)
        tokens = [bytes([number]) for number in range(VOCAB)]
        (found[name] / "vocabulary").write_bytes(Vocabulary(tokens, SPECIAL).encode())
    return found


def wishes(chance: random.Random, routes: bool, kinds: tuple[str, ...] = KINDS) -> list[Request]:
    made = []
    for _ in range(chance.randrange(1, 7)):
        prompt = [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 60))]
        most = chance.randrange(1, 40)
        extra: dict = {}
        stops = tuple(chance.sample(range(VOCAB), chance.choice((0, 0, 3, 12))))
        kind = chance.choice(kinds)
        if kind == "pooled":
            sampling = Sampling(0, 0.0, pooling=chance.choice(POOLINGS))
            made.append(Request(prompt, sampling, Stopping(1)))
            continue
        if kind == "penalties":
            extra = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}
        elif kind == "bias":
            extra = {
                "logit_bias": LogitBias.of({5: 3.0, 9: -4.0}),
                "bad_words": (pack_int32([5, 5]), pack_int32([7])),
                "allowed": pack_int32(sorted({*chance.sample(range(VOCAB), 60), 5, 7})),
            }
        elif kind == "grammar":
            pattern = chance.choice(("[a-f]+", "(ab|cd|x[0-9]{3})+", "[A-Z]{4}-[0-9]{1,9}"))
            extra = {"constraint": Constraint(Checker(SPECIAL).check(Structure(Regex(pattern))))}
            stops = (1,)
        drawn = {"temperature": 0.8, "top_p": 0.9} if chance.random() < 0.5 else {"temperature": 0.0}
        sampling = Sampling(
            chance.getrandbits(60),
            logprobs=chance.choice((None, None, 0, 3)),
            routes_from=chance.choice((None, 0, 9)) if routes and len(prompt) > 9 else None,
            **drawn,
            **extra,
        )
        least = 0 if kind == "grammar" else min(chance.choice((0, 0, 5)), most)
        made.append(Request(prompt, sampling, Stopping(most, least, stops)))
    return made


def check(
    directory: Path,
    form: tuple[str, str | None],
    seed: int,
    rounds: int,
    routes: bool,
    kinds: tuple[str, ...] = KINDS,
) -> list[int]:
    """Returns how many drafts there were, how many of them were right, and how many steps had both drafts and
    prompts that want a vector or labels."""
    dtype, quantization = form
    drafts = right = mixed = 0
    executor = TorchExecutor.from_config(
        config_for(
            directory,
            dtype=dtype,
            quantization="int8" if quantization == "int8" else None,
            kv_cache_dtype="int8" if quantization == "kv int8" else None,
            max_model_len=LONGEST,
            max_num_seqs=6,
            num_threads=1,
            vocabulary=str(directory / "vocabulary"),
            speculation=Speculation(method="planted", num_speculative_tokens=6),
        ),
        0,
        "",
    )
    try:
        for number in range(rounds):
            chance = random.Random(1000 * seed + number)
            options = {"slots": chance.choice((1, 3, 6)), "budget": chance.choice((16, 64)), "seed": number}
            answers: list[tuple] = []
            for planted in (False, True):
                chance = random.Random(1000 * seed + number)
                requests = wishes(chance, routes, kinds)
                if kinds is not KINDS:  # (what is pooled comes while others decode)
                    requests.sort(key=lambda request: request.sampling.pooling is not None)
                serving = Serving(executor, longest=LONGEST, **options)
                executor.speculator.drafter = None
                if planted:
                    quality = (0.5, 0.9, 1.0)[number % 3]
                    executor.speculator.drafter = plant(serving, requests, answers, 6, VOCAB, quality)
                found = serving.run(requests)
                if planted:
                    assert found == answers, (seed, number)
                    drafts, right = drafts + serving.drafts, right + serving.right
                    mixed += serving.mixed
                answers = found
    finally:
        executor.close()
    return [drafts, right, mixed]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form[1] or form[0])
@pytest.mark.parametrize("name", BACKENDS)
def test_answers_are_those_without_drafts(
    name: str, form: tuple[str, str | None], checkpoints: dict[str, Path]
) -> None:
    number = BACKENDS.index(name) * len(FORMS) + FORMS.index(form)
    found = np.zeros(3, np.int64)
    with backend(name):
        if form[1] == "int8" and why_not_int8():
            pytest.skip(why_not_int8())
        for place, shape in enumerate(checkpoints):
            if ROUNDS or (number + place) % len(SHAPES) == 0:
                seed = number * len(SHAPES) + place
                found += check(checkpoints[shape], form, seed, ROUNDS or 3, shape == "sinks")
    drafts, right, mixed = found.tolist()
    print(f"{name} {form}: {drafts} drafts, {right} of them right; {mixed} steps with pooled prompts")
    assert 0 < right < drafts


@pytest.mark.parametrize("form", FORMS[:2], ids=lambda form: form[0])
def test_positions_with_masks_are_sampled_together_where_they_can_be(
    form: tuple[str, str | None], checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not beside penalties, of which each token depends on the ones before."""
    if sampling_kernel() is None:
        pytest.skip("no native kernel")
    told = []
    begin = Masks.begin

    def seen(masks: Masks, slots: Int32Array, drafts: list[list[int]] | None = None) -> bool:
        told.append(begin(masks, slots, drafts))
        return told[-1]

    monkeypatch.setattr(Masks, "begin", seen)
    kinds = ("plain", "penalties", "grammar", "grammar", "grammar", "grammar")
    drafts, right, _ = check(checkpoints["groups"], form, 50, 12, False, kinds)
    print(f"{drafts} drafts, {right} of them right; {sum(told)} of {len(told)} times together")
    assert 0 < right < drafts
    assert 20 < sum(told) < len(told) - 20


@pytest.mark.parametrize("together", [True, False])
def test_rows_whose_grammar_is_still_compiled_change_nothing_for_others(
    together: bool, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no token in a step with others' drafts, and no log-probabilities: each has its own."""
    if together and sampling_kernel() is None:
        pytest.skip("no native kernel")
    steps, late = 0, 0
    compiled: list[tuple[int, Promise, Promise]] = []
    begin, ready, matcher = Masks.begin, Masks.ready, Grammars.matcher

    def later(grammars: Grammars, *given: object, **options: object) -> Promise:
        promise = Promise()
        compiled.append((steps + (0, 3, 9)[steps % 3], matcher(grammars, *given, **options), promise))
        return promise

    def beginning(masks: Masks, slots: Int32Array, drafts: list[list[int]] | None = None) -> bool:
        nonlocal steps, compiled
        steps += 1
        for _, its, promise in [one for one in compiled if one[0] < steps]:
            if promise.set_running_or_notify_cancel():  # (a preemption cancels it)
                found, promise.lexer = its.result(), its.lexer
                promise.set_result(found)
        compiled = [one for one in compiled if one[0] >= steps]
        return begin(masks, slots, drafts)

    def counting(masks: Masks) -> Ready:
        nonlocal late
        found = ready(masks)
        late += len(found.late)
        return found

    monkeypatch.setattr(Masks, "begin", beginning)
    monkeypatch.setattr(Masks, "ready", counting)
    monkeypatch.setattr(Grammars, "matcher", later)
    kinds = ("plain", "plain", "grammar", "grammar") if together else ("penalties", "grammar", "grammar")
    drafts, right, _ = check(checkpoints["groups"], FORMS[0], 60 + together, 12, False, kinds)
    assert 0 < right < drafts
    assert late > 20


@pytest.mark.parametrize("form", FORMS[:2], ids=lambda form: form[0])
def test_drafts_and_pooled_prompts_share_steps(
    form: tuple[str, str | None], checkpoints: dict[str, Path]
) -> None:
    kinds = ("plain", "penalties", "grammar", "pooled", "pooled", "pooled")
    drafts, right, mixed = check(checkpoints["sinks"], form, 40, 9, True, kinds)
    print(f"{drafts} drafts, {right} of them right; {mixed} steps with pooled prompts")
    assert 0 < right < drafts
    assert mixed > 0
