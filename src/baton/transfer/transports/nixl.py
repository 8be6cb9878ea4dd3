"""Pages over NIXL (the extra `nixl`): RDMA, NVLink or whatever its UCX backend finds; the reader READs.

Theory.  Each rank has an agent, with its pool registered.  The reader loads the source's metadata, describes
the runs of bytes on both sides and posts a READ.  Completion is polled, twice a millisecond.

What differs from the other transports, and what follows from it:

* The bytes are placed by a device or by UCX, not by us, and a READ that was *released* while under way still
  lands later (seen over TCP: all 64 MB, after the source had woken up).  So the reader has an agent of its
  own for each rank that it reads from, and a transfer that is dropped or late ends with that agent: without
  it nothing is left that could place a byte.  The next fetch makes a new one.
* Over plain TCP UCX emulates READ in the source's process, and aborts that process if the reader vanishes
  while it hangs (seen: "Fatal: unexpected error: Endpoint timeout").  It is also slower there than our own
  TCP transport.  So this one is used where it is asked for, and by itself only for pools in device memory.
* A source that hangs looks like a transfer in progress for ever: each has a deadline of its own.
* The agent's progress thread, with the delay of 0 that the Python package sets, burns a core while idle.
  With a delay it sleeps in `poll()`, so this uses the package's bindings, where the delay can be given.  Only
  the exporting agent needs one: a reading agent moves when its state is polled.
* There are no checksums: nobody on the source's side computes any.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import runpy
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from baton.protocol.messages.handover import PoolSource
from baton.transfer.base import SILENCE_S, Copy, Copying, Int32Array, PoolView, TransferError
from baton.transfer.layout import Part, part_here, part_there
from baton.transfer.tasks import Wait

log = logging.getLogger(__name__)

Descriptors = npt.NDArray[np.uint64]
"""[n, 3] address, length and device of each run of bytes."""

_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
_PROGRESS_DELAY_US = 50_000
_POLL_S = 0.0005
_UNDER_WAY = "under way"
_SLOWEST_BYTES_S = 20e6
"""The deadline of a transfer allows for a network so slow."""
_UNUSED_S = 60.0
"""A reading agent that was not used for so long is given up."""


class _Place(msgspec.Struct, array_like=True, frozen=True):
    """What `PoolSource.nixl` holds."""

    agent: str
    metadata: bytes
    address: int
    device: int


class _Agent:
    """A NIXL agent with the pool registered."""

    def __init__(self, api: Any, pool: PoolView, *, progress: bool) -> None:
        self.name = f"baton-{secrets.token_hex(8)}"
        self._api = api
        config = api.nixlAgentConfig()
        config.useProgThread = progress
        config.pthrDelay = _PROGRESS_DELAY_US
        self._agent: Any = api.nixlAgent(self.name, config)
        # With "peer" the death of the other side is an error instead of silence.
        self._backend = self._agent.createBackend("UCX", {"ucx_error_handling_mode": "peer"})
        self._here = _segment(api, pool.device)
        memory = [(pool.address, pool.num_blocks * pool.block_bytes, max(pool.device, 0), "")]
        self._registered = api.nixlRegDList(self._here, memory)
        self._agent.registerMem(self._registered, [self._backend])
        self.used = time.monotonic()

    def metadata(self) -> bytes:
        return bytes(self._agent.getLocalMD())

    def load(self, metadata: bytes) -> None:
        self._agent.loadRemoteMD(metadata)

    def post(self, place: _Place, here: Descriptors, there: Descriptors) -> Any:
        """Begins to read.  The request must be released, or the agent closed."""
        api = self._api
        local = api.nixlXferDList(self._here, here)
        remote = api.nixlXferDList(_segment(api, place.device), there)
        request = self._agent.createXferReq(api.NIXL_READ, local, remote, place.agent, b"", [self._backend])
        self._agent.postXferReq(request, b"")
        return request

    def state(self, request: Any) -> str:
        """`_UNDER_WAY`, "" when it is done, or what went wrong."""
        try:
            status = self._agent.getXferStatus(request)
        except Exception as error:
            return _reason(error)
        if status == self._api.NIXL_IN_PROG:
            return _UNDER_WAY
        return "" if status == self._api.NIXL_SUCCESS else f"status {status}"

    def release(self, request: Any) -> None:
        self._agent.releaseXferReq(request)

    def close(self, request: Any = None) -> None:
        """After this nothing of it reads or writes the pool.  `request`: one that was not released."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        try:
            if request is not None:
                agent.releaseXferReq(request)
            agent.deregisterMem(self._registered, [self._backend])
        except Exception as error:
            log.debug("NIXL: closing agent %s: %s", self.name, _reason(error))


