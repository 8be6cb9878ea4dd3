"""The shapes of what a server says of its processes and instances (`answers.py`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

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


class Totals(Struct, forbid_unknown_fields=True):
    """Since the start of the server."""

    prompt_tokens: Count
    generated_tokens: Count
    ended: Count
    """Sequences."""
    handed_over: Count
    continued: Count


class Overview(Struct, forbid_unknown_fields=True):
    """The server as it stands, by the gateway's books."""

    now: float
    """Seconds, on the clock of `requests`."""
    model: str
    version: str
    state: str
    paused: bool
    leaving: bool
    """It will stop soon."""
    totals: Totals
    open: Count
    """Requests."""
    instances: list[dict[str, Any]]
    """A part of what /cluster/instances says of each."""
    requests: list[tuple[str, float, int, int, str, str]]
    """Id, when it arrived, prompt tokens, generated tokens, how it stands (held, waiting, prefill, decode),
    and the instance that has it; 10,000 at most, those that came first."""


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
    decoding: Count
    """Of these, sequences whose first token came."""
    queued_tokens: Count
    """Tokens of prompts that wait there to be computed."""
    reported_ago_s: float | None
    """Since it said last how busy it is, or that it can serve; null while it is not ready.  While nothing
    changes it says nothing."""
    weights: InstanceWeights | None
    """Those that it has; None while it is not ready."""


class Unplaced(Struct, forbid_unknown_fields=True):
    """An instance for which Ray has no node, or of which it says nothing."""

    name: str
    label: Literal["prefill", "decode", "mixed"]
    state: Literal["waiting", "moving", "unknown"]
    """moving: its node was lost. unknown: Ray does not answer; the instance may well run."""
    needs: dict[str, float]
    """What a node must have free, as Ray counts it, such as {"CPU": 8}."""
    hosts: int
    """How many such nodes."""


class Pressure(Struct, forbid_unknown_fields=True):
    """1: as much as can be done within --slo."""

    prefill: float
    decode: float


class ArrangingChange(Struct, forbid_unknown_fields=True):
    """That an instance got another label, one was added or one is drained."""

    ago_s: float
    what: Literal["label", "add", "drain"]
    name: str
    from_: Literal["prefill", "decode", "mixed"] = field(name="from")
    to: Literal["prefill", "decode", "mixed"]
    why: str


class Arranging(Struct, forbid_unknown_fields=True):
    """What --auto-labels and --autoscale have decided."""

    slo: str
    labels: bool
    bounds: list[Count] | None
    pressure: Pressure | None
    waits_for: str
    """Why nothing is decided now; empty: nothing need be."""
    changes: list[ArrangingChange]
    """The last ones, newest first."""


class ClusterTraffic(Struct, forbid_unknown_fields=True):
    """Counted since this server started."""

    requests: Count
    prompt_tokens: Count
    """To be computed: those in prefix caches are left out."""
    first: Count
    """First tokens."""
    late: Count
    """Of these, later than --slo says."""
    ended: Count
    """Answers of several tokens."""
    slow: Count
    """Of these, slower than --slo says."""


class Instances(Struct):
    instances: list[Instance]
    unplaced: list[Unplaced]
    arranging: Arranging | None
    """None: without --auto-labels and --autoscale."""
    slo: str
    """What is promised, as --slo says it; empty: nothing."""
    traffic: ClusterTraffic
    weights: InstanceWeights
    """Those that all are to have."""
    checkpoint: str


class Gone(Struct, forbid_unknown_fields=True):
    name: str
    state: Literal["gone"]
