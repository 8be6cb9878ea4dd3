"""The tokenizer that a GGUF file describes in its metadata.

Theory.  llama.cpp has code for each kind of tokenizer; a file has the tokens, their kinds, and merges or
scores.  Two kinds are in use for the architectures that Baton serves, and both are byte pair encodings of the
`tokenizers` library:

* `gpt2`: texts are cut by a regular expression, named by `tokenizer.ggml.pre`, and the bytes of each piece
  are merged.
* `llama` (SentencePiece): spaces become "▁", characters are merged, and what has no token falls back to
  bytes.  A pair's rank follows from the score of what it makes.

An expression that is not known is an error: other pieces are other tokens, and worse answers without a word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from baton.gateway.text.gguf_pieces import WHOLE_WORDS, cutter, is_normalized
from baton.gateway.text.template_files import one_template
from baton.model.checkpoint.gguf import GgufFile, read_gguf
from baton.model.checkpoint.gguf_config import ends_by_name

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""Kinds of tokens"""

_TEMPLATE: Final = "tokenizer.chat_template"
"""And, of others that have names, the name after a dot."""
_SPECIAL: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # (as the format spells it)
}


def read_gguf_tokenizer(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """And what a tokenizer_config.json would say.

    Raises `ValueError` (one line) for a file without a tokenizer, or with one of another kind.
    """
    file = read_gguf(path)
    tokens = file.strings("tokenizer.ggml.tokens")
    kind = file.metadata.get("tokenizer.ggml.model")
    if not tokens or kind not in ("gpt2", "llama"):
        what = f"its tokenizer is a {kind!r}" if tokens else "it has no tokenizer"
        raise ValueError(f"{what}; Baton reads gpt2 and llama; give a directory with one by --tokenizer")
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        kinds = [1] * len(tokens)
    kinds = list(kinds)
    for number in ends_by_name(tokens, kinds):
        kinds[number] = _CONTROL  # (as llama.cpp takes them; a template's text would be cut otherwise)
    make = _byte_level if kind == "gpt2" else _sentencepiece
    tokenizer = make(file, tokens, kinds)
    special = [token for token, one in zip(tokens, kinds, strict=True) if one == _CONTROL]
    plain = [token for token, one in zip(tokens, kinds, strict=True) if one == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
    return tokenizer, _config(file, tokens, kind)


def _config(file: GgufFile, tokens: list[str], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, key in _SPECIAL.items():
        number = file.metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(number, int) and 0 <= number < len(tokens):
            found[name] = tokens[number]
    adds = file.metadata.get("tokenizer.ggml.add_bos_token")
    if not isinstance(adds, bool):
        adds = kind == "llama" or file.metadata.get("tokenizer.ggml.pre") in WHOLE_WORDS
    templates = {
        key.removeprefix(_TEMPLATE).removeprefix(".") or "default": text
        for key, text in file.metadata.items()
        if isinstance(text, str) and (key == _TEMPLATE or key.startswith(f"{_TEMPLATE}."))
    }
    return {**found, "add_bos_token": adds, "chat_template": one_template(templates)}


def _byte_level(file: GgufFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    cut = cutter(name)
    if cut is None:
        raise ValueError(
            f"texts are cut as in {str(name)[:60]!r} (tokenizer.ggml.pre), which Baton does not know; give a "
            "directory with its tokenizer by --tokenizer"
        )
    halves = [merge.partition(" ") for merge in file.strings("tokenizer.ggml.merges")]
    merges = [(first, second) for first, _, second in halves]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name in WHOLE_WORDS))
    if is_normalized(name):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ValueError(f"it has not a score for each of {len(tokens)} tokens (tokenizer.ggml.scores)")
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    known = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(tokens, scores, kinds),
            unk_token=known,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([*([normalizers.Prepend("▁")] if adds else []), spaces])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if adds else [])])
    return tokenizer


def _merges(tokens: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, those of the highest score first."""
    alone = (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)
    whole = {token for token, kind in zip(tokens, kinds, strict=True) if kind not in alone}
    found: list[tuple[float, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        if token in whole:
            for cut in range(1, len(token)):
                first, second = token[:cut], token[cut:]
                if first in whole and second in whole:
                    found.append((-score, first, second))
    found.sort(key=lambda merge: merge[0])
    return [(first, second) for _, first, second in found]
