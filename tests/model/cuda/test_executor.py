"""The whole executor with Triton's kernels, interpreted or on a device: the CPU's tokens, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.executor.devices.kernels import device_sampling, ops_of
from baton.executor.torch_executor import TorchExecutor
from baton.launch.planning.instance_config import instance_config
from baton.model.ops import triton
from baton.protocol.params.sampling import LogitBias, Sampling
from tests.executor.driver import Driver
from tests.model.checkpoints import VOCAB, make_checkpoint
from tests.model.cuda.where import DEVICE, serve

CPU = torch.device("cpu")
WISHES = [
    Sampling(seed=1, temperature=0.0),
    Sampling(seed=2, temperature=0.9),
    Sampling(seed=3, temperature=0.8, top_k=20, top_p=0.9, logprobs=3),
    Sampling(seed=4, temperature=1.2, min_p=0.02, repetition_penalty=1.3, frequency_penalty=0.4),
    Sampling(
        seed=5,
        temperature=1.0,
        presence_penalty=0.7,
        allowed=np.arange(0, VOCAB, 2, dtype=np.int32).tobytes(),
        logit_bias=LogitBias(
            np.array([6, 8], np.int32).tobytes(), np.array([2.0, -3.0], np.float32).tobytes()
        ),
    ),
]


def executor_of(directory: Path, **changes: Any) -> TorchExecutor:
    sizes = dict(
        max_model_len=96, dtype="float32", block_size=8, num_blocks=40, max_num_seqs=6, num_threads=1
    )
    return TorchExecutor.from_config(instance_config(model=str(directory), **{**sizes, **changes}), 0, "")


def answers(executor: TorchExecutor) -> list[list[int]]:
    """Chunks, a prefix that is there, decoding beside chunks, every wish; in few steps: a launch takes the
    interpreter a tenth of a second."""
    driver = Driver(executor, chunk=11)
    prompts = [np.random.default_rng(n).integers(3, VOCAB, 4 + 4 * n).tolist() for n in range(len(WISHES))]
    made = [driver.add(prompt, 2, wish) for prompt, wish in zip(prompts, WISHES, strict=True)]
    driver.run()
    beside = driver.add([*prompts[-1][:17], 5, 6], 1, prefix_of=made[-1])
    assert beside.computed == 16
    driver.run()
    return [request.tokens for request in (*made, beside)]


@pytest.mark.parametrize(
    ("variant", "changes"),
    [("llama3", {}), ("qwen3", {}), ("llama3", {"kv_cache_dtype": "int8"})],
    ids=["llama3", "qwen3", "llama, KV in 8 bits"],
)
def test_tokens_are_the_cpus(
    variant: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_checkpoint(tmp_path, variant)
    plain = executor_of(tmp_path, **changes)
    expected = answers(plain)
    plain.close()
    serve(monkeypatch)
    ours = executor_of(tmp_path, **changes, device=DEVICE.type)
    assert "attention by Triton" in ours.info.detail
    assert ours.info.tile.startswith("rows:")
    assert answers(ours) == expected
    ours.close()


def test_a_cpu_has_none_of_it():
    assert not triton.serve(CPU)
    assert device_sampling(CPU) is None
    assert "Triton" not in type(ops_of(torch.float32, CPU, 64)).__name__


@pytest.mark.parametrize(
    ("version", "capability", "reason"),
    [
        ("3.6.0", (8, 0), ""),
        ("3.9.1", (12, 0), ""),
        ("", (9, 0), "not installed"),
        ("3.5.1", (9, 0), "is 3.5.1"),
        ("3.10.0", (9, 0), "is 3.10.0"),
        ("nightly", (9, 0), "no known version"),
        ("3.7.1", (7, 5), "capability 7.5"),
    ],
)
def test_why_kernels_do_not_serve(version: str, capability: tuple[int, int], reason: str):
    found = triton.why_not(version, capability)
    assert reason in found
    assert bool(found) == bool(reason)


def test_kernels_do_not_serve_where_triton_cannot_start_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """As here, where there is no driver; elsewhere a C compiler may be missing."""
    from triton.runtime import driver

    class Driver:
        @property
        def active(self) -> Any:
            raise RuntimeError("Failed to find C compiler.\nPlease specify")

    monkeypatch.setattr("triton.runtime.driver", Driver())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    there = torch.device("cuda", 63)
    triton._told.cache_clear()
    assert not triton.serve(there)
    assert not triton.serve(there)
    assert caplog.text.count("it needs a C compiler") == 1
    assert "RuntimeError: Failed to find C compiler. Please specify" in caplog.text
    monkeypatch.setattr("triton.runtime.driver", driver)
    triton._told.cache_clear()
