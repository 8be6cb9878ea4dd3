"""An instance for tests of the gateway: a real ZeroMQ ROUTER that speaks the protocol, and no model.

By default a request is answered with its own prompt, over and over, one token a message; a test scripts
other answers, delays, rejections, deaths.  It runs in a thread of its own.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from baton.protocol.codec import pack_int32, pack_int64, unpack_int32
from baton.protocol.messages.reports import PromptLogprobs
from baton.protocol.messages.requests import (
    FROM_ENGINE,
    TO_ENGINE,
    Cancel,
    Failing,
    Finished,
    FromEngine,
    Hello,
    Outputs,
    Query,
    QueryReply,
    Submit,
    Welcome,
)
from baton.protocol.params.pooling import Pooling, pack_vector
from baton.protocol.params.sampling import LISTED_LOGPROBS, TokenLogprobs
from baton.protocol.rules.proof import answer as prove
from baton.protocol.standing import Stand, Standing, changed
from baton.protocol.weights import Weights


def logprobs_of(token: int, count: int, vocab: int) -> TokenLogprobs:
    """The chosen token is always the second most likely one."""
    top = tuple(((token + 1 - i) % vocab, -0.25 * (i + 1)) for i in range(count))
    if count > LISTED_LOGPROBS:
        ids, values = pack_int32([one for one, _ in top]), array("f", [value for _, value in top])
        return TokenLogprobs.packed(token, -0.5, 2, ids, values.tobytes())
    return TokenLogprobs(token, -0.5, 2, top)


@dataclass
class _Running:
    identity: bytes
    submit: Submit
    prompt: list[int]
    answer: Callable[[int], int]
    generated: int = 0


@dataclass
class Behaviour:
    """What a test may change while the engine runs."""

    answer: Callable[[list[int]], Callable[[int], int]] | None = None
    """prompt → (index → token)"""
    step_s: float = 0.0
    tokens_per_message: int = 1
    reject: Finished | None = None
    """Answers every Submit with this (the id is replaced)."""
    mute: bool = False
    """Takes requests and says nothing."""
    hold_after: int | None = None
    """After so many tokens of a request it says nothing more of it, so that it cannot end by itself."""
    num_cached: int = 0
    stop_late: bool = False
    """Sends the end in a message of its own."""
    stats: dict[str, Any] = field(default_factory=dict)
    answer_queries: bool = True
    answer_orders: bool = True
    """Says what became of new weights that were decided."""
    replies: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What a query of this kind is answered with, instead of its own kind and argument."""
    room: int | None = None
    """Refuses with `queue_full` what comes while so many run, once each of those has sent a token."""
    when_full: Callable[[], None] | None = None
    """Called when it refuses one for that."""
    max_running: int = 0
    """The most that ever ran; the engine counts."""


