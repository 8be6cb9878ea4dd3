"""Attention by FlashInfer: on a CPU by a double that computes what the library's documentation says
(`flashinfer_double`), on a GPU by the library where it is installed."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.executor import torch_executor
from baton.executor.devices.graphs import graphs_of
from baton.executor.devices.kernels import attention_backend
from baton.executor.streams import queue as queues
from baton.executor.torch_executor import TorchExecutor
from baton.executor.torch_late import LateTorchExecutor
from baton.executor.weights.forms import ExecutorError
from baton.launch.limits import OptionError
from baton.launch.options.engine import EngineOptions
from baton.launch.planning.instance_config import instance_config
from baton.launch.planning.plan import make_plan
from baton.model.attention import flashinfer_backend
from baton.model.attention.base import AttentionStep
from baton.model.attention.flashinfer_backend import FlashInferAttention, page_lists
from baton.model.attention.torch_backend import TorchAttention
from baton.model.attention.torch_pieces import TorchPieces
from baton.model.ops import flashinfer
from baton.protocol.params.sampling import Sampling
from tests.executor.delayed import DelayedQueue, Recorded
from tests.executor.driver import Driver
from tests.model.attention_cases import LAYER, Case, Loaded, load, run
from tests.model.checkpoints import VOCAB, make_checkpoint
from tests.model.cuda import flashinfer_double
from tests.model.cuda.test_graphs import Again
from tests.model.cuda.test_late import WISHES, played
from tests.model.cuda.where import DEVICE, ON_CPU, ON_DEVICE, serve
from tests.worker.late_torch import PROMPTS, SIZES

BF16, F16 = torch.bfloat16, torch.float16
pytestmark = pytest.mark.skipif(
    not ON_CPU and not flashinfer.installed(),
    reason="FlashInfer is not installed: pip install flashinfer-python",
)
WORKSPACE = 1 << 20 if ON_CPU else flashinfer_backend.WORKSPACE_BYTES
CASES = {
    "decode and chunks": Case(((5, 1), (0, 1), (300, 1), (0, 7), (20, 9)), 64, dtype=F16),
    "several heads": Case(((5, 1), (31, 1), (32, 1), (0, 40)), 128, 2, 4, dtype=F16, block_size=32),
    "odd heads": Case(((33, 1), (3, 2)), 64, 1, 7, dtype=F16, block_size=5),
    "window": Case(((600, 1), (70, 1), (40, 5), (0, 50)), 64, 1, 3, dtype=F16, block_size=7, window=33),
    "a window of itself": Case(((3, 1), (0, 19)), 64, 1, 2, dtype=F16, block_size=8, window=1),
    "large heads": Case(((20, 1), (11, 3)), 256, 1, 2, dtype=F16),
    "chunks alone": Case(((11, 3), (0, 64)), 64, 2, 2, dtype=F16),
    "bfloat16": Case(((260, 1), (9, 1), (30, 20)), 128, 1, 2, dtype=BF16),
}
LARGE = {
    "Llama 8B": Case(((4000, 1), (1, 1), (700, 300), (0, 129)), 128, 8, 4, block_size=32, dtype=BF16),
    "Gemma, window": Case(((5000, 1), (900, 130)), 256, 8, 2, block_size=32, dtype=BF16, window=1024),
    "one KV head of sixteen": Case(((600, 1), (300, 40)), 128, 1, 16, block_size=64, dtype=BF16),
}
ALL = [pytest.param(case, id=name) for name, case in CASES.items()]
ALL += [pytest.param(case, id=name, marks=ON_DEVICE) for name, case in LARGE.items()]


def library() -> Any:
    return flashinfer_double if ON_CPU else flashinfer_backend.library()


def loaded_for(case: Case, soft_cap: float | None = None) -> tuple[FlashInferAttention, Loaded]:
    """What is unused in the pool is NaN."""
    shape = replace(case.shape(), soft_cap=soft_cap, device=DEVICE)
    loaded = load(TorchAttention(shape), case, garbage=float("nan"))
    backend = FlashInferAttention(shape, library(), WORKSPACE)
    backend.bind(loaded.pool)
    return backend, loaded


@pytest.mark.parametrize("case", ALL)
def test_agrees_with_a_direct_computation(case: Case):
    backend, loaded = loaded_for(case)
    tolerance = 2e-3 if case.dtype == F16 else case.tolerance
    torch.testing.assert_close(
        run(backend, loaded).double(), loaded.expected(), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("window", [None, 40])
def test_a_soft_cap(window: int | None):
    case = Case(((300, 1), (20, 5)), 64, 1, 2, block_size=16, window=window, dtype=F16)
    backend, loaded = loaded_for(case, soft_cap=0.5)
    found = run(backend, loaded)
    torch_backend = TorchAttention(backend.shape)
    torch_backend.bind(loaded.pool)
    torch.testing.assert_close(found, run(torch_backend, loaded), atol=2e-3, rtol=2e-3)
    assert (found.double() - loaded.expected()).abs().max() > 0.1


def test_one_plan_serves_all_layers_and_the_next_step_has_its_own():
    backend, loaded = loaded_for(CASES["decode and chunks"])
    plan = backend.prepare(loaded.step)
    backend.write_kv(LAYER, loaded.new(loaded.keys), loaded.new(loaded.values), plan)
    first = backend.attend(LAYER, loaded.queries, None, plan)
    if ON_CPU:
        wrappers = [each._made for each in (backend._decodes[None], backend._chunks[None])]
        backend.attend(LAYER, loaded.queries, None, plan)
        assert [wrapper.plans for wrapper in wrappers] == [1, 1]
    step = loaded.step
    part = AttentionStep(step.starts[1:3], step.counts[1:3], step.block_tables[1:3], 2)
    found = backend.attend(LAYER, loaded.queries[1:3], None, backend.prepare(part))
    torch.testing.assert_close(found, first[1:3], atol=2e-3, rtol=2e-3)
    if ON_CPU:
        assert [wrapper.plans for wrapper in wrappers] == [2, 1]
    with pytest.raises(ValueError, match="no sinks"):
        backend.attend(LAYER, loaded.queries, None, plan, torch.zeros(2))


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 30)), min_size=1, max_size=6),
    size=st.integers(1, 33),
    window=st.none() | st.integers(1, 40),
    padded=st.integers(0, 8),
    seed=st.integers(0, 1000),
)
def test_page_lists_are_what_rows_see(
    rows: list[tuple[int, int]], size: int, window: int | None, padded: int, seed: int
):
    """Page by page and position by position."""
    starts, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    tables = np.random.default_rng(seed).integers(1, 1 << 20, (len(rows), 110)).astype(np.int32)
    found = page_lists(starts, counts, tables, size, window, padded)
    assert [array.dtype for array in (found.indptr, found.indices, found.last)] == [np.int32] * 3
    assert len(found.last) == len(found.indptr) - 1 == max(len(rows), padded)
    assert found.indptr[0] == 0
    for row in range(len(found.last)):
        pages = found.indices[found.indptr[row] : found.indptr[row + 1]].tolist()
        if row >= len(rows):
            assert (pages, found.last[row]) == ([0], 1)
            continue
        start, count = rows[row]
        lowest = 0 if window is None else max(start - window + 1, 0)
        seen = [(tables[row, n // size], n % size) for n in range(lowest, start + count)]
        listed = [(page, n) for page in pages for n in range(size)]
        listed = listed[: (len(pages) - 1) * size + int(found.last[row])]
        assert listed[-len(seen) :] == seen, "right-aligned with the row's end"
        assert len(listed) - len(seen) < size, "no page that nobody sees"


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer is installed here, or its double is, which computes in float32, so that tokens are equal."""
    serve(monkeypatch)
    if ON_CPU:
        monkeypatch.setattr(flashinfer, "installed", lambda: flashinfer_double.VERSION)
        monkeypatch.setattr(flashinfer, "_DTYPES", (torch.float32, F16, BF16))
        monkeypatch.setattr(flashinfer_backend, "library", lambda: flashinfer_double)
        monkeypatch.setattr(FlashInferAttention.__init__, "__defaults__", (WORKSPACE,))


