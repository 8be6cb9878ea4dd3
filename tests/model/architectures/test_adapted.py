"""Which models transformers may compute, and why not others: one line each, before it is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.model.architectures import adapted
from baton.model.checkpoint.config import ModelConfig, UnsupportedModel
from baton.model.checkpoint.gguf import SUFFIX

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "GPTJForCausalLM": ({}, "its attention bypasses the interface of transformers"),
    "FalconForCausalLM": ({"model_type": "falcon"}, "its attention bypasses the interface of transformers"),
    "BloomForCausalLM": ({}, "its attention bypasses the interface of transformers"),
    "Qwen2MoeForCausalLM": ({"model_type": "qwen2_moe", "num_experts": 60}, "it has mixtures of experts"),
    "StableLmForSequenceClassification": ({}, "it is no class that goes on with texts"),
    "BrandNewForCausalLM": ({}, "has no such class"),
    "OwnForCausalLM": ({"auto_map": {"AutoModelForCausalLM": "own.py"}}, "(auto_map) is not run"),
    "Cohere2ForCausalLM": ({"layer_types": ["chunked_attention"]}, "of the kind 'chunked_attention'"),
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_it_is_named_with_the_reason(architecture: str) -> None:
    fields, reason = REFUSED[architecture]
    with pytest.raises(UnsupportedModel) as caught:
        ModelConfig.from_dict({"architectures": [architecture], **SIZES, **fields}, "/m")
    line = str(caught.value)
    assert line.startswith(f"'/m' is a '{architecture}', which Baton does not serve: ")
    assert reason in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("installed", "says"),
    [("", "is not installed"), ("4.57.1", "of the transformers 4"), ("5.21.1", "of the transformers 5.21")],
)
def test_the_library_is_asked_for(installed: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapted, "installed", lambda: installed)
    with pytest.raises(UnsupportedModel, match=says) as caught:
        ModelConfig.from_dict({"architectures": ["StableLmForCausalLM"], **SIZES}, "/m")
    assert 'pip install "transformers>=5.22"' in str(caught.value)


def test_who_computes_it() -> None:
    def computed_by(architecture: str, asked: Any) -> str:
        raw = {"architectures": [architecture], **SIZES, "intermediate_size": 96}
        return ModelConfig.from_dict(raw, "/m", implementation=asked).implementation

    assert computed_by("LlamaForCausalLM", "auto") == computed_by("LlamaForCausalLM", "baton") == "baton"
    assert computed_by("LlamaForCausalLM", "transformers") == "transformers"
    assert computed_by("StableLmForCausalLM", "auto") == "transformers"
    with pytest.raises(UnsupportedModel, match=r"it has mixtures of experts, .*; leave --model-impl away"):
        computed_by("MixtralForCausalLM", "transformers")
    with pytest.raises(
        UnsupportedModel, match="'StableLmForCausalLM', which Baton does not serve; Baton serves: "
    ):
        computed_by("StableLmForCausalLM", "baton")


def test_sizes_have_the_names_of_their_family() -> None:
    raw = {"vocab_size": 9, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 77}
    config = ModelConfig.from_dict({"architectures": ["GPT2LMHeadModel"], **raw}, "/m")
    assert (config.hidden_size, config.num_layers, config.num_kv_heads, config.max_context) == (64, 3, 4, 77)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    raw = {"architectures": ["SeedOssForCausalLM"], **SIZES, "rope_scaling": yarn}
    assert ModelConfig.from_dict(raw, "/m").max_context == 1024
    with pytest.raises(UnsupportedModel, match="one rank; give 1"):
        config.check_tensor_parallel(2)
    with pytest.raises(UnsupportedModel, match="has no 'hidden_size'"):
        ModelConfig.from_dict({"architectures": ["StableLmForCausalLM"], "n_ctx": 9}, "/m")


def test_angles_are_told_to_other_instances() -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    raw = {"architectures": ["StableLmForCausalLM"], **SIZES, "rope_parameters": rope}
    config = ModelConfig.from_dict(raw, "/m")
    assert [config.angles(length) for length in (64, 65)] == ["short", "long"]


def test_gguf_files_are_for_the_decoder_here(tmp_path: Path) -> None:
    (tmp_path / f"m{SUFFIX}").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModel, match="leave --model-impl away"):
        ModelConfig.from_directory(tmp_path / f"m{SUFFIX}", "transformers")


def test_serve_says_so_before_it_imports_anything_large(tmp_path: Path) -> None:
    """All of them in one process of `baton`; and one that is served, up to the weights that are missing."""
    served = {"StableLmForCausalLM": ({}, "no *.safetensors")}
    for architecture, (fields, _) in (REFUSED | served).items():
        (tmp_path / architecture).mkdir()
        config = {"architectures": [architecture], **SIZES, **fields}
        (tmp_path / architecture / "config.json").write_text(json.dumps(config))
        (tmp_path / architecture / "tokenizer.json").write_text("{}")
    code = (
        "import sys\n"
        "from baton.cli.main import app\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        app(['serve', name, '--port', '0'])\n"
        "    except SystemExit as end:\n"
        "        print(end.code)\n"
        "print(*sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    paths = [str(tmp_path / name) for name in REFUSED | served]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, timeout=120)
    lines = done.stderr.splitlines()
    assert len(lines) == len(paths), done.stderr
    for line, (_, reason) in zip(lines, (REFUSED | served).values(), strict=True):
        assert reason in line
    assert done.stdout.splitlines() == ["2"] * len(paths) + [""]
