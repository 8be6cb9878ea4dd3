"""Copies of state machines, and their content as a value that can be compared: what the explorer is made of.

`clone` copies everything that can change and shares everything that cannot; two names of one object stay two
names of one object.  `freeze` gives nested tuples that are equal exactly if the objects are, whatever their
addresses; they are hashable, and no two different states ever look the same, as they could with a digest.

Both go through all attributes of all objects of Baton by themselves, so a new attribute takes part at once.
What must not count (statistics, wall time) is named in `IGNORED`.  An object of a kind that is not known here
is a `TypeError`: nothing is skipped in silence.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeVar

import msgspec
import numpy as np

from baton.transfer.base import PoolView

T = TypeVar("T")

IGNORED = {
    "Continued": None,
    "Counters": None,
    "DecodeSet": {"room", "tables"},
    "Alignment": None,
    "EngineRequest": {"lost_at", "trail"},
    "Member": {"loads"},
    "Trails": None,
    "EngineCore": {"config", "counters", "workers", "_started", "_reports"},
    "Outboxes": {"redirections"},
    "StepReader": {"_counters", "_rows", "_rows_of"},
    "Turnover": None,
    "RequestTable": {"num_handed_over"},
    "SimulatedExecutor": {"_cost", "_pool", "_positions", "_weights", "info", "virtual_seconds"},
    "TokenPool": {"view"},
}
"""By class: attributes that influence nothing that follows; None: all of them."""

_ATOMS = (
    *(int, float, str, bytes, bool, type(None), np.generic),
    *(type, FunctionType, BuiltinFunctionType, BaseException),
)
_MAPPINGS = (dict, OrderedDict, Counter)
_attributes_of: dict[type, tuple[str, ...]] = {}


def clone(thing: T, memo: dict[int, Any] | None = None) -> T:
    """A copy that can go its own way.  Raises `TypeError` for what cannot be copied."""
    result: T = _clone(thing, {} if memo is None else memo)
    return result


def _clone(thing: Any, memo: dict[int, Any]) -> Any:
    kind = type(thing)
    if isinstance(thing, (*_ATOMS, Enum, msgspec.Struct, frozenset, PoolView)):
        return thing  # (a view of the pool's memory is for other processes, and there are none)
    known = memo.get(id(thing))
    if known is not None:
        return known
    copy: Any
    if kind is list or kind is deque:
        copy = memo[id(thing)] = deque(maxlen=thing.maxlen) if kind is deque else []
        copy.extend(_clone(item, memo) for item in thing)
        return copy
    if kind in _MAPPINGS:
        copy = memo[id(thing)] = kind()
        for key, value in thing.items():
            copy[_clone(key, memo)] = _clone(value, memo)
        return copy
    if kind is tuple:
        return tuple(_clone(item, memo) for item in thing)
    if isinstance(thing, tuple):  # a named one
        return kind(*(_clone(item, memo) for item in thing))
    if kind is set:
        copy = memo[id(thing)] = {_clone(item, memo) for item in thing}
        return copy
    if kind is array or kind is bytearray:
        copy = memo[id(thing)] = thing[:]
        return copy
    if kind is np.ndarray:
        copy = memo[id(thing)] = _clone_array(thing, memo)
        return copy
    if kind is MethodType:
        return MethodType(thing.__func__, _clone(thing.__self__, memo))
    if kind is itertools.count:
        copy = memo[id(thing)] = itertools.count(_next_of(thing))
        return copy
    _require_known(kind)
    copy = memo[id(thing)] = object.__new__(kind)
    for name in _attributes(thing):
        object.__setattr__(copy, name, _clone(getattr(thing, name), memo))
    return copy


def _clone_array(thing: np.ndarray[Any, Any], memo: dict[int, Any]) -> np.ndarray[Any, Any]:
    """A view of an array becomes a view of that one's copy: what is written to one is read from both."""
    whole = thing.base
    if type(whole) is not np.ndarray or not whole.flags.c_contiguous:
        return thing.copy()
    offset = thing.ctypes.data - whole.ctypes.data
    return np.ndarray(thing.shape, thing.dtype, _clone(whole, memo), offset, thing.strides)


def freeze(thing: Any) -> Hashable:
    """The content of an object.  Raises `TypeError` for what has no content that could be compared."""
    return _freeze(thing, {})


def _freeze(thing: Any, seen: dict[int, int]) -> Hashable:
    kind = type(thing)
    if isinstance(thing, _ATOMS):
        atom: Hashable = f"{kind.__name__}: {thing}" if isinstance(thing, BaseException) else thing
        return atom
    if isinstance(thing, Enum):
        return str(thing)
    if isinstance(thing, msgspec.Struct):
        return kind.__name__, msgspec.msgpack.encode(thing)
    if isinstance(thing, tuple):
        return tuple([_freeze(item, seen) for item in thing])
    if kind is frozenset:
        return frozenset(thing)
    if kind is MethodType:
        return thing.__func__.__qualname__, _freeze(thing.__self__, seen)
    number = seen.get(id(thing))
    if number is not None:
        return "again", number
    seen[id(thing)] = len(seen)
    if kind is list or kind is deque:
        return tuple([_freeze(item, seen) for item in thing])
    if kind in _MAPPINGS:
        # In order: the order of a dict may decide what happens next.
        return tuple([(_freeze(key, seen), _freeze(value, seen)) for key, value in thing.items()])
    if kind is set:
        return frozenset(thing)
    if kind is np.ndarray:
        return thing.shape, thing.tobytes()
    if kind is array or kind is bytearray:
        return bytes(thing)
    if kind is itertools.count:
        return _next_of(thing)
    _require_known(kind)
    ignored = IGNORED.get(kind.__name__, ())
    if ignored is None:
        return kind.__name__
    return (
        kind.__name__,
        *[_freeze(getattr(thing, name), seen) for name in _attributes(thing) if name not in ignored],
    )


def _attributes(thing: Any) -> list[str]:
    """The names of what it has, always in the same order."""
    kind = type(thing)
    slots = _attributes_of.get(kind)
    if slots is None:
        named = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
        slots = _attributes_of[kind] = tuple(name for name in named if name != "__weakref__")
    names = [name for name in slots if hasattr(thing, name)]
    return [*names, *sorted(thing.__dict__)] if hasattr(thing, "__dict__") else names


def _next_of(count: Any) -> int:
    """What an `itertools.count` gives next, without taking it."""
    return int(repr(count)[len("count(") : -1])


def _require_known(kind: type) -> None:
    if not kind.__module__.startswith("baton."):
        raise TypeError(f"the explorer does not know how to copy a {kind.__module__}.{kind.__qualname__}")
