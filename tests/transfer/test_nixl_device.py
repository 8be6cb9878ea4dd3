"""NIXL with a pool in a device's memory: what Baton gives the package's own lists of descriptors.

No device is needed for that, and none is read: an agent that only notes takes the place of the package's."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton.transfer.base import Copy, PoolView
from baton.transfer.transports import nixl

pytestmark = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("nixl_cu13", "nixl_cu12")),
    reason="the extra nixl is not installed",
)
SIZES = dict(
    num_blocks=32, block_bytes=3 * 2 * 2 * 256, num_layers=3, kv_heads=2, head_start=0, total_kv_heads=2,
    memory=None, fd=None,
)  # fmt: skip
LAYER = 2 * 2 * 256


class Agent:
    """Takes what `nixlAgent` takes."""

    made: list[Agent]

    def __init__(self, name: str, config: Any) -> None:
        self.name, self.memory, self.reads = name, [], []
        Agent.made.append(self)

    def createBackend(self, kind: str, options: dict[str, str]) -> int:
        assert kind == "UCX"
        return 7

    def registerMem(self, memory: Any, backends: list[int]) -> None:
        assert backends == [7]
        self.memory.append(memory)

    def getLocalMD(self) -> bytes:
        return b"metadata"

    def loadRemoteMD(self, metadata: bytes) -> str:
        assert metadata == b"metadata"
        return "remote"

    def createXferReq(
        self, operation: Any, local: Any, remote: Any, agent: str, message: bytes, backends: list[int]
    ) -> int:
        self.reads.append((operation, local, remote, agent))
        return 1

    def postXferReq(self, request: int, message: bytes) -> None: ...

    def getXferStatus(self, request: int) -> Any:
        return nixl._bindings().NIXL_SUCCESS

    def releaseXferReq(self, request: int) -> None: ...

    def deregisterMem(self, memory: Any, backends: list[int]) -> None: ...


def told(descriptors: Any) -> list[tuple[int, ...]]:
    return [tuple(descriptors[n])[:3] for n in range(descriptors.descCount())]


@pytest.mark.parametrize(("here", "there"), [(0, 1), (1, 0), (2, -1), (-1, 0)])
def test_memory_of_devices_is_named_as_such(here: int, there: int, monkeypatch: pytest.MonkeyPatch):
    """Registered where it lies, and read from where it lies, run by run."""
    api = nixl._bindings()
    given = {name: getattr(api, name) for name in dir(api) if not name.startswith("_")}
    monkeypatch.setattr(nixl, "_bindings", lambda: SimpleNamespace(**{**given, "nixlAgent": Agent}))
    monkeypatch.setattr(Agent, "made", [], raising=False)
    source_pool = PoolView(**SIZES, address=1 << 40, device=there)
    source = nixl.NixlTransport(source_pool)
    reader = nixl.NixlTransport(PoolView(**SIZES, address=1 << 41, device=here))
    pages, blocks = np.array([3, 9], np.int32), np.array([20, 0], np.int32)
    copy = Copy(source.export(source_pool.source(0)), pages, blocks, 1, 2, 0, 0, 2)
    moved: list[int] = []

    def fetch() -> Any:
        moved.append((yield from reader.copy(copy)))

    assert list(fetch()) == []  # (it need not wait)
    assert moved == [2 * 2 * LAYER]
    kinds = [api.DRAM_SEG if device < 0 else api.VRAM_SEG for device in (there, here)]
    (exported,), (own,) = Agent.made[0].memory, Agent.made[1].memory
    assert [exported.getType(), own.getType()] == kinds
    size = SIZES["num_blocks"] * SIZES["block_bytes"]
    assert told(exported) == [(1 << 40, size, max(there, 0))]
    assert told(own) == [(1 << 41, size, max(here, 0))]
    ((operation, local, remote, agent),) = Agent.made[2].reads
    assert operation == api.NIXL_READ
    assert agent == Agent.made[0].name
    assert [remote.getType(), local.getType()] == kinds
    place = [(address + page * SIZES["block_bytes"] + LAYER, 2 * LAYER, max(device, 0))
             for address, page, device in ((1 << 40, 3, there), (1 << 40, 9, there))]  # fmt: skip
    assert told(remote) == place
    at = [(1 << 41) + block * SIZES["block_bytes"] + LAYER for block in (20, 0)]
    assert told(local) == [(one, 2 * LAYER, max(here, 0)) for one in at]
