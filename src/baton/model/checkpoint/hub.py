"""From what a user typed as a model to a directory with its files, or to its GGUF file.

A directory or a GGUF file loads as it is, so a machine without network serves whatever was copied to it.
Anything else is a name on the Hugging Face hub; its files are downloaded once into the hub's cache.  There,
`OWNER/NAME:Q4_K_M` or `OWNER/NAME/FILE.gguf` is a GGUF file.  Nothing, or the name `baton-tiny`, is the model
that comes with Baton, for trying things out.

Every failure is a `ModelNotFound` of one line that says what to do, or, of a model that Baton is known not to
compute, an `UnsupportedModel`: before its weights are looked for or downloaded.  No torch, no transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from baton.model.architectures.families import check_known
from baton.model.checkpoint.files import some
from baton.model.checkpoint.gguf import SUFFIX, is_gguf
from baton.model.description.fields import ModelNotFound, read_json_object

EMBEDDED_MODEL = "baton-tiny"
_EMBEDDED_DIRECTORY = Path(__file__).resolve().parents[2] / "assets" / EMBEDDED_MODEL
_WANTED = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "*.txt")
_UNWANTED = ("consolidated*", "original/*", "onnx/*")


_TAGGED = re.compile(r"(?P<name>[\w.-]+/[\w.-]+):(?P<tag>[\w.-]+)\Z")
_FILE = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)/(?P<file>.+\.gguf)\Z", re.IGNORECASE)
_LATER_SHARD = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf\Z", re.IGNORECASE)
_LISTED = 8
_CONFIG = "config.json"
_OTHERS = {
    "adapter_config.json": "is an adapter (LoRA); merge it into its model, and give that directory",
    "model_index.json": "is a pipeline of diffusers, which makes images; Baton serves models of texts",
    "params.json": "is in Mistral's own format; give the directory of the same model with a config.json",
}
"""What a directory without a config.json is, by the file that tells it."""
_PROJECTOR = "mmproj"
"""Begins the names of files with the part of a model that reads images."""


def resolve_model(name_or_path: str | None, revision: str | None = None) -> Path:
    """The directory of a checkpoint, or its (first) GGUF file, downloaded if need be.

    `revision` is a branch, tag or commit of the hub and has no meaning for files that are here.
    Raises `ModelNotFound` and `UnsupportedModel`.
    """
    if name_or_path is None or name_or_path == EMBEDDED_MODEL:
        return _checked(_EMBEDDED_DIRECTORY)
    if not name_or_path.strip():
        raise ModelNotFound(
            "the model's name is empty: leave it out for the embedded model, or give a directory, a GGUF "
            "file, or a name on the hub"
        )
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _checked(path)
    if path.exists():
        if is_gguf(path):
            return path
        raise ModelNotFound(
            f"{name_or_path!r} is a file; give the directory that holds config.json, or a GGUF file "
            f"(*{SUFFIX})"
        )
    is_path = name_or_path.startswith(("/", ".", "~"))
    file, tagged = _FILE.match(name_or_path), _TAGGED.match(name_or_path)
    if file is not None and not is_path:
        return _downloaded_file(file["name"], file["file"], revision)
    if tagged is not None and not is_path:
        return _downloaded_tag(tagged["name"], tagged["tag"], revision)
    if is_path or name_or_path.count("/") > 1 or path.suffix.lower() == SUFFIX:
        what = "file" if path.suffix.lower() == SUFFIX else "directory"
        raise ModelNotFound(f"{name_or_path!r}: no such {what}")
    _check_known(_download(name_or_path, revision, [_CONFIG]), name_or_path)
    return _checked(_download(name_or_path, revision))


def _downloaded_file(name: str, file: str, revision: str | None) -> Path:
    """One GGUF file of a model of the hub, and those that it is split into."""
    pattern = re.sub(r"-\d{5}(-of-\d{5}\.gguf)\Z", r"-*\1", file, flags=re.IGNORECASE)
    path = _download(name, revision, [pattern]) / file
    if not path.is_file():
        raise ModelNotFound(f"{name!r} has no file {file!r}")
    return path


def _downloaded_tag(name: str, tag: str, revision: str | None) -> Path:
    """The GGUF file whose name ends with a tag, as people call its types: `Q4_K_M`."""
    spellings = dict.fromkeys((tag, tag.upper(), tag.lower()))
    directory = _download(name, revision, [f"*{spelling}*{SUFFIX}" for spelling in spellings])
    ends = re.compile(rf"(.*[-._/])?{re.escape(tag)}(-00001-of-\d{{5}})?\.gguf\Z", re.IGNORECASE)
    found = [path for path in _gguf_files(directory.rglob(f"*{SUFFIX}")) if ends.match(path.name)]
    if not found:
        raise ModelNotFound(f"{name!r} has no GGUF file whose name ends with {tag!r}")
    shortest = min(len(path.name) for path in found)  # X-Q4_K_M rather than X-UD-Q4_K_M
    found = [path for path in found if len(path.name) == shortest]
    if len(found) > 1:
        raise ModelNotFound(f"{name!r} has several files for {tag!r}: {some(path.name for path in found)}")
    return found[0]


def _gguf_files(paths: Iterable[Path]) -> list[Path]:
    """One for each model."""
    return sorted(
        path for path in paths if not _LATER_SHARD.search(path.name) and not path.name.startswith(_PROJECTOR)
    )


def _checked(directory: Path) -> Path:
    files = _gguf_files(directory.glob(f"*{SUFFIX}"))
    if files and not any(directory.glob("*.safetensors")):
        if len(files) == 1:
            return files[0]
        raise ModelNotFound(
            f"{str(directory)!r} has {len(files)} GGUF files; give one of them: "
            f"{', '.join(path.name for path in files[:_LISTED])}"
        )
    if not (directory / _CONFIG).is_file():
        what = next((what for name, what in _OTHERS.items() if (directory / name).is_file()), "")
        hint = what or f"has no {_CONFIG}; give the directory of a checkpoint"
        raise ModelNotFound(f"{str(directory)!r} {hint}")
    _check_known(directory, str(directory))
    if not any(directory.glob("*.safetensors")):
        other = next(
            (path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern)), ""
        )
        hint = f" (there is {other}; convert it, Baton reads no pickled weights)" if other else ""
        raise ModelNotFound(f"{str(directory)!r} has no *.safetensors files{hint}")
    return directory


def _check_known(directory: Path, name: str) -> None:
    path = directory / _CONFIG
    if path.is_file():
        check_known(read_json_object(path), name, _CONFIG)


def _download(name: str, revision: str | None, wanted: Iterable[str] = _WANTED) -> Path:
    # Imported here: it takes a fifth of a second that a local directory need not pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        path = snapshot_download(
            name, revision=revision, allow_patterns=list(wanted), ignore_patterns=list(_UNWANTED)
        )
    except HFValidationError:
        raise ModelNotFound(
            f"{name!r} is neither a directory nor a model name such as 'Qwen/Qwen3-0.6B'"
        ) from None
    except GatedRepoError:
        raise ModelNotFound(
            f"{name!r} is gated: accept its licence on huggingface.co/{name}, then set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise ModelNotFound(f"{name!r} has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise ModelNotFound(
            f"{name!r}: no such directory, and no such model on the hub (a private one needs HF_TOKEN)"
        ) from None
    except LocalEntryNotFoundError:
        raise ModelNotFound(
            f"{name!r}: no such directory, not in the local cache, and the hub cannot be reached; "
            "copy the checkpoint here and give its directory"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFound(f"{name!r}: the download failed: {reason}") from None
    return Path(path)
