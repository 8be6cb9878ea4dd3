"""How far a prompt is: told to who asks, not often, and at the end of it."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from baton.engine.outbox import Outboxes
from baton.engine.request import Request
from baton.protocol.codec import INT32
from baton.protocol.messages.requests import Outputs
from baton.protocol.params.sampling import Sampling, Stopping


@pytest.fixture
def outboxes() -> Outboxes:
    return Outboxes(100.0)


def asking(outboxes: Outboxes, progress_at: float | None = 100.0) -> Request:
    tokens = array(INT32, range(1000))
    request = Request(
        outboxes.of(b"g"), 7, "r", tokens, Sampling(1), Stopping(10), priority=0, number=1, arrived=99.0
    )
    request.first_admitted, request.progress_at = 100.0, progress_at
    return request


def told(outboxes: Outboxes) -> list[Any]:
    return [one for _, message in outboxes.take() if isinstance(message, Outputs) for one in message.progress]


def test_twice_a_second_and_when_it_is_through(outboxes: Outboxes):
    request = asking(outboxes)
    for after, computed in ((0.0, 16), (0.1, 200), (0.49, 300), (0.5, 400), (0.6, 999), (0.7, 1000)):
        outboxes.now = 100.0 + after
        outboxes.tell_progress(request, computed)
    assert told(outboxes) == [(7, 16, 0), (7, 400, 500), (7, 1000, 700)]
    assert told(outboxes) == []


def test_nobody_is_told_who_did_not_ask_or_has_left(outboxes: Outboxes):
    outboxes.tell_progress(asking(outboxes, None), 500)
    left = asking(outboxes)
    outboxes.redirect(left, outboxes.nowhere)
    outboxes.tell_progress(left, 1000)
    begun = asking(outboxes)
    begun.tokens.append(5)
    outboxes.tell_progress(begun, 1000)
    assert told(outboxes) == []
