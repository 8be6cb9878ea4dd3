"""Tensor parallelism in real processes: two and four ranks give the tokens of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.executor.loading import create_executor
from baton.protocol.params.pooling import unpack_vector
from baton.protocol.params.sampling import Sampling
from tests.executor.driver import Driver
from tests.executor.results.test_pooling import KINDS, pooled
from tests.executor.test_torch_parity import config_for, prompt_of
from tests.model.checkpoints import MIXTURES, make_checkpoint

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
    """One rank, in a process of its own, for one checkpoint after the other; a line for each."""
    rank, size, timeout, *directories = sys.argv[1:]
    for place in directories:
        directory = Path(place)
        config = config_for(
            directory, tensor_parallel_size=int(size), step_timeout_s=float(timeout), num_blocks=None,
            kv_cache_memory_bytes=(8 << 20) + int(rank), kv_cache_dtype=kv_of(directory),
        )  # fmt: skip
        executor = create_executor(config, int(rank), str(directory / "meet"))
        result = play(executor)
        result["blocks"] = executor.info.num_blocks
        executor.close()
        print(json.dumps(result), flush=True)


def kv_of(directory: Path) -> str | None:
    return "int8" if directory.name.endswith("-int8") else None


def start(directories: list[Path], rank: int, size: int, timeout: float = 60) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.executor.test_torch_parallel"]
    arguments = [str(rank), str(size), str(timeout), *map(str, directories)]
    return subprocess.Popen(
        command + arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# Two KV heads on two and four ranks: one each, then one shared by two; biases; an odd vocabulary; norms of
# all heads together, of which four ranks share some.  Each family is there.
BY_SIZE = {
    2: (
        *("qwen2", "llama-biased-linear", "qwen3-int8", "smollm3", "granite", "phi3", "glm4", "ministral3"),
        *("gemma2", "gemma3", "olmo3", "mistral", "ernie4_5-biased", "granite4", "glm", "gemma"),
        *(
            "ernie4_5-moe",
            "qwen3-moe",
            "gpt-oss",
            "gpt-oss-int8",
            "glm4-moe",
            "mixtral",
            "granite-moe",
            "olmoe",
        ),
    ),
    4: ("qwen3", "olmo2"),
}


@pytest.fixture(scope="module", params=BY_SIZE)
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """Of each checkpoint: its name, what one process finds, and what each of several ranks finds."""
    size = request.param
    place = tmp_path_factory.mktemp(f"ranks-{size}")
    directories = [place / name for name in BY_SIZE[size]]
    expected = []
    for directory in directories:
        make_checkpoint(directory, directory.name.removesuffix("-int8"))
        alone = create_executor(config_for(directory, kv_cache_dtype=kv_of(directory)), 0, "")
        expected.append(play(alone))
        alone.close()
    ranks = [start(directories, rank, size) for rank in range(size)]
    found: list[list[dict[str, Any]]] = []
    try:
        for process in ranks:
            out, errors = process.communicate(timeout=900)
            assert process.returncode == 0, errors
            found.append([json.loads(line) for line in out.splitlines() if line.startswith("{")])
    finally:
        for process in ranks:
            process.kill()
    return list(zip(BY_SIZE[size], expected, map(list, zip(*found, strict=True)), strict=True))


def test_ranks_together_give_the_tokens_of_one(
    played: list[tuple[str, dict[str, Any], list[dict[str, Any]]]],
) -> None:
    for name, expected, found in played:
        for result in found:
            assert result["tokens"] == expected["tokens"], name
            assert result["blocks"] == found[0]["blocks"] > 0, name
        assert found[0]["ranks"] == expected["ranks"], name
        assert found[0]["logprobs"] == pytest.approx(expected["logprobs"], abs=2e-3), name
        assert all(result["logprobs"] == [] for result in found[1:]), name
        assert found[0]["routes"] == expected["routes"], name
        assert bool(expected["routes"]) == (name.removesuffix("-int8") in MIXTURES), name
        assert all(result["routes"] == [] for result in found[1:]), name
        for vector, alone_gave in zip(found[0]["pooled"], expected["pooled"], strict=True):
            assert vector == pytest.approx(alone_gave, abs=5e-2 if name.endswith("int8") else 5e-3), name
        assert all(result["pooled"] == [[]] * len(KINDS) for result in found[1:]), name


def test_a_rank_that_never_comes_is_noticed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen2")
    process = start([tmp_path], 0, 2, timeout=2)
    try:
        _, errors = process.communicate(timeout=150)
    finally:
        process.kill()
    assert process.returncode != 0
    assert "rror" in errors


if __name__ == "__main__":
    main()
