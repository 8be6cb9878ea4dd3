"""From a name to a directory, and the one line that says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from baton.model.checkpoint.config import ModelNotFound
from baton.model.checkpoint.hub import resolve_model


def test_a_directory_loads_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="safetensors"):
        resolve_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelNotFound, match="pickled"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_paths_that_are_not_there_are_not_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    for name in (str(tmp_path / "absent"), "./absent", "~/absent", "a/b/c"):
        with pytest.raises(ModelNotFound, match="no such directory"):
            resolve_model(name)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelNotFound, match="is a file"):
        resolve_model(str(file))
    for name in ("", " "):
        with pytest.raises(ModelNotFound, match="name is empty: leave it out for the embedded model"):
            resolve_model(name)


def test_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("Some/Model", revision="v1") == tmp_path
    assert (asked["name"], asked["revision"]) == ("Some/Model", "v1")
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])


_RESPONSE = httpx.Response(404, request=httpx.Request("GET", "https://hub"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError("x\ny", response=_RESPONSE), "gated"),
        (errors.RepositoryNotFoundError("x\ny", response=_RESPONSE), "no such model"),
        (errors.RevisionNotFoundError("x\ny", response=_RESPONSE), "no revision 'v1'"),
        (errors.LocalEntryNotFoundError("x\ny"), "cannot be reached"),
        (errors.HfHubHTTPError("boom\ny", response=_RESPONSE), "download failed"),
        (OSError("disk full"), "disk full"),
        (errors.HFValidationError("x"), "neither a directory nor a model name"),
    ],
)
def test_failures_are_one_line(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFound) as caught:
        resolve_model("Some/Model", revision="v1")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "Some/Model" in str(caught.value)


def test_no_network_and_not_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real hub client, told to stay offline."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match="Some/Absent-Model"):
        resolve_model("Some/Absent-Model")


def test_gguf_files_and_directories_with_one(tmp_path: Path) -> None:
    first, second = tmp_path / "a-Q4_K_M.gguf", tmp_path / "mmproj-a.gguf"
    for path in (first, second):
        path.write_bytes(b"GGUF")
    assert resolve_model(str(first)) == first
    assert resolve_model(str(tmp_path)) == first
    (tmp_path / "a-Q8_0-00001-of-00002.gguf").write_bytes(b"")
    (tmp_path / "a-Q8_0-00002-of-00002.gguf").write_bytes(b"")
    with pytest.raises(
        ModelNotFound, match=r"has 2 GGUF files; give one of them: a-Q4_K_M\.gguf, a-Q8_0-00001"
    ):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelNotFound, match="no such file"):
        resolve_model(str(tmp_path / "absent.gguf"))
    with pytest.raises(ModelNotFound, match="no such file"):
        resolve_model("absent.gguf")


def test_gguf_files_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "sub").mkdir()
    for name in (
        "m-Q4_K_M.gguf",
        "m-UD-Q4_K_M.gguf",
        "sub/m-q8_0-00001-of-00002.gguf",
        "a-Q5.gguf",
        "b-Q5.gguf",
    ):
        (tmp_path / name).write_bytes(b"GGUF")
    assert resolve_model("o/m-GGUF:Q4_K_M") == tmp_path / "m-Q4_K_M.gguf"
    assert asked == [("o/m-GGUF", ["*Q4_K_M*.gguf", "*q4_k_m*.gguf"])]
    assert resolve_model("o/m-GGUF:Q8_0").name == "m-q8_0-00001-of-00002.gguf"
    assert resolve_model("o/m/sub/m-q8_0-00001-of-00002.gguf").name == "m-q8_0-00001-of-00002.gguf"
    assert asked[-1] == ("o/m", ["sub/m-q8_0-*-of-00002.gguf"])
    for name, says in (
        ("o/m:Q6_K", "no GGUF file whose name ends with 'Q6_K'"),
        ("o/m:Q5", "several files for 'Q5': 'a-Q5.gguf' \\(and 1 more\\)"),
        ("o/m/x.gguf", "has no file 'x.gguf'"),
    ):
        with pytest.raises(ModelNotFound, match=says):
            resolve_model(name)
