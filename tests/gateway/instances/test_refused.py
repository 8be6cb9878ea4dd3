"""An engine that does not take the gateway's key: ZeroMQ would try again for ever, and in silence."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import zmq

from baton.gateway.instances.channel import EngineChannel
from baton.ipc.sockets.curve import Encryption, Unprotected
from baton.ipc.sockets.zeromq import terminate
from baton.protocol.rules.cluster_secret import ClusterSecret, Secrets
from tests.conftest import GENEROUS_S
from tests.ipc.test_curve import Listener

OURS, OTHER = (ClusterSecret.make(bytes([number] * 32)) for number in range(2))


async def test_the_gateway_is_told_that_its_secret_is_another_one(caplog: pytest.LogCaptureFixture):
    engine = Listener(OTHER)
    context: zmq.Context[Any] = zmq.Context()
    broke = asyncio.Event()
    encryption = Encryption(Secrets((OURS,)))
    try:
        with caplog.at_level(logging.ERROR):
            channel = EngineChannel(
                context,
                engine.endpoint,
                lambda data: None,
                lambda error: None,
                broke.set,
                reconnect_ms=600_000,
                encryption=encryption,
            )
            async with asyncio.timeout(GENEROUS_S):
                await broke.wait()
            channel.close()
        assert "refuses this gateway: it has another --cluster-secret" in caplog.text
        with pytest.raises(Unprotected):
            EngineChannel(context, engine.endpoint, lambda data: None, lambda error: None, broke.set)
    finally:
        terminate(context, GENEROUS_S)
        engine.close()
