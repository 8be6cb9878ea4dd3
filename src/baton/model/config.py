"""What Baton needs to know of a checkpoint before it loads it: config.json and generation_config.json.

Theory.  A checkpoint's `config.json` names an architecture and its sizes.  It has been written by many
versions of many programs, so everything that varies is settled here, once: rotary parameters as
`rope_theta` + `rope_scaling` (older files) or as `rope_parameters` (newer), head_dim given or implied,
the sliding window as one number or layer by layer, ids as one int or a list.  The rest of Baton sees
one frozen `ModelConfig`.  Whatever Baton cannot compute faithfully (another architecture, quantized
weights, an unknown rotary scaling) is an `UnsupportedModel` here and never a wrong answer later.

No torch, no transformers: the launcher reads this in milliseconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Ernie4_5ForCausalLM",
)
SUPPORTED_DTYPES = ("bfloat16", "float16", "float32")
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_DEFAULT_ROPE_THETA = {"Ernie4_5ForCausalLM": 500_000.0}


class ModelNotFound(ValueError):
    """There is no such model, or its files are incomplete or out of reach.  One line, for people."""


class UnsupportedModel(ValueError):
    """Baton cannot serve this model faithfully.  One line that says what and what it can serve."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.  `parameters` holds what the type needs (factor, beta_fast, …)."""

    theta: float = 10_000.0
    type: str = "default"
    """default, linear, dynamic, llama3 or yarn."""
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model.  Sizes are in elements, lengths in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Of the attention's output projection."""
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]
    """For each layer: a position sees so many positions, itself included; None: all before it."""
    dtype: str
    """What the checkpoint says of its weights: one of SUPPORTED_DTYPES."""
    bos_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_directory(cls, directory: str | Path) -> ModelConfig:
        """Reads `config.json`.  Raises `ModelNotFound` or `UnsupportedModel`."""
        return cls.from_dict(_read_json(Path(directory) / "config.json"), str(directory))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], name: str = "model") -> ModelConfig:
        """Parses the contents of a `config.json`; `name` is for error messages."""
        architecture = _architecture(raw, name)
        try:
            return _parse(raw, architecture, name)
        except (KeyError, TypeError) as error:
            problem = f"has no {error}" if isinstance(error, KeyError) else f"cannot be read: {error}"
            raise UnsupportedModel(f"{name!r}: config.json {problem}") from None

    def window_of(self, layer: int, max_model_len: int) -> int | None:
        """The layer's window, or None where it is no restriction for contexts of `max_model_len`."""
        window = self.layer_windows[layer]
        return None if window is None or window >= max_model_len else window

    def sizes_differ(self, other: ModelConfig) -> str:
        """What makes weights of this model useless for `other`, or "".

        Special tokens and the dtype of the files do not count.
        """
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if item.name not in ("dtype", "bos_token_ids", "eos_token_ids") and mine != theirs:
                return f"{item.name} is {mine!r}, not {theirs!r}"
        return ""

    def check_tensor_parallel(self, size: int) -> None:
        """Raises `UnsupportedModel` if the model cannot be cut for `size` ranks."""
        for what, value in (
            ("attention heads", self.num_attention_heads),
            ("columns of the MLP", self.intermediate_size),
        ):
            if value % size:
                raise UnsupportedModel(
                    f"tensor_parallel_size {size} does not divide the model's {value} {what}"
                )
        if self.num_kv_heads % size and size % self.num_kv_heads:
            raise UnsupportedModel(
                f"tensor_parallel_size {size} and the model's {self.num_kv_heads} KV heads: "
                "one must divide the other"
            )

    def kv_heads_of_rank(self, rank: int, size: int) -> tuple[int, int]:
        """[first, stop) KV heads of a rank; with fewer heads than ranks, several ranks hold the same."""
        if self.num_kv_heads >= size:
            share = self.num_kv_heads // size
            return rank * share, (rank + 1) * share
        head = rank * self.num_kv_heads // size
        return head, head + 1


def _architecture(raw: dict[str, Any], name: str) -> str:
    names = raw.get("architectures") or []
    for candidate in names:
        if candidate in SUPPORTED_ARCHITECTURES:
            return str(candidate)
    what = f"is a {str(names[0])!r}" if names else "names no architecture in its config.json"
    raise UnsupportedModel(f"{name!r} {what}; Baton serves: {', '.join(SUPPORTED_ARCHITECTURES)}")


