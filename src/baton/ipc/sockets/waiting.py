"""Which connection gives way when too many wait that have not shown who they are.  No I/O.

Theory.  A listener bears only so many connections of which it does not know yet whose they are.  If it
refused further ones, a few that say nothing would keep all others out; so one of those that wait is closed:

1. of an address from which no member has come before, if there is any such;
2. of the address that has most of them (64 bits of IPv6 count as one address);
3. one that has said nothing yet, if there is any; and of these the oldest.

So who floods from one address pushes himself out, not a member that comes from another one; and a member at
the same address is not pushed out by those who say nothing, as it speaks with its first packet.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

MOST = 64
_MAX_ADDRESSES = 1024
"""Of members, that are remembered."""

K = TypeVar("K", bound=Hashable)


class Waiting(Generic[K]):
    """Those of one listener.  `spoke(one)`: whether it has said something; asked when one has to go."""

    def __init__(self, spoke: Callable[[K], bool], most: int = MOST) -> None:
        self._spoke = spoke
        self._most = most
        self._from: dict[K, str] = {}
        """Each with its address, in the order of their coming."""
        self._talking: set[K] = set()
        self._members: OrderedDict[str, None] = OrderedDict()
        """Addresses from which members have come, the latest last."""

    def __len__(self) -> int:
        return len(self._from)

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._from))

    def __contains__(self, one: K) -> bool:
        return one in self._from

    def come(self, one: K, address: str) -> K | None:
        """It waits from now on.  Returns one that is to be closed for that, which waits no more."""
        self._from[one] = _network(address)
        if len(self._from) <= self._most:
            return None
        found = self._next()
        self.leave(found)
        return found

    def leave(self, one: K) -> None:
        """It is gone, or is waited for no more; idempotent."""
        self._from.pop(one, None)
        self._talking.discard(one)

    def proved(self, one: K, address: str) -> None:
        """It belongs to a member, whether it waited here or not."""
        self.leave(one)
        self._members[_network(address)] = None
        self._members.move_to_end(_network(address))
        if len(self._members) > _MAX_ADDRESSES:
            self._members.popitem(last=False)

    def _next(self) -> K:
        strange = [one for one, address in self._from.items() if address not in self._members]
        few = strange or list(self._from)
        (crowd, _), *_ = Counter(self._from[one] for one in few).most_common(1)
        there = [one for one in few if self._from[one] == crowd]
        return next((one for one in there if self._is_silent(one)), there[0])

    def _is_silent(self, one: K) -> bool:
        if one not in self._talking and self._spoke(one):
            self._talking.add(one)
        return one not in self._talking


def _network(address: str) -> str:
    """What one host, or one who has a network of his own, can give itself no more of."""
    if ":" not in address or "." in address:  # (of IPv4, in clear or mapped)
        return address
    head, gap, tail = address.partition("%")[0].partition("::")
    first = head.split(":") if head else []
    missing = 8 - len(first) - len([part for part in tail.split(":") if part]) if gap else 0
    return ":".join([*first, *["0"] * missing, *tail.split(":")][:4])
