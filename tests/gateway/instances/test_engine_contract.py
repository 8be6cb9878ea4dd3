"""What the gateway's tests take for granted of an engine, asked of the `EchoEngine` and of a real one alike.

Nearly all of these tests run against the `EchoEngine`, which decides by itself how it answers; a real engine
that answered otherwise would be found by none of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import msgspec
import pytest

from baton.launch.planning.instance_config import instance_config
from baton.protocol.codec import pack_int32, unpack_int32, unpack_int64
from baton.protocol.config import CostModel
from baton.protocol.messages.requests import Cancel, Finished, Outputs, Query, QueryReply, Submit, Welcome
from baton.protocol.params.sampling import Sampling, Stopping
from tests.engine.instance import Gateway, Instance
from tests.gateway.echo_engine import EchoEngine

VOCAB = 500
SLOTS, WAITING = 2, 3
PROMPT = [7, 8, 9]


class Both:
    """An engine of either kind, and a connection to it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        if kind == "echo":
            self.echo = EchoEngine(vocab=VOCAB)
            endpoint, self.close_engine = self.echo.endpoint, self.echo.die
        else:
            config = instance_config(
                model="",
                executor="simulated",
                simulated_cost=CostModel(0.002),
                vocab_size=VOCAB,
                max_model_len=4096,
                block_size=8,
                num_blocks=2000,
                max_num_seqs=SLOTS,
                max_waiting=WAITING,
            )
            instance = Instance(config)
            endpoint, self.close_engine = instance.loop.endpoint, instance.close
        self.gateway = Gateway(endpoint)
        welcome = self.gateway.receive()
        assert isinstance(welcome, Welcome)
        self.welcome = welcome
        self._ids = itertools.count(1)

    def reset(self) -> None:
        if self.kind == "echo":
            self.echo.behaviour = type(self.echo.behaviour)()

    def full_at(self, room: int) -> None:
        """The echo engine is told; the real one has `SLOTS` and `WAITING`."""
        if self.kind == "echo":
            self.echo.behaviour.room = room

    def slow(self) -> None:
        if self.kind == "echo":
            self.echo.behaviour.step_s = 0.002

    def submit(self, max_tokens: int, **more: object) -> int:
        number = next(self._ids)
        sampling = more.pop("sampling", Sampling(seed=0, temperature=0.0))
        self.gateway.send(
            Submit(number, f"r{number}", pack_int32(PROMPT), sampling, Stopping(max_tokens), **more)
        )
        return number

    def outputs(self) -> Iterator[Outputs]:
        while True:
            message = self.gateway.receive()
            assert isinstance(message, Outputs)
            yield message

    def run(self, numbers: set[int], on_message: Callable[[Outputs], None] = lambda message: None) -> Ends:
        """Reads until all have ended, and holds to the order: tokens, then one end, then nothing."""
        tokens: dict[int, list[int]] = {number: [] for number in numbers}
        ends: dict[int, Finished] = {}
        for message in self.outputs():
            for number, token in zip(unpack_int64(message.ids), unpack_int32(message.tokens), strict=True):
                assert number not in ends, "a token after the end"
                tokens[number].append(token)
            for end in message.finished:
                assert end.id not in ends, "a second end"
                ends[end.id] = end
            on_message(message)
            if set(ends) == numbers:
                return tokens, ends


Ends = tuple[dict[int, list[int]], dict[int, Finished]]


@pytest.fixture(scope="module", params=["echo", "real"])
def one(request: pytest.FixtureRequest) -> Iterator[Both]:
    both = Both(request.param)
    yield both
    both.gateway.close()
    both.close_engine()


@pytest.fixture
def engine(one: Both) -> Both:
    one.reset()
    return one


def test_the_welcome_says_what_fits(engine: Both) -> None:
    welcome = engine.welcome
    assert welcome.incarnation
    assert welcome.vocab_size == VOCAB
    assert min(welcome.num_blocks, welcome.block_size, welcome.max_num_seqs, welcome.max_model_len) > 0
    assert welcome.workers


def test_a_request_has_its_tokens_and_then_one_end(engine: Both) -> None:
    numbers = {engine.submit(count) for count in (1, 5, 12)}
    tokens, ends = engine.run(numbers)
    assert [len(tokens[number]) for number in sorted(numbers)] == [1, 5, 12]
    assert {(end.reason, end.code) for end in ends.values()} == {("length", "")}
    assert all(0 <= token < VOCAB for some in tokens.values() for token in some)