def _parse(raw: dict[str, Any], architecture: str, name: str) -> ModelConfig:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"{name!r}: hidden_act {activation!r}; Baton computes silu only")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "an unknown method")
        raise UnsupportedModel(
            f"{name!r} is quantized ({method}); Baton serves weights in {', '.join(SUPPORTED_DTYPES)}"
        )
    heads = int(raw["num_attention_heads"])
    hidden = int(raw["hidden_size"])
    layers = int(raw["num_hidden_layers"])
    if raw.get("head_dim") is None and hidden % heads:
        raise UnsupportedModel(f"{name!r}: hidden_size {hidden} is no multiple of its {heads} heads")
    head_dim = int(raw.get("head_dim") or hidden // heads)
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise UnsupportedModel(f"{name!r}: {heads} attention heads are no multiple of {kv_heads} KV heads")
    if head_dim % 2:
        raise UnsupportedModel(f"{name!r}: head_dim {head_dim} is odd; rotary embedding needs it even")
    qkv_bias, output_bias, mlp_bias = _biases(raw, architecture)
    context = int(raw["max_position_embeddings"])
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=layers,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        rope=_rope(raw, architecture, context, name),
        norm_eps=float(raw.get("rms_norm_eps", 1e-5 if architecture.startswith("Ernie") else 1e-6)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", architecture.startswith("Ernie"))),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=architecture == "Qwen3ForCausalLM",
        layer_windows=_windows(raw, architecture, layers, name),
        dtype=_dtype(raw, name),
        bos_token_ids=_ids(raw.get("bos_token_id")),
        eos_token_ids=_ids(raw.get("eos_token_id")),
    )


def _biases(raw: dict[str, Any], architecture: str) -> tuple[bool, bool, bool]:
    """(q/k/v, attention output, MLP): each architecture has its own flags, or none."""
    if architecture == "Qwen2ForCausalLM":
        return True, False, False
    if architecture == "Ernie4_5ForCausalLM":
        every = bool(raw.get("use_bias", False))
        return every, every, every
    if architecture == "MistralForCausalLM":
        return False, False, False
    attention = bool(raw.get("attention_bias", False))
    return attention, attention, architecture == "LlamaForCausalLM" and bool(raw.get("mlp_bias", False))


def _windows(raw: dict[str, Any], architecture: str, layers: int, name: str) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if architecture == "MistralForCausalLM":
        # A file without the key means the architecture's default, 4096; an explicit null means none.
        window = raw.get("sliding_window", 4096)
        return (None if window is None else int(window),) * layers
    if architecture not in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        return (None,) * layers
    if not raw.get("use_sliding_window", False) or window is None:
        return (None,) * layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = int(raw.get("max_window_layers", 28))
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(
            f"{name!r}: layer_types must name full_attention or sliding_attention for each of {layers} layers"
        )
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _rope(raw: dict[str, Any], architecture: str, context: int, name: str) -> RopeConfig:
    """Both styles: {"rope_theta", "rope_scaling"} and {"rope_parameters": {"rope_theta", …}}."""
    found = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in found.values()):
        raise UnsupportedModel(f"{name!r}: rope_parameters differ from layer to layer; Baton needs one set")
    theta = (
        found.pop("rope_theta", None) or raw.get("rope_theta") or _DEFAULT_ROPE_THETA.get(architecture, 1e4)
    )
    kind = found.pop("rope_type", None) or found.get("type") or "default"
    found.pop("type", None)
    partial = found.pop("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"{name!r}: partial_rotary_factor {partial}; Baton rotates whole heads only")
    if kind not in _ROPE_TYPES:
        raise UnsupportedModel(f"{name!r}: rope type {kind!r}; Baton computes {', '.join(_ROPE_TYPES)}")
    if kind in ("llama3", "yarn"):
        found.setdefault("original_max_position_embeddings", context)
        if raw.get("original_max_position_embeddings"):
            found["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    if kind == "yarn" and found.get("factor") is None:
        found["factor"] = context / found["original_max_position_embeddings"]
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    for key in needed.get(kind, ()):
        if not isinstance(found.get(key), (int, float)):
            raise UnsupportedModel(f"{name!r}: rope type {kind!r} needs a number {key!r} in config.json")
    return RopeConfig(theta=float(theta), type=kind, parameters=found)


def _dtype(raw: dict[str, Any], name: str) -> str:
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in SUPPORTED_DTYPES:
        raise UnsupportedModel(f"{name!r}: weights in {dtype!r}; Baton serves {', '.join(SUPPORTED_DTYPES)}")
    return dtype


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFound(
            f"{str(path.parent)!r}: no {path.name}; give a directory with a checkpoint"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelNotFound(f"{str(path)!r} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ModelNotFound(f"{str(path)!r} is not a JSON object")
    return found


@dataclass(frozen=True)
class GenerationConfig:
    """What the authors of a checkpoint recommend for generation."""

    eos_token_ids: tuple[int, ...] = ()
    """Ids that end an answer; empty: those of config.json."""
    sampling: dict[str, float | int] = field(default_factory=dict)
    """Only what the file says: temperature, top_p, top_k, min_p, repetition_penalty."""


def read_generation_config(directory: str | Path) -> GenerationConfig:
    """Reads `generation_config.json`; everything is empty without one.

    `do_sample: false` is `temperature: 0`: that is what the file asks of the program that wrote it.
    """
    path = Path(directory) / "generation_config.json"
    if not path.exists():
        return GenerationConfig()
    raw = _read_json(path)
    sampling: dict[str, float | int] = {}
    for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = raw.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            sampling[key] = value
    if raw.get("do_sample") is False:
        sampling["temperature"] = 0.0
    return GenerationConfig(_ids(raw.get("eos_token_id")), sampling)
