"""From the metadata of a GGUF file to what config.json and generation_config.json say of other checkpoints.

llama.cpp names the same things otherwise, and leaves out what its own code implies: an output head that is
not there is the embedding, biases are there or not.  Llama's rotary scaling comes as `rope_freqs.weight`, by
what each frequency is divided.

Names of metadata: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.  No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from baton.model.checkpoint.files import LoadError
from baton.model.checkpoint.gguf import FLOATS, GgufFile, read_gguf
from baton.model.checkpoint.gguf_families import GGUF_FAMILIES, GgufFamily, check_window
from baton.model.checkpoint.quantization import Quantization, Scheme
from baton.model.description.fields import MAX_CONTEXT, Fields

SOURCE: Final = "its metadata"
"""What errors call the place of a wrong value."""
ROPE_FACTORS: Final = "rope_freqs.weight"
_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ENDS: Final = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> "
    "<|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> "
    "<|tool_response>".split()
)
"""Tokens that end an answer, whatever the metadata calls the end, as in llama.cpp."""
_CONTROL: Final = 3
_CONTROL_ENDS: Final = frozenset(("</s>",))
"""Likewise, where they are control tokens: in Gemma's vocabulary it is a tag of HTML."""
_NO_END_BESIDE: Final = (
    ("<|end|>", frozenset(("<|return|>", "<|call|>"))),
    ("<|end|>", frozenset(("<|calls|>", "<|flush|>"))),
    ("</s>", frozenset(("<|tool_response>",))),
)
"""No end where all of these are: gpt-oss ends each message of an answer with `<|end|>`."""
_OURS: Final = re.compile(r"(?:model\.layers\.(?P<layer>\d+)\.)?(?P<module>.+)\.(?P<last>weight|bias)\Z")
_BLOCK: Final = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<last>weight|bias)\Z")
_MORE_TOKENS: Final = re.compile(r"blk\.(\d+\.nextn\.)")


def gguf_name(name: str, family: GgufFamily) -> str:
    """Of a tensor that transformers calls `name`."""
    return _renamed(name, _OURS, family.names, "blk")


def usual_names(names: Iterable[str], family: GgufFamily) -> dict[str, str]:
    """How transformers calls tensors of a GGUF file, by their names there; the same, of one that it does not
    have."""
    theirs = {theirs: ours for ours, theirs in family.names.items()}
    found = {name: _renamed(name, _BLOCK, theirs, "model.layers") for name in names}
    # (what is neither weight nor bias for transformers)
    odd = ((".sinks.weight", ".sinks"), (".e_score_correction.bias", ".e_score_correction_bias"))
    for end, usual in odd:
        found = {name: ours.replace(end, usual) for name, ours in found.items()}
    return {name: _MORE_TOKENS.sub(r"model.layers.\1", ours) for name, ours in found.items()}


def family_of_file(file: GgufFile) -> GgufFamily | None:
    kind = file.metadata.get("general.architecture")
    return GGUF_FAMILIES.get(kind) if isinstance(kind, str) else None


def _renamed(name: str, pattern: re.Pattern[str], modules: Mapping[str, str], layers: str) -> str:
    found = pattern.match(name)
    if found is None or found["module"] not in modules:
        return name
    place = "" if found["layer"] is None else f"{layers}.{found['layer']}."
    return f"{place}{modules[found['module']]}.{found['last']}"


def read_config(path: Path) -> tuple[dict[str, Any], Quantization | None]:
    """The fields of a config.json, and which tensors are quantized.

    Raises `LoadError` or `UnsupportedModel`.
    """
    file = read_gguf(path)
    fields = Fields(file.metadata, str(path), SOURCE)
    kind = fields.text("general.architecture") or ""
    if kind not in GGUF_FAMILIES:
        raise fields.refused(f"is a {kind[:60]!r}; of GGUF Baton serves: {', '.join(GGUF_FAMILIES)}")
    return _config(file, fields, kind), _quantization(file)


