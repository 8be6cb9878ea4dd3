"""A config.json of each family that Baton does not serve: one line that says what it is and why, early."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from baton.model.architectures.families import FAMILIES
from baton.model.architectures.refused import why_refused
from baton.model.checkpoint.config import ModelConfig, UnsupportedModel
from baton.model.checkpoint.hub import ModelNotFound, resolve_model

MLA = "has attention over compressed keys (MLA)"
STATE = "has layers with a recurrent state"
ENCODER = "is an encoder, which sees what comes after a token too"
BOTH = "is an encoder and a decoder"
IMAGES = "reads images or sound besides texts"

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DeepseekV2ForCausalLM": ({"kv_lora_rank": 512, "q_lora_rank": 1536}, MLA),
    "DeepseekV3ForCausalLM": ({"kv_lora_rank": 512, "n_routed_experts": 256}, MLA),
    "DeepseekV32ForCausalLM": ({"kv_lora_rank": 512}, MLA),
    "DeepseekV4ForCausalLM": ({}, MLA),
    "KimiK2ForCausalLM": ({"kv_lora_rank": 512}, MLA),
    "Kimi_K25ForConditionalGeneration": ({"text_config": {"kv_lora_rank": 512}, "vision_config": {}}, MLA),
    "Glm4MoeLiteForCausalLM": ({"kv_lora_rank": 512}, MLA),
    "LongcatFlashForCausalLM": ({}, MLA),
    "KimiLinearForCausalLM": ({"linear_attn_config": {"kda_layers": [1]}, "kv_lora_rank": 512}, STATE),
    "Qwen3NextForCausalLM": ({"layer_types": ["linear_attention", "full_attention"]}, STATE),
    "Qwen3_5ForConditionalGeneration": (
        {"text_config": {"layer_types": ["linear_attention"]}, "vision_config": {}},
        STATE,
    ),
    "Qwen3_5MoeForCausalLM": ({}, STATE),
    "MambaForCausalLM": ({"state_size": 16, "num_hidden_layers": 24}, STATE),
    "Mamba2ForCausalLM": ({"state_size": 128}, STATE),
    "JambaForCausalLM": ({"mamba_d_state": 16, "num_attention_heads": 32}, STATE),
    "RwkvForCausalLM": ({"attention_hidden_size": 768}, STATE),
    "RWKV7ForCausalLM": ({}, STATE),
    "Lfm2ForCausalLM": ({"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}, STATE),
    "Zamba2ForCausalLM": ({"layers_block_type": ["mamba", "hybrid"]}, STATE),
    "NemotronHForCausalLM": ({"hybrid_override_pattern": "M-M*"}, STATE),
    "BertModel": ({"type_vocab_size": 2}, ENCODER),
    "BertForSequenceClassification": ({}, ENCODER),
    "XLMRobertaModel": ({}, ENCODER),
    "ModernBertForMaskedLM": ({}, ENCODER),
    "DebertaV2ForSequenceClassification": ({}, ENCODER),
    "T5ForConditionalGeneration": ({"is_encoder_decoder": True}, BOTH),
    "BartForConditionalGeneration": ({"is_encoder_decoder": True}, BOTH),
    "WhisperForConditionalGeneration": ({"is_encoder_decoder": True}, BOTH),
    "InternVLForConditionalGeneration": ({"vision_config": {"depth": 32}}, IMAGES),
    "LlavaForConditionalGeneration": ({"vision_config": {}, "text_config": {"model_type": "llama"}}, IMAGES),
    "Qwen2AudioForConditionalGeneration": ({"audio_config": {}}, IMAGES),
    "CLIPModel": ({"vision_config": {}, "text_config": {}}, "does not go on with texts"),
    "Gemma3nForConditionalGeneration": (
        {"vision_config": {}, "audio_config": {}},
        "has layers that share keys, and embeddings of its layers",
    ),
    "Gemma4ForConditionalGeneration": (
        {"vision_config": {}, "text_config": {"num_kv_shared_layers": 20}},
        "has layers that share keys, and embeddings of its layers",
    ),
    "Llama4ForConditionalGeneration": ({"vision_config": {}}, "has attention within chunks"),
    "LLaDAModelLM": ({}, "writes its tokens in any order (diffusion)"),
}


def _line(name: str, architecture: str, reason: str) -> str:
    return f"{name!r} is a {architecture!r}, which Baton does not serve: it {reason}; Baton serves: Llama, "


@pytest.mark.parametrize("architecture", REFUSED)
def test_it_is_named_with_the_reason(architecture: str) -> None:
    fields, reason = REFUSED[architecture]
    for raw in ({}, fields):  # the name alone is enough
        with pytest.raises(UnsupportedModel) as caught:
            ModelConfig.from_dict({"architectures": [architecture], **raw}, "/m")
        assert _line("/m", architecture, reason) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kv_lora_rank": 512}, MLA),
        ({"text_config": {"kv_lora_rank": 512}, "vision_config": {}}, MLA),
        ({"layer_types": ["full_attention", "linear_attention"]}, STATE),
        ({"ssm_cfg": {}}, STATE),
        ({"is_encoder_decoder": True}, BOTH),
        ({"vision_config": {"depth": 2}}, IMAGES),
        ({"audio_config": {}}, IMAGES),
        ({"kv_lora_rank": None, "is_encoder_decoder": False, "layer_types": ["full_attention"]}, ""),
        ({"layer_types": "conv", "text_config": [], "vision_config": None}, ""),
    ],
)
def test_names_that_are_not_known_are_told_by_their_fields(fields: dict[str, Any], reason: str) -> None:
    assert why_refused({"architectures": ["NewForCausalLM"], **fields}) == reason
    assert why_refused({"architectures": 3, **fields}) == reason


def test_what_is_served_has_no_reason() -> None:
    for name in FAMILIES:
        assert why_refused({"architectures": [name]}) == "", name
    for name in (
        "CohereForCausalLM",
        "GPTNeoXForCausalLM",
        "StableLmForCausalLM",
        "ModernBertDecoderForCausalLM",
    ):
        assert why_refused({"architectures": [name]}) == "", name


def test_a_text_part_is_refused_for_what_it_is() -> None:
    raw = {"text_config": {"model_type": "mistral4", "kv_lora_rank": 256}}
    with pytest.raises(UnsupportedModel, match=r"its text_config is of a model that has attention over comp"):
        ModelConfig.from_dict({"architectures": ["Mistral3ForConditionalGeneration"], **raw}, "/m")


def test_serve_says_so_before_it_imports_torch(tmp_path: Path) -> None:
    """Whatever else is missing there, a tokenizer and weights.  All of them in one process of `baton`."""
    for architecture, (fields, _) in REFUSED.items():
        (tmp_path / architecture).mkdir()
        config = {"architectures": [architecture], **fields}
        (tmp_path / architecture / "config.json").write_text(json.dumps(config))
    code = (
        "import sys\n"
        "from baton.cli.main import app\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        app(['serve', name, '--port', '0'])\n"
        "    except SystemExit as end:\n"
        "        print(end.code)\n"
        "print(*sorted({'torch', 'transformers', 'numba', 'huggingface_hub'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code, *(str(tmp_path / name) for name in REFUSED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = done.stderr.splitlines()
    assert len(lines) == len(REFUSED), done.stderr
    for line, (architecture, (_, reason)) in zip(lines, REFUSED.items(), strict=True):
        assert _line(str(tmp_path / architecture), architecture, reason) in line
    assert done.stdout.splitlines() == ["2"] * len(REFUSED) + [""]


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("adapter_config.json", "is an adapter"),
        ("model_index.json", "is a pipeline of diffusers"),
        ("params.json", "is in Mistral's own format"),
    ],
)
def test_directories_that_are_no_checkpoint(tmp_path: Path, file: str, says: str) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(ModelNotFound, match=says):
        resolve_model(str(tmp_path))


def test_nothing_but_its_config_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["DeepseekV3ForCausalLM"]}')
    asked: list[Any] = []

    def download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UnsupportedModel, match=r"'o/m' is a 'DeepseekV3ForCausalLM'"):
        resolve_model("o/m")
    assert asked == [["config.json"]]
