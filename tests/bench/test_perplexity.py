"""Perplexity: windows, sums, and the figures beside what requests get."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from baton.bench.perplexity import Perplexity, Scorer, measure_perplexity, windows
from baton.cli.main import app
from baton.gateway.text.tokenizer import Tokenizer
from baton.launch.options import EngineOptions
from baton.launch.planning.plan import make_plan
from baton.llm import LLM, SamplingParams
from baton.model.checkpoint.hub import resolve_model

CONTEXT = 96


@given(st.integers(2, 400), st.integers(2, 60), st.data())
def test_each_token_but_the_first_is_predicted_once_with_what_the_stride_leaves_before_it(
    count, context, data
):
    stride = data.draw(st.integers(1, context - 1))
    predicted = []
    for window in windows(count, context, stride):
        assert 0 < window.last - window.first <= context
        tokens = range(window.last - window.scored, window.last)
        predicted += tokens
        for token in tokens:
            assert token - window.first >= min(token, context - stride)
    assert predicted == list(range(1, count))


@pytest.mark.parametrize(("count", "context", "stride"), [(1, 8, 4), (9, 8, 8), (9, 8, 0)])
def test_sizes_that_cannot_be(count, context, stride):
    with pytest.raises(ValueError, match=r"at least two|give 1 to 7"):
        list(windows(count, context, stride))


class Table:
    """A model that predicts by the last token only."""

    def __init__(self, rows: torch.Tensor, pieces: int = 3) -> None:
        self._logs = rows.log()
        self._pieces = pieces

    def log_probabilities(self, tokens, first):
        for begin in range(first, len(tokens), self._pieces):
            yield self._logs[tokens[begin : begin + self._pieces].astype(np.int64)]


def test_figures_are_those_of_the_definitions():
    torch.manual_seed(3)
    own, other = (torch.rand(5, 5).softmax(dim=1) for _ in range(2))
    other[2, 1] = 0.0  # what the reference holds for impossible adds nothing
    tokens = np.array([0, 1, 2, 3, 4, 0, 2, 2, 4, 1, 3], np.int32)
    found = measure_perplexity(tokens, Table(own, pieces=3), Table(other, pieces=2), context=4, stride=2)
    pairs = list(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True))
    assert found.tokens == len(pairs)
    assert found.perplexity == pytest.approx(math.exp(-np.mean([own[a, b].log() for a, b in pairs])))
    apart = [
        sum(float(r * (r / p).log()) for r, p in zip(other[a], own[a], strict=True) if r > 0)
        for a, _ in pairs
    ]
    assert found.reference.kl_mean == pytest.approx(np.mean(apart), rel=1e-4)
    assert found.reference.kl_max == pytest.approx(max(apart), rel=1e-4)
    same = np.mean([bool(own[a].argmax() == other[a].argmax()) for a, _ in pairs])
    assert found.reference.top1_agreement == pytest.approx(same)


def test_an_impossible_token_is_an_error_and_no_figure():
    rows = torch.full((3, 3), 1 / 3)
    rows[1, 2] = 0.0
    with pytest.raises(ValueError, match=r"1 of 3 tokens have no probability"):
        measure_perplexity(np.array([0, 1, 2, 0], np.int32), Table(rows), None, context=4, stride=2)


@pytest.fixture(scope="module")
def tokens():
    return np.array(list(range(40, 140)) + list(range(90, 190)), np.int32)


def measure(tokens, reference=None, **options) -> Perplexity:
    plans = [make_plan(EngineOptions(**given)) for given in (options, reference) if given is not None]
    scorers = [Scorer(plan.instance, CONTEXT) for plan in plans]
    try:
        return measure_perplexity(tokens, scorers[0], (*scorers, None)[1], context=CONTEXT, stride=40)
    finally:
        for scorer in scorers:
            scorer.close()


def test_it_is_what_requests_get(tokens):
    """By the log-probabilities of prompts, which requests for each window return."""
    found = measure(tokens, dtype="float32")
    logs = []
    with LLM(dtype="float32", max_model_len=128, max_num_seqs=4, kv_cache_memory_bytes="64MiB") as llm:
        for window in windows(len(tokens), CONTEXT, 40):
            prompt = tokens[window.first : window.last].tolist()
            params = SamplingParams(max_tokens=1, prompt_logprobs=0)
            (result,) = llm.generate([prompt], params, use_tqdm=False)
            given = [found.logprob for found in result.prompt_logprobs if found is not None]
            logs += given[-window.scored :]
    assert found.tokens == len(logs) == len(tokens) - 1
    assert found.perplexity == pytest.approx(math.exp(-np.mean(logs)), rel=1e-4)


def test_a_model_is_no_distance_from_itself_and_some_when_rounded(tokens):
    own = measure(tokens, {"dtype": "float32"}, dtype="float32").reference
    assert (own.ratio, own.kl_max, own.top1_agreement) == (1.0, 0.0, 1.0)
    rounded = measure(tokens, {"dtype": "float32"}, dtype="bfloat16").reference
    assert 0.0 < rounded.kl_mean < 0.05
    assert rounded.top1_agreement > 0.8


def test_kv_in_eight_bits_is_near_kv_that_is_not(tokens):
    near = measure(tokens, {"dtype": "float32"}, dtype="float32", kv_cache_dtype="int8").reference
    assert 0.0 < near.kl_mean < 0.01
    assert near.ratio == pytest.approx(1.0, abs=0.02)
    assert near.top1_agreement > 0.95


def test_eight_bits_in_groups_are_nearer_than_eight_bits_a_row(tokens):
    rows, groups = (
        measure(tokens, {"dtype": "float32"}, dtype="float32", quantization="int8", **size).reference
        for size in ({}, {"quantization_group_size": 32})
    )
    assert 0.0 < groups.kl_mean < rows.kl_mean


WORDS = Tokenizer.from_directory(resolve_model(None)).encode("Once there was", add_special_tokens=False)[:2]


def run(*words: str):
    return CliRunner().invoke(app, ["bench", "perplexity", *words])


def test_the_command(tmp_path):
    text, result = tmp_path / "text", tmp_path / "found" / "result.json"
    text.write_text("What colour is the sky? The sky is blue. " * 20)
    options = ("--context", "64", "--output-json", str(result), "--reference", "baton-tiny")
    done = run("--text", str(text), *options)
    assert done.exit_code == 0, done.output
    assert "Perplexity: " in done.output
    assert "KL divergence: mean 0.000000" in done.output
    assert '"stride": 32' in result.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--text", "no/such/file"], "--text no/such/file: cannot be read"),
        (["--text", "{empty}"], "at least two are needed"),
        (["--text", "{text}", "--context", "1000000"], "--context 1000000: the context is"),
        (
            ["--text", "{text}", "--context", "64", "--stride", "64"],
            "--stride 64: give less than the context",
        ),
        (["--text", "{text}", "--reference-dtype", "float32"], "there is no --reference"),
        (["--text", "{text}", "--reference", "{other}"], "another tokenizer or vocabulary"),
    ],
)
def test_mistakes_are_one_line(tmp_path, words, said):
    (tmp_path / "empty").write_text("")
    (tmp_path / "text").write_text("Once there was a text. " * 40)
    other = tmp_path / "other"
    other.mkdir()
    for path in resolve_model(None).iterdir():
        (other / path.name).symlink_to(path)
    (other / "tokenizer.json").unlink()
    described = json.loads((resolve_model(None) / "tokenizer.json").read_text())
    ids = described["model"]["vocab"]
    one, two = (next(text for text in ids if ids[text] == chosen) for chosen in WORDS)
    ids[one], ids[two] = ids[two], ids[one]
    (other / "tokenizer.json").write_text(json.dumps(described))
    places = {"empty": tmp_path / "empty", "text": tmp_path / "text", "other": other}
    done = run(*[word.format(**places) for word in words])
    assert done.exit_code == 2, done.output
    assert said in done.output.replace("\n", " ")
