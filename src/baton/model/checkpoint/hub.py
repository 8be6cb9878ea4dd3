"""From what a user typed as a model to a directory with its files.

A directory loads as it is, so a machine without network serves whatever was copied to it.  Anything
else is a name on the Hugging Face hub; its files are downloaded once into the hub's cache.  Nothing, or
the name `baton-tiny`, is the model that comes with Baton, for trying things out.

Every failure is a `ModelNotFound` of one line that says what to do.  No torch, no transformers.
"""

from __future__ import annotations

from pathlib import Path

from baton.model.checkpoint.config import ModelNotFound

EMBEDDED_MODEL = "baton-tiny"
_EMBEDDED_DIRECTORY = Path(__file__).resolve().parents[2] / "assets" / EMBEDDED_MODEL
_WANTED = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "*.txt")
_UNWANTED = ("consolidated*", "original/*", "onnx/*")


def resolve_model(name_or_path: str | None, revision: str | None = None) -> Path:
    """The directory of a checkpoint, downloaded if need be.

    `revision` is a branch, tag or commit of the hub and has no meaning for a directory.
    Raises `ModelNotFound`.
    """
    if name_or_path is None or name_or_path == EMBEDDED_MODEL:
        return _checked(_EMBEDDED_DIRECTORY)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _checked(path)
    if path.exists():
        raise ModelNotFound(f"{name_or_path!r} is a file; give the directory that holds config.json")
    looks_like_a_path = name_or_path.startswith(("/", ".", "~")) or name_or_path.count("/") > 1
    if looks_like_a_path:
        raise ModelNotFound(f"{name_or_path!r}: no such directory")
    return _checked(_download(name_or_path, revision))


def _checked(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise ModelNotFound(f"{str(directory)!r} has no config.json; give the directory of a checkpoint")
    if not any(directory.glob("*.safetensors")):
        other = next(
            (path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern)), ""
        )
        hint = f" (there is {other}; convert it, Baton reads no pickled weights)" if other else ""
        raise ModelNotFound(f"{str(directory)!r} has no *.safetensors files{hint}")
    return directory


def _download(name: str, revision: str | None) -> Path:
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
            name, revision=revision, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED)
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
