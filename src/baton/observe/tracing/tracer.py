"""Which requests are traced, and the thread that sends what became of them.

Theory.  Nothing waits for a collector.  When a request comes the event loop decides whether it is traced
(`begin`: OpenTelemetry's sampler); when it has ended the loop appends it to a queue of bounded length
(`add`), and if that is full counts it as dropped.  A thread wakes up once in `delay_s`, without being rung,
so that the loop pays for no wake-up, takes the requests that ended at least `SETTLE_S` ago, as the notes of
the instance that prefilled may come after the end, makes spans of them in pieces of `batch` spans, between
which it yields the interpreter, and sends them with OpenTelemetry's exporter, which tries again for as long
as its time-out allows.  What cannot be sent is counted.  The end of the server sends what is left, for
`close`'s time at most.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from baton.observe.events.context import Caller, Trace
from baton.observe.events.story import Story
from baton.observe.series import PREFIX
from baton.observe.tracing.traced import Traced, traced

log = logging.getLogger(__name__)

SETTLE_S = 0.25
_YIELD_S = 0.0005
_YIELD_EACH = 8
"""After so many requests, about a millisecond's work, the event loop may have the interpreter."""
_WARN_S = 60.0
"""Between two warnings that nothing can be sent."""


class Collector(Protocol):
    """Where spans go (`collector.py`).  Called by the tracer's thread, but for `samples`."""

    def samples(self, caller: Caller | None, trace_id: int, name: str, about: dict[str, Any]) -> str | None:
        """Whether this request is traced: its `tracestate`; None: it is not."""

    def spans(self, root: Traced, children: Sequence[Traced], trace: Trace, ids: Sequence[int]) -> list[Any]:
        """A request's as the exporter takes them; `ids`: of the children."""

    def send(self, spans: Sequence[Any]) -> bool:
        """False: they are lost."""

    @property
    def why(self) -> str:
        """What was wrong when spans were lost."""

    def close(self) -> None:
        """Ends what `send` waits for."""


class Tracer:
    """Of one gateway.  `begin` and `add` are for its event loop."""

    def __init__(
        self,
        collector: Collector,
        model: str,
        *,
        delay_s: float = 1.0,
        most: int = 2048,
        batch: int = 512,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`most`: requests that may wait; `batch`: spans that are sent together, about."""
        self._collector = collector
        self._model = model
        self._delay_s = delay_s
        self._most = most
        self._batch = batch
        self._clock = clock
        self._waiting: deque[Story] = deque()
        self._random = random.SystemRandom()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp-traces", daemon=True)
        self._warned = -_WARN_S
        self.sent = 0
        self.dropped = {"queue_full": 0, "not_sent": 0}
        """Requests, by why nothing is told of them."""

    def start(self) -> None:
        self._thread.start()

    # -- on the event loop

    def begin(
        self, caller: Caller | None, operation: str, id_prefix: str | None, stream: bool
    ) -> Trace | None:
        """A request has come; None: it is not traced."""
        trace_id = self._random.getrandbits(128) or 1 if caller is None else caller.trace_id
        about = {"gen_ai.operation.name": operation, "gen_ai.request.model": self._model}
        state = self._collector.samples(caller, trace_id, f"{operation} {self._model}", about)
        if state is None:
            return None
        return Trace(trace_id, self._random.getrandbits(64) or 1, caller, operation, id_prefix, stream, state)

    def add(self, story: Story) -> None:
        """A traced request has ended."""
        if len(self._waiting) >= self._most:
            self.dropped["queue_full"] += 1
        else:
            self._waiting.append(story)

    def close(self, timeout_s: float) -> None:
        """Sends what is left, and returns when that is done or after so long.  A second call does nothing."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join(timeout_s)
        left = self._thread.is_alive()
        self._collector.close()
        if left:
            log.warning(
                "--otlp-traces-endpoint: %d requests are not told of, as the server ends", self._left()
            )

    def collect(self) -> Iterator[Metric]:
        """For Prometheus."""
        sent = CounterMetricFamily(
            PREFIX + "traces_sent", "Requests whose spans a collector has.", labels=["model_name"]
        )
        sent.add_metric([self._model], self.sent)
        yield sent
        dropped = CounterMetricFamily(
            PREFIX + "traces_dropped",
            "Traced requests of which nothing is told: too many waited, or the collector did not take them.",
            labels=["model_name", "reason"],
        )
        for reason, count in self.dropped.items():
            dropped.add_metric([self._model, reason], count)
        yield dropped

    # -- on the thread

    def _left(self) -> int:
        return len(self._waiting)

    def _run(self) -> None:
        while not self._stopping.wait(self._delay_s):
            self._send_until(self._clock() - SETTLE_S)
        self._send_until(None)

    def _send_until(self, ended: float | None) -> None:
        """All that ended before; None: all."""
        spans: list[Any] = []
        count = 0
        while self._waiting:
            if ended is not None and (self._waiting[0].ended or 0.0) > ended:
                break
            story = self._waiting.popleft()
            try:
                spans += self._spans(story)
                count += 1
            except Exception:
                self.dropped["not_sent"] += 1
                log.exception("request %s cannot be told to the collector", story.id)
            if len(spans) >= self._batch:
                self._send(spans, count)
                spans, count = [], 0
            elif count % _YIELD_EACH == 0:
                time.sleep(_YIELD_S)
        if spans:
            self._send(spans, count)

    def _spans(self, story: Story) -> list[Any]:
        trace = story.trace
        if trace is None:
            return []
        root, children = traced(story, self._model, self._clock())
        ids = [self._random.getrandbits(64) or 1 for _ in children]
        return self._collector.spans(root, children, trace, ids)

    def _send(self, spans: list[Any], count: int) -> None:
        try:
            taken = self._collector.send(spans)
        except Exception:
            log.exception("--otlp-traces-endpoint: sending failed")
            taken = False
        if taken:
            self.sent += count
            return
        self.dropped["not_sent"] += count
        now = self._clock()
        if now - self._warned >= _WARN_S:
            self._warned = now
            log.warning(
                "--otlp-traces-endpoint: the collector does not take spans (%s); %d requests so far",
                self._collector.why,
                self.dropped["not_sent"],
            )
