"""Answers that are not streamed: gathered at a cost that follows their length, and without waking anybody."""

from __future__ import annotations

from typing import Any

import pytest

from baton.gateway.generation.generation import Generation
from baton.gateway.generation.sequence import Completion, Update
from tests.gateway.harness import GatewayServer


class _Counted(str):
    """Counts the characters that concatenation copies."""

    copied = 0

    def __add__(self, other: str) -> _Counted:
        _Counted.copied += len(self) + len(other)
        return _Counted(str(self) + other)


def test_gathering_does_not_copy_the_text_with_each_piece():
    updates = [Update(0, _Counted("word "), [5], [], None, None) for _ in range(5000)]
    completion = Completion(0)
    for update in updates:
        Generation.gather(None, [update], [completion])  # type: ignore[arg-type]
    assert len(completion.pieces) == 5000
    assert completion.text == "word " * 5000
    assert _Counted.copied == 0
    assert completion.pieces == ["word " * 5000], "joined once"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_who_wants_the_whole_answer_is_patient(server: GatewayServer, path: str):
    """The gateway looks once, at the end; a stream, or one with stop strings, is looked at as it comes."""
    looks: list[int] = []
    real = Generation._advance

    def advance(self: Generation, news: Any) -> Any:
        looks.append(len(news))
        return real(self, news)

    prompt: dict[str, Any] = {"prompt": "the cat"}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "the cat"}]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generation, "_advance", advance)
        with server.http() as http:
            whole = http.post(path, json={**prompt, "max_tokens": 40, "ignore_eos": True, "n": 2})
            assert whole.json()["usage"]["completion_tokens"] == 80
            assert 1 <= len(looks) <= 2, "once for each sequence at most"
            http.post(path, json={**prompt, "max_tokens": 4, "stop": ["zzz"]}).raise_for_status()
            http.post(path, json={**prompt, "max_tokens": 4, "stream": True}).raise_for_status()
    patient = [submit.patient for submit in server.engine.submits]
    assert patient == [True, True, False, False]


def test_the_time_to_the_first_token_is_known_of_patient_requests(server: GatewayServer):
    server.engine.behaviour.step_s = 0.02
    observed: list[tuple[str, int]] = []
    ended: list[dict[str, Any]] = []
    metrics = server.app.state.gateway.metrics
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            metrics, "first_tokens", lambda count, prompt, seconds: observed.append(("first", count))
        )
        patch.setattr(metrics, "all_tokens", lambda count, seconds: observed.append(("all", count)))
        patch.setattr(metrics, "finished", lambda reason, **about: ended.append(about))
        with server.http() as http:
            http.post("/v1/completions", json={"prompt": "x", "max_tokens": 10, "ignore_eos": True})
    assert observed == [("first", 1), ("all", 9)]
    (about,) = ended
    assert 0 < about["first_s"] < about["seconds"], "so prefill and decoding are told apart"
    assert 0 < about["decode_s"] < about["seconds"]


def test_cached_tokens_are_counted_once_each():
    """`continuous_usage_stats` asks with each chunk."""
    looked: list[int] = []

    class Sequence:
        def __init__(self, number: int, cached: int | None) -> None:
            self.number, self._cached = number, cached

        @property
        def num_cached(self) -> int | None:
            looked.append(self.number)
            return self._cached

    generation = Generation.__new__(Generation)
    generation.choices, generation._cached = 2, (0, 0)
    generation.sequences = [Sequence(i, 3 if i < 100 else None) for i in range(200)]  # type: ignore[misc]
    assert [generation.num_cached for _ in range(50)] == [None] * 50
    assert len(looked) == 50 + 50, "those that are known once, the next one each time"
    for sequence in generation.sequences:
        sequence._cached = 3  # type: ignore[attr-defined]
    assert generation.num_cached == 300
