"""Whole models from GGUF files multiply by what the files say; what is wrong is refused in one line."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.model.checkpoint.config import ModelConfig, UnsupportedModel
from baton.model.checkpoint.files import LoadError
from baton.model.checkpoint.gguf import read_gguf
from baton.model.layers.rounding import Grouping
from baton.model.loader import check_numbers
from baton.model.weights.rows import pairs_to_halves
from tests.model.checkpoints import make_checkpoint
from tests.model.gguf_files import GGUFWriter, gguf, write_gguf
from tests.model.reading.test_quantized_models import load, matrices, weight_of

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def make(tmp_path, variant="llama2", kinds="Q4_0", **more):
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64} if "K" in str(kinds) else {}
    make_checkpoint(source, variant, num_hidden_layers=1, **sizes)
    path = tmp_path / "model.gguf"
    return path, write_gguf(source, path, kinds, **more)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ["llama2", "qwen3", "ernie4_5"])
def test_a_model_multiplies_by_what_its_file_says(tmp_path, kind, variant):
    path, made = make(tmp_path, variant, kind)
    config = ModelConfig.from_directory(path)
    model = load(path)
    for module, weight in matrices(model, config).items():
        expected = made[f"{module}.weight"]
        if variant == "ernie4_5" and module.endswith(("q_proj", "k_proj")):
            expected = pairs_to_halves(expected, config.head_dim)
        near = {"Q6_K": 0.01}.get(kind, 1e-6 if kind.endswith(("1", "K")) else 0)
        assert float((weight - expected).abs().max()) <= near * float(expected.abs().max()), module
    embedding = made["model.embed_tokens.weight"]
    found = model.embedding.look_up(torch.tensor([3, 100, 196]))
    assert float((found - embedding[[3, 100, 196]]).abs().max()) <= 0.01 * float(embedding.abs().max())
    rounded = model.placement.rounded.errors
    assert bool(rounded) == (kind == "Q6_K")


def test_an_embedding_of_its_own_stays_in_groups(tmp_path):
    path, _ = make(tmp_path, "llama2", "Q4_0")
    embedding = load(path).embedding
    assert embedding.weight is None
    # 4 bits a weight and a float16 a group, in whole panels of rows
    assert embedding.weight_bytes() < 256 * 64 * 0.6


def test_an_embedding_of_its_own_is_quantized_with_the_head(tmp_path):
    make_checkpoint(tmp_path, "llama2", num_hidden_layers=1)
    plain = load(tmp_path)
    rows = torch.tensor([3, 100])
    model = load(tmp_path, head_grouping=Grouping(8, 64))
    assert model.embedding.weight is None
    exact, found = (item.embedding.look_up(rows) for item in (plain, model))
    assert 0.001 < float((found - exact).norm() / exact.norm()) < 0.01
    assert set(model.placement.rounded.errors) == {"model.embed_tokens.weight", "lm_head.weight"}


def test_ranks_together_hold_each_group_once(tmp_path):
    source = tmp_path / "source"
    make_checkpoint(source, "llama2", num_hidden_layers=1, intermediate_size=128)
    path = tmp_path / "model.gguf"
    made = write_gguf(source, path, "Q4_0")
    blocks = [load(path, rank, 2).layers[0] for rank in range(2)]
    down = torch.cat([weight_of(block.mlp.down.product, 64) for block in blocks], dim=1)
    assert torch.equal(down, made["model.layers.0.mlp.down_proj.weight"])
    queries = torch.cat([weight_of(block.attention.qkv.product, 64)[:32] for block in blocks])
    assert torch.equal(queries, made["model.layers.0.self_attn.q_proj.weight"])


def test_a_cut_through_a_group_is_refused(tmp_path):
    path, _ = make(tmp_path)
    with pytest.raises(UnsupportedModel, match="cuts 96 inputs through a group of 32 of this gguf Q4_0"):
        load(path, 0, 2)


def test_a_model_in_several_files(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    make_checkpoint(source, "qwen3", num_hidden_layers=1)
    whole = tmp_path / "whole.gguf"
    made = write_gguf(source, whole, "Q8_0")
    file = read_gguf(whole)
    names = sorted(file.tensors)
    data = whole.read_bytes()
    for number, part in enumerate((names[:4], names[4:]), start=1):
        writer = GGUFWriter(tmp_path / f"model-{number:05}-of-00002.gguf", "qwen3")
        if number == 1:
            for key, value in file.metadata.items():
                if isinstance(value, int):
                    writer.add_uint32(key, value)
                elif isinstance(value, float):
                    writer.add_float32(key, value)
        writer.add_uint16("split.count", 2)
        for name in part:
            tensor = file.tensors[name]
            content = np.frombuffer(data[tensor.offset : tensor.offset + tensor.nbytes], np.uint8)
            shape = (*tensor.shape[:-1], tensor.nbytes // int(np.prod(tensor.shape[:-1], dtype=int)))
            if tensor.kind == "F32":
                writer.add_tensor(name, content.view(np.float32).reshape(tensor.shape))
            else:
                kind = gguf.GGMLQuantizationType[tensor.kind]
                writer.add_tensor(name, content.reshape(shape), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    for number in (1, 2):
        path = tmp_path / f"model-{number:05}-of-00002.gguf"
        found = matrices(load(path), ModelConfig.from_directory(path))
        assert all(torch.equal(weight, made[f"{name}.weight"]) for name, weight in found.items())
    path.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(LoadError, match=r"one of 2 files; 'model-00002-of-00002\.gguf' is missing"):
        ModelConfig.from_directory(tmp_path / "model-00001-of-00002.gguf")
    (tmp_path / "model-00001-of-00002.gguf").rename(tmp_path / "renamed.gguf")
    with pytest.raises(LoadError, match="one of 2 files; name them as they were"):
        ModelConfig.from_directory(tmp_path / "renamed.gguf")


def place_of(path, name):
    return read_gguf(path).tensors[name].offset


def rewritten(path, offset, content):
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(data)


def test_scales_that_are_no_numbers_are_refused(tmp_path):
    path, _ = make(tmp_path)
    rewritten(path, place_of(path, "blk.0.ffn_up.weight"), b"\x00\x7e")
    with pytest.raises(LoadError, match=r"'blk\.0\.ffn_up\.weight': scales hold NaN or infinity") as error:
        load(path)
    assert "\n" not in str(error.value)
    with pytest.raises(LoadError, match=r"'blk\.0\.ffn_up\.weight' holds NaN"):
        check_numbers(path)


def extra(name, shape=(32, 32)):
    return lambda writer: writer.add_tensor(name, np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (extra("blk.0.odd.weight"), r"no place for tensor 'blk\.0\.odd\.weight'"),
        (extra("blk.7.attn_q.weight"), r"no place for tensor 'model\.layers\.7\.self_attn\.q_proj\.weight'"),
        (lambda writer: writer.add_block_count(2), r"no tensor 'blk\.1\.attn_k\.weight' \(and 8 more\)"),
        (lambda writer: writer.add_feed_forward_length(64), r"has shape \[96, 64\], .*metadata makes it"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_anything_is_loaded(tmp_path, change, says):
    path, _ = make(tmp_path, change=change)
    with pytest.raises(LoadError, match=says) as error:
        load(path)
    assert "\n" not in str(error.value)
