"""Streams that nobody reads closely, many at a time, in a thread of their own."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Self
from urllib.parse import urlsplit


class _Stream(asyncio.Protocol):
    def __init__(self) -> None:
        self.over = asyncio.get_running_loop().create_future()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)


class Load:
    """`lanes` streams at a time, each of `tokens` tokens, one after the other until the end."""

    def __init__(self, url: str, lanes: int, tokens: int = 300) -> None:
        self._lanes, self._tokens = lanes, tokens
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._all: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(lambda: self._all and self._all.cancel())
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._lanes_of())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.failure = error
        finally:
            self._loop.close()

    async def _lanes_of(self) -> None:
        self._all = asyncio.current_task()
        async with asyncio.TaskGroup() as lanes:
            for number in range(self._lanes):
                lanes.create_task(self._lane(number))
                if number % 50 == 49:
                    await asyncio.sleep(0.02)

    async def _lane(self, number: int) -> None:
        turn = 0
        while True:
            body = {"prompt": "Once upon a time " * (3 + number % 7), "max_tokens": self._tokens}
            data = json.dumps(body | {"ignore_eos": True, "stream": True}).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\nconnection: close\r\n"
                f"x-request-id: lane-{number}-{turn}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(data)}\r\n\r\n"
            )
            transport, stream = await self._loop.create_connection(_Stream, self._host, self._port)
            try:
                transport.write(head.encode() + data)
                await stream.over
            finally:
                transport.abort()
            turn += 1
