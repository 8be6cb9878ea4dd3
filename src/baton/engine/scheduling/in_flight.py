"""Blocks of prompts that are being computed, and requests that wait for them instead of computing the same.

Theory.  The prefix index knows what is computed.  This module knows what is about to be: from the moment
that a request has its blocks until a report says that they are computed, the request is the *filler* of the
full blocks of its tokens.  A request that comes meanwhile, and whose tokens go on as a filler's do, takes the
filler's blocks into its own table (one more owner each, `Ledger.claim`) and *follows*: it has a slot, and
blocks for what is its own, and the worker is not told of it.  When the last block that it shares is computed,
the scheduler sends its `Admit`, with all of them as computed.  So the worker never sees a block that is not
final, and the command log says nothing of who follows whom.

* *Who may follow.*  A key names all tokens before and the salt (`prefix.py`), so nothing is shared that the
  prefix index would not share.  KV on top of another gateway's word (`Request.origin`) is for requests of
  that gateway.  A request that wants log-probabilities of its prompt computes all of it, and follows nobody.
* *When it is worth while.*  To wait costs a round trip to the worker.  So a request follows only if what
  others compute for it is a quarter of what it would have to compute, or `WORTH_TOKENS`.
* *When the filler goes* (its slot is closed or given up, whatever the reason) before it has filled a block
  that is shared, who follows it gives slot and blocks up and waits again, ahead of newcomers.  What was
  computed is in the prefix index, so the first of them goes on where the filler stopped, and the others
  follow that one.  A filler that is being closed is waited for until the worker has closed it: what it
  computes until then counts.
* *No deadlock.*  A follower can be a filler itself, of its own blocks, and be followed.  But it follows only
  requests that got their slots before it, so nobody waits in a circle, and the first of a chain is a request
  that the worker computes: it has all blocks that its prompt needs, and prompts are computed in the order of
  admission, so it is through with the shared part before the follower would be, whatever their priorities.
  Where the worker chooses whose prompt comes first (`in_order` False), nobody follows a request that it may
  choose later: one without tokens if it has some itself, or one with more than twice as much to compute.
* *Priority is lent.*  A request of high priority that waits for one of low priority would wait for all that
  goes before the latter.  So a filler is as urgent (`Request.urgency`, `hurried`) as the most urgent of those
  that follow it, and of those that follow these: the worker computes its prompt by that priority, and the
  scheduler preempts it only after them.  What it was lent ends when the last block that they share is
  computed, or when they leave.  The flow that pays for the tokens stays the filler's.
* *No wait without an end.*  A filler progresses, or is closed: both are what `EngineCore` times.

Each operation costs O(1) a block of the request, on admission and when the block is reported, and O(1) a
follower and report, or departure of a follower.  Tokens and rows of a step cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.request import Request
from baton.engine.scheduling.ledger import Ledger
from baton.engine.states import State

WORTH_TOKENS = 256
"""So many tokens are worth waiting for, however many are left besides."""


class Shared:
    """What a request can have of its leading blocks."""

    __slots__ = ("behind", "blocks", "final", "origin")

    def __init__(self, blocks: list[int], origin: str) -> None:
        self.blocks = blocks
        self.final = len(blocks)
        """Leading ones that are computed."""
        self.origin = origin
        self.behind: dict[int, int] = {}
        """Of each filler's slot, the index of the last block that is awaited of it."""


