"""Many requests at once give each the answer it gets alone, and leave nothing behind."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.e2e.server import Server
from tests.e2e.workload import Job, make_jobs, solo, together


def wait_clean(server: Server, deadline_s: float = 60.0) -> dict[str, object]:
    """The ledger once nothing is held; fails if that takes longer."""
    end = time.monotonic() + deadline_s
    while True:
        ledger = server.ledger()
        if ledger["free"] + ledger["cached"] == ledger["total"]:
            return ledger
        if time.monotonic() > end:
            raise AssertionError(f"blocks are still held: {ledger}")
        time.sleep(0.05)


def run_together(server: Server, jobs: list[Job]) -> list[str]:
    async def scenario() -> list[str]:
        async with server.async_client() as client:
            return await together(client, jobs)

    return asyncio.run(scenario())


def run_alone(server: Server, jobs: list[Job]) -> None:
    async def scenario() -> None:
        async with server.async_client() as client:
            await solo(client, jobs)

    asyncio.run(scenario())


@pytest.mark.slow
def test_200_streams_of_which_a_third_is_cut(server: Server) -> None:
    jobs = make_jobs(200, seed=7, longest_prompt=600, longest_output=60, cut_share=0.3)
    run_alone(server, jobs)
    quiet = len(server.warnings())
    differing = run_together(server, jobs)
    assert not differing, "\n".join(differing[:5])
    assert sum(job.cut is not None for job in jobs) > 40
    wait_clean(server)
    assert server.warnings()[quiet:] == []


@pytest.fixture(scope="module")
def long_jobs(server: Server) -> list[Job]:
    """Jobs of 60 to 120 tokens with the answers of a roomy server with one rank, each alone."""
    jobs = make_jobs(40, seed=11, longest_prompt=120, longest_output=60)
    for job in jobs:
        job.delay_s = 0.0
        job.settings["extra_body"]["ignore_eos"] = True
        job.settings["max_tokens"] += 60
    run_alone(server, jobs)
    return jobs


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_hundred_preemptions_change_nothing(long_jobs: list[Job], tensor_parallel: int) -> None:
    """The pool is far too small, and no headroom is kept, so that preemption is the rule."""
    flags = ["--dtype", "float32", "--num-gpu-blocks-override", "48", "--block-size", "8"]
    flags += ["--max-num-seqs", "48", "--max-model-len", "384", "--admission-headroom", "0"]
    with Server(*flags, "--tensor-parallel-size", str(tensor_parallel)) as small:
        differing: list[str] = []
        for _ in range(8):
            differing += run_together(small, long_jobs)
            preemptions = small.metric("baton:num_preemptions_total")
            if preemptions >= 100:
                break
        print(f"TP {tensor_parallel}: {preemptions:.0f} preemptions")
        assert not differing, "\n".join(differing[:5])
        assert preemptions >= 100
        wait_clean(small)
        assert not small.warnings(), "\n".join(small.warnings()[:10])