def read_generation(path: Path) -> dict[str, Any]:
    """The fields of a generation_config.json."""
    file = read_gguf(path)
    fields = Fields(file.metadata, str(path), SOURCE)
    names = {
        "temperature": "temp",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "repetition_penalty": "penalty_repeat",
    }
    given = {key: fields.any(f"general.sampling.{name}") for key, name in names.items()}
    ends = [fields.any(f"tokenizer.ggml.{key}") for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    ends += ends_by_name(
        file.strings("tokenizer.ggml.tokens"), file.metadata.get("tokenizer.ggml.token_type")
    )
    # float32 of the file: 0.7 is not 0.699999988079071
    found = {key: float(f"{value:.6g}") for key, value in given.items() if isinstance(value, (int, float))}
    return {**found, "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}


def ends_by_name(tokens: Sequence[str], kinds: object) -> list[int]:
    """Ids of tokens that end an answer by their names, of whatever kind a file says they are: many converters
    write plain ones, or those that a user added."""
    control = (
        {token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL}
        if isinstance(kinds, list)
        else set()
    )
    present = (_ENDS & set(tokens)) | (_CONTROL_ENDS & control)
    none = {end for end, beside in _NO_END_BESIDE if beside <= present}
    return [number for number, token in enumerate(tokens) if token in present - none]


def has_gguf_tokenizer(path: Path) -> bool:
    """Whether the file says how texts become tokens.  Raises `LoadError` or `UnsupportedModel`."""
    return "tokenizer.ggml.tokens" in read_gguf(path).metadata


def _config(file: GgufFile, fields: Fields, kind: str) -> dict[str, Any]:
    def key(name: str) -> str:
        return f"{kind}.{name}"

    if fields.integer(key("expert_count"), 0, least=0) and not GGUF_FAMILIES[kind].mixture:
        raise fields.refused(f"is a {kind} with experts; Baton serves it dense only")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise LoadError(f"{str(file.path)!r}: no tensor 'token_embd.weight' of two dimensions in the file")
    hidden, heads = fields.integer(key("embedding_length")), fields.integer(key("attention.head_count"))
    if key("attention.key_length") not in fields and hidden % heads:
        raise fields.refused(f"embedding_length {hidden} is no multiple of its {heads} heads")
    head_dim = fields.integer(key("attention.key_length"), max(1, hidden // heads))
    family = GGUF_FAMILIES[kind]
    rotated = fields.integer(key("rope.dimension_count"), head_dim, least=0)
    for name, found in (
        ("attention.value_length", fields.integer(key("attention.value_length"), head_dim)),
        ("rope.dimension_count", head_dim if family.partial and rotated < head_dim else rotated),
    ):
        if found != head_dim:
            raise fields.refused(f"{key(name)} {found}, with heads of {head_dim}: not served")
    check_window(fields, kind)
    biased = "blk.0.attn_q.bias" in file.tensors
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.integer(key("feed_forward_length")),
        "num_hidden_layers": fields.integer(key("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer(key("attention.head_count_kv"), heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer(key("context_length"), most=MAX_CONTEXT),
        "rms_norm_eps": fields.number(key("attention.layer_norm_rms_epsilon"), more_than=0),
        "rope_parameters": _rope(file, fields, kind, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "partial_rotary_factor": rotated / head_dim if family.partial else None,
        "attention_bias": biased,
        "use_bias": biased,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "bos_token_id": fields.any("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.any("tokenizer.ggml.eos_token_id"),
        "torch_dtype": _dtype(file),
    }
    return config | family.more(file, fields, kind, config)


def _rope(file: GgufFile, fields: Fields, kind: str, head_dim: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": fields.number(f"{kind}.rope.freq_base", 10_000.0, more_than=0),
    }
    inside = f"{kind}.rope.scaling."
    scaling = fields.text(f"{inside}type", "none")
    if scaling not in ("none", "linear", "yarn"):
        raise fields.refused(f"{inside}type {scaling!r}; Baton computes linear and yarn")
    old = fields.number(f"{kind}.rope.scale_linear", 1.0, more_than=0)
    if scaling == "linear" or (scaling == "none" and old != 1):
        found |= {"rope_type": "linear", "factor": fields.number(f"{inside}factor", old, more_than=0)}
    elif scaling == "yarn":
        factor = fields.number(f"{inside}attn_factor", 1.0)
        if (factor != 1 and kind != "olmo2") or fields.number(f"{inside}yarn_attn_factor", 1.0) != 1:
            raise fields.refused(f"{inside}attn_factor: not served")
        if factor != 1:
            found["attention_factor"] = factor  # (as config.json has it, which the converter copies)
        found |= {
            "rope_type": "yarn",
            "factor": fields.number(f"{inside}factor", more_than=0),
            "original_max_position_embeddings": fields.integer(
                f"{inside}original_context_length", most=MAX_CONTEXT
            ),
            "beta_fast": fields.number(f"{inside}yarn_beta_fast", 32.0),
            "beta_slow": fields.number(f"{inside}yarn_beta_slow", 1.0),
        }
    if ROPE_FACTORS not in file.tensors:
        return found
    if found["rope_type"] != "default":
        raise fields.refused(f"{ROPE_FACTORS} beside {inside}type {scaling}: not served")
    return found | {"rope_type": "factors", "factors": file.floats(ROPE_FACTORS, head_dim // 2)}


def _dtype(file: GgufFile) -> str:
    """What most elements of matrices are in; bfloat16 for what is multiplied in groups."""
    sizes = dict.fromkeys(FLOATS, 0)
    for tensor in file.tensors.values():
        if len(tensor.shape) == 2 and tensor.kind in sizes:
            sizes[tensor.kind] += math.prod(tensor.shape)
    return "bfloat16" if file.quantized else _DTYPES[max(sizes, key=sizes.__getitem__)]


def _quantization(file: GgufFile) -> Quantization | None:
    if not file.quantized:
        return None
    # All types come out in groups of 32 inputs: see `reading/ggml.py`.
    scheme = Scheme("gguf", 8, 32, symmetric=False)
    return Quantization(f"gguf {' + '.join(file.quantized)}", ((lambda module: True, scheme),))
