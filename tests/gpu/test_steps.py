"""Steps of the executor on a device: graphs beside eager steps, steps that overlap beside those that wait,
preemption, and pages in eight bits byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from baton.executor.base import StepBatch
from baton.executor.torch_executor import TorchExecutor
from baton.executor.torch_late import LateTorchExecutor
from baton.launch.planning.instance_config import instance_config
from baton.model.attention.base import AttentionStep
from baton.model.attention.torch_backend import TorchAttention
from baton.protocol.config import Speculation
from baton.protocol.params.sampling import Sampling, Stopping
from tests.executor.delayed import DelayedQueue, on_a_delayed_device
from tests.executor.driver import Driver, Request
from tests.executor.serving import Request as Asked
from tests.executor.serving import Serving, plant
from tests.model.attention_cases import LAYER, LAYERS, Case
from tests.model.checkpoints import VOCAB, make_checkpoint
from tests.model.cuda.where import DEVICE, ON_CPU, ON_DEVICE, THERE, serve
from tests.model.mtp_checkpoints import make_agreeing, make_mtp_checkpoint

pytestmark = pytest.mark.skipif(not THERE, reason="Triton is not installed: pip install 'baton-llm[cuda]'")
GREEDY, DRAWN = Sampling(seed=1, temperature=0.0), Sampling(seed=2, temperature=0.9, top_k=50, top_p=0.95)


def config_of(directory: Path, **changes: Any) -> Any:
    sizes = dict(max_model_len=200, block_size=16, num_blocks=80, max_num_seqs=12, num_threads=1)
    settings = {**sizes, "dtype": "float32", "device": DEVICE.type, **changes}
    return instance_config(model=str(directory), **settings)


def prompt_of(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB, length)]


def five_requests() -> list[Asked]:
    """Greedy and drawn."""
    return [
        Asked(prompt_of(3 + 9 * n, n), structs.replace(DRAWN if n % 2 else GREEDY, seed=n), Stopping(30))
        for n in range(5)
    ]


def answers(executor: TorchExecutor, rows: int, count: int) -> list[list[int]]:
    driver = Driver(executor)
    made = [
        driver.add(prompt_of(3 + 2 * n, n), count, structs.replace(DRAWN if n % 2 else GREEDY, seed=n))
        for n in range(rows)
    ]
    driver.run()
    for request in made:
        driver.remove(request)
    return [request.tokens for request in made]


@ON_DEVICE
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv", [None, "int8"], ids=["", "KV in 8 bits"])
def test_graphs_give_the_tokens_of_eager_steps(tmp_path: Path, dtype: str, kv: str | None):
    """In float32 for any number of rows, so with padding; in bfloat16 for numbers that need none: cuBLAS
    multiplies other numbers of rows otherwise."""
    make_checkpoint(tmp_path, "qwen3")
    given = dict(dtype=dtype, kv_cache_dtype=kv)
    recorded = TorchExecutor.from_config(config_of(tmp_path, **given), 0, "")
    eager = TorchExecutor.from_config(config_of(tmp_path, enforce_eager=True, **given), 0, "")
    assert recorded._graphs is not None
    assert eager._graphs is None
    for rows in (1, 2, 3, 5, 8, 11) if dtype == "float32" else (1, 2, 4, 8):
        assert answers(recorded, rows, 20) == answers(eager, rows, 20), f"{rows} rows"
    assert recorded._graphs._graphs, "no step was recorded"
    assert recorded._graphs.why_no_more == ""
    for executor in (recorded, eager):
        executor.close()


@ON_DEVICE
def test_graphs_are_recorded_again_for_new_weights(tmp_path: Path):
    """Into memory that the old ones had: of those PyTorch must still know."""
    old, new = tmp_path / "old", tmp_path / "new"
    for directory in (old, new):
        make_checkpoint(directory, "qwen3")
    weights = load_file(new / "model.safetensors")
    save_file(
        {name: tensor.flip(0).contiguous() for name, tensor in weights.items()},
        new / "model.safetensors",
        metadata={"format": "pt"},
    )
    executor = TorchExecutor.from_config(config_of(old), 0, "")
    fresh = TorchExecutor.from_config(config_of(new), 0, "")
    before, expected = answers(executor, 3, 12), answers(fresh, 3, 12)
    fresh.close()
    assert before != expected
    executor.update_weights(str(new))
    assert answers(executor, 3, 12) == expected
    executor.update_weights(str(old))
    assert answers(executor, 3, 12) == before
    assert executor._graphs is not None
    assert executor._graphs._graphs
    assert executor._graphs.why_no_more == ""
    executor.close()


@ON_DEVICE
def test_graphs_of_steps_with_drafts_give_the_tokens_of_eager_steps_without(tmp_path: Path):
    """Drafts of which some are wrong, of greedy and drawn requests, in float32."""
    make_checkpoint(tmp_path, "qwen3")
    drafts = Speculation(method="planted", num_speculative_tokens=4)
    executor = TorchExecutor.from_config(config_of(tmp_path, speculation=drafts), 0, "")
    graphs, speculator, answers = executor._graphs, executor.speculator, []
    assert graphs is not None
    assert speculator is not None
    for drafting in (False, True):
        requests = five_requests()
        serving = Serving(executor, slots=5, budget=64, longest=200, seed=1, preempts=0.0)
        executor._graphs = graphs if drafting else None
        speculator.drafter = plant(serving, requests, answers, 4, VOCAB, 0.8) if drafting else None
        found = [answer[0] for answer in serving.run(requests)]
        if drafting:
            assert found == [answer[0] for answer in answers]
        answers = [request.answer for request in requests]
    assert 0 < serving.right < serving.drafts
    assert graphs._graphs, "no step was recorded"
    assert graphs.why_no_more == ""
    executor.close()


@pytest.mark.parametrize("make", [make_agreeing, make_mtp_checkpoint], ids=["right", "wrong"])
@pytest.mark.parametrize(
    "eager", [pytest.param(False, marks=ON_DEVICE), True], ids=["where graphs are", "eager"]
)
def test_drafts_of_an_mtp_layer_give_the_tokens_of_steps_without(
    tmp_path: Path, make: Callable[[Path], object], eager: bool
):
    """In float32.  A layer that says what the model will say, and one that says something else."""
    make(tmp_path)
    drafts = Speculation(method="mtp", num_speculative_tokens=3)
    config = config_of(tmp_path, speculation=drafts, enforce_eager=eager)
    executor = TorchExecutor.from_config(config, 0, "")
    speculator, answers = executor.speculator, []
    assert speculator is not None
    layer = speculator.drafter
    assert layer is not None
    for drafter in (None, layer):
        speculator.drafter = drafter
        requests = five_requests()
        serving = Serving(executor, slots=5, budget=64, longest=200, seed=1, preempts=0.1)
        serving.run(requests)
        answers.append([request.answer for request in requests])
    assert answers[0] == answers[1]
    assert serving.drafts > 0
    if make is make_agreeing:
        assert serving.right > serving.drafts / 4  # (those of greedy requests)
    executor.close()


@ON_DEVICE
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_deterministic_bits_do_not_depend_on_the_batch(tmp_path: Path, quantization: str | None):
    """`--deterministic`, in bfloat16: a request alone, and among others of other lengths: the same
    log-probabilities of its tokens, to the last bit."""
    make_checkpoint(tmp_path, "llama2")
    given = dict(dtype="bfloat16", deterministic=True, quantization=quantization)
    executor = TorchExecutor.from_config(config_of(tmp_path, **given), 0, "")
    told = Sampling(seed=5, temperature=0.0, logprobs=VOCAB)

    def ask(others: int) -> Request:
        driver = Driver(executor, seed=others)
        request = driver.add(prompt_of(20, 1), 12, told)
        for number in range(others):
            driver.add(prompt_of(3 + 9 * number, number), 14, DRAWN)
        driver.run()
        for one in list(driver.requests.values()):
            driver.remove(one)
        return request

    alone = ask(0)
    for others in (1, 4, 9):
        among = ask(others)
        assert among.tokens == alone.tokens
        assert [report.best() for report in among.logprobs] == [report.best() for report in alone.logprobs]
    executor.close()


def late_executor(directory: Path, patch: pytest.MonkeyPatch, enforce_eager: bool) -> LateTorchExecutor:
    """On a CPU it is one that delays, with PyTorch's attention."""
    if ON_CPU:
        sizes = dict(max_model_len=200, block_size=16, num_blocks=80, max_num_seqs=12)
        return on_a_delayed_device(
            patch, directory, DelayedQueue(0.3), graphs=not enforce_eager, mirrored=False, **sizes
        )
    return LateTorchExecutor.from_config(config_of(directory, enforce_eager=enforce_eager), 0, "")


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_overlapping_steps_give_the_tokens_of_those_that_wait(
    tmp_path: Path, enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
):
    """Rows are carried on the device over forty steps; the batch changes its size on the way."""
    make_checkpoint(tmp_path, "llama3")
    executor = late_executor(tmp_path, monkeypatch, enforce_eager)
    assert executor.one_step_late, executor.why_waits
    rows, count = 5, 40

    def begun(driver: Driver) -> list[Request]:
        wishes = [structs.replace(DRAWN if n % 2 else GREEDY, seed=n) for n in range(rows)]
        return [driver.add(prompt_of(4 + n, n), count, wish) for n, wish in enumerate(wishes)]

    driver = Driver(executor)
    made = begun(driver)
    driver.run()
    expected = [request.tokens for request in made]
    for request in made:
        driver.remove(request)
    late = Driver(executor, seed=3)
    made = begun(late)
    late.step()  # the prompts
    assert overlapped(executor, late, made, count) == expected
    executor.close()


