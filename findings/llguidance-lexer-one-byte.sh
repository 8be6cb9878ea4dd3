#!/usr/bin/env bash
# llguidance's lexer looks one byte ahead and does not go back: of a grammar whose terminal may go on with the
# first byte of the next one, texts that the grammar allows (Lark's own parser takes them) are cut short.
# The same text is taken where the grammar is one terminal.
#
# Tried with llguidance 1.9.1 and lark 1.3.1.
# Heeded by Baton: src/baton/grammar/lark.py (a tool's grammar becomes one terminal, or is refused where the
# lexer would have to look further).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check llguidance==1.9.1 lark==1.3.1
"$folder/venv/bin/python" - <<'PY'
from importlib.metadata import version

from lark import Lark
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


class Bytes:
    eos_token_id, bos_token_id = 256, None
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    special_token_ids = [256]

    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=257, eos_token=256)


def taken(grammar, text):
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    return matcher.try_consume_tokens(list(text.encode()))


TWO = 'start: WORD "bd"\nWORD: /a+(bc)?/\n'
ONE = 'start: ALL\nALL: /a+(bc)?/ "bd"\n'
TEXT = "aabd"
print("llguidance", version("llguidance"), "lark", version("lark"))
print("lark's parser:", Lark(TWO, parser="earley").parse(TEXT).children)
two, one = taken(TWO, TEXT), taken(ONE, TEXT)
print(f"llguidance, two terminals: {two} of {len(TEXT)} bytes of {TEXT!r} taken; one terminal: {one}")
assert (two, one) == (3, 4), "it behaves otherwise now"
print("as described")
PY
