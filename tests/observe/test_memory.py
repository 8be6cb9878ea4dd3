"""What the kernel says of mappings becomes a few sums."""

from __future__ import annotations

import os
import subprocess

from baton.ipc.memory import SharedMemory, create_memory
from baton.observe.memory import child_processes, memory_of, memory_of_all, read_smaps, sum_of

SMAPS = """\
55d000-55e000 r-xp 00000000 08:01 1234                       /usr/bin/python3.11
Size:                  4 kB
Rss:                   4 kB
Pss:                   2 kB
Pss_Dirty:             0 kB
VmFlags: rd ex mr mw me
7f0000-7f1000 rw-s 00000000 00:01 77                         /memfd:baton-weights (deleted)
Pss:                 100 kB
SwapPss:               0 kB
7f1000-7f2000 r--s 00000000 00:01 77                         /cache/ernie-0123456789abcdef.weights
Pss:                  50 kB
7f2000-7f3000 rw-s 00000000 00:01 78                         /memfd:baton-kv (deleted)
Pss:                  30 kB
7f3000-7f4000 rw-p 00000000 00:00 0
Pss:                   8 kB
7f4000-7f5000 rw-s 00000000 00:01 79                         /memfd:baton-ring (deleted)
Pss:                   1 kB
"""


def test_mappings_are_added_up_by_what_they_are():
    found = read_smaps(SMAPS)
    assert found.as_dict() == {
        "pss_bytes": 191 * 1024,
        "image_bytes": 150 * 1024,
        "kv_pool_bytes": 30 * 1024,
        "private_bytes": 11 * 1024,
    }
    assert sum_of([found, found]).private == 22 * 1024
    assert sum_of([]).pss == 0


def test_a_pool_is_counted_where_it_is_in_use():
    before = memory_of(os.getpid())
    memory = create_memory("baton-kv", 1 << 22)
    shared = SharedMemory(memory)
    shared.bytes[: 1 << 21] = b"1" * (1 << 21)
    after = memory_of(os.getpid())
    shared.close()
    os.close(memory)
    assert (1 << 21) <= after.kv_pool - before.kv_pool <= 1 << 22


def test_processes_that_are_gone_are_left_out():
    child = subprocess.Popen(["sleep", "600"])
    assert child.pid in child_processes(os.getpid())
    assert memory_of_all({"child": child.pid})["child"].pss > 0
    child.kill()
    child.wait()
    assert memory_of(child.pid) is None
    assert memory_of_all({"child": child.pid}) == {}
    assert child_processes(child.pid) == []
