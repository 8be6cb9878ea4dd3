"""Requests of more sequences than the instance lets wait."""

from __future__ import annotations

import threading
import time

import openai
import pytest

from baton.gateway.cluster.request import EngineRequest
from baton.gateway.generation import generation
from baton.gateway.instances.inbox import Inbox
from tests.gateway.harness import GatewayServer

SLOTS = 8
"""What the echo engine says it runs at once."""


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_of_many_prompts_fits_an_idle_server(server: GatewayServer, stream):
    """It would be refused for ever if all had to be accepted at once."""
    server.engine.behaviour.room = SLOTS
    prompts = [[50 + i % 100, 60] for i in range(300)]
    answer = server.openai().completions.create(
        model="tiny", prompt=prompts, max_tokens=2, stream=stream, extra_body={"return_token_ids": True}
    )
    tokens: dict[int, list[int]] = {}
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            tokens.setdefault(choice.index, []).extend(choice.token_ids)
    assert [tokens[i] for i in range(300)] == prompts
    assert server.engine.behaviour.max_running <= SLOTS
    assert len(server.engine.submits) == 300


def test_many_choices_are_in_order(server: GatewayServer):
    server.engine.behaviour.room = SLOTS
    done = server.openai().completions.create(
        model="tiny", prompt=[[50], [60]], n=20, max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert [choice.token_ids for choice in done.choices] == [[50]] * 20 + [[60]] * 20
    names = [submit.name.rsplit("-", 1)[1] for submit in server.engine.submits]
    assert names == [str(i) for i in range(40)]
    assert done.usage.completion_tokens == 40


@pytest.mark.parametrize("room", [1, 3])
def test_a_queue_that_fills_up_later_costs_no_work(server: GatewayServer, room):
    """Others came; the request goes on with what room it finds."""
    server.engine.behaviour.step_s = 0.005
    crowded = threading.Event()

    def goes_on():
        server.engine.behaviour.hold_after = None

    def answer(prompt):
        if prompt[0] == 70:  # of the second window: from here on there is less room
            server.engine.behaviour.room = room
            server.engine.behaviour.hold_after = 1  # (none ends before the gateway has sent the next)
            server.engine.behaviour.when_full = goes_on
            crowded.set()
        return lambda i: prompt[0]

    server.engine.behaviour.answer = answer
    prompts = [[50 + i] for i in range(60)]
    done = server.openai().completions.create(
        model="tiny", prompt=prompts, max_tokens=2, extra_body={"return_token_ids": True}
    )
    assert crowded.is_set()
    assert [choice.token_ids for choice in done.choices] == [prompt * 2 for prompt in prompts]
    assert len(server.engine.submits) > 60, "nothing was ever refused: the test shows nothing"
    assert len(server.engine.submits) < 200


def test_a_full_queue_with_nothing_running_is_asked_again(
    server: GatewayServer, monkeypatch: pytest.MonkeyPatch
):
    """Not in a hurry: each question has waited for `AGAIN_S`."""
    server.engine.behaviour.step_s = 0.005
    monkeypatch.setattr(generation, "AGAIN_S", 0.2)
    waits: list[float] = []
    real = Inbox.wait

    async def wait(self: Inbox, timeout_s: float | None = None) -> list[EngineRequest]:
        if timeout_s is not None:
            waits.append(timeout_s)
        return await real(self, timeout_s)

    monkeypatch.setattr(Inbox, "wait", wait)

    class Submits(list):
        """The engine has room again once it was left alone twice."""

        def append(self, submit):
            super().append(submit)
            if len(waits) >= 2:
                server.engine.behaviour.room = None

    def answer(prompt):
        if prompt[0] == 57:  # the last of the first window: then everything is full for a while
            server.engine.behaviour.room = 0
        return lambda i: prompt[0]

    asked = Submits()
    monkeypatch.setattr(server.engine, "submits", asked)
    server.engine.behaviour.answer = answer
    done = server.openai().completions.create(
        model="tiny",
        prompt=[[50 + i] for i in range(10)],
        max_tokens=1,
        extra_body={"return_token_ids": True},
    )
    assert [choice.token_ids for choice in done.choices] == [[50 + i] for i in range(10)]
    # The first window, a question for each of it that ended, one after each wait, and the last one with room.
    assert SLOTS + 2 < len(asked) <= 2 * SLOTS + len(waits) + 1
    assert waits == [0.2] * len(waits)


def test_a_full_queue_is_the_answer_at_first(server: GatewayServer):
    server.engine.behaviour.room = 0
    with pytest.raises(openai.RateLimitError, match="no room"):
        server.openai().completions.create(model="tiny", prompt=[[50]] * 30)
    # The first refusal is the answer; the engine may still be reading the rest of the first window.
    server.engine.wait_for(lambda: len(server.engine.submits) >= SLOTS, "the first window")
    time.sleep(0.1)
    assert len(server.engine.submits) == SLOTS


def test_who_leaves_takes_what_was_not_submitted_along(server: GatewayServer):
    server.engine.behaviour.hold_after = 1
    stream = server.openai().completions.create(
        model="tiny", prompt=[[50]] * 100, max_tokens=100, stream=True
    )
    next(iter(stream))
    stream.close()
    server.engine.wait_for(lambda: server.engine.num_running == 0, "the cancel of all")
    assert len(server.engine.submits) == SLOTS
    assert server.client.in_flight == 0
