"""Weight images as files, for the next start (`--weight-cache DIR`).

Theory.  A file is written under another name, synced and renamed, so under its own name there is a whole one
or none.  It is made for one directory of a checkpoint and one way of holding it, and named after both: an
image of newer files there takes its place.  What it was made of is in its key; a file with another key,
size or table of contents, or a tensor with another checksum, is made anew.  Nothing else is ever deleted.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from baton.model.weights.image import ImageError, ImageReader

log = logging.getLogger(__name__)

_WRITTEN_AT_ONCE = 16 << 20


def cache_file(cache: str, directory: Path, place: str) -> Path:
    """Of the checkpoint in `directory`, held as `place` says."""
    real = directory.resolve()
    digest = hashlib.sha256(f"{real}\0{place}".encode()).hexdigest()[:16]
    return Path(cache) / f"{real.name}-{digest}.weights"


def read_file(path: Path, key: str, threads: int) -> tuple[ImageReader, int] | None:
    """The image and a descriptor of the file, which is the caller's; None if there is none that is right.

    `threads`: that compare the checksums of tensors; 0: they are not compared.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        log.warning("weight cache: %s cannot be read: %s", path, error.strerror)
        return None
    try:
        reader = ImageReader(fd, key)
        if threads:
            reader.verify(threads)
    except (ImageError, OSError) as error:
        os.close(fd)
        log.warning("weight cache: %s is made anew: %s", path, error)
        return None
    return reader, fd


def write_file(image: memoryview, path: Path) -> None:
    """Writes the image.  What keeps it from being written is one warning."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_unfinished(path)
        fd, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            first = 0
            while first < len(image):
                first += os.write(fd, image[first : first + _WRITTEN_AT_ONCE])
            os.fchmod(fd, 0o400)
            os.fsync(fd)
            os.rename(unfinished, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            raise
        finally:
            os.close(fd)
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
    except OSError as error:
        log.warning(
            "weight cache: %s cannot be written: %s; the next start packs the weights again",
            path,
            error.strerror,
        )


def _remove_unfinished(path: Path) -> None:
    """Files of processes that were killed while they wrote."""
    for left in path.parent.glob(f".{path.name}.*"):
        with suppress(OSError):
            fd = os.open(left, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
            finally:
                os.close(fd)
