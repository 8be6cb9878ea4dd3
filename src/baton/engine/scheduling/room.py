"""The book of an engine's slots and blocks: who has which slot, what is promised, how much is left.  Pure.

Theory.  The ledger knows the owner of every block.  It does not know how many more those that have a slot may
want, nor what was promised to those that are to come.  That is kept and added up here, for who is admitted
(`admission.py`) as for who grows and who gives way (`scheduler.py`):

| who | slot | blocks |
| --- | --- | --- |
| follows or runs | taken | held; it may want more |
| is being closed | taken | held until then; it wants no more |
| is to arrive, with a reservation (`arriving`) | promised | reserved; it may want more |
| is to arrive, with a credit (`promise`) | promised | promised, with those that it may want |

Someone new *fits* if, beside its own blocks, as many are available as all of these and itself may want within
the next H tokens (`headroom.py`), or up to their own limits if those are nearer.
"""

from __future__ import annotations

from baton.engine.request import Request
from baton.engine.scheduling.headroom import Headroom
from baton.engine.scheduling.ledger import Key, Ledger
from baton.engine.states import State

STAYING = (State.FOLLOWING, State.RUNNING)
"""Of those that have a slot: they keep it."""


class Room:
    """`max_num_seqs` slots over the blocks of one ledger.  `lookahead`: a request should have blocks for so
    many tokens beyond those that it has."""

    def __init__(
        self, ledger: Ledger, headroom: Headroom, *, block_size: int, max_num_seqs: int, lookahead: int
    ) -> None:
        self.ledger = ledger
        self.headroom = headroom
        self.block_size = block_size
        self.lookahead = lookahead
        self.slots: list[Request | None] = [None] * max_num_seqs
        """Who occupies each slot: following, running or being closed."""
        self.arriving: dict[Key, Request] = {}
        """Requests with a reservation, by its key in the ledger."""
        self.kept_slots = 0
        """So many are left to departing requests by those that were to depart and stay for want of room."""
        self._promised_slots = 0
        self._promised_blocks = 0
        self._epochs = [0] * max_num_seqs
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    # -- slots

    @property
    def num_taken(self) -> int:
        """Slots that somebody occupies."""
        return len(self.slots) - len(self._free_slots)

    @property
    def spare_slots(self) -> int:
        """Free slots that are promised to nobody."""
        return len(self._free_slots) - len(self.arriving) - self._promised_slots

    def take_slot(self, request: Request) -> int:
        slot = self._free_slots.pop()
        self._epochs[slot] += 1
        request.slot, request.epoch = slot, self._epochs[slot]
        request.continued = True
        request.urgency, request.hurried = request.rank, not request.patient
        self.slots[slot] = request
        return slot

    def leave_slot(self, request: Request) -> None:
        """Its slot and blocks are free."""
        slot = request.slot
        self.ledger.release(slot)
        self.slots[slot] = None
        self._free_slots.append(slot)
        request.slot, request.held = -1, 0

    # -- promises.  Each returns whether less is promised than before.

    def promise(self, slots: int, blocks: int) -> bool:
        """So many slots and blocks, in all, were promised to requests of other instances."""
        less = slots < self._promised_slots or blocks < self._promised_blocks
        self._promised_slots, self._promised_blocks = slots, blocks
        return less

    def keep_slots(self, wanted: bool) -> bool:
        """Whether anybody wants to depart: an eighth of the slots is left to those."""
        kept = len(self.slots) // 8 if wanted else 0
        less = kept < self.kept_slots
        self.kept_slots = kept
        return less

    # -- blocks of one request

    def blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def spare_tokens(self, request: Request) -> int:
        """Tokens that fit in its blocks beyond those it has."""
        return request.held * self.block_size - len(request.tokens)

    def target(self, request: Request) -> int:
        """Blocks that it should hold now."""
        return self.blocks(min(len(request.tokens) + self.lookahead, request.limit))

    def estimate(self, request: Request) -> int:
        """Blocks that a reservation takes at most, room for its growth included."""
        return self.blocks(
            min(len(request.tokens) + max(self.headroom.tokens, self.lookahead), request.limit)
        )

    # -- whether someone new fits

    def cost(self, request: Request, shared: list[int]) -> tuple[int, int]:
        """Fresh blocks that an admission takes, and blocks that the request may want within the headroom."""
        target = self.target(request)
        grown = self.blocks(min(len(request.tokens) + self.headroom.tokens, request.limit))
        return target - len(shared), max(grown - target, 0)

    def available(self, shared: list[int]) -> int:
        """Blocks that are available to a request that shares these."""
        return self.ledger.available - self.ledger.idle(shared) - self._promised_blocks

    def growth(self) -> int:
        """Blocks that everybody who runs may want within the next H tokens."""
        ahead, size = self.headroom.tokens, self.block_size
        total = 0
        for request in self.slots:
            if request is not None and request.state in STAYING:
                tokens = min(len(request.tokens) + ahead, request.limit)
                total += max(-(-tokens // size) - request.held, 0)
        for key, request in self.arriving.items():
            tokens = min(len(request.tokens) + ahead, request.limit)
            total += max(-(-tokens // size) - len(self.ledger.reserved(key)), 0)
        return total

    def has(self, blocks: int) -> bool:
        """Whether a request that needs so many blocks, its growth included, would fit."""
        if self.spare_slots <= 0:
            return False
        return blocks + self.growth() + self._promised_blocks <= self.ledger.available
