"""What sentence-transformers keeps beside a checkpoint: how a vector, or a score, is made of a text.

`modules.json` lists the steps: a Transformer, then Pooling (its config.json says which), perhaps Normalize.
Qwen3-Embedding has these files, and so does nearly every embedding model on the hub.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from baton.model.checkpoint.config import UnsupportedModel
from baton.protocol.params.pooling import Pooling, PoolingKind

_MODES: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "cls": "first"}
_FLAGS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_TYPES: dict[str, PoolingKind] = {"LAST": "last", "MEAN": "mean", "CLS": "first"}
"""vLLM's names."""
_WITHOUT_EFFECT = frozenset({"Transformer", "Pooling", "Normalize"})


@dataclass(frozen=True)
class SentenceFiles:
    """What they say."""

    pooling: Pooling
    max_length: int | None
    """Tokens, of sentence_bert_config.json."""


def read_sentence_files(directory: Path) -> SentenceFiles | None:
    """None: there is no modules.json.  Raises `UnsupportedModel` for steps that Baton does not take."""
    if not (directory / "modules.json").is_file():
        return None
    modules = _read(directory / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise UnsupportedModel(f"{directory / 'modules.json'}: must be a list of modules")
    kinds = {str(one.get("type", "")).rpartition(".")[2]: one for one in modules}
    unknown = sorted(kinds.keys() - _WITHOUT_EFFECT)
    if unknown:
        raise UnsupportedModel(
            f"{directory / 'modules.json'}: module {unknown[0]} is not supported; Transformer, Pooling and "
            "Normalize are"
        )
    kind: PoolingKind = "last"
    if "Pooling" in kinds:
        path = directory / str(kinds["Pooling"].get("path", "1_Pooling")) / "config.json"
        kind = _pooling_kind(path)
    limits = directory / "sentence_bert_config.json"
    length = _read(limits).get("max_seq_length") if limits.is_file() else None
    return SentenceFiles(
        Pooling(kind, normalize="Normalize" in kinds), length if isinstance(length, int) else None
    )


def read_classifier_tokens(directory: Path) -> tuple[str, str] | None:
    """The tokens for no and yes of a model that is asked a question: `classifier_from_token` of config.json,
    in vLLM's words.  None: there are none.  Raises `UnsupportedModel`."""
    found = _read(directory / "config.json")
    tokens = found.get("classifier_from_token") if isinstance(found, dict) else None
    if tokens is None:
        return None
    if not isinstance(tokens, list) or len(tokens) != 2 or not all(isinstance(one, str) for one in tokens):
        raise UnsupportedModel(
            f"{directory / 'config.json'}: classifier_from_token: give two texts, for no and yes"
        )
    return tokens[0], tokens[1]


def _pooling_kind(path: Path) -> PoolingKind:
    found = _read(path)
    if not isinstance(found, dict):
        raise UnsupportedModel(f"{path}: must be an object")
    modes = [mode for flag, mode in _FLAGS.items() if found.get(flag) is True]
    named = found.get("pooling_mode")
    if isinstance(named, str):
        modes = [named]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedModel(
            f"{path}: pooling by {' and '.join(modes) or 'nothing'} is not supported; by one of "
            f"{', '.join(_MODES)} it is (or give --pooler-config)"
        )
    return _MODES[modes[0]]


def _read(path: Path) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise UnsupportedModel(f"{path}: cannot be read: {error}") from None


def read_pooler_config(text: str, default: Pooling, dimensions: int) -> Pooling:
    """`--pooler-config`, over what the checkpoint says.  Raises `ValueError` with the fix."""
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ValueError(f"is no JSON object: {error}") from None
    kind, normalize, size = default.kind, default.normalize, default.dimensions
    for name, value in given.items():
        if name in ("pooling_type", "seq_pooling_type"):
            if not isinstance(value, str) or value.upper() not in _TYPES:
                raise ValueError(f"{name}: {value!r}; give one of {', '.join(_TYPES)}")
            kind = _TYPES[value.upper()]
        elif name in ("normalize", "use_activation"):
            if not isinstance(value, bool):
                raise ValueError(f"{name}: {value!r}; give true or false")
            normalize = value
        elif name == "dimensions":
            if type(value) is not int or not 1 <= value <= dimensions:
                raise ValueError(f"dimensions: {value!r}; give a number from 1 to {dimensions}")
            size = value
        else:
            raise ValueError(f"{name}: unknown; give pooling_type, normalize or dimensions")
    return Pooling(kind, size, normalize)
