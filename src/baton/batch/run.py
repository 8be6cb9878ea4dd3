"""Drives a batch: so many requests in flight, each answer appended as it comes.

What may be otherwise later (a full queue, an instance that restarts, a connection that is lost) is tried
again; an answer is what stays.  If nothing at all is answered for `PATIENCE_S`, or the server refuses the
key, the run ends without a line for what it has not done, so the next run does that.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from baton.batch.client import Address, Answer, Connection, ConnectionLost
from baton.batch.lines import MAX_LINE, BadLine, Request, answered, line_id, read_line, refused
from baton.batch.output import Output, OutputError

PATIENCE_S = 600.0
_ANSWER_S = 6 * 3600.0
_AGAIN_S = 0.5
_MOST_S = 15.0
_PASSING = frozenset({408, 429, 502, 503, 504})
"""Of answers that may be others later."""
_READY_LOOK_S = 0.05


class BatchFailed(RuntimeError):
    """The run cannot go on; one line."""


@dataclass
class Counts:
    """Of lines."""

    total: int = 0
    before: int = 0
    """Done by earlier runs."""
    answered: int = 0
    errors: int = 0
    retries: int = 0
    twice: int = 0
    """Whose custom_id an earlier line has too; of the lines that this run has read."""

    @property
    def done(self) -> int:
        return self.before + self.answered + self.errors


@dataclass
class Batch:
    """One run.  `advance` is called with each line that is done."""

    source: BinaryIO
    output: Output
    address: Address
    api_key: str | None = None
    max_concurrency: int = 256
    advance: Callable[[], object] = lambda: None
    counts: Counts = field(default_factory=Counts)
    stopping: bool = False
    """No further line is begun."""
    _lines: Iterator[Request | BadLine] = field(init=False)
    _success_at: float = field(init=False, default=0.0)

    async def run(self) -> None:
        """Until all lines are done, or those that had begun when it was stopped.  Raises `BatchFailed`,
        `OutputError`."""
        self._lines = self._read()
        self._success_at = asyncio.get_running_loop().time()
        workers = [asyncio.create_task(self._work(), name="batch") for _ in range(self.max_concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    def _read(self) -> Iterator[Request | BadLine]:
        """Those that are to be done."""
        seen: set[str] = set()
        for number, line in lines_of(self.source):
            if number not in self.output.done:
                found = read_line(number, line)
                if found.custom_id is not None:
                    self.counts.twice += found.custom_id in seen
                    seen.add(found.custom_id)
                yield found

    async def _work(self) -> None:
        connection = Connection(self.address, self.api_key)
        try:
            while not self.stopping and (line := next(self._lines, None)) is not None:
                if isinstance(line, BadLine):
                    self._write(refused(line), failed=True)
                    await asyncio.sleep(0)
                    continue
                answer = await self._ask(connection, line)
                if answer is None:
                    return
                request_id = answer.headers.get("x-request-id", "")
                self._write(
                    answered(line, answer.status, request_id, answer.body), failed=answer.status >= 400
                )
        finally:
            connection.close()

    async def _ask(self, connection: Connection, request: Request) -> Answer | None:
        """The answer that stays; None: it was not found before the run was stopped.  Raises `BatchFailed`."""
        loop = asyncio.get_running_loop()
        pause = _AGAIN_S
        while True:
            try:
                answer = await connection.post(request.url, request.body, request.id, _ANSWER_S)
            except ConnectionLost as error:
                why, wait = str(error), pause
            except TimeoutError:
                raise BatchFailed(f"line {request.number} had no answer within {_ANSWER_S:g} s") from None
            else:
                if answer.status not in _PASSING:
                    self._check_right(answer)
                    self._success_at = loop.time()
                    return answer
                why = f"the server answers {answer.status}: {answer.body[:300].decode(errors='replace')}"
                wait = min(answer.retry_after_s or pause, _MOST_S)
            if self.stopping:
                return None
            if loop.time() - self._success_at > PATIENCE_S:
                raise BatchFailed(f"nothing was answered for {PATIENCE_S:g} s; lastly: {why}")
            self.counts.retries += 1
            pause = min(2 * pause, _MOST_S)
            await asyncio.sleep(wait)

    @staticmethod
    def _check_right(answer: Answer) -> None:
        if answer.status in (401, 403):
            raise BatchFailed(
                f"the server answers {answer.status}; give a key that it takes with --openai-api-key, or "
                "OPENAI_API_KEY"
            )

    def _write(self, line: bytes, *, failed: bool) -> None:
        self.output.append(line)
        if failed:
            self.counts.errors += 1
        else:
            self.counts.answered += 1
        self.advance()


def lines_of(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of those that are not empty; of one that is too long as much as shows that."""
    number = 0
    while line := source.readline(MAX_LINE + 1):
        number += 1
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)  # (what some editors write at a file's head)
        if len(line) > MAX_LINE and not line.endswith(b"\n"):
            while (rest := source.readline(MAX_LINE)) and not rest.endswith(b"\n"):
                pass
        if line.strip():
            yield number, line


def count_lines(source: BinaryIO, output: Output) -> Counts:
    """Reads it once, and stands at its beginning again.  Raises `OutputError` if the output is of another
    input."""
    total, missing = 0, set(output.done)
    for total, (number, line) in enumerate(lines_of(source), 1):  # noqa: B007 (of use afterwards)
        known = output.done.get(number)
        if known is not None:
            missing.discard(number)
            if known != line_id(number, line):
                break
    else:
        if not missing:
            source.seek(0)
            return Counts(total=total, before=len(output.done))
        number = min(missing)
    raise OutputError(
        f"-o {output.path}: it answers line {number} of another input than this one; give the input that it "
        "is of, or another output"
    )


async def until_ready(address: Address, timeout_s: float) -> None:
    """Waits for a server that is being started.  Raises `TimeoutError`."""
    connection = Connection(address)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    if (await connection.get("/ready", timeout_s)).status == 200:
                        return
                except ConnectionLost:
                    pass
                await asyncio.sleep(_READY_LOOK_S)
    finally:
        connection.close()
