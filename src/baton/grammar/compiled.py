"""Compiled grammars, and the matchers that are made of them, in threads of their own.

A grammar is compiled once for all requests that have it: a copy costs microseconds.  One thread compiles what
is new; it gives way to those that compute.  Another one makes the copies, so that a request with a known
grammar does not queue behind one whose grammar takes long.  What nobody waits for any more is not compiled.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer

from baton.grammar.limits import parser_limits

_KEPT = 64
"""Compiled grammars."""
_NICE = 5
"""By so much the thread that compiles gives way."""


class MatchingError(RuntimeError):
    """A matcher cannot follow its request."""


class _Compiled:
    """A grammar that is compiled, or will be."""

    __slots__ = ("future", "waiting")

    def __init__(self, future: Future[LLMatcher]) -> None:
        self.future = future
        self.waiting: set[Future[LLMatcher]] = set()
        """Matchers of those who were promised one, and did not take it back."""


class Grammars:
    """Makes matchers.  Driven by one thread."""

    def __init__(self, tokenizer: Callable[[], LLTokenizer]) -> None:
        """`tokenizer`: as of `Masks`."""
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        self._compiling: ThreadPoolExecutor | None = None
        self._copying: ThreadPoolExecutor | None = None

    def matcher(self, grammar: str, generated: list[int]) -> Future[LLMatcher]:
        """One that has read these tokens.  Its exception may be any: `MatchingError`, or what `tokenizer`
        raises."""
        if self._compiling is None or self._copying is None:
            self._compiling = ThreadPoolExecutor(1, "grammars", initializer=_give_way)
            self._copying = ThreadPoolExecutor(1, "matchers")
        found = self._compiled.get(grammar)
        if found is None or (found.future.done() and found.future.exception() is not None):
            found = self._compiled[grammar] = _Compiled(self._compiling.submit(self._compile, grammar))
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        promise: Future[LLMatcher] = Future()
        if not found.future.done():
            found.waiting.add(promise)
        copying = self._copying

        def copy(compiled: Future[LLMatcher]) -> None:
            with contextlib.suppress(RuntimeError):  # (closed)
                copying.submit(_copy, compiled, generated, promise)

        found.future.add_done_callback(copy)
        return promise

    def release(self, grammar: str, promise: Future[LLMatcher]) -> None:
        """Nobody will ask for this one any more."""
        promise.cancel()
        found = self._compiled.get(grammar)
        if found is not None and promise in found.waiting:
            found.waiting.discard(promise)
            if not found.waiting and found.future.cancel():
                del self._compiled[grammar]

    def close(self) -> None:
        for pool in (self._compiling, self._copying):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> LLMatcher:
        made = LLMatcher(self._tokenizer(), grammar, log_level=0, limits=parser_limits())
        check_matcher(made)
        return made


def check_matcher(matcher: LLMatcher) -> None:
    """Raises `MatchingError`."""
    if matcher.is_error():
        raise MatchingError(" ".join(matcher.get_error().split("<state>")[0].split()))


def _copy(compiled: Future[LLMatcher], generated: list[int], promise: Future[LLMatcher]) -> None:
    if not promise.set_running_or_notify_cancel():
        return
    try:
        matcher = compiled.result().deep_copy()
        if generated:
            matcher.consume_tokens(generated)
            check_matcher(matcher)
    except (Exception, CancelledError) as error:
        promise.set_exception(error)
    else:
        promise.set_result(matcher)


def _give_way() -> None:
    """Of this thread alone (Linux)."""
    with contextlib.suppress(OSError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)