class NixlTransport:
    """See `base.Transport`."""

    name = "nixl"
    parallel = 1

    def __init__(self, pool: PoolView, *, silence_s: float = SILENCE_S) -> None:
        """Raises `ImportError` without the extra, and what NIXL raises if it does not work here."""
        self._api = _bindings()
        self._pool = pool
        self._silence_s = silence_s
        self._exporter = _Agent(self._api, pool, progress=True)
        self._readers: dict[str, _Agent] = {}

    def export(self, source: PoolSource) -> PoolSource:
        exporter = self._exporter
        place = _Place(exporter.name, exporter.metadata(), self._pool.address, self._pool.device)
        return msgspec.structs.replace(source, nixl=msgspec.msgpack.encode(place))

    def why_not(self, source: PoolSource) -> str:
        return "" if source.nixl else "the source has no NIXL agent"

    def copy(self, copy: Copy) -> Copying:
        try:
            place = msgspec.msgpack.decode(copy.source.nixl, type=_Place)
        except msgspec.MsgspecError as error:
            raise TransferError(f"its NIXL metadata cannot be read: {error}") from None
        if not len(copy.pages):
            return 0
        size = len(copy.pages) * part_here(copy, self._pool).page_bytes
        give_up = time.monotonic() + self._silence_s + size / _SLOWEST_BYTES_S
        request: Any = None
        whole = False
        try:
            agent = self._reader(place)
            request = agent.post(place, *self._descriptors(copy, place))
            while (state := agent.state(request)) == _UNDER_WAY:
                if time.monotonic() > give_up:
                    raise TransferError(f"NIXL: {size} bytes did not come within the deadline")
                yield Wait(-1, 0, _POLL_S)
            if state:
                raise TransferError(f"NIXL: {state}")
            agent.release(request)
            whole = True
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(f"NIXL: {_reason(error)}") from None
        finally:
            if not whole:  # dropped, late or failed: something may still be under way
                self._end_reader(place.agent, request)
        return size

    def tick(self) -> bool:
        """Ends the agents that nobody used for a while."""
        too_old = time.monotonic() - _UNUSED_S
        for name, agent in list(self._readers.items()):
            if agent.used < too_old:
                self._end_reader(name)
        return bool(self._readers)

    def close(self) -> None:
        for name in list(self._readers):
            self._end_reader(name)
        self._exporter.close()

    def _descriptors(self, copy: Copy, place: _Place) -> tuple[Descriptors, Descriptors]:
        """Of what is written here and of what is read there."""
        here, there = part_here(copy, self._pool), part_there(copy, self._pool)
        as_runs = here.is_run and there.is_run
        pool = self._pool
        return (
            _descriptors(here, copy.blocks, pool.address, pool.device, as_runs=as_runs),
            _descriptors(there, copy.pages, place.address, place.device, as_runs=as_runs),
        )

    def _reader(self, place: _Place) -> _Agent:
        """The agent that reads from this source."""
        found = self._readers.get(place.agent)
        if found is None:
            found = self._readers[place.agent] = _Agent(self._api, self._pool, progress=False)
            found.load(place.metadata)
        found.used = time.monotonic()
        return found

    def _end_reader(self, name: str, request: Any = None) -> None:
        agent = self._readers.pop(name, None)
        if agent is not None:
            agent.close(request)


def _bindings() -> Any:
    """Of the package that is built for the CUDA of the installed torch, as the package `nixl` chooses itself;
    where torch has none, of whichever is installed.  Raises `ImportError`."""
    major = cuda_of_torch()
    names = _PACKAGES if major is None else (f"nixl_cu{major}",)
    for package in names:
        try:
            return importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError as error:
            if error.name not in (package, f"{package}._bindings"):
                raise  # (the package is there, and lacks something)
    if major is None:
        raise ImportError("NIXL is not installed; install the extra: pip install 'baton-llm[nixl]'")
    other = next((name for name in _PACKAGES if importlib.util.find_spec(name) is not None), None)
    there = "NIXL is not installed" if other is None else f"{other} is for another one"
    raise ImportError(f"torch is built for CUDA {major}, and {there}: pip install nixl-cu{major}")


def cuda_of_torch() -> int | None:
    """The major version of CUDA that the installed torch is built for; None: for none, or there is no torch.

    Where torch is not imported yet its small file of versions is run, not torch.
    """
    torch = sys.modules.get("torch")
    told = getattr(torch, "version", None) if torch is not None else _versions_of_torch()
    cuda = getattr(told, "cuda", None)
    major = cuda.partition(".")[0] if isinstance(cuda, str) else ""
    return int(major) if major.isdecimal() else None


def _versions_of_torch() -> object:
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        return SimpleNamespace(**runpy.run_path(str(Path(spec.origin).with_name("version.py"))))
    except (ImportError, ValueError, OSError, SyntaxError):
        return None


def _descriptors(part: Part, ids: Int32Array, address: int, device: int, *, as_runs: bool) -> Descriptors:
    """Each run of each page; the same lengths on both sides."""
    lines = list(_lines(part, as_runs))
    offsets = np.array([offset for offset, _ in lines], np.uint64)
    found = np.empty((len(ids), len(lines), 3), np.uint64)
    pages = ids.astype(np.uint64) * np.uint64(part.block_bytes) + np.uint64(address)
    found[:, :, 0] = pages[:, None] + offsets
    found[:, :, 1] = [length for _, length in lines]
    found[:, :, 2] = max(device, 0)
    return found.reshape(-1, 3)


def _lines(part: Part, as_runs: bool) -> Iterator[tuple[int, int]]:
    """(offset, length) within a page."""
    line = part.kv_heads * part.tile_bytes
    first = 2 * part.first_layer
    if as_runs:
        yield first * line, part.page_bytes
        return
    for index in range(first, first + 2 * part.layers):
        yield index * line + part.head * part.tile_bytes, part.heads * part.tile_bytes


def _segment(api: Any, device: int) -> Any:
    return api.DRAM_SEG if device < 0 else api.VRAM_SEG


def _reason(error: Exception) -> str:
    return f"{type(error).__name__} {' '.join(str(error).split())}".strip()
