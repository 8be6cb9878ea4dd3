"""Answers that are kept, so that later requests can go on from them (`--responses-store`).

Each answer is one tenant's, that of its API key, and nobody else finds it.  At most so many answers and so
many bytes are kept: the oldest go first.  What an answer says and what was said before it are *runs* of
items; an answer holds all runs of its conversation, and a run goes with the last answer that holds it.  So a
conversation of a hundred turns is kept once, and goes on when its first answers are gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Item = tuple[str, bytes]
"""Its id, and itself as JSON."""
_OVERHEAD = 200
"""Bytes that Python needs for an entry besides its texts."""


class Run:
    """Items that were said together."""

    __slots__ = ("holders", "items", "size")

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = tuple(items)
        self.holders = 0
        """Answers."""
        self.size = _OVERHEAD + sum(len(id) + len(data) + _OVERHEAD for id, data in items)


class Kept:
    """One answer."""

    __slots__ = ("body", "owner", "runs", "size")

    def __init__(self, owner: str, body: bytes, runs: Sequence[Run]) -> None:
        self.owner = owner
        self.body = body
        """As it was given, JSON."""
        self.runs = tuple(runs)
        """Of the whole conversation; the last but one is this request's input, the last one the output."""
        self.size = _OVERHEAD + len(body) + 8 * len(runs)

    @property
    def input(self) -> list[Item]:
        """All that the answer was given to, also what came before in the conversation."""
        return [item for run in self.runs[:-1] for item in run.items]

    @property
    def conversation(self) -> list[bytes]:
        return [data for run in self.runs for _, data in run.items]


class ResponseStore:
    """Of one server."""

    def __init__(self, most: int = 0, most_bytes: int = 0) -> None:
        """`most`: answers; 0: none is kept."""
        self.most = most
        self.most_bytes = most_bytes
        self.size = 0
        """In bytes."""
        self.evicted = 0
        """Answers that went because of others."""
        self.refused = 0
        """Answers that were too large to be kept."""
        self._answers: OrderedDict[str, Kept] = OrderedDict()
        self._items: dict[tuple[str, str], bytes] = {}
        """By owner and id."""

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def keeps(self) -> bool:
        return self.most > 0

    def get(self, owner: str, id: str) -> Kept | None:
        """None also for what is somebody else's."""
        kept = self._answers.get(id)
        return kept if kept is not None and kept.owner == owner else None

    def item(self, owner: str, id: str) -> bytes | None:
        return self._items.get((owner, id))

    def add(
        self,
        owner: str,
        id: str,
        body: bytes,
        before: Sequence[Run],
        given: Sequence[Item],
        said: Sequence[Item],
    ) -> bool:
        """`before`: the runs of the answer that this one follows.  False: it alone is more than may be
        kept."""
        runs = [*before, Run(given), Run(said)]
        kept = Kept(owner, body, runs)
        if not self.most or kept.size + sum(run.size for run in runs) > self.most_bytes:
            self.refused += bool(self.most)
            return False
        self._answers[id] = kept
        self.size += kept.size
        for run in runs:
            if not run.holders:
                self.size += run.size
                self._items.update(((owner, name), data) for name, data in run.items)
            run.holders += 1
        while len(self._answers) > self.most or self.size > self.most_bytes:
            self._remove(next(iter(self._answers)))
            self.evicted += 1
        return True

    def delete(self, owner: str, id: str) -> bool:
        """False: there is no such answer of this owner.  Those that follow it go on."""
        if self.get(owner, id) is None:
            return False
        self._remove(id)
        return True

    def _remove(self, id: str) -> None:
        kept = self._answers.pop(id)
        self.size -= kept.size
        for run in kept.runs:
            run.holders -= 1
            if not run.holders:
                self.size -= run.size
                for name, data in run.items:
                    if self._items.get((kept.owner, name)) is data:
                        del self._items[kept.owner, name]

    def collect(self) -> Iterator[Metric]:
        """For Prometheus."""
        prefix = "baton:responses_kept"
        yield GaugeMetricFamily(prefix, "Answers of /v1/responses in memory.", value=len(self._answers))
        yield GaugeMetricFamily(prefix + "_bytes", "Bytes that they take.", value=self.size)
        yield CounterMetricFamily(
            prefix + "_evicted", "Answers that went because of newer ones.", value=self.evicted
        )
        yield CounterMetricFamily(
            prefix + "_refused", "Answers that were too large to be kept.", value=self.refused
        )