def config_of(directory: Path, **changes: Any) -> Any:
    sizes = dict(max_model_len=64, block_size=8, num_blocks=30, max_num_seqs=4, num_threads=1)
    given = dict(dtype="float32", attention_backend="flashinfer", speculation=None)
    return instance_config(model=str(directory), **{**sizes, **given, **changes})


def answers(executor: TorchExecutor) -> list[list[int]]:
    """The batch shrinks, so that graphs of two sizes and padding take part."""
    driver = Driver(executor, chunk=11)
    prompts = [np.random.default_rng(n).integers(3, VOCAB, 5 + 9 * n).tolist() for n in range(3)]
    made = [driver.add(prompt, 2 + n, Sampling(n, 0.0)) for n, prompt in enumerate(prompts)]
    driver.run()
    return [request.tokens for request in made]


@pytest.mark.skipif(not ON_CPU, reason="tests/gpu/test_parity.py does it on a device, in bfloat16")
@pytest.mark.parametrize("variant", ["qwen3", "gemma2"])
def test_tokens_are_the_cpus(variant: str, tmp_path: Path, there: None, monkeypatch: pytest.MonkeyPatch):
    """With a window and a soft-cap in one of them; eagerly, and over the buffers of graphs."""
    make_checkpoint(tmp_path, variant, head_dim=64, num_hidden_layers=2)
    with monkeypatch.context() as without:
        without.setattr("baton.model.ops.triton.serve", lambda device: False)
        plain = TorchExecutor.from_config(config_of(tmp_path, attention_backend="auto"), 0, "")
        expected = answers(plain)
        plain.close()
    executor = TorchExecutor.from_config(config_of(tmp_path), 0, "")
    assert "attention by FlashInfer 0.7" in executor.info.detail
    assert executor.info.tile == "rows:float32:8x64"
    assert answers(executor) == expected
    again, sampling = Again(), executor._sampler.on_device
    assert sampling is not None
    executor._graphs = graphs_of(executor._config, executor._model, sampling, again, DelayedQueue(eager=1.0))
    assert answers(executor) == expected
    assert again.recorded >= 2
    assert again.replayed >= 3
    executor.close()


