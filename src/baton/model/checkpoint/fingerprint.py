"""What tells two checkpoints apart, without reading them whole.

Instances of one server hand KV pages over and continue each other's requests: all of them must have the
same weights.  Two fine-tunes of a model have the same shapes, and often the same name; this tells them apart.
It covers the configuration, the headers of the safetensors or GGUF files and samples that are spread over
each file (training changes nearly every weight), so it costs milliseconds also for a large model.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from baton.model.checkpoint.files import checkpoint_files
from baton.model.checkpoint.gguf import is_gguf, read_gguf

_SAMPLE_BYTES = 4096
_SAMPLES = 16
"""Of each file, spread evenly; besides its beginning."""


def fingerprint(directory: Path) -> str:
    """The same for two directories with the same checkpoint, wherever they are; "" if it cannot be read."""
    digest = hashlib.sha256()
    try:
        if is_gguf(directory):
            for path, start in read_gguf(directory).headers.items():
                _add_header(digest, path, start)
                _add(digest, path)
            return digest.hexdigest()[:16]
        digest.update(_canonical(directory / "config.json"))
        for path in checkpoint_files(directory):
            digest.update(path.name.encode())
            _add(digest, path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""  # the loader says what is wrong
    return digest.hexdigest()[:16]


def _canonical(path: Path) -> bytes:
    return json.dumps(json.loads(path.read_text(encoding="utf-8")), sort_keys=True).encode()


def _add_header(digest: hashlib._Hash, path: Path, size: int) -> None:
    """Metadata and descriptions of tensors; files may be called anything."""
    with path.open("rb") as file:
        digest.update(file.read(size))


def _add(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        digest.update(file.read(_SAMPLE_BYTES))
        for number in range(1, _SAMPLES + 1):
            file.seek(max(0, size * number // _SAMPLES - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
