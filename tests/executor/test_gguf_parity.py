"""Models from GGUF files against transformers, whose model has the weights that the file says."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.executor.scoring import TextScorer
from baton.executor.torch_executor import TorchExecutor
from baton.launch.instances.image_server import image_server
from baton.model import loader
from baton.model.checkpoint.config import ModelConfig
from tests.executor.driver import Driver
from tests.executor.test_torch_parity import ALL, check, config_for, prompt_of
from tests.model.checkpoints import VARIANTS, make_checkpoint
from tests.model.gguf_files import ARCHITECTURES, write_gguf

WRITTEN = [
    name
    for name, (family, _) in VARIANTS.items()
    if f"{family.removesuffix('Text')}ForCausalLM" in ARCHITECTURES
    and name not in ("qwen2-window", "smollm3-odd", "gemma3-odd", "mistral-images", "gemma3-images")
    and name not in ("gpt-oss-odd", "qwen3-moe-odd", "ernie4_5-moe-odd", "olmoe-odd")
]
"""llama.cpp's converter does not say where these have windows or no experts; what sees images is a file of
its own."""
IMPLIED: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "olmo3": {
        "rope_parameters": {
            "full_attention": VARIANTS["olmo3"][1]["rope_parameters"]["full_attention"],
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        }
    },
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma2-odd": {"query_pre_attn_scalar": 24},
}
"""What these models must have, as llama.cpp knows no others."""


def make(directory: Path, variant: str, kinds: Any, **changes: Any) -> tuple[Path, Any]:
    """A file, and a model in float32 with what it holds."""
    source = directory / "source"
    source.mkdir()
    model = make_checkpoint(source, variant, **{**IMPLIED.get(variant, {}), **changes})
    path = directory / "model.gguf"
    weights = write_gguf(source, path, kinds)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return path, model


@pytest.mark.parametrize("variant", WRITTEN)
def test_every_architecture(tmp_path: Path, variant: str) -> None:
    path, model = make(tmp_path, variant, "F32")
    executor = TorchExecutor.from_config(config_for(path), 0, "")
    driver = Driver(executor)
    requests = [driver.add(prompt_of(length, seed=length), 24, ALL) for length in (40, 5)]
    driver.run()
    for request in requests:
        check(request, model)
    executor.close()


@pytest.mark.parametrize("variant", WRITTEN)
def test_the_metadata_say_what_config_json_says(tmp_path: Path, variant: str) -> None:
    path, _ = make(tmp_path, variant, "BF16")
    found, expected = (ModelConfig.from_directory(item) for item in (path, tmp_path / "source"))
    assert found.dtype == "bfloat16"
    pairs = zip(found.rotaries, expected.rotaries, strict=True)
    rope, source = next(
        (pair for pair in pairs if pair[0] is not None and pair[0].type != "default"),
        (found.rotaries[0], expected.rotaries[0]),
    )
    assert rope is not None
    assert source is not None
    if rope.type == "longrope":
        for name in ("long_factor", "short_factor"):
            assert rope.parameters[name] == pytest.approx(source.parameters[name])
        assert (rope.theta, rope.share) == (source.theta, source.share)
        assert found.angles(64) == expected.angles(64)
    elif variant == "llama3":  # its scaling comes as numbers
        assert (rope.type, rope.theta) == ("factors", source.theta)
    elif rope.type == "yarn":
        for key, value in source.parameters.items():
            assert rope.parameters[key] == value
    else:
        assert found.rotaries == expected.rotaries
    for name in ("num_kv_heads", "head_dim", "tie_word_embeddings", "layer_windows"):
        assert getattr(found, name) == getattr(expected, name), name
    attention, like = found.layers[0].attention, expected.layers[0].attention
    assert (attention.qkv_bias, attention.output_bias) == (like.qkv_bias, like.output_bias)
    assert [layer.mlp for layer in found.layers] == [layer.mlp for layer in expected.layers]
    assert found.norm_eps == pytest.approx(expected.norm_eps)


@pytest.mark.parametrize(
    ("variant", "arch"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3-moe", "qwen3vlmoe")]
)
def test_text_parts_of_models_that_see_images(tmp_path: Path, variant: str, arch: str) -> None:
    """llama.cpp's converter writes them with the names of models of texts."""

    def change(writer: Any) -> None:
        writer.add_rope_dimension_sections([6, 5, 5, 0])
        writer.add_uint32(f"{arch}.n_deepstack_layers", 3)

    source = tmp_path / "source"
    source.mkdir()
    model = make_checkpoint(source, variant)
    write_gguf(source, tmp_path / "model.gguf", "F32", change=change, arch=arch)
    executor = TorchExecutor.from_config(config_for(tmp_path / "model.gguf"), 0, "")
    driver = Driver(executor)
    request = driver.add(prompt_of(40, seed=4), 12, ALL)
    driver.run()
    check(request, model)
    executor.close()


