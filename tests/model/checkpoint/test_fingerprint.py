"""Which checkpoints count as the same."""

import json
import shutil
from pathlib import Path

from baton.model.checkpoint.fingerprint import fingerprint
from baton.model.checkpoint.hub import resolve_model


def test_a_copy_is_the_same_and_a_change_is_another(tmp_path: Path):
    original = resolve_model(None)
    copy = tmp_path / "copy"
    shutil.copytree(original, copy)
    mark = fingerprint(original)
    assert mark
    assert fingerprint(copy) == mark

    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config, indent=7))
    assert fingerprint(copy) == mark, "the same, written in another way"
    (copy / "config.json").write_text(json.dumps({**config, "rope_theta": 3.0}))
    assert fingerprint(copy) != mark

    (copy / "config.json").write_text(json.dumps(config))
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    for place in range(len(data) // 2, len(data), 1024):  # as training does: it changes nearly everything
        data[place] ^= 1
    weights.chmod(0o644)
    weights.write_bytes(data)
    assert fingerprint(copy) not in ("", mark)


def test_what_cannot_be_read_has_none(tmp_path: Path):
    assert fingerprint(tmp_path) == ""
