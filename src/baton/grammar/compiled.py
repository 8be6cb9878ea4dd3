"""Compiled grammars, and the matchers that are made of them, in threads of their own.

A grammar is compiled once for all requests that have it: a copy costs microseconds.  One thread compiles what
is new; it gives way to those that compute.  Another one makes the copies, so that a request with a known
grammar does not queue behind one whose grammar takes long.  What nobody waits for any more is not compiled.

Copies share a *lexer* (llguidance's `deep_copy` is not as deep as that), and two things follow.  It is behind
a lock: masks of copies are not filled side by side, so a grammar that many have gets several lexers, one for
each thread at most.  And its states only become more: when there are too many, all its copies fail, whoever
has made them.  So a request whose matcher fails is given one with a lexer of its own, which reads the same
tokens; it fails if that one fails as well.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer

from baton.grammar.limits import counted_by, parser_limits

_KEPT = 64
"""Grammars."""
_KEPT_CHARACTERS = 200_000
"""That the lexers of all these may have counted: about 1 GB, if answers have gone so far."""
_MOST_LEXERS = 4
_MANY = 8
"""Requests that have shared a lexer before the grammar gets another one."""
_NICE = 5
"""By so much the thread that compiles gives way."""
_STATE = re.compile(r"<state>|<non-verbose/>")
"""Behind what is wrong llguidance writes its state, or that it does not."""


class MatchingError(RuntimeError):
    """A matcher cannot follow its request."""


class Promise(Future[LLMatcher]):
    """Of a matcher."""

    lexer: int = -1
    """The number of the one that it shares; -1: it has its own."""


class _Compiled:
    """A grammar that is compiled, or will be."""

    __slots__ = ("future", "waiting")

    def __init__(self, future: Future[LLMatcher]) -> None:
        self.future = future
        self.waiting: set[Promise] = set()
        """Matchers of those who were promised one, and did not take it back."""

    @property
    def failed(self) -> bool:
        return self.future.done() and self.future.exception() is not None


class _Lexers:
    """Those of one grammar."""

    __slots__ = ("compiled", "served")

    def __init__(self) -> None:
        self.compiled: list[_Compiled] = []
        self.served = 0
        """Matchers that were made of them."""


class Grammars:
    """Makes matchers.  Driven by one thread."""

    def __init__(self, tokenizer: Callable[[], LLTokenizer], lexers: int = 1) -> None:
        """`tokenizer`: as of `Masks`.  `lexers`: of one grammar at most."""
        self._tokenizer = tokenizer
        self._most = min(lexers, _MOST_LEXERS)
        self._kept: OrderedDict[str, _Lexers] = OrderedDict()
        self._compiling: ThreadPoolExecutor | None = None
        self._copying: ThreadPoolExecutor | None = None

    def matcher(self, grammar: str, generated: list[int], *, alone: bool = False) -> Promise:
        """One that has read these tokens.  Its exception may be any: `MatchingError`, or what `tokenizer`
        raises.  `alone`: with a lexer of its own, as the others may be full."""
        if self._compiling is None or self._copying is None:
            self._compiling = ThreadPoolExecutor(1, "grammars", initializer=_give_way)
            self._copying = ThreadPoolExecutor(1, "matchers")
        promise = Promise()
        if alone:
            self._kept.pop(grammar, None)
            self._compiling.submit(self._make_alone, grammar, generated, promise)
            return promise
        lexers = self._kept.setdefault(grammar, _Lexers())
        self._kept.move_to_end(grammar)
        promise.lexer, found = self._chosen(grammar, lexers)
        self._forget()
        if not found.future.done():
            found.waiting.add(promise)
        copying = self._copying

        def copy(compiled: Future[LLMatcher]) -> None:
            with contextlib.suppress(RuntimeError):  # (closed)
                copying.submit(self._copy, grammar, compiled, generated, promise)

        found.future.add_done_callback(copy)
        return promise

    def _forget(self) -> None:
        """Those that were asked for longest ago, where there are too many; who follows one goes on."""
        counted = sum(counted_by(one) * len(its.compiled) for one, its in self._kept.items())
        while len(self._kept) > 1 and (len(self._kept) > _KEPT or counted > _KEPT_CHARACTERS):
            grammar, lexers = self._kept.popitem(last=False)
            counted -= counted_by(grammar) * len(lexers.compiled)

    def _chosen(self, grammar: str, lexers: _Lexers) -> tuple[int, _Compiled]:
        """The lexer of the next matcher, and its number; begins another one where many share them."""
        assert self._compiling is not None
        compiled = lexers.compiled = [one for one in lexers.compiled if not one.failed]
        ready = [number for number, one in enumerate(compiled) if one.future.done()]
        many = lexers.served >= _MANY * len(compiled) and len(compiled) < self._most
        if not compiled or (ready and many):
            compiled.append(_Compiled(self._compiling.submit(self._compile, grammar)))
        number = ready[lexers.served % len(ready)] if ready else 0
        lexers.served += 1
        return number, compiled[number]

    def release(self, grammar: str, promise: Promise) -> None:
        """Nobody will ask for this one any more."""
        promise.cancel()
        lexers = self._kept.get(grammar)
        for found in lexers.compiled if lexers is not None else ():
            if promise in found.waiting:
                found.waiting.discard(promise)
                if not found.waiting and found.future.cancel():
                    del self._kept[grammar]
                break

    def close(self) -> None:
        for pool in (self._compiling, self._copying):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    # ---- in the threads

    def _compile(self, grammar: str) -> LLMatcher:
        made = LLMatcher(self._tokenizer(), grammar, log_level=0, limits=parser_limits(grammar))
        check_matcher(made)
        return made

    def _copy(
        self, grammar: str, compiled: Future[LLMatcher], generated: list[int], promise: Promise
    ) -> None:
        if not promise.set_running_or_notify_cancel():
            return
        try:
            matcher = compiled.result().deep_copy()
        except (Exception, CancelledError) as error:
            promise.set_exception(error)
            return
        try:
            promise.set_result(_having_read(matcher, generated))
        except MatchingError:  # (a full lexer, maybe)
            assert self._compiling is not None
            with contextlib.suppress(RuntimeError):  # (closed)
                self._compiling.submit(self._make_alone, grammar, generated, promise, begun=True)

    def _make_alone(
        self, grammar: str, generated: list[int], promise: Promise, *, begun: bool = False
    ) -> None:
        if not begun and not promise.set_running_or_notify_cancel():
            return
        try:
            promise.set_result(_having_read(self._compile(grammar), generated))
        except Exception as error:
            promise.set_exception(error)


def _having_read(matcher: LLMatcher, tokens: list[int]) -> LLMatcher:
    """Raises `MatchingError`."""
    if tokens:
        matcher.consume_tokens(tokens)
        check_matcher(matcher)
    return matcher


def check_matcher(matcher: LLMatcher) -> None:
    """Raises `MatchingError`."""
    if matcher.is_error():
        raise MatchingError(" ".join(_STATE.split(matcher.get_error())[0].split()))


def _give_way() -> None:
    """Of this thread alone (Linux)."""
    with contextlib.suppress(OSError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)