def test_blocks_that_predict_more_tokens_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of GLM 4.5: one behind the model's layers, which the file counts with them."""

    def change(writer: Any) -> None:
        writer.add_block_count(layers + 1)
        writer.add_nextn_predict_layers(1)
        for name in ("nextn.eh_proj", "nextn.enorm", "attn_q", "ffn_gate_exps", "exp_probs_b"):
            last = "bias" if name == "exp_probs_b" else "weight"
            writer.add_tensor(f"blk.{layers}.{name}.{last}", np.zeros((2, 4, 4), np.float32))

    source, path = tmp_path / "source", tmp_path / "model.gguf"
    source.mkdir()
    make_checkpoint(source, "glm4-moe", num_hidden_layers=2)
    layers = 2
    write_gguf(source, path, "F32", change=change)
    with caplog.at_level(logging.INFO):
        executor = TorchExecutor.from_config(config_for(path), 0, "")
    assert len(executor._model.layers) == layers
    assert "tensors for more than one token a step are not read" in caplog.text
    executor.close()


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """As gpt-oss is published; against the model with these numbers."""

    def kind(name: str) -> str:
        return "MXFP4" if "_exps." in name else "F32"

    path, model = make(tmp_path, "gpt-oss", kind, num_hidden_layers=2)
    tokens = np.array(prompt_of(60), np.int32)
    with closing(TextScorer.from_config(config_for(path), 0, "")) as scorer:
        assert scorer.expand() == 2 * 2 * 8
        found = torch.cat(list(scorer.text_logits(tokens)))
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens).long()[None]).logits[0]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_a_file_in_float16_is_quantized_while_it_is_loaded(tmp_path: Path) -> None:
    path, _ = make(tmp_path, "qwen3", "F16")
    executor = TorchExecutor.from_config(config_for(path, quantization="int4"), 0, "")
    assert "weights rounded" in executor.info.detail
    executor.close()


MIXED = {"attn_v.weight": "Q6_K", "ffn_down.weight": "Q6_K", "output.weight": "Q6_K", "ffn_up.weight": "Q5_K"}


def test_a_mixed_file_as_people_have_them(tmp_path: Path) -> None:
    """Q4_K_M: the banner says what could not be held exactly, and answers are near the float32 model's."""

    def kind(name: str) -> str:
        return next((kind for end, kind in MIXED.items() if name.endswith(end)), "Q4_K")

    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "initializer_range": 0.05}
    path, model = make(tmp_path, "llama2", kind, **sizes)
    assert ModelConfig.from_directory(path).quantization.method == "gguf Q6_K + Q4_K + Q5_K"
    executor = TorchExecutor.from_config(config_for(path), 0, "")
    assert "gguf Q6_K + Q4_K + Q5_K" in executor.info.detail
    assert "7 weights (v_proj, o_proj, down_proj, lm_head) rounded by 0.3" in executor.info.detail
    block = executor._model.layers[0]
    assert [part.bits for part in block.attention.qkv.product.parts] == [4, 8], "q and k; v"
    assert [part.bits for part in block.mlp.gate_up.product.parts] == [4, 8], "gate; up"
    driver = Driver(executor)
    request = driver.add(prompt_of(40), 8, ALL)
    driver.run()
    with torch.no_grad():
        logits = model(torch.tensor([request.all_tokens])).logits[0].log_softmax(-1)
    found = torch.full((8, logits.shape[1]), torch.nan)
    for row, report in enumerate(request.logprobs):
        for token, value in report.best():
            found[row, token] = value
    error = found - logits[39:-1]
    assert float(error.square().mean().sqrt()) < 0.05 * float(logits.std())
    executor.close()


def test_a_file_is_read_once_for_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image has the embedding in groups, the head, and what was rounded."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    path, _ = make(tmp_path, "llama2", lambda name: "Q6_K" if name == "output.weight" else "Q4_0", **sizes)
    with image_server() as server:
        config = config_for(path, weight_images=server, dtype="bfloat16")
        first = TorchExecutor.from_config(config, 0, "")
        monkeypatch.setattr(loader, "open_source", lambda *_: pytest.fail("the file was read again"))
        second = TorchExecutor.from_config(config, 0, "")
        assert "1 weight (lm_head) rounded by 0.3" in first.info.detail
        assert "1 weight (lm_head) rounded by 0.3" in second.info.detail
        tokens = []
        for executor in (first, second):
            driver = Driver(executor)
            tokens.append(driver.add(prompt_of(20), 12))
            driver.run()
            executor.close()
        assert tokens[0].tokens == tokens[1].tokens
