"""The HTTP side of a server: the application, and uvicorn without what Baton does itself.

Imported after the instances have been started: it takes half a second, which their start then hides.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import uvicorn

from baton.gateway.access import Access
from baton.gateway.app import create_app
from baton.gateway.cluster_client import ClusterClient
from baton.gateway.served_model import ServedModel

_ANSWERING_S = 5.0
"""What the last answers may take to be written."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process before the instances are stopped, and
    without its ten looks a second at `should_exit`: it serves until `stopping` is set, then stops accepting
    and waits for requests to finish."""

    def __init__(self, config: uvicorn.Config, stopping: asyncio.Event, close: Callable[[], None]) -> None:
        super().__init__(config)
        self._stopping = stopping
        self.close = close
        """Gives up what the application holds."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not self._stopping.is_set():
            await self.on_tick(0)  # (the date header)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 1.0)


def make_http(
    served: ServedModel,
    client: ClusterClient,
    stopping: asyncio.Event,
    *,
    access: Access,
    on_weights: Callable[[str], str],
    shutdown_timeout_s: float,
) -> HttpServer:
    """Raises as `create_app`."""
    app = create_app(served, client, access=access, on_weights=on_weights)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=round(shutdown_timeout_s + _ANSWERING_S),
    )
    gateway = app.state.gateway
    gateway.helpers.start()  # its imports take a moment, which the model's loading hides
    return HttpServer(config, stopping, gateway.close)
