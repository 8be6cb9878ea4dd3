"""Pools, readers and source processes for the contract tests."""

import gc
import mmap
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

from baton.ipc.memory import create_memory
from baton.launch.planning.instance_config import instance_config
from baton.protocol.codec import pack_int32
from baton.protocol.messages.commands import DropFetch, Fetch, Grant
from baton.protocol.messages.handover import InstanceSource
from baton.protocol.messages.reports import Fetched
from baton.protocol.rules.ranks import heads_of_rank
from baton.transfer.base import PoolView
from baton.transfer.service import TransferService

DEADLINE_S = 60.0
TOKEN = b"the readers' own"
"""Of the grant of all pages that every source of these tests gives."""


class Geometry(msgspec.Struct, frozen=True):
    num_blocks: int = 64
    num_layers: int = 3
    total_heads: int = 4
    tile_bytes: int = 512
    ranks: int = 1
    transfer: str = "tcp"
    checksums: bool = False
    grant: bytes = TOKEN
    scribble: bool = False
    """The source changes its pages all the time."""

    def config(self):
        return instance_config(
            model="",
            max_model_len=64,
            transfer=self.transfer,
            transfer_checksums=self.checksums,
            transfer_encryption=True,
            peer_endpoint="ipc://unused",
        )


class Pool:
    """The pool of one rank in a memfd: uint8 [block, layer, K/V, head, tile]."""

    def __init__(self, geometry, rank=0):
        first, stop = heads_of_rank(geometry.total_heads, rank, geometry.ranks)
        shape = (geometry.num_blocks, geometry.num_layers, 2, stop - first, geometry.tile_bytes)
        self.fd = create_memory("baton-kv", int(np.prod(shape)))
        self.array = np.frombuffer(mmap.mmap(self.fd, 0), np.uint8).reshape(shape)
        self.view = PoolView(
            num_blocks=shape[0],
            block_bytes=int(np.prod(shape[1:])),
            num_layers=shape[1],
            kv_heads=shape[3],
            head_start=first,
            total_kv_heads=geometry.total_heads,
            memory=memoryview(self.array.data).cast("B"),
            fd=self.fd,
            address=self.array.ctypes.data,
        )

    def close(self):
        os.close(self.fd)


def content(geometry, rank=0):
    """What the pages of a source hold: noise, but the same for a head on whichever rank it is."""
    shape = (geometry.num_blocks, geometry.num_layers, 2, geometry.total_heads, geometry.tile_bytes)
    whole = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    first, stop = heads_of_rank(geometry.total_heads, rank, geometry.ranks)
    return whole[:, :, :, first:stop]


class Reader:
    """A transfer service in this process, with a pool of zeros."""

    def __init__(self, geometry, rank=0):
        self.pool = Pool(geometry, rank)
        self.reports = queue.Queue()
        self.rank = rank
        self.service = TransferService(rank, self.pool.view, geometry.config(), self.reports.put)
        self.service.start()
        self.ids = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.service.close()
        self.pool.close()

    def begin(self, source, pages, blocks, first_layer=0, num_layers=-1, grant=TOKEN):
        self.ids += 1
        packed = pack_int32(pages), pack_int32(blocks)
        self.service.fetch(Fetch(self.ids, source, *packed, first_layer, num_layers, grant))
        return self.ids

    def drop(self, *ids):
        self.service.drop(DropFetch(list(ids)))

    def end(self, timeout_s=DEADLINE_S) -> Fetched:
        return self.reports.get(timeout=timeout_s)

    def fetch(self, *args, **options):
        id_ = self.begin(*args, **options)
        found = self.end()
        assert (found.id, found.rank) == (id_, self.rank)
        return found


class Source:
    """A process with the pools of all ranks of an instance."""

    def __init__(self, geometry):
        command = [sys.executable, "-m", "tests.transfer.pools", msgspec.json.encode(geometry).decode()]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        self.instance = InstanceSource("tile", 8, msgspec.json.decode(line, type=InstanceSource).ranks)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)
        self.process.stdin.close()
        self.process.stdout.close()

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: "T" in Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2][:3])

    def wake(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def wait_until(done, timeout_s=DEADLINE_S):
    give_up = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < give_up, "it did not happen in time"
        time.sleep(0.005)


def resources():
    """Descriptors, mappings of pools and threads of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd:baton-kv")
    return len(os.listdir("/proc/self/fd")), maps, threading.active_count()


def serve(geometry):
    """The source process: prints where its pages are, until its input ends."""
    pools = [Pool(geometry, rank) for rank in range(geometry.ranks)]
    services = []
    for rank, pool in enumerate(pools):
        pool.array[:] = content(geometry, rank)
        services.append(TransferService(rank, pool.view, geometry.config(), print))
        services[-1].start()
        services[-1].grant(
            Grant(geometry.grant, "reader", [b""], pack_int32(range(geometry.num_blocks)), 3600.0)
        )
    print(
        msgspec.json.encode(InstanceSource("tile", 8, [one.source for one in services])).decode(), flush=True
    )
    if geometry.scribble:
        threading.Thread(target=scribble, args=(pools[0],), daemon=True).start()
    sys.stdin.read()
    for service in services:
        service.close()


def scribble(pool):
    value = 0
    while True:
        value = (value + 1) % 251
        pool.array[:] = value


if __name__ == "__main__":
    serve(msgspec.json.decode(sys.argv[1], type=Geometry))
