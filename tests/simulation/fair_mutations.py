"""Deliberate defects in how users share an engine; see `mutations.py`."""

from __future__ import annotations

from baton.engine.intake import Intake
from baton.engine.request import Outbox
from baton.engine.scheduling.waiting import WaitingLine
from baton.gateway.cluster.request import EngineRequest
from baton.protocol.rules.fair_queue import EVERYBODY, FairQueue, Flow, Share
from tests.simulation.mutations import Patch, mutation


@mutation("newcomers are first come first served, whosever they are", "fair", scenario="fair")
def first_come(patch: Patch) -> None:
    push = FairQueue.push
    patch.setattr(
        FairQueue, "push", lambda self, item, number, rank, flow: push(self, item, number, rank, EVERYBODY)
    )


@mutation("what is generated is not charged", "fair", scenario="fair")
def answers_are_free(patch: Patch) -> None:
    settle = WaitingLine.settle

    def wrong(self, running, *, charge, alone=False):
        settle(self, running, charge=False, alone=alone)

    patch.setattr(WaitingLine, "settle", wrong)


@mutation("what is computed of a prompt is not charged", "fair", scenario="fair")
def prompts_are_free(patch: Patch) -> None:
    take = FairQueue.take
    patch.setattr(FairQueue, "take", lambda self, cost: take(self, 0))


@mutation("weights have no effect", "fair", scenario="fair")
def weightless(patch: Patch) -> None:
    child = Share.child
    patch.setattr(Share, "child", lambda self, name, weight: child(self, name, 1.0))


@mutation("each user has a share of its own beside the keys", "fair", scenario="fair")
def flat(patch: Patch) -> None:
    share = FairQueue.share

    def wrong(self, flow):
        return share(self, Flow(f"{flow.key}/{flow.user}", "", flow.weight))

    patch.setattr(FairQueue, "share", wrong)


@mutation("who comes late may catch up with what the others were served before", "fair", scenario="fair")
def saved_up(patch: Patch) -> None:
    init = Share.__init__

    def wrong(self, name, parent, weight):
        init(self, name, parent, weight)
        self.tag = 0.0

    def forgetful(self, rank):
        clocks, share = [], self
        while share.parent is not None:
            clocks.append((share.parent, share.parent.clock))
            share.parent.clock, share = 0.0, share.parent
        wait(self, rank)
        for parent, clock in clocks:
            parent.clock = clock

    wait = Share.wait
    patch.setattr(Share, "__init__", wrong)
    patch.setattr(Share, "wait", forgetful)


@mutation("the gateway does not say whose a request is", "fair", scenario="fair")
def nobodys(patch: Patch) -> None:
    submit = EngineRequest.submit

    def wrong(self, decoders=()):
        flow, self.flow = self.flow, EVERYBODY
        try:
            return submit(self, decoders)
        finally:
            self.flow = flow

    patch.setattr(EngineRequest, "submit", wrong)


@mutation("who leaves and comes again is forgiven what it was served", "fair", scenario="returns", start=102)
def forgiven(patch: Patch) -> None:
    """Its virtual time goes back to that of the others."""
    wait = Share.wait

    def wrong(self, rank):
        share = self
        while share.parent is not None:
            if not share.waiting:
                share.tag = 0.0
            share = share.parent
        wait(self, rank)

    patch.setattr(Share, "wait", wrong)


@mutation("the users of a key are served in the order of their coming", "fair", scenario="fair")
def users_ignored(patch: Patch) -> None:
    push = FairQueue.push

    def wrong(self, item, number, rank, flow):
        push(self, item, number, rank, Flow(flow.key, "", flow.weight))

    patch.setattr(FairQueue, "push", wrong)


@mutation("who makes place in a full queue is told nothing", "liveness", "end", "retired", scenario="refused")
def displaced_untold(patch: Patch) -> None:
    make_place = Intake._make_place

    def wrong(self, submit, flow, now):
        self._refuse = lambda *_: None
        try:
            make_place(self, submit, flow, now)
        finally:
            del self._refuse

    patch.setattr(Intake, "_make_place", wrong)


@mutation("the gateways over which a user asks are one", "fair", scenario="gateway-floods")
def gateways_are_one(patch: Patch) -> None:
    def wrong(self, name):
        self.name = name

    patch.setattr(Outbox, "call", wrong)