@pytest.mark.skipif(not ON_CPU, reason="tests/gpu/test_steps.py does it with real graphs and a real queue")
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_steps_that_overlap_are_planned_when_the_device_comes_to_them(
    graphs: bool, tmp_path: Path, there: None, monkeypatch: pytest.MonkeyPatch
):
    """The device does nothing before it is waited for, so plans of two steps are made before either runs."""
    make_checkpoint(tmp_path, "qwen3", head_dim=64, num_hidden_layers=1)
    config = config_of(tmp_path, **SIZES)
    with monkeypatch.context() as without:
        without.setattr("baton.model.ops.triton.serve", lambda device: False)
        plain = TorchExecutor.from_config(config_of(tmp_path, attention_backend="auto", **SIZES), 0, "")
        driver, expected = Driver(plain), []
        for number, sampling, count in WISHES:
            request = driver.add(PROMPTS[number], count, sampling)
            driver.run()
            expected.append(request.tokens)
        plain.close()
    device = DelayedQueue(eager=1.0)
    monkeypatch.setattr(queues, "device_queue", lambda _: device)

    def make_graphs(config: Any, model: Any, sampling: Any, parallel: Any, _: Any) -> Any:
        return graphs_of(config, model, sampling, Recorded(), device) if graphs else None

    monkeypatch.setattr(torch_executor, "make_graphs", make_graphs)
    monkeypatch.setattr(LateTorchExecutor, "_warm_up", lambda *_: None)
    executor = LateTorchExecutor.from_config(config, 0, "")
    assert executor.one_step_late
    device.eager = 0.0
    assert played(executor) == expected
    assert bool(executor._backend._of_graphs) == graphs
    executor.close()