class EchoEngine:
    """Serves until `die`, which closes the socket without a word."""

    def __init__(
        self,
        *,
        incarnation: str = "first",
        vocab: int = 512,
        welcome: bool = True,
        max_message_bytes: int = -1,
    ) -> None:
        self.behaviour = Behaviour()
        self.incarnation = incarnation
        self.vocab = vocab
        self.submits: list[Submit] = []
        self.cancels: list[int] = []
        self.queries: Counter[str] = Counter()
        self.unanswered: list[Query] = []
        self.weights = Weights()
        self.standing = Standing()
        self.paused = False
        self._resumes: threading.Timer | None = None
        self.orders: list[Weights] = []
        """Weights that it was told to have."""
        self.hellos = 0
        self.secret = "s" * 32
        """With which it proves itself where it joins."""
        self._asked: dict[bytes, tuple[bytes, str]] = {}
        self.garbled = False
        """Greets with what cannot be read."""
        self._welcome = welcome
        self._max_message_bytes = max_message_bytes
        self._directory = tempfile.TemporaryDirectory(prefix="echo-")
        self.endpoint = f"ipc://{self._directory.name}/engine.sock"
        self._running: dict[tuple[bytes, int], _Running] = {}
        self._say: deque[FromEngine | bytes] = deque()
        self._peers: set[bytes] = set()
        self._alive = True
        self._bell_out, self._bell_in = os.pipe()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="echo-engine", daemon=True)
        self._thread.start()
        assert self._started.wait(60)

    # -- for tests

    def say(self, message: FromEngine | bytes) -> None:
        """Sends a message (or raw bytes) to every gateway."""
        self._say.append(message)
        os.write(self._bell_in, b"x")

    def fail(self, message: str) -> None:
        self.say(Failing(message))

    def die(self) -> None:
        if self._alive:
            self._alive = False
            os.write(self._bell_in, b"x")
            self._thread.join(60)
            assert not self._thread.is_alive()
            os.close(self._bell_in)
            os.close(self._bell_out)
            self._directory.cleanup()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def wait_held(self, count: int) -> None:
        """Until `count` requests run and each has been held (see `Behaviour.hold_after`)."""
        held = [self.behaviour.hold_after] * count
        self.wait_for(
            lambda: [running.generated for running in list(self._running.values())] == held,
            f"the hold of {count} requests",
        )

    def wait_for(self, condition: Callable[[], bool], what: str, deadline_s: float = 60.0) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, f"{what} did not happen within {deadline_s} s"
            time.sleep(0.005)

    # -- the engine

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        socket.bind(self.endpoint)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._bell_out, zmq.POLLIN)
        self._started.set()
        next_step = 0.0
        while self._alive:
            busy = self._running and not self.behaviour.mute
            pause = 0.0 if self.behaviour.hold_after is None else 0.005  # held requests need no spinning
            wait = max(pause, next_step - time.monotonic()) * 1000 if busy else None
            events = dict(poller.poll(wait))
            if self._bell_out in events:
                os.read(self._bell_out, 100)
            while self._say:
                message = self._say.popleft()
                data = message if isinstance(message, bytes) else FROM_ENGINE.encode(message)
                for peer in self._peers:
                    socket.send_multipart([peer, data])
            while socket.poll(0):
                identity, data = socket.recv_multipart()
                self._handle(socket, identity, TO_ENGINE.decode(data))
            if self._running and not self.behaviour.mute and time.monotonic() >= next_step:
                self._step(socket)
                next_step = time.monotonic() + self.behaviour.step_s
        socket.close(0)
        context.term()

    def _handle(self, socket: zmq.Socket[bytes], identity: bytes, message: object) -> None:
        if isinstance(message, Hello):
            self._peers.add(identity)
            self.hellos += 1
            self._asked[identity] = message.nonce, message.gateway
            if self.garbled:
                socket.send_multipart([identity, b"\xc1"])
                return
            if self._welcome:
                socket.send_multipart([identity, FROM_ENGINE.encode(self._make_welcome(identity))])
        elif isinstance(message, Submit):
            self.submits.append(message)
            reject, room = self.behaviour.reject, self.behaviour.room
            if room is not None and any(not one.generated for one in self._running.values()):
                self._step(socket)
            if room is not None and len(self._running) >= room:
                reject = Finished(0, "rejected", "queue_full", "there is no room")
                if self.behaviour.when_full is not None:
                    self.behaviour.when_full()
            if reject is not None:
                end = msgspec.structs.replace(reject, id=message.id)
                socket.send_multipart([identity, FROM_ENGINE.encode(Outputs(finished=[end]))])
                return
            prompt = list(unpack_int32(message.prompt))
            if message.sampling.pooling is not None:
                values = self.vector(prompt, message.sampling.pooling)
                end = Finished(message.id, "pooled", pooled=pack_vector(values))
                socket.send_multipart([identity, FROM_ENGINE.encode(Outputs(finished=[end]))])
                return
            script = self.behaviour.answer
            answer = script(prompt) if script else lambda i: prompt[i % len(prompt)]
            before = len(message.generated) // 4  # what the client has from an instance that was lost
            self._running[identity, message.id] = _Running(identity, message, prompt, answer, before)
            self.behaviour.max_running = max(self.behaviour.max_running, len(self._running))
        elif isinstance(message, Cancel):
            self.cancels.append(message.id)
            if self._running.pop((identity, message.id), None):
                end = Finished(message.id, "aborted")
                socket.send_multipart([identity, FROM_ENGINE.encode(Outputs(finished=[end]))])
        elif isinstance(message, Query):
            if not self.behaviour.answer_queries:
                self.unanswered.append(message)
            self.queries[message.what] += 1
            if self.behaviour.answer_queries:
                body = self.behaviour.stats if message.what == "stats" else {"what": message.what}
                if message.argument:
                    body = {**body, "argument": message.argument}
                if message.what in ("check_weights", "update_weights"):
                    body = {**body, "path": message.argument, "weights": "w:" + message.argument}
                body = self.behaviour.replies.get(message.what, body)
                if message.what in ("pause", "resume", "stand") and "error" not in body:
                    before = self.standing, self.paused
                    self._stands(message)
                    if (self.standing, self.paused) != before:
                        self._welcome_all(socket)
                if message.weights is not None:
                    self.orders.append(message.weights)
                    if not self.behaviour.answer_orders:
                        return
                    if "error" not in body:
                        self.weights = message.weights
                        self._welcome_all(socket)
                socket.send_multipart([identity, FROM_ENGINE.encode(QueryReply(message.id, body))])

    def _stands(self, query: Query) -> None:
        if query.what == "stand":
            self.standing = changed(self.standing, query.stand or Stand())
            return
        self.paused = query.what == "pause"
        if self._resumes is not None:
            self._resumes.cancel()
        if self.paused and query.argument:  # (of an engine that looks at the clock only when it must)
            self._resumes = threading.Timer(float(query.argument), self.resume)
            self._resumes.daemon = True
            self._resumes.start()

    def resume(self) -> None:
        """A pause ends by itself."""
        self.paused = False
        self.say(self.greeting())

    def greeting(self) -> Welcome:
        """What it says of itself now, to gateways that did not ask for a proof."""
        return self._make_welcome(b"")

    def _welcome_all(self, socket: zmq.Socket[bytes]) -> None:
        for peer in self._peers:
            socket.send_multipart([peer, FROM_ENGINE.encode(self._make_welcome(peer))])

    @staticmethod
    def vector(prompt: list[int], pooling: Pooling) -> list[float]:
        """How often each id stands there, by its remainder."""
        size = len(pooling.labels) or pooling.dimensions or 8
        counts = Counter(token % size for token in prompt)
        length = sum(count**2 for count in counts.values()) ** 0.5 if pooling.normalize else 1.0
        return [counts[place] / length for place in range(size)]

    def _make_welcome(self, peer: bytes) -> Welcome:
        return Welcome(
            self.incarnation,
            100,
            16,
            256,
            8,
            self.vocab,
            [1],
            detail="echo",
            weights=self.weights,
            proof=prove(self.secret, *self._asked.get(peer, (b"", "")), self.incarnation),
            standing=self.standing,
            paused=self.paused,
            first=True,
        )

    def _step(self, socket: zmq.Socket[bytes]) -> None:
        """One message a gateway, with a few tokens of every request."""
        by_peer: dict[bytes, list[_Running]] = {}
        hold = self.behaviour.hold_after
        for running in self._running.values():
            if hold is None or running.generated < hold:
                by_peer.setdefault(running.identity, []).append(running)
        for identity, group in by_peer.items():
            ids: list[int] = []
            tokens: list[int] = []
            logprobs: list[tuple[int, TokenLogprobs]] = []
            prompt_logprobs: list[tuple[int, PromptLogprobs]] = []
            finished: list[Finished] = []
            hits: list[tuple[int, int]] = []
            for running in group:
                submit = running.submit
                if self.behaviour.num_cached and not running.generated:
                    hits.append((submit.id, self.behaviour.num_cached))
                count = submit.sampling.prompt_logprobs
                if count is not None and not running.generated:
                    items = [logprobs_of(token, count, self.vocab) for token in running.prompt[1:]]
                    half = len(items) // 2
                    for first, part in ((1, items[:half]), (1 + half, items[half:])):
                        prompt_logprobs.append((submit.id, PromptLogprobs(0, 0, first, part)))
                for _ in range(self.behaviour.tokens_per_message):
                    token = running.answer(running.generated)
                    running.generated += 1
                    if submit.sampling.logprobs is not None:
                        top = logprobs_of(token, submit.sampling.logprobs, self.vocab)
                        logprobs.append((len(tokens), top))
                    ids.append(submit.id)
                    tokens.append(token)
                    stopped = token in submit.stopping.stop_token_ids
                    if stopped or running.generated == submit.stopping.max_tokens:
                        reason = "stop" if stopped else "length"
                        cached = self.behaviour.num_cached
                        finished.append(Finished(submit.id, reason, num_cached=cached, queued_s=0.001))
                        del self._running[identity, submit.id]
                        break
            ends, late = (finished, []) if not self.behaviour.stop_late else ([], finished)
            first = Outputs(pack_int64(ids), pack_int32(tokens), logprobs, prompt_logprobs, ends, hits)
            socket.send_multipart([identity, FROM_ENGINE.encode(first)])
            if late:
                socket.send_multipart([identity, FROM_ENGINE.encode(Outputs(finished=late))])
