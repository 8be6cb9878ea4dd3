"""The weights that come next: a second model, made while steps run, that takes the first one's place.

Theory.  Where weights lie in an image (`images.py`) nobody writes into it, so new ones are another image and
another model.  A check (`TorchExecutor.check_weights`) makes both, in a thread beside the steps: on each host
one worker fills the image, the others wait for it and map it.  What can go wrong when weights are loaded goes
wrong here, where nothing has changed yet.  The update itself only swaps the two models.

What was prepared goes with the update, with `drop`, or when something else is prepared.  A check that is
given up may still be loading: what it has made when it is done is dropped then.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from baton.executor.base import ControlRefused
from baton.executor.kv_pool import available_memory
from baton.executor.reading import read_model
from baton.executor.weights.forms import groups_of
from baton.executor.weights.images import WeightMemory, open_weights
from baton.model.checkpoint.fingerprint import fingerprint
from baton.model.decoder.decoder import Decoder
from baton.model.layers.rounding import Rounded
from baton.model.loader import AnyDecoder, load_model
from baton.protocol.config import InstanceConfig


class Second(NamedTuple):
    """A model that could be the one that runs, and what its weights lie in."""

    model: AnyDecoder
    memory: WeightMemory


class _Prepared(NamedTuple):
    directory: str
    name: str
    """Fingerprint of what was read."""
    second: Second


class NextWeights:
    """At most one prepared model.  `drop` and `take` belong to the thread of the steps."""

    def __init__(self, config: InstanceConfig, rank: int) -> None:
        self._config, self._rank = config, rank
        self._lock = threading.Lock()
        self._prepared: _Prepared | None = None
        self._round = 0
        """Grows with each `drop` and `take`: what was begun before is of no use any more."""

    def prepared(self, directory: str) -> str:
        """Its fingerprint, if `prepare` has read it and the files are still the same; else ""."""
        with self._lock:
            found = self._prepared
        same = found is not None and found.directory == directory and found.name == _name(directory)
        return found.name if found is not None and same else ""

    def prepare(self, directory: str, name: str, present: Second) -> None:
        """In another thread.  Raises `ControlRefused` if it cannot be made; then nothing is held."""
        with self._lock:
            begun = self._round
        self.drop(begun)
        try:
            second = self.make(directory, present)
        except (OSError, ValueError, MemoryError, RuntimeError) as error:
            raise ControlRefused(
                f"{directory!r} cannot be loaded: {error or type(error).__name__}"
            ) from error
        with self._lock:
            if begun == self._round and _name(directory) == name:
                self._prepared = _Prepared(directory, name, second)
                return
        second.memory.release()
        raise ControlRefused(f"{directory!r} was given up, or changed, while it was loaded")

    def take(self, directory: str) -> Second | None:
        """What a check has prepared, if the files are still the same."""
        with self._lock:
            self._round += 1
            found, self._prepared = self._prepared, None
        if found is None:
            return None
        if found.directory == directory and found.name == _name(directory):
            return found.second
        found.second.memory.release()
        return None

    def drop(self, begun: int | None = None) -> None:
        """Nothing is to be prepared any more; with `begun`: unless that is another round."""
        with self._lock:
            if begun is None:
                self._round += 1
            elif begun != self._round:
                return
            found, self._prepared = self._prepared, None
        if found is not None:
            found.second.memory.release()

    @torch.inference_mode()
    def make(self, directory: str, present: Second) -> Second:
        """A model of another checkpoint, of the same sizes as the present one.  Raises as `load_model` and
        `open_weights`, and `ValueError` if there is no memory for it."""
        placement = present.model.placement
        mtp = present.model.mtp if isinstance(present.model, Decoder) else None
        config, built = read_model(self._config, directory)
        groups = groups_of(self._config, config, placement.device)
        memory = open_weights(self._config, Path(directory), self._rank, placement.weights, groups)
        try:
            if memory.origin in ("filled", "private"):
                _check_room(present.memory.nbytes)
            new = replace(placement, store=memory.store, rounded=Rounded(), **groups)
            model = load_model(
                Path(directory),
                config,
                new,
                present.model.backend,
                self._config.max_model_len,
                memory.progress,
                built,
                None if mtp is None else mtp.backend,
            )
            memory.done()
        except BaseException:
            memory.release()
            raise
        return Second(model, memory)


def _name(directory: str) -> str:
    """ "" if there is nothing to tell it by."""
    try:
        return fingerprint(Path(directory))
    except (OSError, ValueError):
        return ""


def _check_room(needed: int) -> None:
    """The kernel would not refuse the memory but end a process.  Raises `ValueError`."""
    free = available_memory()
    if needed > free:
        raise ValueError(
            f"its weights need {needed / 1e6:,.0f} MB beside the present ones, and only {free / 1e6:,.0f} MB "
            "are free"
        )
