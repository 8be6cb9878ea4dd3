"""A prompt that a client gives up on and sends again goes on where it was (jcode#976, unsloth#9403)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.e2e.server import Server

TOKENS = 1500
CHUNK = 64


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    """A prompt takes three milliseconds a token, in steps of 64."""
    flags = ("--executor", "simulated", "--simulated-cost", "0,0.003", "--max-model-len", "2048")
    more = ("--max-num-batched-tokens", str(CHUNK), "--block-size", "16", "--max-num-seqs", "8")
    with Server(*flags, *more) as server:
        yield server


def _computed(server: Server) -> int:
    """Tokens of prompts, so far."""
    for line in server.http.get("/metrics").text.splitlines():
        if line.startswith("baton:iteration_prompt_tokens_sum"):
            return int(float(line.split()[-1]))
    raise AssertionError("no such metric")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_three_cancels_at_half_of_what_is_left_still_end(slow: Server, path: str):
    prompt = [5 + (17 * number + len(path)) % 250 for number in range(TOKENS)]
    text = "".join(chr(97 + (7 * number + number // 26) % 26) for number in range(TOKENS))
    asks = {"prompt": prompt, "max_tokens": 1} if path == "/v1/completions" else {"input": text}
    body = asks | {"stream": True, "return_progress": True}
    if path == "/v1/responses":
        body["max_output_tokens"] = 1
    before, cached, total = _computed(slow), 0, 0
    for attempt in range(4):
        progress = None
        with slow.http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                news = json.loads(line[6:]).get("prompt_progress")
                if news is None:
                    continue
                progress = news
                total = progress["total"]
                assert progress["cache"] >= cached - 16, "what was computed is there"
                half = progress["cache"] + (total - progress["cache"]) // 2
                if attempt < 3 and progress["processed"] >= half:
                    cached = progress["processed"]
                    break
            else:
                assert progress is not None
                assert progress["processed"] == total
                assert attempt == 3, "it was computed before half of it was told"
    computed = _computed(slow) - before
    assert total - 16 <= computed <= total + 4 * CHUNK, (total, computed)
