"""A real uvicorn with the gateway's application in a thread, in front of an `EchoEngine`."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn
import uvloop
from openai import AsyncOpenAI, OpenAI

from baton.gateway.access import Access
from baton.gateway.http.app import create_app
from baton.gateway.instances.client import ClusterClient
from baton.gateway.responses.store import ResponseStore
from baton.gateway.served_model import ServedModel
from baton.gateway.sharing import SharingOptions
from tests.gateway.echo_engine import Behaviour, EchoEngine

T = TypeVar("T")


class GatewayServer:
    """Use as a context manager.  `engine` may be replaced by `restart_engine`."""

    def __init__(
        self,
        tokenizer: Path,
        *,
        eos: int | None,
        vocab: int,
        access: Access | None = None,
        sharing: SharingOptions | None = None,
        responses: ResponseStore | None = None,
        refuse_tools: bool = False,
        retry_wait_s: float = 60.0,
        attach: bool = True,
        max_model_len: int = 256,
        **served: Any,
    ) -> None:
        self.engine = EchoEngine(vocab=vocab)
        self.fatal: list[str] = []
        self.served = ServedModel(
            names=("tiny", "alias"),
            tokenizer=tokenizer,
            max_model_len=max_model_len,
            eos_token_ids=() if eos is None else (eos,),
            vocab_size=vocab,
            **served,
        )
        self._access = access or Access(profile_dir="/", weights_dir="/")
        self._sharing, self._responses, self._refuse_tools = sharing, responses, refuse_tools
        self._retry_wait_s = retry_wait_s
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._thread.start()
        assert self._started.wait(60)
        if attach:
            self.attach()

    def __enter__(self) -> GatewayServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(setattr, self._http, "should_exit", True)
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.engine.die()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.client = ClusterClient(retry_wait_s=self._retry_wait_s, on_fatal=self.fatal.append)
        self.instance = self.client.add("instance-0")
        self.app = create_app(
            self.served,
            self.client,
            access=self._access,
            sharing=self._sharing,
            responses=self._responses,
            refuse_tools=self._refuse_tools,
        )
        config = uvicorn.Config(self.app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
        self._http = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._started.set()
        await self._http.serve(sockets=[listener])
        await self.client.close()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the gateway's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def attach(self) -> None:
        self.call(self.instance.attach(self.engine.endpoint, self.engine.incarnation))

    def lose_engine(self, reason: str = "killed by a test") -> None:
        """The process dies and the supervisor notices."""
        self.engine.die()

        async def lost() -> None:
            self.instance.lost(reason)

        self.call(lost())

    def restart_engine(self, **behaviour: Any) -> None:
        self.engine = EchoEngine(incarnation="next", vocab=self.engine.vocab)
        self.engine.behaviour = Behaviour(**behaviour)
        self.attach()

    def reset(self) -> None:
        """Between tests: no behaviour, no memory."""
        self.engine.behaviour = Behaviour()
        self.engine.submits = []
        self.engine.cancels.clear()

    def openai(self, **options: Any) -> OpenAI:
        settings = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
        return OpenAI(base_url=self.url + "/v1", **settings)

    def async_openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=60)

    def http(self) -> httpx.Client:
        """Bodies that it is given as bytes are JSON as well."""
        headers = {"content-type": "application/json"}
        return httpx.Client(base_url=self.url, timeout=60, headers=headers)
