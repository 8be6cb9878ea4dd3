"""A model as Baton understands it: from a `config.json` or a GGUF file, checked, with nothing implied.

The families (`model/architectures`) say what a file means; here is what is read of all of them alike.
Anything that Baton cannot compute faithfully is an `UnsupportedModel` here, before a weight is loaded.

No torch, no transformers: the launcher reads this in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from baton.model.architectures.families import Implementation, classifies, family_of, reads_only, text_part
from baton.model.checkpoint.files import usual_dtype
from baton.model.checkpoint.gguf import is_gguf
from baton.model.checkpoint.gguf_config import SOURCE, read_config
from baton.model.checkpoint.labels import Activation, read_activation, read_labels
from baton.model.checkpoint.quantization import Quantization, read_quantization
from baton.model.description.fields import Fields, ModelNotFound, UnsupportedModel, read_json_object
from baton.model.description.model import Description, MoeConfig, RopeConfig, difference
from baton.protocol.rules.ranks import heads_of_rank

__all__ = ["ModelConfig", "ModelNotFound", "RopeConfig", "UnsupportedModel"]

_DTYPE_FIELDS = ("dtype", "torch_dtype")
SUPPORTED_DTYPES = ("bfloat16", "float16", "float32")
Asked = Implementation | Literal["auto"]
_OF_THE_FILES = frozenset({"dtype", "bos_token_ids", "eos_token_ids"})
_NO_MATTER = frozenset(
    {"bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config"}
    | {"transformers_version", "_name_or_path", "auto_map", "use_cache", "attn_implementation"}
)
"""Fields of a config.json that do not change what its class computes."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Description):
    """One decoder-only model, and how its checkpoint holds it."""

    architecture: str
    dtype: str
    """What the checkpoint says of its weights: one of SUPPORTED_DTYPES."""
    bos_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    reads_only: bool = field(default=False, compare=False)
    """Its class has no head at all: it gives vectors of texts."""
    labels: tuple[str, ...] = ()
    """Of a model that scores texts (…ForSequenceClassification), by the rows of `score.weight`; (): its head
    gives logits of tokens."""
    activation: Activation = field(default="identity", compare=False)
    """What makes results of scores."""
    quantization: Quantization | None = field(default=None, compare=False)
    """Which weights are small integers, and how; None: none are, or a GGUF file's tensors say."""
    implementation: Implementation = "baton"
    """Whose code computes it."""
    whole: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """With transformers: the config.json, for its class."""

    @classmethod
    def from_directory(cls, directory: str | Path, implementation: Asked = "auto") -> ModelConfig:
        """Reads `config.json`, or the metadata of a GGUF file.

        Raises `ModelNotFound`, `UnsupportedModel` or, for a GGUF file that is damaged, `LoadError`.
        """
        path = Path(directory)
        if is_gguf(path):
            if implementation == "transformers":
                raise UnsupportedModel(
                    f"{str(directory)!r} is a GGUF file, whose tensors the decoder of Baton reads; leave "
                    "--model-impl away"
                )
            raw, quantization = read_config(path)
            return replace(cls.from_dict(raw, str(path), SOURCE), quantization=quantization)
        raw = read_json_object(path / "config.json")
        inner = raw.get("text_config")
        if not any(part.get(key) for part in (raw, inner) if isinstance(part, dict) for key in _DTYPE_FIELDS):
            raw = {**raw, "dtype": usual_dtype(path)}  # (as the files are, and as vLLM has it)
        return cls.from_dict(raw, str(directory), implementation=implementation)

    @classmethod
    def from_dict(
        cls,
        raw: Mapping[str, Any],
        name: str = "model",
        file: str = "config.json",
        implementation: Asked = "auto",
    ) -> ModelConfig:
        """Parses a `config.json`; `name` and `file` are for errors.  Raises `UnsupportedModel`."""
        raw = text_part(raw, name, file)
        family, computed_by = family_of(raw, name, file, implementation)
        defaults = {key: value for key, value in family.defaults.items() if key not in raw}
        inside = Fields(raw, name, file, defaults=defaults)  # (an explicit null is no default)
        described = family.describe(inside)
        _check_served(inside, described)
        labels = read_labels(inside) if classifies(raw) else ()
        bodies = reads_only(raw)
        if labels or bodies:
            described = _without_head(described)
        return cls(
            **{item.name: getattr(described, item.name) for item in fields(described)},
            architecture=family.architecture,
            dtype=_dtype(inside),
            bos_token_ids=inside.token_ids("bos_token_id", described.vocab_size),
            eos_token_ids=inside.token_ids("eos_token_id", described.vocab_size),
            reads_only=bodies,
            labels=labels,
            activation=read_activation(inside, len(labels)) if labels else "identity",
            quantization=read_quantization(inside),
            implementation=computed_by,
            whole=dict(raw) if computed_by == "transformers" else {},
        )

    def without_head(self) -> ModelConfig:
        """The same, where nobody asks for tokens."""
        return _without_head(self)

    @property
    def max_context(self) -> int:
        """The longest context that the positions are made for, in tokens.

        YaRN is configured by hand in many files and stretches the original context by its factor, whatever
        `max_position_embeddings` says (so transformers and vLLM).
        """
        longest = self.max_position_embeddings
        for rope in self.rotaries:
            if rope is not None and rope.type == "yarn":
                original, factor = (
                    rope.parameters[key] for key in ("original_max_position_embeddings", "factor")
                )
                longest = max(longest, int(original * factor))
        return longest

    def window_of(self, layer: int, max_model_len: int) -> int | None:
        """The layer's window, or None where it is no restriction for contexts of `max_model_len`."""
        window = self.layers[layer].attention.window
        return None if window is None or window >= max_model_len else window

    def angles(self, max_model_len: int) -> Literal["", "short", "long"]:
        """Which of LongRoPE's two sets instances with this `max_model_len` use; "": there is one set."""
        for rope in self.rotaries:
            if rope is not None and rope.type == "longrope":
                return rope.set_of(max_model_len)
        return ""

    def sizes_differ(self, other: ModelConfig) -> str:
        """What makes weights of this model useless for `other`, or "".

        Special tokens, the dtype of the files and how they are quantized do not count.
        """
        if self.implementation != other.implementation:
            return f"architecture is {self.architecture}, not {other.architecture}"
        if self.implementation == "baton":
            return difference(self, other, _OF_THE_FILES)
        # What is described is less than what the class reads.
        for key in sorted((self.whole.keys() | other.whole.keys()) - _NO_MATTER):
            if self.whole.get(key) != other.whole.get(key):
                return f"{key} is {self.whole.get(key)!r}, not {other.whole.get(key)!r}"
        return ""

    def why_no_mtp(self, name: str) -> str:
        """What to tell who wants drafts of a layer that this model has not."""
        return (
            f"{name!r} ({self.architecture}) has no layer that predicts more than one token, or none that "
            "Baton computes; ERNIE-4.5's mixtures have one if num_nextn_predict_layers says so; leave method "
            "mtp away"
        )

    def check_tensor_parallel(self, size: int) -> None:
        """Raises `UnsupportedModel` if the model cannot be cut for `size` ranks."""
        if self.implementation == "transformers" and size > 1:
            raise UnsupportedModel("a model that transformers computes has one rank; give 1")
        counts = [("attention heads", self.num_attention_heads)]
        counts += [("columns of the MLP", columns) for columns in self.intermediate_sizes]
        for what, value in counts:
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
        inputs = (self.num_attention_heads * self.head_dim, *self.intermediate_sizes)
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


