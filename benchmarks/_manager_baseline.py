"""The other way to feed a worker, for comparison: shared lists and flags in a manager process.

A stand-in of our own for the queue of FastDeploy 2.x (`multiprocessing.managers.BaseManager`), with as many
round trips for each operation as were counted there with one rank:

| operation | round trips |
| --- | --- |
| is there a batch? `num_tasks` | 3 (lock, length, unlock) |
| is there a batch? `exist_tasks` | 0 over TCP (a flag in shared memory), 1 over a unix socket |
| the other operand of the worker's check, each step | 1 |
| `put_tasks` | 7 |
| `get_tasks` | 11 |

The worker runs the same slots and the same executor as ours, so only the way in differs.  An idle worker
sleeps 1 ms between two looks, as there.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import numpy as np

from baton.ipc.memory import SharedMemory, create_memory
from baton.protocol.codec import pack_int32
from baton.protocol.messages.commands import Admit
from baton.protocol.params.sampling import Sampling, Stopping
from baton.worker.slots.outcome import Admitted
from baton.worker.slots.slots import Slots

AUTHKEY = b"benchmark"
IDLE_SLEEP_S = 0.001


class Store:
    """Lives in the manager process; each call of a method through its proxy is one round trip."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: list[Any] = []
        self._flags = [1]
        self._exist = 0

    def acquire(self) -> None:
        self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def length(self) -> int:
        return len(self._tasks)

    def item(self, index: int) -> Any:
        """None past the end, which is how iterating through a proxy ends."""
        return self._tasks[index] if index < len(self._tasks) else None

    def clear(self) -> None:
        self._tasks.clear()

    def append(self, batch: Any) -> None:
        self._tasks.append(batch)

    def flag(self, index: int) -> int | None:
        return self._flags[index] if index < len(self._flags) else None

    def flag_count(self) -> int:
        return len(self._flags)

    def set_flag(self, value: int) -> None:
        self._flags[0] = value

    def exist(self) -> int:
        return self._exist

    def set_exist(self, value: int) -> None:
        self._exist = value


class Manager(BaseManager):
    """Serves one `Store`."""


_STORE = Store()
Manager.register("store", callable=lambda: _STORE)

Address = tuple[str, int] | str


def parse_address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    return (host, int(port)) if colon else text


def serve(address: str) -> None:
    Manager(parse_address(address), AUTHKEY).get_server().serve_forever()


class Client:
    """One side of the queue.  `flag_fd` is the shared-memory flag of the TCP mode, None for a unix socket."""

    def __init__(self, address: str, flag_fd: int | None) -> None:
        manager = Manager(parse_address(address), AUTHKEY)
        for attempt in range(200):
            try:
                manager.connect()
                break
            except OSError:
                if attempt == 199:
                    raise
                time.sleep(0.025)
        self._store = manager.store()  # type: ignore[attr-defined]
        self._flag = SharedMemory(flag_fd).words if flag_fd is not None else None

    def num_tasks(self) -> int:
        self._store.acquire()
        count: int = self._store.length()
        self._store.release()
        return count

    def exist_tasks(self) -> bool:
        return bool(self._flag[0] if self._flag is not None else self._store.exist())

    def check(self) -> bool:
        """What the worker asks each step."""
        return self.exist_tasks() or self._store.exist() == 2

    def put(self, batch: Any) -> None:
        """Waits while the batch before was not read, 1 ms at a time."""
        self._store.acquire()
        while self._store.flag(0) != 1:
            self._store.release()
            time.sleep(0.001)
            self._store.acquire()
        self._store.clear()
        self._store.set_flag(0)
        self._store.append(batch)
        self._set_exist(1)
        self._store.release()

    def get(self) -> list[Any]:
        self._store.acquire()
        batches = [self._store.item(index) for index in range(self._store.length())]
        self._store.item(len(batches))
        self._store.set_flag(1)
        if sum(self._store.flag(index) for index in range(self._store.flag_count())) == 1:
            self._store.flag(1)
            self._store.clear()
            self._set_exist(0)
        self._store.release()
        return batches

    def _set_exist(self, value: int) -> None:
        self._store.set_exist(value)
        if self._flag is not None:
            self._flag[0] = value


def run_worker(address: str, flag: str, slots: Slots, executor: Any) -> None:
    """A step loop that takes requests from the queue until one of them is None."""
    client = Client(address, int(flag) if flag != "-" else None)
    step = 0
    while True:
        if client.check():
            for batch in client.get():
                for request in batch:
                    if request is None:
                        executor.close()
                        return
                    effect = slots.apply(to_admit(request))
                    assert isinstance(effect, Admitted)
                    executor.admit(*effect)
        composed = slots.compose(step + 1)
        if composed is None:
            time.sleep(IDLE_SLEEP_S)
            continue
        step += 1
        outcome = slots.commit(composed, executor.execute(composed))
        for closed in outcome.closings:
            executor.release(closed.slot)


def to_request(command: Admit) -> dict[str, Any]:
    """A request as such an engine sends it: plain objects, token ids as a list."""
    return {
        "slot": command.slot,
        "epoch": command.epoch,
        "prompt_token_ids": np.frombuffer(command.tokens, np.int32).tolist(),
        "block_tables": np.frombuffer(command.blocks, np.int32).tolist(),
        "max_tokens": command.stopping.max_tokens,
    }


def to_admit(request: dict[str, Any]) -> Admit:
    return Admit(
        slot=request["slot"],
        epoch=request["epoch"],
        tokens=pack_int32(request["prompt_token_ids"]),
        num_prompt=len(request["prompt_token_ids"]),
        num_computed=0,
        blocks=pack_int32(request["block_tables"]),
        sampling=Sampling(seed=0, temperature=0.0),
        stopping=Stopping(max_tokens=request["max_tokens"]),
    )


def start_server(directory: Path, kind: str) -> tuple[subprocess.Popen[bytes], str, int | None]:
    """Returns the manager's process, its address and the descriptor of the shared flag (TCP only)."""
    if kind == "unix":
        address, flag = str(directory / "manager.sock"), None
    else:
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        flag = create_memory("flag", 64)
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
    code += f"import _manager_baseline as m; m.serve({address!r})"
    return subprocess.Popen([sys.executable, "-c", code]), address, flag
