"""Loading: complete or a clear error; one rank's slices; no second copy in memory."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.model import loader
from baton.model.attention import AttentionShape, attention_backend
from baton.model.checkpoint.config import ModelConfig
from baton.model.cpu import quantizing
from baton.model.cpu.library import native
from baton.model.layers import placement
from baton.model.layers.packed import Weights, best_form
from baton.model.layers.parallel import TensorParallel
from baton.model.layers.placement import Placement
from baton.model.layers.rounding import Grouping
from baton.model.loader import LoadError, load_model
from baton.model.weights.store import PrivateStore
from tests.model.checkpoints import VOCAB, make_checkpoint
from tests.model.reading.test_quantized_models import make as make_quantized


def load(
    directory: Path,
    rank: int = 0,
    size: int = 1,
    dtype: torch.dtype = torch.float32,
    weights: Weights = "plain",
    **more: Any,
):
    config = ModelConfig.from_directory(directory)
    device = torch.device("cpu")
    shape = AttentionShape(
        config.num_layers, 4, 2, config.head_dim, 16, 1.0, frozenset({None}), dtype, device
    )
    placement = Placement(TensorParallel(rank, size, object()), dtype, device, weights, **more)
    return load_model(directory, config, placement, attention_backend(shape), 64)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "llama2")
    return tmp_path


def rewrite(directory: Path, change) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def test_a_missing_tensor(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(LoadError, match=r"no tensor 'model\.layers\.1\.self_attn\.k_proj\.weight'"):
        load(checkpoint)


def test_an_unknown_tensor(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({"model.layers.0.odd.weight": torch.ones(2)}))
    with pytest.raises(LoadError, match=r"no place for tensor 'model\.layers\.0\.odd\.weight'"):
        load(checkpoint)


def test_derived_tensors_are_ignored(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(checkpoint, lambda tensors: tensors.update({name: torch.ones(2)}))
    load(checkpoint)


def test_a_wrong_shape(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    with pytest.raises(
        LoadError, match=r"'model\.norm\.weight' has shape \[65\], config\.json makes it \[64\]"
    ):
        load(checkpoint)


def test_integers_are_no_weights(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64).int()}))
    with pytest.raises(LoadError, match="int32"):
        load(checkpoint)


def test_a_damaged_file(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(LoadError, match="cannot be read"):
        load(checkpoint)


def test_a_shard_that_is_missing_and_shards_without_an_index(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama2", "100KB")
    expected = model.state_dict()["model.norm.weight"]
    index = tmp_path / "model.safetensors.index.json"
    contents = index.read_text()
    index.unlink()
    assert torch.equal(load(tmp_path).norm.weight, expected)  # several files, no index
    index.write_text(contents)
    name = json.loads(contents)["weight_map"]["model.norm.weight"]
    shard = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    with pytest.raises(LoadError, match=name):
        load(tmp_path)
    index.unlink()
    (tmp_path / name).write_bytes(shard)
    (tmp_path / "model-copy.safetensors").write_bytes(shard)
    with pytest.raises(LoadError, match="another file"):
        load(tmp_path)


def test_a_stored_head_of_a_tied_model_is_ignored(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen2")
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(VOCAB, 64)}))
    model = load(tmp_path)
    assert model.head is model.embedding
    assert model.head.weight.std() < 1


def test_an_untied_model_needs_its_head(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(LoadError, match=r"lm_head\.weight"):
        load(checkpoint)


def test_dtype_is_converted_on_the_way(checkpoint: Path) -> None:
    whole = load(checkpoint).layers[0].mlp.down.weight
    half = load(checkpoint, dtype=torch.bfloat16).layers[0].mlp.down.weight
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, whole.to(torch.bfloat16))


def test_ranks_together_hold_each_weight_once(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    state = model.state_dict()
    ranks = [load(tmp_path, rank, 4) for rank in range(4)]
    blocks = [rank.layers[0] for rank in ranks]
    prefix = "model.layers.0"
    queries = torch.cat([block.attention.qkv.weight[:32] for block in blocks])
    assert torch.equal(queries, state[f"{prefix}.self_attn.q_proj.weight"])
    keys = [block.attention.qkv.weight[32:64] for block in blocks]  # two KV heads on four ranks
    assert torch.equal(keys[0], keys[1])
    assert torch.equal(torch.cat((keys[0], keys[2])), state[f"{prefix}.self_attn.k_proj.weight"])
    down = torch.cat([block.mlp.down.weight for block in blocks], dim=1)
    assert torch.equal(down, state[f"{prefix}.mlp.down_proj.weight"])
    up = torch.cat([block.mlp.gate_up.weight[24:] for block in blocks])
    assert torch.equal(up, state[f"{prefix}.mlp.up_proj.weight"])
    embedding = torch.cat([rank.embedding.weight for rank in ranks])
    assert torch.equal(embedding[:VOCAB], state["model.embed_tokens.weight"])
    assert embedding[VOCAB:].abs().sum() == 0


class Kept(PrivateStore):
    """Remembers what was made in it, and whether other threads than the caller's made some of it."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.facts: dict[str, Any] = {}
        self.shared_out = False

    def make(self, name, shape, dtype, device):
        self.shared_out |= threading.current_thread() is not threading.main_thread()
        return self.tensors.setdefault(name, super().make(name, shape, dtype, device))

    def note(self, name, facts):
        return self.facts.setdefault(name, super().note(name, facts))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.skipif(native() is None, reason="threads share out what the library packs")
