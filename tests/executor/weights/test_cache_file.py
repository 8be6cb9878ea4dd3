"""Weight images as files: mapped by the next start, and made anew where they are wrong in any way."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.executor.torch_executor import TorchExecutor
from baton.executor.weights.cache_file import write_file
from baton.model import loader
from tests.executor.test_controls import perturbed
from tests.executor.weights.test_images import answers
from tests.executor.weights.test_images import make as made
from tests.model.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "m"
    make_checkpoint(directory, "qwen3")
    return directory


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def origin_and_answers(checkpoint: Path, cache: Path, **settings) -> tuple[str, list[object]]:
    executor = make(checkpoint, cache, **settings)
    found = executor._memory.origin, answers(executor)
    executor.close()
    return found


def make(checkpoint: Path, cache: Path, **settings) -> TorchExecutor:
    settings = {"weight_cache": str(cache), "quantization": "int4", "quantize_head": 8, **settings}
    return made(checkpoint, **settings)


def test_the_second_start_maps_what_the_first_wrote_and_reads_no_checkpoint(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, expected = origin_and_answers(checkpoint, cache)
    assert origin == "filled"
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o777 == 0o400
    monkeypatch.setattr(loader, "load_weights", None)
    assert origin_and_answers(checkpoint, cache) == ("file", expected)


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    rewrite(file, bytes(content))


def rewrite(file: Path, content: bytes) -> None:
    file.unlink()
    file.write_bytes(content)


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "cut": ("it was cut", lambda file: rewrite(file, file.read_bytes()[:-100])),
    "cut to the header": ("it was cut", lambda file: rewrite(file, file.read_bytes()[:4096])),
    "empty": ("no finished", lambda file: rewrite(file, b"")),
    "longer": ("it was cut or extended", lambda file: rewrite(file, file.read_bytes() + b"\0")),
    "a bit of the magic": ("no finished", lambda file: flip(file, 3)),
    "a bit of a tensor": ("is damaged", lambda file: flip(file, 4096 + 1000)),
    "a bit of the table": ("its table of contents is damaged", lambda file: flip(file, -50)),
    "zeros": ("no finished", lambda file: rewrite(file, bytes(file.stat().st_size))),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_file_is_made_anew(
    damage: str, checkpoint: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reason, change = DAMAGES[damage]
    _, expected = origin_and_answers(checkpoint, cache)
    (file,) = cache.iterdir()
    change(file)
    assert origin_and_answers(checkpoint, cache) == ("filled", expected)
    assert reason in caplog.text
    assert "is made anew" in caplog.text
    assert list(cache.iterdir()) == [file]
    assert origin_and_answers(checkpoint, cache) == ("file", expected)


def test_without_verifying_the_table_is_looked_at_and_tensors_are_not(checkpoint: Path, cache: Path) -> None:
    _, expected = origin_and_answers(checkpoint, cache)
    (file,) = cache.iterdir()
    flip(file, file.stat().st_size - 50)
    assert origin_and_answers(checkpoint, cache, weight_cache_verify=False) == ("filled", expected)
    assert origin_and_answers(checkpoint, cache, weight_cache_verify=False) == ("file", expected)
    flip(file, 4096 + 1000)
    executor = make(checkpoint, cache, weight_cache_verify=False)
    assert executor._memory.origin == "file"
    executor.close()


def test_another_checkpoint_in_the_same_directory_takes_the_place_of_the_first(
    checkpoint: Path, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "m"
    shutil.copytree(checkpoint, directory)
    _, first = origin_and_answers(directory, cache)
    (file,) = cache.iterdir()
    perturbed(checkpoint, tmp_path / "other")
    shutil.rmtree(directory)
    (tmp_path / "other").rename(directory)
    origin, second = origin_and_answers(directory, cache)
    assert origin == "filled"
    assert first != second
    assert "another checkpoint" in caplog.text
    assert list(cache.iterdir()) == [file]
    assert origin_and_answers(directory, cache) == ("file", second)


def test_a_file_that_was_written_again_counts_as_another_checkpoint(
    checkpoint: Path, cache: Path, tmp_path: Path
) -> None:
    """The fingerprint looks at parts of it only."""
    directory = tmp_path / "m"
    shutil.copytree(checkpoint, directory)
    origin_and_answers(directory, cache)
    path = directory / "model.safetensors"
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert origin_and_answers(directory, cache)[0] == "filled"


def test_settings_have_files_of_their_own(checkpoint: Path, cache: Path) -> None:
    for number, settings in enumerate(
        ({}, {"dtype": "bfloat16"}, {"quantize_head": 4}, {"quantization_group_size": 32}), 1
    ):
        assert origin_and_answers(checkpoint, cache, **settings)[0] == "filled"
        assert len(list(cache.iterdir())) == number


def test_a_directory_that_cannot_be_written_is_one_warning(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no directory")
    origin, _ = origin_and_answers(checkpoint, tmp_path / "file")
    assert origin == "filled"
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "cannot be written" in warnings[0].message


def test_a_full_disk_is_one_warning_and_leaves_nothing(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        write_file(memoryview(bytes(3 << 20)), cache / "m.weights")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(cache.iterdir()) == []
    (warning,) = caplog.records
    assert "cannot be written: File too large" in warning.message


def test_what_killed_writers_left_is_removed_and_what_others_write_is_not(cache: Path) -> None:
    cache.mkdir()
    (cache / ".m.weights.abandoned").write_bytes(b"half")
    (cache / ".other.weights.abandoned").write_bytes(b"half")
    written = cache / ".m.weights.written"
    with written.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_file(memoryview(b"image"), cache / "m.weights")
        assert sorted(path.name for path in cache.iterdir()) == [
            ".m.weights.written",
            ".other.weights.abandoned",
            "m.weights",
        ]
    assert (cache / "m.weights").read_bytes() == b"image"
