"""What Baton needs to know of a checkpoint before it loads it: config.json and generation_config.json.

Theory.  A checkpoint's `config.json` names an architecture and its sizes.  It has been written by many
versions of many programs, so everything that varies is settled here, once: rotary parameters as
`rope_theta` + `rope_scaling` (older files) or as `rope_parameters` (newer), head_dim given or implied,
the sliding window as one number or layer by layer, ids as one int or a list.  The rest of Baton sees
one frozen `ModelConfig`.  Whatever Baton cannot compute faithfully (another architecture, a format of
quantized weights that it does not read, an unknown rotary scaling) is an `UnsupportedModel` here and never a
wrong answer later.

No torch, no transformers: the launcher reads this in milliseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from baton.model.checkpoint.config_fields import (
    MAX_CONTEXT,
    Fields,
    ModelNotFound,
    UnsupportedModel,
    read_json_object,
    shown,
)
from baton.model.checkpoint.gguf import is_gguf
from baton.model.checkpoint.gguf_config import SOURCE, read_config
from baton.model.checkpoint.quantization import Quantization, read_quantization
from baton.protocol.rules.ranks import heads_of_rank

__all__ = ["ModelConfig", "ModelNotFound", "RopeConfig", "UnsupportedModel"]

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Ernie4_5ForCausalLM",
)
SUPPORTED_DTYPES = ("bfloat16", "float16", "float32")
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "factors")
"""factors: by what each frequency is divided, one by one (GGUF files of Llama 3)."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128},
    "Ernie4_5ForCausalLM": {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
}
"""Of fields that a file leaves out: as in the architecture's class of transformers (a test compares)."""
_MAX_LAYERS = 4096
_MAX_HEADS = 1 << 16
_MAX_HEAD_DIM = 1 << 14


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.  `parameters` holds what the type needs (factor, beta_fast, …)."""

    theta: float = 10_000.0
    type: str = "default"
    """default, linear, dynamic, llama3, yarn or factors."""
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
    quantization: Quantization | None = field(default=None, compare=False)
    """Which weights are small integers, and how; None: none are, or a GGUF file's tensors say."""

    @classmethod
    def from_directory(cls, directory: str | Path) -> ModelConfig:
        """Reads `config.json`, or the metadata of a GGUF file.

        Raises `ModelNotFound`, `UnsupportedModel` or, for a GGUF file that is damaged, `LoadError`.
        """
        path = Path(directory)
        if is_gguf(path):
            raw, quantization = read_config(path)
            return replace(cls.from_dict(raw, str(path), SOURCE), quantization=quantization)
        return cls.from_dict(read_json_object(path / "config.json"), str(directory))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], name: str = "model", file: str = "config.json") -> ModelConfig:
        """Parses a `config.json`; `name` and `file` are for errors.  Raises `UnsupportedModel`."""
        architecture = _architecture(Fields(raw, name, file), name)
        defaults = {
            key: value for key, value in _DEFAULTS[architecture].items() if key not in raw
        }  # (an explicit null is none)
        return _parse(Fields(raw, name, file, defaults=defaults), architecture)

    @property
    def max_context(self) -> int:
        """The longest context that the positions are made for, in tokens.

        YaRN is configured by hand in many files and stretches the original context by its factor, whatever
        `max_position_embeddings` says (so transformers and vLLM).
        """
        if self.rope.type != "yarn":
            return self.max_position_embeddings
        parameters = self.rope.parameters
        stretched = int(parameters["original_max_position_embeddings"] * parameters["factor"])
        return max(self.max_position_embeddings, stretched)

    def window_of(self, layer: int, max_model_len: int) -> int | None:
        """The layer's window, or None where it is no restriction for contexts of `max_model_len`."""
        window = self.layer_windows[layer]
        return None if window is None or window >= max_model_len else window

    def sizes_differ(self, other: ModelConfig) -> str:
        """What makes weights of this model useless for `other`, or "".

        Special tokens, the dtype of the files and how they are quantized do not count.
        """
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if (
                item.compare
                and item.name not in ("dtype", "bos_token_ids", "eos_token_ids")
                and mine != theirs
            ):
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
        self._check_cut_of_groups(size)

    def _check_cut_of_groups(self, size: int) -> None:
        """The output projection and the MLP's second matrix are cut by inputs: groups must stay whole."""
        if self.quantization is None or size == 1:
            return
        inputs = (self.num_attention_heads * self.head_dim, self.intermediate_size)
        for scheme in self.quantization.schemes():
            if scheme.ordered and scheme.group is not None:
                raise UnsupportedModel(
                    f"tensor_parallel_size {size}: a {self.quantization.method} checkpoint in act-order "
                    "cannot be cut, for every group has inputs of every rank; serve it with "
                    "tensor_parallel_size 1"
                )
            for count in inputs:
                if count // size % (scheme.group or 32):
                    raise UnsupportedModel(
                        f"tensor_parallel_size {size} cuts {count} inputs through a group of "
                        f"{scheme.group or 32} of this {self.quantization.method} checkpoint"
                    )

    def kv_heads_of_rank(self, rank: int, size: int) -> tuple[int, int]:
        """[first, stop) KV heads of a rank."""
        return heads_of_rank(self.num_kv_heads, rank, size)


def _architecture(fields: Fields, name: str) -> str:
    names = fields.texts("architectures") or []
    for candidate in names:
        if candidate in SUPPORTED_ARCHITECTURES:
            return candidate
    what = f"is a {names[0][:60]!r}" if names else "names no architecture in its config.json"
    raise UnsupportedModel(f"{name!r} {what}; Baton serves: {', '.join(SUPPORTED_ARCHITECTURES)}")


