"""Files that are not whole are found by their headers, before a worker starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from baton.launch.limits import OptionError
from baton.launch.options import ServeOptions
from baton.launch.planning.plan import make_plan
from baton.model.checkpoint.files import INDEX, LoadError, check_files, has_tokenizer

TENSORS = {
    "a": np.ones((3, 5), np.float32),
    "b": np.ones(7, np.float16),
    "empty": np.ones((0, 4), np.float32),
}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    check_files(tmp_path)
    return tmp_path


def with_header(path: Path, change) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "no safetensors file"),
        (lambda data: b"<html>not found</html>", "no safetensors file"),
        (lambda data: data[:40], "cut short"),
        (lambda data: data[:-1], "cut short"),
        (lambda data: data + b"\0", "longer than its tensors"),
        (lambda data: data[:8] + b"[" * (len(data) - 8), "cannot be read|no safetensors file"),
        (lambda data: data[:20] + b"\xff\xfe" + data[22:], "header cannot be read"),
    ],
)
def test_damaged_bytes(whole: Path, damage, message: str) -> None:
    path = whole / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(LoadError, match=message) as caught:
        check_files(whole)
    assert "model.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header["a"].update(shape=[3, 6]), r"tensor 'a' of shape \[3, 6\] in F32"),
        (lambda header: header["a"].update(shape=[-3, -5]), "no valid shape"),
        (lambda header: header["a"].update(dtype="F33"), "unknown type 'F33'"),
        (lambda header: header["a"].pop("data_offsets"), "cannot be read"),
        (lambda header: header.update(a=3), "cannot be read"),
        (lambda header: header["b"].update(data_offsets=[60, 7400], shape=[3670]), "cut short"),
    ],
)
def test_headers_that_contradict_the_file(whole: Path, change, message: str) -> None:
    with_header(whole / "model.safetensors", change)
    with pytest.raises(LoadError, match=message):
        check_files(whole)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {"a": "absent.safetensors"}}', "absent.safetensors"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "not in the checkpoint's directory"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not in the checkpoint's directory"),
        ('{"weight_map": {"a": 3}}', "cannot be read"),
        ('{"weight_map": ["a"]}', "cannot be read"),
        ('{"weight_map": {}}', "names no files"),
        ("[]", "cannot be read"),
        ("{", "cannot be read"),
    ],
)
def test_indexes(whole: Path, text: str, message: str) -> None:
    (whole / INDEX).write_text(text)
    with pytest.raises(LoadError, match=message) as caught:
        check_files(whole)
    assert "\n" not in str(caught.value)


def _copy_of_the_embedded_model(directory: Path) -> Path:
    from baton.model.checkpoint.hub import resolve_model

    for file in resolve_model(None).iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def test_the_launcher_refuses_before_anything_starts(tmp_path: Path) -> None:
    directory = _copy_of_the_embedded_model(tmp_path)
    options = ServeOptions(model=str(directory))
    make_plan(options)
    weights = next(directory.glob("*.safetensors"))
    data = weights.read_bytes()
    weights.write_bytes(data[:-100])
    with pytest.raises(LoadError, match="cut short"):
        make_plan(options)
    weights.write_bytes(data)
    (directory / "tokenizer.json").unlink()
    assert not has_tokenizer(directory)
    with pytest.raises(
        OptionError, match=r"no tokenizer \(tokenizer\.json or tokenizer\.model\).*--tokenizer"
    ):
        make_plan(options)


def test_no_torch_is_needed() -> None:
    code = (
        "import sys, baton.model.checkpoint.files\nsys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
