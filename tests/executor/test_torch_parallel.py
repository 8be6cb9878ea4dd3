"""Tensor parallelism in real processes: two and four ranks give the tokens of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baton.executor.loading import create_executor
from baton.protocol.pooling import unpack_vector
from baton.protocol.sampling import Sampling
from tests.executor.driver import Driver
from tests.executor.test_pooling import KINDS, pooled
from tests.executor.test_torch_parity import config_for, prompt_of
from tests.model.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[2]


def play(executor) -> dict:
    """A few requests of every kind; the same calls on each rank."""
    asks = bool(executor._model.mixtures)
    driver = Driver(executor, chunk=19)
    greedy = driver.add(prompt_of(5), 24)
    driver.step()
    chunked = driver.add(prompt_of(50, 1), 24, Sampling(3, temperature=0.9, top_p=0.9))
    reported = driver.add(prompt_of(33, 2), 24, Sampling(0, 0.0, logprobs=2, prompt_logprobs=1))
    driver.run()
    reports = [*reported.logprobs, *reported.prompt_logprobs]
    for request in list(driver.requests.values()):
        driver.remove(request)
    asked = driver.add(prompt_of(21, 3), 6, Sampling(0, 0.0, routes_from=0 if asks else None))
    driver.run()
    driver.remove(asked)
    return {
        "routes": [run.ids.hex() for run in asked.routes],
        "pooled": vectors_of(executor),
        "tokens": [greedy.tokens, chunked.tokens, reported.tokens],
        "ranks": [report.rank for report in reports],
        "logprobs": [round(report.logprob, 3) for report in reports],
    }


def vectors_of(executor) -> list[list[float]]:
    """Of a prompt in pieces, one of each kind; empty on all ranks but the first."""
    return [unpack_vector(pooled(executor, [prompt_of(40, 4)], KINDS[kind], chunk=19)[0]) for kind in KINDS]


def main() -> None:
    """One rank, in a process of its own."""
    directory, rendezvous, rank, size, timeout, kv = sys.argv[1:]
    config = config_for(
        Path(directory), tensor_parallel_size=int(size), step_timeout_s=float(timeout), num_blocks=None,
        kv_cache_memory_bytes=(8 << 20) + int(rank), kv_cache_dtype=kv or None,
    )  # fmt: skip
    executor = create_executor(config, int(rank), rendezvous)
    result = play(executor)
    result["blocks"] = executor.info.num_blocks
    executor.close()
    print(json.dumps(result))


def start(
    directory: Path, meet: Path, rank: int, size: int, timeout: float = 60, kv: str = ""
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.executor.test_torch_parallel"]
    arguments = [str(directory), str(meet), str(rank), str(size), str(timeout), kv]
    return subprocess.Popen(
        command + arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# Two KV heads on two and four ranks: one each, then one shared by two; biases; an odd vocabulary.
@pytest.mark.parametrize(
    ("variant", "size", "kv"),
    [
        *(("qwen2", 2, ""), ("qwen3", 4, ""), ("llama-biased-linear", 2, ""), ("qwen3", 2, "int8")),
        *((family, 2, "") for family in ("smollm3", "granite", "phi3", "glm4", "ministral3")),
        *((family, 2, "") for family in ("gemma2", "gemma3", "olmo3")),
        *((family, 2, "") for family in ("ernie4_5-moe", "qwen3-moe", "gpt-oss")),
        ("gpt-oss", 2, "int8"),
        ("olmo2", 4, ""),  # norms of all heads together, of which ranks share some
    ],
)
def test_ranks_together_give_the_tokens_of_one(variant: str, size: int, kv: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, variant)
    alone = create_executor(config_for(tmp_path, kv_cache_dtype=kv or None), 0, "")
    expected = play(alone)
    alone.close()
    ranks = [start(tmp_path, tmp_path / "meet", rank, size, kv=kv) for rank in range(size)]
    found = []
    try:
        for process in ranks:
            out, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in ranks:
            process.kill()
    for result in found:
        assert result["tokens"] == expected["tokens"]
        assert result["blocks"] == found[0]["blocks"] > 0
    assert found[0]["ranks"] == expected["ranks"]
    assert found[0]["logprobs"] == pytest.approx(expected["logprobs"], abs=2e-3)
    assert all(result["logprobs"] == [] for result in found[1:])
    assert found[0]["routes"] == expected["routes"]
    assert all(result["routes"] == [] for result in found[1:])
    for vector, alone_gave in zip(found[0]["pooled"], expected["pooled"], strict=True):
        assert vector == pytest.approx(alone_gave, abs=5e-3 if not kv else 5e-2)
    assert all(result["pooled"] == [[]] * len(KINDS) for result in found[1:])


def test_a_rank_that_never_comes_is_noticed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen2")
    process = start(tmp_path, tmp_path / "meet", 0, 2, timeout=2)
    try:
        _, errors = process.communicate(timeout=150)
    finally:
        process.kill()
    assert process.returncode != 0
    assert "rror" in errors


if __name__ == "__main__":
    main()
