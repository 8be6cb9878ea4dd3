"""Whole models from quantized files: they compute what a model with the dequantized weights computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.model.attention import AttentionShape, attention_backend
from baton.model.checkpoint.config import ModelConfig, UnsupportedModel
from baton.model.checkpoint.files import LoadError
from baton.model.decoder.mixture import Mixture
from baton.model.layers.grouped import GroupedProduct
from baton.model.layers.parallel import TensorParallel
from baton.model.layers.placement import Placement
from baton.model.layers.rounding import Grouping
from baton.model.loader import load_model
from baton.model.weights.group_rows import quantize_in_blocks
from tests.model import quantized_checkpoints as files
from tests.model.checkpoints import make_checkpoint

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def load(directory: Path, rank=0, size=1, **groups):
    config = ModelConfig.from_directory(directory)
    config.check_tensor_parallel(size)
    device = torch.device("cpu")
    shape = AttentionShape(config.num_layers, 4, 2, config.head_dim, 16, 1.0, frozenset({None}), F32, device)
    parallel = TensorParallel(rank, size, object())
    groups = {"groups": True, **groups}
    placement = Placement(parallel, F32, device, "plain", **groups)
    return load_model(directory, config, placement, attention_backend(shape), 64)


def weight_of(product, inputs: int) -> torch.Tensor:
    """[out, inputs] in the order of the inputs."""
    if not isinstance(product, GroupedProduct):
        return product.multiply(torch.eye(inputs)).t()
    outputs = len(product.multiply(quantize_in_blocks(torch.zeros(1, inputs)))[0])
    rows = product.rows(torch.arange(outputs))
    if product.form.order is None:
        return rows
    found = torch.empty_like(rows)
    found[:, product.form.order.long()] = rows
    return found


def matrices(model, config: ModelConfig) -> dict[str, torch.Tensor]:
    """What the products multiply by, by the names of modules; one rank."""
    found = {}

    def multiplied(product, inputs: int) -> torch.Tensor:
        return weight_of(product, inputs)

    queries, keys = config.num_attention_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for number, block in enumerate(model.layers):
        name = f"model.layers.{number}"
        parts = multiplied(block.attention.qkv.product, config.hidden_size).split([queries, keys, keys])
        for last, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
            found[f"{name}.self_attn.{last}"] = part
        found[f"{name}.self_attn.o_proj"] = multiplied(block.attention.output.product, queries)
        mlps = {f"{name}.mlp": block.mlp}
        if isinstance(block.mlp, Mixture):
            experts = enumerate(block.mlp.experts)
            mlps = {f"{name}.mlp.experts.{number}": expert for number, expert in experts}

        for module, mlp in mlps.items():
            gate, up = multiplied(mlp.gate_up.product, config.hidden_size).chunk(2)
            found[f"{module}.gate_proj"], found[f"{module}.up_proj"] = gate, up
            found[f"{module}.down_proj"] = multiplied(mlp.down.product, mlp.config.size)
    if not config.tie_word_embeddings:
        found["lm_head"] = multiplied(model.head.product, config.hidden_size)[: config.vocab_size]
    return found


FORMATS = {
    "compressed-tensors": (
        files.compressed_config(4, 32, True),
        lambda weight: ((made := files.rounded(weight, 4, 32, True, BF16)), files.packed(made, True)),
    ),
    "compressed-tensors-zeros": (
        files.compressed_config(4, 32, False),
        lambda weight: ((made := files.rounded(weight, 4, 32, False, BF16)), files.packed(made, False)),
    ),
    "w8a8": (
        files.compressed_config(8, None, True, format="int-quantized"),
        lambda weight: ((made := files.by_channel(weight, 8, 32)), files.int8(made)),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        lambda weight: ((made := files.rounded(weight, 4, 32, False, F16)), files.awq(made)),
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
        lambda weight: ((made := files.rounded(weight, 4, 32, True, F16)), files.gptq(made)),
    ),
    "gptq-act-order": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "sym": False,
            "desc_act": True,
            "checkpoint_format": "gptq_v2",
        },
        lambda weight: ((made := files.in_order(weight, 4, 32, F16)), files.gptq(made, 2)),
    ),
}


def make(directory: Path, form: str, variant: str = "llama2") -> dict:
    make_checkpoint(directory, variant, num_hidden_layers=2)
    config, write = FORMATS[form]
    return files.rewrite(
        directory, config, lambda module, weight: None if module == "lm_head" else write(weight)
    )


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("variant", "matrices_there"), [("llama2", 14), ("qwen3", 14), ("qwen3-moe", 104)])
def test_a_model_multiplies_by_what_its_file_says(tmp_path, form, variant, matrices_there):
    made = make(tmp_path, form, variant)
    assert len(made) == matrices_there
    config = ModelConfig.from_directory(tmp_path)
    for module, weight in matrices(load(tmp_path), config).items():
        if module in made:
            assert torch.equal(weight, made[module].dequantized()), module


def test_pairs_of_ernie_are_put_into_halves_in_groups_too(tmp_path):
    made = make(tmp_path, "gptq", "ernie4_5")
    from baton.model.weights.rows import pairs_to_halves

    found = matrices(load(tmp_path), ModelConfig.from_directory(tmp_path))
    name = "model.layers.0.self_attn.k_proj"
    assert torch.equal(found[name], pairs_to_halves(made[name].dequantized(), 32))


def test_ranks_together_hold_each_group_once(tmp_path):
    make_checkpoint(tmp_path, "llama2", num_hidden_layers=1, intermediate_size=128)
    config, write = FORMATS["awq"]
    made = files.rewrite(
        tmp_path, config, lambda module, weight: None if module == "lm_head" else write(weight)
    )
    blocks = [load(tmp_path, rank, 2).layers[0] for rank in range(2)]
    down = torch.cat([weight_of(block.mlp.down.product, 64) for block in blocks], dim=1)
    assert torch.equal(down, made["model.layers.0.mlp.down_proj"].dequantized())
    gates = [weight_of(block.mlp.gate_up.product, 64)[:64] for block in blocks]
    assert torch.equal(torch.cat(gates), made["model.layers.0.mlp.gate_proj"].dequantized())


def test_experts_of_gpt_oss_on_one_rank_and_on_two(tmp_path):
    """Each number of the file, as it is; everything else stays in floating point."""
    make_checkpoint(tmp_path, "gpt-oss", num_hidden_layers=1, intermediate_size=128)
    made = files.rewrite_gpt_oss(tmp_path)
    gate_up, down = (made[f"model.layers.0.mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
    for size in (1, 2):
        blocks = [load(tmp_path, rank, size).layers[0] for rank in range(size)]
        share = 128 // size
        for expert in range(8):
            parts = [weight_of(block.mlp.gate_up[expert].product, 64) for block in blocks]
            assert torch.equal(torch.cat([part[:share] for part in parts]), gate_up[expert, :, ::2].t())
            assert torch.equal(torch.cat([part[share:] for part in parts]), gate_up[expert, :, 1::2].t())
            parts = [weight_of(block.mlp.down[expert].product, share) for block in blocks]
            assert torch.equal(torch.cat(parts, dim=1), down[expert].t())
            assert isinstance(blocks[0].mlp.down[expert].product, GroupedProduct)
        assert not isinstance(blocks[0].attention.qkv.product, GroupedProduct)


def test_gpt_oss_is_not_cut_through_a_group(tmp_path):
    make_checkpoint(tmp_path, "gpt-oss", num_hidden_layers=1)
    files.rewrite_gpt_oss(tmp_path)
    with pytest.raises(UnsupportedModel, match="tensor_parallel_size 2 cuts 96 inputs through a group of 32"):
        load(tmp_path, 0, 2)


def test_a_cut_through_a_group_is_refused(tmp_path):
    make(tmp_path, "gptq")
    with pytest.raises(UnsupportedModel, match="tensor_parallel_size 2 cuts 96 inputs through a group of 32"):
        load(tmp_path, 0, 2)


def test_act_order_is_not_cut(tmp_path):
    make(tmp_path, "gptq-act-order")
    with pytest.raises(UnsupportedModel, match="act-order cannot be cut"):
        load(tmp_path, 0, 2)


def test_modules_that_are_ignored_stay_as_they_are(tmp_path):
    make_checkpoint(tmp_path, "llama2", num_hidden_layers=2)
    true = load_file(tmp_path / "model.safetensors")
    config = files.compressed_config(
        4, 32, True, ignore=["lm_head", "re:.*layers.1.*", "model.layers.0.mlp.up_proj"]
    )

    def write(module, weight):
        if module == "lm_head" or "layers.1" in module or module == "model.layers.0.mlp.up_proj":
            return None
        made = files.rounded(weight, 4, 32, True, BF16)
        return made, files.packed(made, True)

    made = files.rewrite(tmp_path, config, write)
    assert len(made) == 6
    for module, weight in matrices(load(tmp_path), ModelConfig.from_directory(tmp_path)).items():
        expected = made[module].dequantized() if module in made else true[f"{module}.weight"]
        assert torch.equal(weight, expected), module


def test_groups_of_several_sizes_and_bits_in_one_checkpoint(tmp_path):
    make_checkpoint(tmp_path, "llama2", num_hidden_layers=2)
    config = files.compressed_config(4, 32, True)
    eight = files.compressed_config(8, None, True)["config_groups"]["group_0"] | {"targets": ["re:.*v_proj"]}
    config["config_groups"] |= {"group_1": eight}

    def write(module, weight):
        if module == "lm_head":
            return None
        wide = module.endswith("v_proj")
        made = files.by_channel(weight, 8, 32) if wide else files.rounded(weight, 4, 32, True, BF16)
        tensors = files.packed(made, True)
        if wide:
            tensors["weight_scale"] = tensors["weight_scale"][:, :1]
        return made, tensors

    made = files.rewrite(tmp_path, config, write)
    for module, weight in matrices(load(tmp_path), ModelConfig.from_directory(tmp_path)).items():
        if module in made:
            assert torch.equal(weight, made[module].dequantized()), module


@pytest.mark.parametrize("variant", ["llama2", "qwen3"])
def test_int4_while_loading_is_near_the_checkpoint(tmp_path, variant):
    make_checkpoint(tmp_path, variant, num_hidden_layers=2)
    true = load_file(tmp_path / "model.safetensors")
    model = load(tmp_path, grouping=Grouping(4, 64), head_grouping=Grouping(8, 64))
    for module, weight in matrices(model, ModelConfig.from_directory(tmp_path)).items():
        exact = true[f"{module}.weight"]
        error = float((weight - exact).norm() / exact.norm())
        assert (0.001 < error < 0.01) if module == "lm_head" else (0.03 < error < 0.12), (module, error)
    count = 9 if variant == "qwen3" else 10  # an embedding of its own is one more
    assert len(model.placement.rounded.errors) == count
    assert f"{count} weights rounded" in model.placement.rounded.told()
    if variant == "qwen3":  # tied: rows are looked up in the same table
        rows = model.embedding.look_up(torch.tensor([3, 100]))
        assert 0.001 < float((rows - true["model.embed_tokens.weight"][[3, 100]]).norm() / rows.norm()) < 0.01


@pytest.mark.parametrize("size", [1, 2])
def test_v_keeps_bits_of_its_own(tmp_path, size):
    """Only v is nearer than without, and each rank has just its rows of it."""
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2, intermediate_size=128)
    true = load_file(tmp_path / "model.safetensors")
    config = ModelConfig.from_directory(tmp_path)
    dim, inputs = config.head_dim, config.hidden_size
    plain, whole = (
        load(tmp_path, grouping=Grouping(4, 64), finer=finer) for finer in (None, Grouping(8, 64))
    )
    before, after = matrices(plain, config), matrices(whole, config)
    for module, weight in after.items():
        exact = true[f"{module}.weight"]
        if module.endswith("v_proj"):
            assert 0.001 < float((weight - exact).norm() / exact.norm()) < 0.01
        else:
            assert torch.equal(weight, before[module])
    names = "model.layers.1.self_attn.q_proj.weight + model.layers.1.self_attn.k_proj.weight"
    assert whole.placement.rounded.errors[names] > 0.03
    assert whole.placement.rounded.errors["model.layers.1.self_attn.v_proj.weight"] < 0.01
    for rank in range(size):
        model = load(tmp_path, rank, size, grouping=Grouping(4, 64), finer=Grouping(8, 64))
        product = model.layers[1].attention.qkv.product
        assert [part.bits for part in product.parts] == [4, 8]
        first, stop = config.kv_heads_of_rank(rank, size)
        heads = config.num_attention_heads // size
        name, rows = "model.layers.1.self_attn.", slice(first * dim, stop * dim)
        expected = torch.cat(
            [
                after[f"{name}q_proj"][rank * heads * dim : (rank + 1) * heads * dim],
                after[f"{name}k_proj"][rows],
                after[f"{name}v_proj"][rows],
            ]
        )
        assert torch.equal(weight_of(product, inputs), expected)


def changed(directory: Path, change) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


NAME = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(f"{NAME}.scales"), rf"no tensor '{NAME}\.scales'"),
        (lambda t: t.pop(f"{NAME}.qweight"), rf"no tensor '{NAME}\.qweight'"),
        (lambda t: t[f"{NAME}.scales"].fill_(float("nan")), rf"'{NAME}\.scales' holds NaN"),
        (
            lambda t: t.update({f"{NAME}.qzeros": torch.zeros(2, 11, dtype=torch.int32)}),
            rf"'{NAME}\.qzeros' has shape \[2, 11\], config\.json makes it \[2, 12\]",
        ),
        (lambda t: t.update({f"{NAME}.qweight": t[f"{NAME}.qweight"].long()}), "is I64; Baton reads I32"),
        (lambda t: t.update({f"{NAME}.odd": torch.ones(1)}), rf"no place for tensor '{NAME}\.odd'"),
    ],
)
def test_wrong_tensors_are_refused_before_anything_is_loaded(tmp_path, change, says):
    make(tmp_path, "gptq")
    changed(tmp_path, change)
    with pytest.raises(LoadError, match=says) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def config_of(directory: Path, quantization) -> ModelConfig:
    raw = json.loads((directory / "config.json").read_text())
    return ModelConfig.from_dict(raw | {"quantization_config": quantization}, "m")


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        (
            {"quant_method": "fp8"},
            "quantized by 'fp8', which Baton does not serve; it serves compressed-tensors",
        ),
        ({"quant_method": "bitsandbytes"}, "quantized by 'bitsandbytes'"),
        ({"bits": 4}, "quantized by 'an unknown method'"),
        ({"quant_method": "gptq", "bits": 3}, "weights in 3 bits; Baton reads 4 and 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16}, "groups of 16 inputs"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:(": {}}}, "pattern"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "without zero points"),
        (files.compressed_config(6), "weights in 6 bits"),
        (files.compressed_config(4, 16), "groups of 16 inputs"),
        (files.compressed_config(format="nvfp4-pack-quantized"), "'nvfp4-pack-quantized'"),
        (files.compressed_config(config_groups={}), "config_groups"),
        (files.compressed_config(transform_config={"a": 1}), "rotated"),
    ],
)
def test_formats_that_are_not_served_are_refused_by_name(tmp_path, quantization, says):
    make_checkpoint(tmp_path, "llama2", num_hidden_layers=1)
    with pytest.raises(UnsupportedModel, match=says) as error:
        config_of(tmp_path, quantization)
    assert "\n" not in str(error.value)
