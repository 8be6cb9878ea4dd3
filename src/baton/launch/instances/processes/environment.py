"""The environment variables of an instance's processes.  What the user has set stays, but for
`OPENBLAS_NUM_THREADS` of the fork server: a pool made by NumPy's import could not be forked.

| variable | value | why |
| --- | --- | --- |
| `OMP_WAIT_POLICY` | `passive` | PyTorch's threads sleep at OpenMP's barriers: see below |
| `THP_MEM_ALLOC_ENABLE` | `1` | PyTorch asks for huge pages for large tensors: weights are read faster |
| `MALLOC_TRIM_THRESHOLD_`, `…MMAP_THRESHOLD_` | 256, 32 MiB | temporaries stay mapped between steps: below |
| `OPENBLAS_NUM_THREADS` | `1` | NumPy makes no pool of threads of its own, which nothing would use |
| `TORCH_NCCL_DUMP_ON_TIMEOUT` | `0` | NCCL's ranks do not ask their store each second: below |

Waiting.  Compute threads, engine, gateway and whatever else runs share the cores.  A thread that spins at a
barrier gains some microseconds a region when every thread has a core of its own.  When it has not, it keeps
its core from the thread that it waits for until its time slice is over, and a step takes many times as long.
On few cores that is the rule, so PyTorch's threads wait passively.  Those of the native library, which do
most of the work, wait actively for a moment but give way (`model/cpu/native/team.cpp`; `BATON_SPIN_US`).

Memory.  glibc gives large blocks back to the kernel when they are freed, and each step would get its
temporaries anew, cleared page by page: 2,300 page faults, 6 ms of 48, in a prefill of 2,048 tokens by a tiny
model.  With these thresholds a step uses the memory of the one before.

NCCL.  With dumps PyTorch's process group asks the store in which ranks met, once a second for as long as it
lives, whether another rank has timed out.  Ranks on several hosts meet in one that has no such question
(`model/layers/meeting.py`), and would write a warning into the log each second.  A rank that hangs is the
engine's to notice, and nobody reads the dumps.
"""

from __future__ import annotations

import os

from baton.protocol.rules.cluster_secret import NO_SECRETS, SECRETS_VARIABLE, Secrets

_OF_ENGINES = {"OPENBLAS_NUM_THREADS": "1"}
_OF_WORKERS = {
    **_OF_ENGINES,
    "OMP_WAIT_POLICY": "passive",
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def engine_environment() -> dict[str, str]:
    return {**_OF_ENGINES, **os.environ}


def worker_environment(secrets: Secrets = NO_SECRETS) -> dict[str, str]:
    """`secrets`: those of the cluster, if what the worker sends to other hosts is to be encrypted."""
    told = {SECRETS_VARIABLE: secrets.dump()} if secrets else {}
    return {**_OF_WORKERS, **os.environ, **told}
