"""The states of a request inside the engine, and what may happen in each.

| state | holds | waits for |
| --- | --- | --- |
| preparing | nothing | a decode instance's promise of room, or that none gives it (`departures.py`) |
| waiting | nothing | admission |
| following | a slot, blocks | blocks that another request computes (`in_flight.py`); then it runs |
| running | a slot, blocks | tokens |
| preempting | a slot, blocks | the closing; then it waits again with all tokens it has |
| aborting | a slot, blocks | the closing; its tokens are no longer forwarded |
| handed | its pages, under a lease | the decode instance's word that it has them (`departures.py`) |
| arriving | reserved blocks | the pages of the instance that prefilled it (`arrivals.py`) |
| gone | nothing | nothing: its one `Finished` has been written, or another instance writes it |

`TRANSITIONS` is the whole truth about what may happen when; an event that is not in the row of the state is
an `IllegalTransition` that names both.  A slot and its blocks are given up only by an event that came from
the worker (the second half of `Event`).
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    PREPARING = "preparing"
    WAITING = "waiting"
    FOLLOWING = "following"
    RUNNING = "running"
    PREEMPTING = "preempting"
    ABORTING = "aborting"
    HANDED = "handed"
    ARRIVING = "arriving"
    GONE = "gone"


class Event(Enum):
    """What can happen to a request.  The values of the closings are those of `CloseReason`."""

    ADMIT = "admit"
    FOLLOW = "follow"
    """It has a slot, and awaits blocks of another request."""
    GIVE_UP = "give_up"
    """It gives the slot back, of which the worker has not heard."""
    PREEMPT = "preempt"
    CANCEL = "cancel"
    FAIL = "fail"
    PREPARE = "prepare"
    """A new request is to be handed over."""
    SETTLE = "settle"
    """It is prepared: to be handed over after its prefill, or to stay."""
    TAKEN = "taken"
    RETURNED = "returned"
    """The decode instance did not take it."""
    LOST = "lost"
    """It is not known whether the decode instance took it."""
    RECOMPUTE = "recompute"
    """It has arrived, and its pages cannot be had."""

    STOP = "stop"
    LENGTH = "length"
    PREEMPTED = "preempted"
    ABORTED = "aborted"
    HANDED_OVER = "handed_over"
    POOLED = "pooled"
    ERROR = "error"


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.PREPARING: {Event.SETTLE: State.WAITING, Event.CANCEL: State.GONE, Event.FAIL: State.GONE},
    State.WAITING: {
        Event.PREPARE: State.PREPARING,
        Event.ADMIT: State.RUNNING,
        Event.FOLLOW: State.FOLLOWING,
        Event.CANCEL: State.GONE,
        Event.FAIL: State.GONE,
    },
    State.FOLLOWING: {
        Event.ADMIT: State.RUNNING,
        Event.GIVE_UP: State.WAITING,
        Event.CANCEL: State.GONE,
        Event.FAIL: State.GONE,
    },
    State.RUNNING: {
        Event.PREEMPT: State.PREEMPTING,
        Event.CANCEL: State.ABORTING,
        Event.FAIL: State.GONE,
        Event.STOP: State.GONE,
        Event.LENGTH: State.GONE,
        Event.POOLED: State.GONE,
        Event.ERROR: State.GONE,
        Event.HANDED_OVER: State.HANDED,
    },
    State.PREEMPTING: {
        Event.CANCEL: State.ABORTING,
        Event.FAIL: State.GONE,
        Event.PREEMPTED: State.WAITING,
        Event.STOP: State.GONE,
        Event.LENGTH: State.GONE,
        Event.POOLED: State.GONE,
        Event.ERROR: State.GONE,
        Event.HANDED_OVER: State.HANDED,
    },
    State.ABORTING: {
        Event.CANCEL: State.ABORTING,
        Event.FAIL: State.GONE,
        Event.PREEMPTED: State.GONE,
        Event.ABORTED: State.GONE,
        Event.STOP: State.GONE,
        Event.LENGTH: State.GONE,
        Event.POOLED: State.GONE,
        Event.ERROR: State.GONE,
        Event.HANDED_OVER: State.GONE,
    },
    State.HANDED: {
        Event.TAKEN: State.GONE,
        Event.RETURNED: State.WAITING,
        Event.LOST: State.GONE,
        Event.CANCEL: State.GONE,
        Event.FAIL: State.GONE,
    },
    State.ARRIVING: {
        Event.ADMIT: State.RUNNING,
        Event.RECOMPUTE: State.WAITING,
        Event.CANCEL: State.GONE,
        Event.FAIL: State.GONE,
    },
    State.GONE: {},
}


class IllegalTransition(RuntimeError):
    """An event that cannot happen in the state; the message names both."""