class InFlight:
    """The fillers of one engine and those that follow them, by slot.

    `slots`: who occupies each one, kept by the scheduler.  `in_order`: the worker computes prompts in the
    order in which it was given them."""

    def __init__(
        self, ledger: Ledger, block_size: int, slots: Sequence[Request | None], *, in_order: bool = True
    ) -> None:
        self._in_order = in_order
        self._slots = slots
        self._changed: dict[int, None] = {}
        """Slots of requests that became more urgent, or less, since `take_lent`."""
        self._ledger = ledger
        self._block_size = block_size
        self._fillers: dict[bytes, Request] = {}
        """By key, who computes the block."""
        self._followers: dict[int, dict[int, int]] = {}
        """Filler's slot → follower's slot → index of the last block that it awaits."""
        self._behind: dict[int, set[int]] = {}
        """Follower's slot → slots of those it awaits something of."""

    def find(self, request: Request, shared: Shared, limit: int) -> None:
        """Appends to what is computed the blocks that others compute, up to `limit` in all, if they are worth
        waiting for.  The request's keys are known up to there."""
        fillers, keys, gateway = self._fillers, request.keys, request.gateway.name or ""
        blocks, behind = shared.blocks, shared.behind
        left = len(request.tokens) - shared.final * self._block_size
        for index in range(shared.final, limit):
            filler = fillers.get(keys[index])
            if filler is None or (filler.origin and filler.origin != gateway):
                break
            if not self._comes_before(filler, request, left):
                break
            blocks.append(self._ledger.table(filler.slot)[index])
            behind[filler.slot] = index
            shared.origin = shared.origin or filler.origin
        awaited = (len(blocks) - shared.final) * self._block_size
        if awaited < min(left / 4, WORTH_TOKENS):
            del blocks[shared.final :]
            behind.clear()

    def fill(self, request: Request, first: int, full: int) -> None:
        """A request has its slot and blocks, and computes those from index `first` to before `full`, up to
        which its keys are known."""
        request.fills, request.fills_to = first, full
        fillers = self._fillers
        for key in request.keys[first:full]:
            filler = fillers.setdefault(key, request)
            if filler is not request and not self._comes_before(filler, request, request.uncomputed):
                fillers[key] = request

    def follow(self, request: Request, behind: dict[int, int]) -> None:
        """A request with a slot awaits these."""
        self._behind[request.slot] = set(behind)
        for filler, last in behind.items():
            self._followers.setdefault(filler, {})[request.slot] = last
            self._lend(filler, request)

    def computed(self, request: Request, full: int) -> list[int]:
        """A filler's blocks before index `full` are computed.  Returns the slots of those that await nothing
        more."""
        fillers = self._fillers
        full = min(full, request.fills_to)
        for index in range(request.fills, full):
            key = request.keys[index]
            if fillers.get(key) is request:
                del fillers[key]
        request.fills = max(request.fills, full)
        followers = self._followers.get(request.slot)
        if not followers:
            return []
        ready = []
        served = [slot for slot, last in followers.items() if last < full]
        for slot in served:
            self._let_go(followers, request.slot, slot)
            if not self._behind[slot]:
                del self._behind[slot]
                ready.append(slot)
        if served:
            self._take_back(request.slot)
        return ready

    def leave(self, request: Request) -> list[int]:
        """A request is about to lose its slot.  Returns the slots of those that await blocks which nobody
        computes now; they are to leave too."""
        fillers, slot = self._fillers, request.slot
        for key in request.keys[request.fills : request.fills_to]:
            if fillers.get(key) is request:
                del fillers[key]
        request.fills = request.fills_to = 0
        for filler in self._behind.pop(slot, ()):
            self._followers[filler].pop(slot)
            if not self._followers[filler]:
                del self._followers[filler]
            self._take_back(filler)
        orphans = list(self._followers.pop(slot, ()))
        for orphan in orphans:
            self._behind[orphan].discard(slot)
        return orphans

    def forget(self) -> None:
        """Nobody new follows those that compute now."""
        self._fillers.clear()

    @property
    def has_lent(self) -> bool:
        """Whether `take_lent` may return any."""
        return bool(self._changed)

    def take_lent(self) -> list[Request]:
        """Those that run, and whose urgency has changed since the last call."""
        if not self._changed:
            return []
        changed = [self._slots[slot] for slot in self._changed]
        self._changed.clear()
        return [request for request in changed if request is not None and request.state is State.RUNNING]

    def _comes_before(self, filler: Request, request: Request, left: int) -> bool:
        """Whether the worker computes what the filler has left before so many tokens of this one."""
        if self._in_order:
            return True
        as_soon = filler.num_generated > 0 or request.num_generated == 0
        return as_soon and filler.uncomputed <= 2 * left

    def _lend(self, slot: int, follower: Request) -> None:
        """A filler, and those that it waits for itself, are at least as urgent as its follower."""
        lent = [slot]
        while lent:
            slot = lent.pop()
            filler = self._slots[slot]
            if filler is None or (filler.urgency <= follower.urgency and filler.hurried >= follower.hurried):
                continue
            filler.urgency = min(filler.urgency, follower.urgency)
            filler.hurried = filler.hurried or follower.hurried
            self._changed[slot] = None
            lent += self._behind.get(slot, ())

    def _take_back(self, slot: int) -> None:
        """Some do not wait for this filler any more: it is as urgent as itself and those that are left, and
        so are those that it waits for itself."""
        owed = [slot]
        while owed:
            slot = owed.pop()
            filler = self._slots[slot]
            if filler is None:
                continue
            urgency, hurried = filler.rank, not filler.patient
            for one in self._followers.get(slot, ()):
                follower = self._slots[one]
                if follower is not None:
                    urgency, hurried = min(urgency, follower.urgency), hurried or follower.hurried
            if (urgency, hurried) != (filler.urgency, filler.hurried):
                filler.urgency, filler.hurried = urgency, hurried
                self._changed[slot] = None
                owed += self._behind.get(slot, ())

    def _let_go(self, followers: dict[int, int], filler: int, follower: int) -> None:
        del followers[follower]
        if not followers:
            del self._followers[filler]
        self._behind[follower].discard(filler)
