"""Which memory the weights of a rank come to lie in: an image of this host, or the worker's own.

In this order: the image that the keeper has, made by another worker or an earlier one; a file of
`--weight-cache`, which then is the image; an image that this worker fills, and which it writes to the weight
cache; private memory, where there is no keeper, on devices, and for forms that only oneDNN can make.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from baton.executor.weights.cache_file import cache_file, read_file, write_file
from baton.executor.weights.forms import ExecutorError
from baton.executor.weights.progress import LoadProgress
from baton.ipc.image_client import ImageClient, KeeperGone
from baton.model.architectures.adapted import installed
from baton.model.checkpoint.files import LoadError, checkpoint_files
from baton.model.checkpoint.fingerprint import fingerprint
from baton.model.checkpoint.gguf import is_gguf, shards_of
from baton.model.cpu.library import made_of, native
from baton.model.cpu.linear import serves
from baton.model.layers.packed import Weights
from baton.model.weights.image import ImageError, ImageReader, ImageWriter
from baton.model.weights.store import PrivateStore, WeightStore
from baton.observe.logs import unless_shown
from baton.protocol.config import InstanceConfig
from baton.version import __version__

log = logging.getLogger(__name__)

PACKING = 6
"""Grows when what Python packs, quantizes or names changes, within a version of Baton."""
_ROOM_TIMES = 8
"""A checkpoint in 4 bits becomes float32 at most."""
_MORE_ROOM = 1 << 30
_MOST_WAIT = 0.95
"""Of `--startup-timeout`, so that the reason is the worker's, which knows more."""


class WeightMemory:
    """What the weights of one model are made in; see `open_weights`."""

    def __init__(
        self,
        store: WeightStore,
        origin: Literal["private", "filled", "mapped", "file"],
        client: ImageClient | None = None,
        fd: int = -1,
        cache: Path | None = None,
    ) -> None:
        self.store = store
        self.origin = origin
        self.is_current: Callable[[], bool] = lambda: True
        """Whether the checkpoint's files are those that were there at the beginning."""
        self.progress: LoadProgress | None = None
        """Of the loading, if there is any and somebody is to be told."""
        self._client, self._fd, self._cache = client, fd, cache

    @property
    def shared(self) -> bool:
        """Whether other processes map, or can map, the same memory."""
        return self.origin != "private"

    def done(self) -> None:
        """The model has been loaded: from now on others can map what was filled.

        Raises `LoadError` if the checkpoint's files were changed meanwhile: old and new may be mixed.
        """
        if self.progress is not None:
            self.progress.close()
        if not isinstance(self.store, ImageWriter) or self.store.complete:
            return
        if not self.is_current():
            raise LoadError("the files of the checkpoint were changed while they were read; start again")
        try:
            self.store.finish(torch.get_num_threads())
        except OSError as error:
            log.warning("the weight image cannot be shared: %s; others make copies of their own", error)
            self.origin = "private"
            self.release()
            return
        if self._client is not None:
            self._client.filled(None)
        if self._cache is not None:
            write_file(self.store.bytes, self._cache)
        self._close_fd()

    def release(self) -> None:
        """Nothing in this process uses these weights any more."""
        self._close_fd()
        if self._client is not None:
            self._client.close()
            self._client = None

    def teller(self, instance: str) -> Callable[[str], None] | None:
        """Tells who started this worker how far it is; None if there is nobody.  (It does not refer to this
        memory: that would be a circle, which keeps the image until the garbage collector comes.)"""
        return partial(self._client.doing, instance) if self._client is not None else None

    def say(self, instance: str, what: str) -> None:
        """Tells who started this worker what it does."""
        if self._client is not None:
            self._client.doing(instance, what)

    def told(self) -> str:
        """For the banner."""
        if self.origin == "private":
            return "private"
        how = {"filled": "made here", "mapped": "shared", "file": "from the weight cache"}[self.origin]
        return f"image of {self.nbytes / 1e6:.0f} MB, {how}"

    @property
    def nbytes(self) -> int:
        """Of the image; 0 if there is none."""
        return self.store.nbytes if isinstance(self.store, ImageWriter | ImageReader) else 0

    def _close_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_weights(
    config: InstanceConfig, directory: Path, rank: int, form: Weights, groups: Mapping[str, Any]
) -> WeightMemory:
    """Where the weights of rank `rank` of the checkpoint in `directory` are, or are to be filled in.

    `groups`: as in `weights.groups_of`.  Waits while another worker fills them.  Raises `ExecutorError` after
    `startup_timeout_s`, and `LoadError` if there are no files.
    """
    memory = _open(config, directory, rank, form, groups)
    if rank == 0 and not memory.store.complete:
        total = sum(path.stat().st_size for path in _files(directory))
        memory.progress = LoadProgress(total, tell=memory.teller(config.name))
    return memory


