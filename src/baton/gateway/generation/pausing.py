"""`/pause` and `/resume`: what happens to requests meanwhile, in vLLM's modes.

| mode | requests in flight | new requests |
| --- | --- | --- |
| `abort` | end at once, with what they have and `finish_reason` "abort" | wait in the instances' queues |
| `wait` | run to their ends first; the call is answered then | wait here meanwhile, then in the queues |
| `keep` | stand still where they are, and go on | wait in the instances' queues |

In flight is what came over this server.  Requests of other gateways that share an instance stand still, in
every mode, and those gateways know that it is paused (`protocol/messages/requests.Welcome`); each of them may
end it.  What waits has no deadline while the pause lasts: `/ready` and the metrics say that and since when.
With `resume_after_s` the engines end a pause by themselves, also if this server is gone by then.  An
incarnation of an instance that starts meanwhile is not paused.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal, NamedTuple, get_args

from baton.gateway.errors import Conflict, InstanceUnavailable
from baton.gateway.generation.generator import Generator
from baton.gateway.instances.client import ClusterClient
from baton.gateway.instances.orders import checked

log = logging.getLogger(__name__)

PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)

_SWITCH_DEADLINE_S = 10.0


class Pause(NamedTuple):
    """The pause that lasts."""

    mode: PauseMode
    since: float
    """On the event loop's clock."""
    until: float | None
    """When it ends by itself; None: `/resume` ends it."""


class Pausing:
    """The pauses of one server.  Belongs to one event loop."""

    def __init__(self, client: ClusterClient, generator: Generator) -> None:
        self._client = client
        self._generator = generator
        self._pause: Pause | None = None
        self._waiting: asyncio.Task[bool] | None = None

    async def pause(
        self, mode: PauseMode, *, clear_cache: bool, timeout_s: float, resume_after_s: float | None
    ) -> dict[str, Any]:
        """Pauses all instances that are ready; a second call changes the mode of a pause and its end.

        `clear_cache`: the prefix cache is forgotten too.  `timeout_s`: what mode `wait` may take; nothing is
        paused if that is not enough.  Raises `ApiError`.
        """
        if self._waiting is not None:
            raise Conflict("a pause waits for requests to end; let it, or end it with /resume", code="busy")
        in_flight = self._generator.open
        if mode == "wait":
            await self._drain(timeout_s)
        try:
            ends = "" if resume_after_s is None else str(resume_after_s)
            answer = checked(await self._client.query("pause", _SWITCH_DEADLINE_S, ends))
            self._begin(mode, resume_after_s)
        finally:
            self._generator.release()
        aborted = 0
        if mode == "abort":
            aborted = sum(generation.abort() for generation in in_flight)
        if clear_cache:
            checked(await self._client.query("reset_prefix_cache", _SWITCH_DEADLINE_S))
        log.info("paused (%s), %d sequences aborted", mode, aborted)
        return {**answer, "status": "paused", "mode": mode, "aborted": aborted}

    async def resume(self) -> dict[str, Any]:
        """Everything goes on, also after a pause by another gateway.  Raises `ApiError`."""
        if self._waiting is not None:
            self._waiting.cancel()
        answer = checked(await self._client.query("resume", _SWITCH_DEADLINE_S))
        self._pause = None
        log.info("resumed")
        return {**answer, "status": "resumed"}

    def describe(self) -> dict[str, Any]:
        """As `/is_paused` says it; seconds."""
        now = asyncio.get_running_loop().time()
        pause = self._pause if self._client.paused else None
        if pause and pause.until is not None and now > pause.until + _SWITCH_DEADLINE_S:
            pause = None  # ours is over, and another gateway has ordered this one
        return {
            "is_paused": self._client.paused,
            "waiting": self._waiting is not None,
            "mode": pause.mode if pause else None,
            "paused_for_s": round(now - pause.since, 3) if pause else None,
            "resumes_in_s": round(max(0.0, pause.until - now), 3) if pause and pause.until else None,
        }

    @property
    def reason(self) -> str | None:
        """Why no request is answered now, for `/ready`; None: nothing is paused."""
        if self._waiting is not None:
            return "a pause (mode wait) lets running requests end first; new ones wait"
        if not self._client.paused:
            return None
        now = self.describe()
        if now["mode"] is None:
            return "paused; POST /resume ends it"
        text = f"paused (mode {now['mode']}) for {now['paused_for_s']:.0f} s; POST /resume ends it"
        if now["resumes_in_s"] is not None:
            text += f", and it ends by itself in {now['resumes_in_s']:.0f} s"
        return text

    # -- inside

    async def _drain(self, timeout_s: float) -> None:
        """Holds back what is new until what was there has ended.  Then the caller pauses and releases."""
        self._generator.hold()
        self._waiting = asyncio.create_task(self._generator.drained(timeout_s), name="pause: wait")
        try:
            ended = await self._waiting
        except BaseException as error:
            self._generator.release()
            task = asyncio.current_task()
            if not isinstance(error, asyncio.CancelledError) or (task and task.cancelling()):
                raise
            why = "resumed while requests were waited for; nothing is paused"
            raise Conflict(why, code="resumed") from None
        finally:
            self._waiting = None
        if not ended:
            self._generator.release()
            raise InstanceUnavailable(
                f"requests still run after {timeout_s:g} s (timeout_s); nothing is paused", code="timeout"
            )

    def _begin(self, mode: PauseMode, resume_after_s: float | None) -> None:
        now = asyncio.get_running_loop().time()
        self._pause = Pause(mode, now, None if resume_after_s is None else now + resume_after_s)
