"""What ranks say so that those of other hosts find them (`model/layers/meeting.py`), and who waits for it."""

from __future__ import annotations


class Meeting:
    """Keys that are written once."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[int, str]] = []

    def say(self, key: str, value: bytes) -> bool:
        """False: it was said already."""
        if key in self._values:
            return False
        self._values[key] = value
        return True

    def known(self) -> list[tuple[str, bytes]]:
        return list(self._values.items())

    def ask(self, who: int, key: str) -> None:
        self._waiting.append((who, key))

    def answers(self) -> list[tuple[int, bytes]]:
        """(who, value) of those whose key is known by now."""
        found = [(who, self._values[key]) for who, key in self._waiting if key in self._values]
        self._waiting = [(who, key) for who, key in self._waiting if key not in self._values]
        return found