def overlapped(
    executor: LateTorchExecutor, driver: Driver, made: list[Request], count: int
) -> list[list[int]]:
    """Goes on with requests that have their first token, each row until it has `count`; row n leaves n steps
    before the end, so that graphs of other sizes take part."""
    for request in made:
        while len(request.blocks) * driver.block_size < len(request.prompt) + count:
            request.blocks.append(int(driver.free.pop()))
    tokens = {request.slot: list(request.tokens) for request in made}
    launched: list[list[Request]] = []
    for step in range(count - 1):
        running = [request for number, request in enumerate(made) if step < count - 1 - number]
        executor.launch(decode_of(running, step, first=step == 0))
        launched.append(running)
        if step:
            take(executor, launched[step - 1], tokens)
    take(executor, launched[-1], tokens)
    rest = [count - len(tokens[request.slot]) for request in made]
    assert rest == list(range(len(made)))
    for number, request in enumerate(made):  # the steps that a row left out
        for step in range(count - 1 - number, count - 1):
            executor.launch(decode_of([request], step, last=tokens[request.slot][-1]))
            take(executor, [request], tokens)
    return [tokens[request.slot] for request in made]


def take(executor: LateTorchExecutor, running: list[Request], tokens: dict[int, list[int]]) -> None:
    for request, token in zip(running, executor.collect().tokens.tolist(), strict=True):
        tokens[request.slot].append(token)