def _open(
    config: InstanceConfig, directory: Path, rank: int, form: Weights, groups: Mapping[str, Any]
) -> WeightMemory:
    identity = None if is_private(config, form) else _identity(config, directory, rank, form, groups)
    if identity is None:
        return WeightMemory(PrivateStore(), "private")
    place, key = identity

    def is_current() -> bool:
        return identity == _identity(config, directory, rank, form, groups)

    client, fill, fd = _ask(config, directory, place, key)
    if client is None and not config.weight_cache:
        os.close(fd)
        return WeightMemory(PrivateStore(), "private")
    try:
        if not fill:
            return WeightMemory(_mapped(fd, key), "mapped", client)
        cache = cache_file(config.weight_cache, directory, place) if config.weight_cache else None
        if cache is not None:
            found = read_file(cache, key, torch.get_num_threads() if config.weight_cache_verify else 0)
            if found is not None:
                reader, file = found
                if client is not None:
                    client.filled(file)
                os.close(file)
                return WeightMemory(reader, "file", client)
        room = _ROOM_TIMES * sum(path.stat().st_size for path in _files(directory)) + _MORE_ROOM
        kept = os.dup(fd)
        try:
            memory = WeightMemory(ImageWriter(kept, key, room), "filled", client, kept, cache)
        except BaseException:
            os.close(kept)
            raise
        memory.is_current = is_current
        return memory
    except (ImageError, OSError) as error:
        log.warning("no image of the weights: %s; this worker has its own copy of them", error)
        if client is not None:
            client.close()
        return WeightMemory(PrivateStore(), "private")
    finally:
        if fd >= 0:
            os.close(fd)


def is_private(config: InstanceConfig, form: Weights) -> bool:
    """Whether each worker must have its own copy: on a device, and of what oneDNN has packed in its own way;
    and whether nothing would be gained by an image."""
    if config.device != "cpu" or not hasattr(os, "memfd_create"):
        return True
    if form == "onednn" or (form == "int8" and not serves(native(), torch.int8)):
        return True
    return not config.weight_images and not config.weight_cache


def _ask(
    config: InstanceConfig, directory: Path, place: str, key: str
) -> tuple[ImageClient | None, bool, int]:
    """The keeper, if there is one; whether this worker is to fill the image; its memory."""
    if config.weight_images:
        timeout_s = _MOST_WAIT * config.startup_timeout_s
        client: ImageClient | None = None
        try:
            client = ImageClient(config.weight_images)
            return client, *client.ask(key, place, timeout_s, partial(_say_waiting, client, config.name))
        except TimeoutError:
            if client is not None:
                client.close()
            raise ExecutorError(
                f"another worker has not made the weight image of {str(directory)!r} within "
                f"{timeout_s:.0f} s; raise --startup-timeout if that takes longer"
            ) from None
        except KeeperGone as error:
            if client is not None:
                client.close()
            log.warning("%s; this worker has its own copy of the weights", error)
    return None, True, os.memfd_create("baton-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _say_waiting(client: ImageClient, instance: str) -> None:
    client.doing(instance, "waiting for the weights")
    log.log(unless_shown(logging.INFO), "another worker makes the weight image; waiting for it")


def _identity(
    config: InstanceConfig, directory: Path, rank: int, form: Weights, groups: Mapping[str, Any]
) -> tuple[str, str] | None:
    """(place, key) of an image, as texts; None if the checkpoint cannot be told apart from others."""
    checkpoint = fingerprint(directory)
    if not checkpoint:
        return None
    library = native()
    place = {
        "baton": __version__,
        "packing": PACKING,
        "library": "" if library is None else f"{library.instruction_set} {made_of()}",
        "form": form,
        "dtype": config.dtype,
        "groups": repr(sorted(groups.items())),
        "rank": rank,
        "size": config.tensor_parallel_size,
        "model_impl": f"{config.model_impl}, transformers {installed()}",
    }
    if config.speculation is not None and config.speculation.method == "mtp":
        place["mtp"] = True
    if config.headless:
        place["headless"] = True
    # Files that were written again have other times; the fingerprint looks at parts of them only.
    stats = [path.stat() for path in _files(directory)]
    key = {**place, "checkpoint": checkpoint, "files": [[stat.st_size, stat.st_mtime_ns] for stat in stats]}
    return json.dumps(place), json.dumps(key)


def _files(directory: Path) -> list[Path]:
    return shards_of(directory) if is_gguf(directory) else checkpoint_files(directory)


def _mapped(fd: int, key: str) -> ImageReader:
    readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return ImageReader(readable, key)
    finally:
        os.close(readable)
