"""Which worker fills which image, who waits for it, and which images stay.  Pure.

Theory.  An image has a *key*: all that it is a function of.  Of those who ask for a key that nobody has made,
the first fills it and the others wait.  A filler that goes before it has said `filled` was killed, or failed:
what it left is thrown away, and the next who waits fills it anew.

A worker holds its image for as long as its connection lives.  The last image of a *place* (the key without
the checkpoint) stays when nobody holds it, so that workers that are restarted find it.  It goes when another
of its place is held.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Grant:
    """Give the worker the image; `fill`: its empty memory, to fill it."""

    worker: int
    key: str
    fill: bool


@dataclass(frozen=True)
class Drop:
    """Let go of the memory of this image."""

    key: str


Effect = Grant | Drop


@dataclass
class _Image:
    place: str
    filler: int | None = None
    """The worker that fills it; None when it has been filled."""
    waiting: list[int] = field(default_factory=list)
    holders: set[int] = field(default_factory=set)


class Keeper:
    """Workers are numbers that the caller gives: one a connection."""

    def __init__(self) -> None:
        self._images: dict[str, _Image] = {}
        self._asked: dict[int, str] = {}

    @property
    def keys(self) -> list[str]:
        """Of the images that there are, or that are being filled."""
        return list(self._images)

    def asked(self, worker: int) -> str:
        """The key for which it has asked; "" if it has asked for none."""
        return self._asked.get(worker, "")

    def ask(self, worker: int, key: str, place: str) -> list[Effect]:
        """Raises `ValueError` if this worker has asked already."""
        if worker in self._asked:
            raise ValueError("a worker asks for one image")
        self._asked[worker] = key
        image = self._images.get(key)
        if image is None:
            self._images[key] = _Image(place, filler=worker)
            return [Grant(worker, key, fill=True)]
        if image.filler is not None:
            image.waiting.append(worker)
            return []
        image.holders.add(worker)
        return [Grant(worker, key, fill=False), *self._let_go(image.place)]

    def filled(self, worker: int) -> list[Effect]:
        """Raises `ValueError` if this worker was not told to fill one."""
        image = self._images.get(self.asked(worker))
        if image is None or image.filler != worker:
            raise ValueError("this worker was to fill no image")
        image.filler = None
        waiting, image.waiting = image.waiting, []
        image.holders.update((worker, *waiting))
        key = self._asked[worker]
        return [*(Grant(other, key, fill=False) for other in waiting), *self._let_go(image.place)]

    def gone(self, worker: int) -> list[Effect]:
        """Its connection has ended, or it is not to be listened to any more."""
        key = self._asked.pop(worker, "")
        image = self._images.get(key)
        if image is None:
            return []
        if image.filler == worker:
            if not image.waiting:
                del self._images[key]
                return [Drop(key)]
            image.filler = image.waiting.pop(0)
            return [Drop(key), Grant(image.filler, key, fill=True)]
        if worker in image.waiting:
            image.waiting.remove(worker)
            return []
        image.holders.discard(worker)
        return self._let_go(image.place, last=key)

    def _let_go(self, place: str, last: str = "") -> list[Effect]:
        """The images of the place that nobody holds go, if another one is held, or is the `last` that was."""
        here = {key: image for key, image in self._images.items() if image.place == place}
        idle = [key for key, image in here.items() if image.filler is None and not image.holders]
        if all(image.filler is not None or not image.holders for image in here.values()):
            idle = [key for key in idle if key != last] if last in idle else idle[:-1]
        for key in idle:
            del self._images[key]
        return [Drop(key) for key in idle]
