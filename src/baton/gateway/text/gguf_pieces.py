r"""How texts are cut into pieces before merging, by the names that GGUF files give it (`tokenizer.ggml.pre`).

Each cut splits what the ones before it have left: what an expression fits is a piece, and so is what lies
between.  The expressions are those of the models' own tokenizer.json.  llama.cpp's own differ from some of
them: it keeps runs of digits of deepseek-llm together, where the model was trained on single ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tokenizers import Regex, pre_tokenizers

LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2: Final = LLAMA3.replace("{1,3}", "")
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED_CODER: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3: Final = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_LETTERS: Final = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_HAN: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
WHOLE_WORDS: Final = frozenset(
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken".split()
)
"""Where a piece that is a token is not merged, and a text begins with the BOS, as llama.cpp has it."""
_CUTS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(WHOLE_WORDS | {"dbrx", "smaug-bpe", "glm4", "chatglm-bpe"}, (LLAMA3,)),
    "tekken": (_TEKKEN,),
    "gpt-4o": (_GPT4O,),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), (QWEN2,)),
    "seed-coder": (_SEED_CODER,),
    # Numbers in threes from their end.
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
}
_WITH_DIGITS: Final[Mapping[str, tuple[str, ...]]] = {
    "deepseek-llm": (
        "[\r\n]",
        rf"\s?[{_DEEPSEEK_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _DEEPSEEK_HAN,
    ),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN),
}
"""Likewise, and each digit is on its own then."""
_GPT2: Final = frozenset(("gpt-2", "default", "olmo", "mpt", "jais", "trillion", "granite-docling"))
"""Cut as in GPT-2."""
_DIGITS: Final = frozenset(
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
)
"""Likewise, with each digit on its own before."""


def cutter(name: object) -> pre_tokenizers.PreTokenizer | None:
    """What cuts texts, and makes bytes of the pieces; None for a name that is not known."""
    if not isinstance(name, str):
        return None
    cuts: list[Any]
    if name in _CUTS or name in _WITH_DIGITS:
        expressions = _CUTS.get(name) or _WITH_DIGITS[name]
        cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
        cuts += [pre_tokenizers.Digits(individual_digits=True)] if name in _WITH_DIGITS else []
        return pre_tokenizers.Sequence([*cuts, _bytes(False)])
    if name in _GPT2 | _DIGITS:
        cuts = [pre_tokenizers.Digits(individual_digits=True)] if name in _DIGITS else []
        return pre_tokenizers.Sequence([*cuts, _bytes(True)])
    return None


def is_normalized(name: object) -> bool:
    """Whether texts are brought into Unicode's form NFC before, as Qwen 2's are."""
    return _CUTS.get(str(name)) == (QWEN2,)


def _bytes(cut: bool) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut)
