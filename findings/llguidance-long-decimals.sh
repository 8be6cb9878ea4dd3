#!/usr/bin/env bash
# llguidance 1.9.1 reads a decimal of sixteen digits and more in a schema as its neighbour, at times: under
# {"const": 0.9820725659870917} the text 0.9820725659870917 is not allowed and 0.9820725659870916 is.  (It forms the
# digits as an integer and divides by a power of ten, which rounds twice.)  Baton writes the number that is
# read as the right one, or moves bounds inwards: src/baton/grammar/numbers.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1
"$folder/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

from llguidance import LLMatcher, LLTokenizer

TOKENIZER = LLTokenizer("byte")
print("llguidance", version("llguidance"))
grammar = LLMatcher.grammar_from_json_schema(json.dumps({"const": 0.9820725659870917}))
allowed = {}
for text in ("0.9820725659870917", "0.9820725659870916"):
    matcher = LLMatcher(TOKENIZER, grammar)
    data = list(text.encode())
    allowed[text] = matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
    print(text, "is allowed" if allowed[text] else "is not allowed")
assert list(allowed.values()) == [False, True], "llguidance reads such numbers otherwise now"
PYTHON