def decode_of(running: list[Request], step: int, first: bool = False, last: int | None = None) -> StepBatch:
    """Step `step` behind the prompts: its tokens are those of the step before, which the device has."""
    known = first or last is not None
    rows = len(running)
    tables = np.zeros((rows, max(len(request.blocks) for request in running)), np.int32)
    for row, request in enumerate(running):
        tables[row, : len(request.blocks)] = request.blocks
    given = [request.tokens[-1] if last is None else last for request in running] if known else [-1] * rows
    return StepBatch(
        step=step + 1,
        slots=np.array([request.slot for request in running], np.int32),
        starts=np.array([len(request.prompt) + step for request in running], np.int32),
        counts=np.ones(rows, np.int32),
        tokens=np.array(given, np.int32),
        samples=np.ones(rows, np.bool_),
        block_tables=tables,
        num_decodes=rows,
        carried=None if known else np.ones(rows, np.bool_),
    )


def test_a_preempted_request_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its blocks are given to others and its tokens computed again, in other blocks: the same answer."""
    make_checkpoint(tmp_path, "llama3")
    serve(monkeypatch)
    whole, half = (4, 2) if ON_CPU else (40, 17)
    executor = TorchExecutor.from_config(config_of(tmp_path), 0, "")
    driver = Driver(executor)
    request = driver.add(prompt_of(9, 1), whole, DRAWN)
    driver.run()
    expected = request.tokens
    driver.remove(request)
    driver = Driver(executor, seed=1)
    request = driver.add(prompt_of(9, 1), half, DRAWN)
    driver.run()
    driver.remove(request)
    if not ON_CPU:
        answers(executor, 6, 12)
    again = driver.add(
        prompt_of(9, 1), sampling=DRAWN, stopping=Stopping(max_tokens=whole), generated=request.tokens
    )
    driver.run()
    assert again.tokens == expected
    executor.close()


@ON_DEVICE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_is_stored_in_eight_bits_is_byte_for_byte_a_cpus(dtype: torch.dtype):
    """100,000 rows of numbers of all sizes."""
    from baton.model.attention.triton_backend import TritonAttention

    case = Case(((0, 12500),), 128, 8, 1, block_size=32, kv_int8=True, dtype=dtype)
    torch.manual_seed(0)
    tokens = case.rows[0][1]
    sizes = torch.exp2(torch.randint(-30, 30, (tokens, 8, 1)).float())
    keys, values = ((torch.randn(tokens, 8, 128) * sizes).to(dtype) for _ in range(2))
    blocks = -(-tokens // 32)
    tables = np.random.default_rng(0).permutation(blocks).astype(np.int32)[None]
    step = AttentionStep(np.zeros(1, np.int32), np.array([tokens], np.int32), tables, 0)
    pools = []
    for device, kind in ((torch.device("cpu"), TorchAttention), (DEVICE, TritonAttention)):
        backend = kind(replace(case.shape(), device=device))
        pool = torch.zeros(blocks, LAYERS, 2, 8, *backend.tile_shape, dtype=torch.uint8, device=device)
        backend.bind(pool)
        backend.write_kv(LAYER, keys.to(device), values.to(device), backend.prepare(step))
        pools.append(pool.cpu())
    differ = (pools[0] != pools[1]).sum().item()
    assert differ == 0, f"{differ} bytes of {pools[0].numel()}"