_Described = TypeVar("_Described", bound=Description)


def _without_head(model: _Described) -> _Described:
    """With the embedding in place of a head of tokens, which is not there, or not needed."""
    return replace(model, tie_word_embeddings=True, mtp=None)


def _check_served(inside: Fields, model: Description) -> None:
    """What a description may say, and the decoder does not compute.  Raises `UnsupportedModel`."""
    first = model.layers[0].attention
    for layer in model.layers:
        if isinstance(layer.mlp, MoeConfig):
            _check_mixture(inside, layer.mlp)
        attention = layer.attention
        for what in ("heads", "kv_heads", "head_dim", "scale", "soft_cap", "growth"):
            if getattr(attention, what) != getattr(first, what):
                raise inside.refused(f"layers differ in their attention's {what}; Baton needs one of all")


def _check_mixture(inside: Fields, told: MoeConfig) -> None:
    if told.groups > 1 and (told.experts % told.groups or told.chosen_groups > told.groups):
        raise inside.refused(
            f"{told.chosen_groups} of {told.groups} groups of {told.experts} experts cannot be chosen"
        )
    if told.chosen > told.experts // told.groups * told.chosen_groups:
        raise inside.refused(
            f"{told.chosen} experts a token, but {told.chosen_groups} of {told.groups} groups have fewer"
        )


def _dtype(inside: Fields) -> str:
    dtype = inside.text("dtype") or inside.text("torch_dtype") or "float32"
    dtype = dtype.removeprefix("torch.")
    if dtype not in SUPPORTED_DTYPES:
        raise inside.refused(f"weights in {dtype!r}; Baton serves {', '.join(SUPPORTED_DTYPES)}")
    return dtype