def test_what_the_client_has_counts_and_is_not_sent_again(engine: Both) -> None:
    """Greedy, so the rest of an answer is the rest of the whole one."""
    whole = engine.submit(6)
    tokens, _ = engine.run({whole})
    rest = engine.submit(6, generated=pack_int32(tokens[whole][:4]))
    more, ends = engine.run({rest})
    assert more[rest] == tokens[whole][4:]
    assert ends[rest].reason == "length"


def test_a_cancelled_request_ends_once_and_is_silent_then(engine: Both) -> None:
    engine.slow()
    victim, other = engine.submit(2000), engine.submit(30)
    cancelled: list[int] = []

    def cancel(message: Outputs) -> None:
        if not cancelled and victim in unpack_int64(message.ids):
            cancelled.append(victim)
            engine.gateway.send(Cancel(victim))

    tokens, ends = engine.run({victim, other}, cancel)
    assert (ends[victim].reason, ends[other].reason) == ("aborted", "length")
    assert 0 < len(tokens[victim]) < 2000
    engine.gateway.send(Cancel(victim))  # once more, and one that never was: no answer
    engine.gateway.send(Cancel(10**9))
    after = engine.submit(2)
    _, ends = engine.run({after})
    assert set(ends) == {after}


def test_a_full_queue_refuses_by_its_name(engine: Both) -> None:
    engine.slow()
    engine.full_at(SLOTS + WAITING)
    running = [engine.submit(3000) for _ in range(SLOTS)]
    for message in engine.outputs():  # (a request that runs has left the queue)
        if set(unpack_int64(message.ids)) >= set(running):
            break
    waiting = [engine.submit(3000) for _ in range(WAITING)]
    refused = engine.submit(4)

    def cancel(message: Outputs) -> None:
        if any(end.id == refused for end in message.finished):
            for number in running + waiting:
                engine.gateway.send(Cancel(number))

    # (Tokens of those that run have been read above: they only have to end.)
    ends: dict[int, Finished] = {}
    for message in engine.outputs():
        ends |= {end.id: end for end in message.finished}
        cancel(message)
        if len(ends) == SLOTS + WAITING + 1:
            break
    assert (ends[refused].reason, ends[refused].code) == ("rejected", "queue_full")
    assert ends[refused].message
    assert {ends[number].reason for number in running + waiting} == {"aborted"}


def test_questions_are_answered_by_their_number(engine: Both) -> None:
    for number, what in enumerate(("stats", "ledger", "reset_prefix_cache", "pause", "resume"), 1000):
        engine.gateway.send(Query(number, what))
        reply = engine.gateway.receive()
        assert isinstance(reply, QueryReply)
        assert reply.id == number
        assert "error" not in reply.body


def test_log_probabilities_belong_to_their_tokens(engine: Both) -> None:
    sampling = Sampling(seed=0, temperature=0.0, logprobs=2, prompt_logprobs=1)
    number = engine.submit(4, sampling=sampling)
    chosen: list[int] = []
    places: list[int] = []

    def look(message: Outputs) -> None:
        for owner, run in message.prompt_logprobs:
            assert owner == number
            assert not chosen, "those of the prompt come before the first token, or with it"
            places.extend(range(run.first, run.first + len(run.positions)))
            assert [item.token for item in run.positions] == PROMPT[
                run.first : run.first + len(run.positions)
            ]
        tokens = unpack_int32(message.tokens)
        for index, logprobs in message.logprobs:
            assert tokens[index] == logprobs.token
            assert len(logprobs.top) == 2
            chosen.append(logprobs.token)

    tokens, _ = engine.run({number}, look)
    assert chosen == tokens[number]
    assert places == list(range(1, len(PROMPT)))


def test_no_field_of_a_submission_stops_the_engine(engine: Both) -> None:
    """What gateways may send of every kind: priorities, salts, patience."""
    base = {"priority": -5, "cache_salt": "s", "patient": True}
    numbers = {engine.submit(3, **base), engine.submit(3, **{**base, "priority": 7, "cache_salt": ""})}
    tokens, ends = engine.run(numbers)
    assert {len(some) for some in tokens.values()} == {3}
    assert {msgspec.structs.replace(end, id=0).reason for end in ends.values()} == {"length"}