@pytest.mark.parametrize(
    ("version", "changes", "reason"),
    [
        ("0.7.2.post1", {}, ""),
        ("0.6.0", {"dtype": F16, "head_dim": 256}, ""),
        ("", {}, "not installed"),
        ("0.5.3", {}, "is 0.5.3"),
        ("nightly", {}, "no known version"),
        ("0.7.2", {"head_dim": 80}, "80 elements"),
        ("0.7.2", {"dtype": torch.float32}, "float16, not float32; give --dtype"),
        ("0.7.2", {"kv_int8": True}, "--kv-cache-dtype"),
        ("0.7.2", {"sinks": True}, "sinks"),
    ],
)
def test_why_it_does_not_serve(version: str, changes: dict[str, Any], reason: str):
    asked = {"head_dim": 128, "dtype": BF16, "kv_int8": False, "sinks": False}
    found = flashinfer.why_not(version, **{**asked, **changes})
    assert reason in found
    assert bool(found) == bool(reason)


@pytest.mark.skipif(not ON_CPU, reason="of a machine without a device, and without FlashInfer")
def test_what_cannot_be_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(message: str, **flags: Any) -> None:
        with pytest.raises(OptionError, match=message):
            make_plan(EngineOptions(**flags))

    refused(
        "flashinfer: it is for CUDA devices; give --device cuda", attention_backend="flashinfer", device="cpu"
    )
    refused("triton: it is for CUDA devices", attention_backend="triton", device="cpu")
    refused("no attention; leave it away", attention_backend="torch", executor="simulated", device="cpu")
    for name in ("flashinfer", "torch"):
        refused(
            f"{name}: there a row's bits depend .* --deterministic",
            attention_backend=name, deterministic=True, device="cuda",
        )  # fmt: skip
    shape = replace(Case(((3, 1),), dtype=BF16).shape(), sinks=True)
    for name, message in (
        ("triton", "attention_backend triton: Triton does not serve cpu"),
        ("flashinfer", "attention_backend flashinfer: Triton does not serve cpu"),
    ):
        with pytest.raises(ExecutorError, match=message):
            attention_backend(config_of(tmp_path, attention_backend=name), shape)
    assert isinstance(attention_backend(config_of(tmp_path, attention_backend="torch"), shape), TorchPieces)
    serve(monkeypatch)
    wanted = config_of(tmp_path)
    if not flashinfer.installed():
        with pytest.raises(ExecutorError, match=r"FlashInfer is not installed \(pip .*, or leave it away"):
            attention_backend(wanted, shape)
    monkeypatch.setattr(flashinfer, "installed", lambda: "0.7.2")
    with pytest.raises(ExecutorError, match="attention_backend flashinfer: the model has attention sinks"):
        attention_backend(wanted, shape)


def signature(node: ast.FunctionDef) -> list[str]:
    given = node.args
    return [one.arg for one in (*given.args, *given.kwonlyargs)]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("decode.py", "BatchDecodeWithPagedKVCacheWrapper"),
        ("prefill.py", "BatchPrefillWithPagedKVCacheWrapper"),
    ],
)
def test_the_double_takes_what_the_library_takes(file: str, name: str):
    """Its source is read: importing it would need a device's libraries."""
    found = importlib.util.find_spec("flashinfer")
    if found is None or found.origin is None:
        pytest.skip("FlashInfer is not installed: pip install flashinfer-python")
    tree = ast.parse((Path(found.origin).parent / file).read_text())
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    there = {node.name: node for node in kind.body if isinstance(node, ast.FunctionDef)}  # the last overload
    for method in ("__init__", "plan", "run", "reset_workspace_buffer"):
        real = there[method]
        if real.args.kwarg is not None:  # (it hands all on)
            real = there[f"_{method}_impl"]
        parameters = inspect.signature(getattr(getattr(flashinfer_double, name), method)).parameters
        assert [one for one in parameters if one != "args"] == signature(real), f"{name}.{method}"
