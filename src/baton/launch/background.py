"""An instance in the background of a program that is not a server: one thread with an event loop.

The loop runs the supervisor and the client of the instance; the program's threads hand it coroutines
(`call`) and functions (`post`).  The children are spawned from this thread, so they die with it whatever
happens to the process.

The end comes in one of three ways, and none may wait for itself:

* A program's thread closes: it asks the loop to stop and waits for the thread, for a bounded time; then the
  engine is killed.
* The garbage collector closes, in whichever thread it happens to run.  On the thread of this or of another
  instance's loop the stop is only asked for, as a wait there would stand in its own way.
* A child made by fork() leaves: it has a copy of everything but the thread.  Nothing of it is the child's to
  end, so it does nothing.

A `call` ends with its coroutine.  It looks every few seconds whether the thread still lives, so it
cannot outlive a loop that has stopped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

from baton.gateway.generation.generator import Generator
from baton.gateway.instances.client import ClusterClient
from baton.gateway.text.tokenizer import Tokenizer
from baton.launch.instances.supervisor import InstanceFailed, Supervisor
from baton.launch.planning.plan import ServerPlan

log = logging.getLogger(__name__)

T = TypeVar("T")

_LIVENESS_S = 5.0
_STOP_DEADLINE_S = 15.0
"""More than the supervisor gives the engine before it kills it."""
_KILLED_DEADLINE_S = 2.0
_READY_DEADLINE_S = 120.0
"""What a request waits for an instance that is being restarted."""

_on_a_loop = threading.local()


class Background:
    """One instance and what talks to it.  `start` first; `stop` may be called at any time, from anywhere."""

    def __init__(self, plan: ServerPlan) -> None:
        self._plan = plan
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="baton-llm", daemon=True)
        self._client = ClusterClient(on_fatal=lambda reason: None)
        self._supervisor = Supervisor(
            plan.instance, self._client.add(plan.instance.name), max_restarts=plan.max_restarts
        )
        self._supervising: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self.on_end: Callable[[], None] = lambda: None
        """Called on the thread when its loop has ended, however."""
        self.tokenizer = Tokenizer.from_directory(plan.served.tokenizer)
        self.tokenizer.use_template(plan.served.chat_template)
        self.generations = Generator(plan.served, self.tokenizer, self._client)

    def start(self) -> None:
        """Blocks until the instance serves; the supervisor bounds that.  Raises `InstanceFailed`."""
        self._thread.start()
        self.call(self._start())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and waits for it; Ctrl-C cancels it.

        Raises what the coroutine raises, and `RuntimeError` after the end, in a child made by fork(), and on
        the loop's own thread, which cannot wait for itself.
        """
        try:
            self._check_usable()
            future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            if self._loop.is_closed():
                raise RuntimeError("this LLM is closed") from None
            raise error from None
        try:
            while True:
                try:
                    return future.result(_LIVENESS_S)
                except TimeoutError:
                    if future.done():
                        raise  # the coroutine's own
                    if not self._thread.is_alive():
                        raise RuntimeError("this LLM was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def post(self, work: Callable[[], object]) -> None:
        """Runs a function on the loop, without waiting; does nothing after the end."""
        if self._is_ours() and self._thread.is_alive():
            with suppress(RuntimeError):  # closed just now
                self._loop.call_soon_threadsafe(work)

    def stop(self) -> None:
        """Ends the instance.  Returns when it has ended, except on a loop's thread: see above."""
        if not self._is_ours():
            return
        if self._thread.ident is None:  # never started
            self._loop.close()
            return
        self.post(self._stopping.set)
        if getattr(_on_a_loop, "yes", False):
            return
        try:
            self._thread.join(_STOP_DEADLINE_S)
        except BaseException:  # an impatient Ctrl-C
            self._supervisor.kill()
            raise
        if self._thread.is_alive():
            log.error("the instance did not stop within %.0f s; killing it", _STOP_DEADLINE_S)
            self._supervisor.kill()
            self._thread.join(_KILLED_DEADLINE_S)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def check(self) -> None:
        """Raises `RuntimeError` where `call` would at once."""
        self._check_usable()

    def together(self) -> AbstractContextManager[None]:
        """On the loop: see `ClusterClient.together`."""
        return self._client.together()

    def check_ready(self) -> None:
        """Raises `InstanceUnavailable` with the reason unless a request can be submitted now."""
        self._client.check_ready()

    async def ready(self) -> None:
        """Waits, on the loop, for an instance that can serve.  Raises `InstanceUnavailable` with the reason
        if it has failed for good or does not come back in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_READY_DEADLINE_S):
                await self._client.ready()
        self._client.check_ready()

    # -- inside

    def _is_ours(self) -> bool:
        return os.getpid() == self._pid

    def _check_usable(self) -> None:
        if not self._is_ours():
            raise RuntimeError("this LLM belongs to the process that made it; make one after fork()")
        if threading.current_thread() is self._thread:
            raise RuntimeError("an LLM cannot be called from its own background thread")
        if not self._thread.is_alive() or self._stopping.is_set():
            raise RuntimeError("this LLM is closed")

    def _main(self) -> None:
        _on_a_loop.yes = True
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._run())
        finally:
            self.on_end()

    async def _run(self) -> None:
        """The life of the loop: until somebody wants the end."""
        await self._stopping.wait()
        await self._client.close()
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.gather(self._supervising, return_exceptions=True)

    async def _start(self) -> None:
        self._supervising = asyncio.create_task(self._supervisor.run(), name="supervisor")
        ready = asyncio.create_task(self._client.ready())
        try:
            await asyncio.wait((self._supervising, ready), return_when=asyncio.FIRST_COMPLETED)
            if self._supervising.done():
                self._supervising.result()
                raise InstanceFailed("the supervisor left without a reason")
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)