def _parse(fields: Fields, architecture: str) -> ModelConfig:
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.refused(f"hidden_act {shown(activation)}; Baton computes silu only")
    heads = fields.integer("num_attention_heads", most=_MAX_HEADS)
    hidden = fields.integer("hidden_size")
    layers = fields.integer("num_hidden_layers", most=_MAX_LAYERS)
    vocab_size = fields.integer("vocab_size")
    if "head_dim" not in fields and hidden % heads:
        raise fields.refused(f"hidden_size {hidden} is no multiple of its {heads} heads")
    head_dim = fields.integer("head_dim", max(1, hidden // heads), most=_MAX_HEAD_DIM)
    kv_heads = fields.integer("num_key_value_heads", heads, most=_MAX_HEADS)
    if heads % kv_heads:
        raise fields.refused(f"{heads} attention heads are no multiple of {kv_heads} KV heads")
    if head_dim % 2:
        raise fields.refused(f"head_dim {head_dim} is odd; rotary embedding needs it even")
    qkv_bias, output_bias, mlp_bias = _biases(fields, architecture)
    context = fields.integer("max_position_embeddings", most=MAX_CONTEXT)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        rope=_rope(fields, context, head_dim),
        norm_eps=fields.number("rms_norm_eps", 1e-6, more_than=0),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=architecture == "Qwen3ForCausalLM",
        layer_windows=_windows(fields, architecture, layers),
        dtype=_dtype(fields),
        bos_token_ids=fields.token_ids("bos_token_id", vocab_size),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        quantization=read_quantization(fields),
    )


def _biases(fields: Fields, architecture: str) -> tuple[bool, bool, bool]:
    """(q/k/v, attention output, MLP): each architecture has its own flags, or none."""
    if architecture == "Qwen2ForCausalLM":
        return True, False, False
    if architecture == "Ernie4_5ForCausalLM":
        every = fields.flag("use_bias")
        return every, every, every
    if architecture == "MistralForCausalLM":
        return False, False, False
    attention = fields.flag("attention_bias")
    return attention, attention, architecture == "LlamaForCausalLM" and fields.flag("mlp_bias")


def _windows(fields: Fields, architecture: str, layers: int) -> tuple[int | None, ...]:
    kinds = fields.texts("layer_types")
    if kinds is not None and (
        len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}
    ):
        raise fields.refused(
            f"layer_types must name full_attention or sliding_attention for each of {layers} layers"
        )
    if architecture == "MistralForCausalLM":
        # A file without the key means the architecture's default, 4096; an explicit null means none.
        has_one = "sliding_window" in fields or not fields.mentions("sliding_window")
        window = fields.integer("sliding_window", 4096, most=MAX_CONTEXT) if has_one else None
        return (window,) * layers
    if architecture not in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        return (None,) * layers
    if not fields.flag("use_sliding_window") or "sliding_window" not in fields:
        return (None,) * layers
    window = fields.integer("sliding_window", most=MAX_CONTEXT)
    if kinds is None:
        first = fields.integer("max_window_layers", 28, least=0)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(fields: Fields, context: int, head_dim: int) -> RopeConfig:
    """Both styles: {"rope_theta", "rope_scaling"} and {"rope_parameters": {"rope_theta", …}}.

    A file that was saved in the newer style and given a `rope_scaling` by hand (as model cards advise for
    YaRN) has both: `rope_scaling` wins, as in transformers.  Its theta is still that of `rope_parameters`,
    unless it names one.
    """
    parameters, scaling = fields.object("rope_parameters"), fields.object("rope_scaling")
    chosen = "rope_scaling" if scaling else "rope_parameters"
    given = fields.within(chosen)
    found = dict(scaling or parameters)
    if any(isinstance(value, dict) for value in found.values()):
        raise fields.refused("rope_parameters differ from layer to layer; Baton needs one set")
    for place in (given, fields.within("rope_parameters"), fields):
        if "rope_theta" in place:
            theta = place.number("rope_theta", more_than=0)
            break
    else:
        theta = 10_000.0
    kind = given.text("rope_type") or given.text("type") or "default"
    for place in (given, fields):
        if place.number("partial_rotary_factor", 1.0) != 1:
            factor = place.number("partial_rotary_factor")
            raise fields.refused(f"partial_rotary_factor {factor:g}; Baton rotates whole heads only")
    if kind not in _ROPE_TYPES:
        raise fields.refused(f"rope type {kind!r}; Baton computes {', '.join(_ROPE_TYPES)}")
    for key in ("rope_theta", "rope_type", "type", "partial_rotary_factor"):
        found.pop(key, None)
    if kind in ("llama3", "yarn"):
        original = "original_max_position_embeddings"
        place = given if original in given else fields
        found[original] = place.integer(original, context, most=MAX_CONTEXT)
    if kind == "yarn":
        found["factor"] = given.number(
            "factor", context / found["original_max_position_embeddings"], more_than=0
        )
        for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"):
            if key in given:
                given.number(key)
    if kind == "factors":
        factors = given.any("factors")
        if (
            not isinstance(factors, list)
            or not all(isinstance(factor, float) and 0 < factor < math.inf for factor in factors)
            or len(factors) != head_dim // 2
        ):
            raise given.wrong("factors", f"must be a list of {head_dim // 2} positive numbers")
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    for key in needed.get(kind, ()):
        given.number(key, more_than=0)
    return RopeConfig(theta=theta, type=kind, parameters=found)


def _dtype(fields: Fields) -> str:
    dtype = fields.text("dtype") or fields.text("torch_dtype") or "float32"
    dtype = dtype.removeprefix("torch.")
    if dtype not in SUPPORTED_DTYPES:
        raise fields.refused(f"weights in {dtype!r}; Baton serves {', '.join(SUPPORTED_DTYPES)}")
    return dtype