@pytest.mark.parametrize("form", ["packed", "int4", "compressed-tensors", "gpt-oss"])
def test_what_threads_fill_is_what_one_fills(tmp_path: Path, threads, form: str) -> None:
    more: dict[str, Any] = {"weights": "packed"}
    if form == "compressed-tensors":
        make_quantized(tmp_path, form, "qwen3-moe")
        more["groups"] = True
    else:
        make_checkpoint(tmp_path, "gpt-oss" if form == "gpt-oss" else "ernie4_5-moe")
    if form == "int4":
        more |= {"groups": True, "grouping": Grouping(4, 32), "finer": Grouping(6, 32)}
    found = []
    for count in (1, 3):
        threads(count)
        store = Kept()
        load(tmp_path, store=store, **more)
        found.append(store)
        assert store.shared_out == (count > 1)
        assert list(store.facts["rounded"]) == list(found[0].facts["rounded"])
    one, three = found
    assert one.facts == three.facts
    assert one.tensors.keys() == three.tensors.keys()
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, three.tensors[name]), name


@pytest.mark.skipif(native() is None, reason="threads share out what the library packs")
@pytest.mark.parametrize("bound", [1 << 12, 1 << 13, 1 << 16])
def test_threads_fill_no_more_than_a_bound_at_once(
    tmp_path: Path, threads, monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    """What is held beside the weights is one large layer, or small ones up to the bound."""
    make_checkpoint(tmp_path, "ernie4_5-moe")
    fill, lock = loader._fill, threading.Lock()
    held: list[int] = []
    found: list[list[int]] = []

    def counted(layer, *more) -> None:
        size = loader._elements(layer)
        with lock:
            held.append(size)
            found.append(list(held))
        fill(layer, *more)
        with lock:
            held.remove(size)

    monkeypatch.setattr(loader, "_fill", counted)
    monkeypatch.setattr(loader, "_AT_ONCE", bound)
    threads(8)
    store = Kept()
    load(tmp_path, weights="packed", store=store)
    assert store.shared_out
    assert all(sum(sizes) <= bound or len(sizes) == 1 for sizes in found), found


@pytest.mark.skipif(native() is None, reason="of weights that the library quantizes")
@pytest.mark.parametrize("variant", ["ernie4_5-moe", "granite-moe"])
def test_a_mixture_is_quantized_matrix_by_matrix(
    tmp_path: Path, threads, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """Beside the weights there are one matrix as it was read, and its codes, a byte each."""
    make_checkpoint(tmp_path, variant)
    live = most = ever = 0

    def gone(size: int) -> None:
        nonlocal live
        live -= size

    def counted(elements: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal live, most, ever
        memory = np.zeros(elements * dtype.itemsize, np.uint8)
        weakref.finalize(memory, gone, len(memory))
        live, ever = live + len(memory), ever + len(memory)
        most = max(most, live)
        return torch.from_numpy(memory).view(dtype)

    for module in (placement, quantizing):
        monkeypatch.setattr(module, "own_memory", counted)
    threads(1)
    more = {"groups": True, "grouping": Grouping(4, 32), "finer": Grouping(6, 32)}
    model = load(tmp_path, dtype=torch.bfloat16, weights="packed", head_grouping=Grouping(8, 32), **more)
    largest = max(map(loader._elements, model.layers_within()))
    assert 0 < most <= (2 + 1) * largest
    assert ever > 5 * most
    assert live == 0


_MEMORY = """
import sys, threading, time
from pathlib import Path
import torch
from baton.model.layers import placement
from baton.model.cpu.library import native
from baton.model.ops.steady import ALL
from tests.model.test_loader import load

# oneDNN keeps what it makes for each shape that it has multiplied: as much as it would keep later.
placement.find_sizes = lambda *_, **__: ALL
if native() is None:  # the compiler of the other kernels takes memory of its own
    from baton.model.cpu.numba.kernels import kernel
    kernel("attend_pairs")

def anonymous():
    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('RssAnon')) * 1024

peak, done = 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())
torch.ones(10)
before = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
model = load(Path(sys.argv[1]), dtype=torch.bfloat16, weights=sys.argv[2])
done.set()
watcher.join()
print(max(peak, anonymous()) - before, model.weight_bytes())
"""


@pytest.mark.parametrize("form", ["plain", "best"])
def test_loading_makes_no_second_copy(tmp_path: Path, form: str) -> None:
    """200 MB of fp32 into 100 MB of bf16: the private memory grows by little more than the parameters."""
    make_checkpoint(
        tmp_path, "llama2", hidden_size=512, intermediate_size=2048, num_hidden_layers=12, vocab_size=1000
    )
    weights = "plain" if form == "plain" else best_form(torch.bfloat16, torch.device("cpu"))
    result = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(tmp_path), weights],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    grown, weights = map(int, result.stdout.split())
    assert weights > 80e6
    assert weights * 0.95 < grown < weights * 1.25
