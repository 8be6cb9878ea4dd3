"""The shapes of what a server says of its processes and instances (`answers.py`)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=0)]


class MemoryParts(Struct, forbid_unknown_fields=True):
    """In bytes of proportional set size: a page that n processes share counts 1/n for each."""

    pss_bytes: int
    """The sum of the three others."""
    image_bytes: int
    """Weights, where they lie in an image that the instances of a host share."""
    kv_pool_bytes: int
    """What of the pool has been in use."""
    private_bytes: int
    """All else; weights too, if they are in no image."""


class ProcessMemory(MemoryParts, forbid_unknown_fields=True, kw_only=True):
    process: str
    """`gateway`, `fork server`, `helper N`, `NAME engine`, `NAME rank N`."""
    pid: int


class MemoryUse(Struct, forbid_unknown_fields=True):
    available: bool
    """Whether the system says it."""
    processes: list[ProcessMemory]
    elsewhere: list[str]
    """Instances that joined: their processes are not this server's."""
    sum: MemoryParts | None = None
    """Of all these processes."""
    reason: str = ""
    """Why it is not available."""


class Paused(Struct):
    """With what the instance says, or `instances` with what each of several says."""

    status: Literal["paused"]
    mode: Literal["abort", "wait", "keep"]
    aborted: Count


class Resumed(Struct):
    status: Literal["resumed"]


class PauseStatus(Struct, forbid_unknown_fields=True):
    is_paused: bool
    waiting: bool
    """A pause (mode wait) waits for requests to end."""
    mode: Literal["abort", "wait", "keep"] | None
    paused_for_s: float | None
    resumes_in_s: float | None


class InstanceWeights(Struct, forbid_unknown_fields=True):
    """A checkpoint that `/update_weights` put in place; generation 0: those of the start."""

    generation: Count
    name: str
    path: str


class Instance(Struct):
    """How an instance stands, as this server sees it."""

    name: str
    label: Literal["prefill", "decode", "mixed"]
    state: Literal["starting", "ready", "restarting", "failed"]
    draining: bool
    drained: bool
    paused: bool
    joined: bool
    incarnation: str
    failure: str | None
    restarts: Count
    in_flight: Count
    weights: InstanceWeights | None
    """Those that it has; None while it is not ready."""


class Unplaced(Struct, forbid_unknown_fields=True):
    """An instance for which Ray has no node."""

    name: str
    label: Literal["prefill", "decode", "mixed"]
    state: Literal["waiting", "moving"]
    """moving: its node was lost."""
    needs: dict[str, float]
    """What a node must have free, as Ray counts it, such as {"CPU": 8}."""


class Instances(Struct):
    instances: list[Instance]
    unplaced: list[Unplaced]
    weights: InstanceWeights
    """Those that all are to have."""
    checkpoint: str


class Gone(Struct, forbid_unknown_fields=True):
    name: str
    state: Literal["gone"]
