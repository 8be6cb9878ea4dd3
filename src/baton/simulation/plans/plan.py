"""What a seed stands for: the sizes of a cluster, the requests of its clients, and what goes wrong.

Theory.  A plan is drawn from a seed before anything runs (`draw.py`), so that a failing one can be made
smaller by leaving parts of it out.  Delays are drawn while the plan runs, each channel from a generator of
its own that is keyed by (seed, channel), so they change little when a part of the plan is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from baton.gateway.arranging.arranger import Rules
from baton.gateway.cluster.member import Label
from baton.protocol.config import InstanceConfig
from baton.protocol.params.sampling import Sampling, Stopping
from baton.protocol.rules.fair_queue import EVERYBODY, Flow

VOCAB_SIZE = 48
POISON = VOCAB_SIZE - 1
"""A prompt that begins with this token is refused by the executor."""
STEP_TIMEOUT_S = 2.0
RETRY_WAIT_S = 3.0
CLUSTER_DRIFT = 0.04
"""How much the clocks of a cluster may differ in rate; see `draw.py`."""

FaultKind = Literal[
    "crash_engine",
    "crash_rank",
    "crash_gateway",
    "fail_rank",
    "terminate",
    "hang_rank",
    "stall_rank",
    "stall_engine",
    "stall_gateway",
    "stall_link",
    "break_link",
    "slow_link",
    "malformed",
    "stale_report",
    "corrupt_report",
    "corrupt_output",
    "update_weights",
    "new_weights",
    "pause",
    "reset_prefix",
    "query",
    "freeze",
    "break_peer",
    "stall_peer",
    "slow_peer",
    "partition",
    "strange_peer",
    "stall_fetch",
    "slow_fetch",
    "fail_fetch",
    "relabel",
    "drain",
    "lease_edge",
    "strange_link",
    "strange_reader",
    "linger_peer",
    "order_at_one",
    "leave_gateway",
    "kill_relay",
    "kill_link",
    "kill_launcher",
    "cut_line",
    "vanish_line",
    "stall_line",
    "stall_relay",
    "lose_frame",
    "repeat_frames",
    "twin_node",
]
HOST_FAULTS: tuple[FaultKind, ...] = FaultKind.__args__[-10:]  # type: ignore[attr-defined]
"""Those of instances over several hosts."""
FAULT_KINDS: tuple[FaultKind, ...] = FaultKind.__args__[:-12]  # type: ignore[attr-defined]
"""Those that may be mixed; besides those of hosts, two are of the scenario `multi-gateway` alone."""
RARE: frozenset[FaultKind] = frozenset(
    (
        "crash_engine",
        "crash_rank",
        "crash_gateway",
        "fail_rank",
        "terminate",
        "hang_rank",
        "corrupt_report",
        "partition",
        "drain",
    )
)
"""Faults that cost a whole incarnation, or a long time: one of them a run is usually enough."""
GATEWAY_FAULTS: frozenset[FaultKind] = frozenset(
    (
        "crash_gateway",
        "stall_gateway",
        "stall_link",
        "break_link",
        "slow_link",
        "corrupt_output",
        "order_at_one",
        "leave_gateway",
    )
)
"""Those whose target is a gateway or its connection."""
CLUSTER_FAULTS: frozenset[FaultKind] = frozenset(FAULT_KINDS[FAULT_KINDS.index("break_peer") :])
"""Those that need several instances."""
PEER_FAULTS: frozenset[FaultKind] = frozenset(
    ("break_peer", "linger_peer", "stall_peer", "slow_peer", "partition")
)
"""Those between two instances: `instance` and `target`."""
SINGLE_FAULTS: tuple[FaultKind, ...] = tuple(kind for kind in FAULT_KINDS if kind not in CLUSTER_FAULTS)

ClientKind = Literal[
    "cancels",
    "floods",
    "priorities",
    "prefixes",
    "poison",
    "logprobs",
    "slow",
    "huge",
    "alike",
    "pools",
    "routes",
    "constrained",
]
CLIENT_KINDS: tuple[ClientKind, ...] = ClientKind.__args__[:-4]  # type: ignore[attr-defined]
"""Those that may be mixed.  `alike`: all requests of a run are of one length, with one beginning;
`pools`: most want a result of their prompt, and no tokens; `routes`: most want to know the experts that
their tokens went to; `constrained`: most answers are bound to a grammar."""
Burden = Literal["full", "slow", "lagging", "dying"]


@dataclass(frozen=True)
class RequestSpec:
    """One request of one client."""

    number: int
    at: float
    """Virtual time of arrival."""
    gateway: int
    prompt: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    priority: int = 0
    flow: Flow = EVERYBODY
    salt: str = ""
    cancel_after_s: float | None = None
    cancel_after_tokens: int | None = None
    slow_s: float = 0.0
    """The client looks at its answer only so often."""

    @property
    def poisoned(self) -> bool:
        return self.prompt[0] == POISON

    def __str__(self) -> str:
        parts = [f"request {self.number}: {len(self.prompt)} prompt + {self.stopping.max_tokens} tokens"]
        if self.sampling.pooling is not None:
            parts.append(f"pooled: {self.sampling.pooling.kind}")
        if self.sampling.routes_from is not None:
            parts.append(f"with experts from token {self.sampling.routes_from}")
        if self.sampling.constraint is not None:
            parts.append(f"bound to {self.sampling.constraint}")
        if self.priority:
            parts.append(f"priority {self.priority}")
        if self.flow != EVERYBODY:
            parts.append(f"of {self.flow.user!r} of key {self.flow.key!r}, weight {self.flow.weight:g}")
        if self.salt:
            parts.append(f"salt {self.salt!r}")
        if self.cancel_after_s is not None:
            parts.append(f"cancelled after {self.cancel_after_s:.3f} s")
        if self.cancel_after_tokens is not None:
            parts.append(f"cancelled after {self.cancel_after_tokens} tokens")
        return f"at {self.at:.3f} from gateway {self.gateway}, " + ", ".join(parts)


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.  What `target` and `amount` mean depends on the kind (see `faults`)."""

    kind: FaultKind
    at: float
    """Virtual time; for crashes 0, as they count messages."""
    target: int = 0
    amount: float = 0.0
    """Seconds of a stall, the factor of a slow link, or the number of the message at which to crash."""
    instance: int = 0
    """Which instance, by its place in the plan."""

    def __str__(self) -> str:
        where = f"{self.kind} {self.target} of instance {self.instance}"
        if self.kind.startswith("crash"):
            return f"{where} at its message {self.amount:.0f}"
        return f"{where} at {self.at:.3f} ({self.amount:.3f})"


@dataclass(frozen=True)
class Shape:
    """What a scenario allows; see `scenarios`."""

    name: str
    about: str
    num_requests: int = 50
    seconds: float = 2.5
    """Requests and faults come within so many virtual seconds."""
    faults: tuple[FaultKind, ...] = SINGLE_FAULTS
    fault_chance: float = 0.3
    """How likely each kind of fault is switched on."""
    clients: tuple[ClientKind, ...] = CLIENT_KINDS
    client_chance: float = 0.5
    max_ranks: int = 3
    max_gateways: int = 2
    min_gateways: int = 1
    notices: bool = False
    """Engines notice at once that a gateway is gone, as they do; else when there is something to tell it."""
    spare_blocks: tuple[int, int] = (0, 7)
    """Blocks beyond those of the longest possible request."""
    max_model_len: tuple[int, int] = (24, 48)
    clusters: tuple[tuple[Label, ...], ...] = (("mixed",),)
    """Labels of the instances; one of these is drawn."""
    late: float = 0.0
    """The share of instances whose executor is one step late."""
    hosts: tuple[int, ...] = ()
    """Of each instance one of these numbers; empty: one."""
    burdens: tuple[tuple[int, Burden], ...] = ()
    """What is wrong with an instance from the beginning."""
    step_tokens: tuple[int, ...] = (6, 12, 24, 48)
    """Budgets of a step."""
    reserve_timeout_s: tuple[float, ...] = (0.02, 0.1, 0.5)
    lease_s: tuple[float, ...] = (0.2, 0.5, 2.0)
    far: bool = False
    """The instances are never on one host."""
    ttl_s: tuple[float, ...] = ()
    """Instances register with their gateways, and renew that within so long; empty: they need not."""
    always: tuple[FaultKind, ...] = ()
    """Kinds of faults that are always switched on."""
    headroom: tuple[int | None, ...] = (0, 0, 4, None)
    max_waiting: tuple[int, int] | None = None
    """None: only where clients come in floods is it small."""
    credit_wait_s: tuple[float, ...] = (0.05, 0.3, 1.0)
    load_interval_s: tuple[float, ...] = ()
    """Other than usual.  What an engine does not say often tells it late that a gateway is gone."""
    drift: tuple[float, ...] = ()
    """Other than usual.  The clocks are then as far apart as they may be."""
    usual_delay: tuple[float, ...] = (0.0002, 0.001, 0.005)
    slots: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 8)
    flows: tuple[Flow, ...] = ()
    """Each request is of one of these, and all of one flow are of the same size and come in a flood."""
    flooded: bool = False
    """Most of the requests of `flows` come over the first gateway."""
    arranged: bool = False
    """Gateways change labels themselves."""
    bursts: tuple[int, int] | None = None
    """Requests come in bursts of so many, each with one beginning; most are the same to the last token."""


@dataclass(frozen=True)
class RunPlan:
    """Everything about a run that is decided before it."""

    seed: int
    scenario: str
    instances: tuple[InstanceConfig, ...]
    labels: tuple[Label, ...]
    num_gateways: int
    ticket_entries: int
    report_room: int
    """Records that a report ring holds."""
    usual_delay: float
    """Seconds between gateway and engine, and between engines."""
    drift: float
    """How much faster or slower than virtual time the clocks of the processes may run."""
    extreme_clocks: bool
    """Each clock runs as fast or as slow as `drift` allows, none in between."""
    faults_end: float
    requests: tuple[RequestSpec, ...]
    faults: tuple[Fault, ...]
    one_host: bool = True
    """Pages are read from shared memory, and a dead process is known to be dead; else over sockets."""
    page_s: float = 0.0001
    """What copying a page takes."""
    threshold: int | None = None
    """The gateways' `disaggregation_threshold`."""
    kinds: tuple[str, ...] = field(default=())
    """What was switched on."""
    ttl_s: float | None = None
    """Time to live of a registration, by the gateway's clock; None: instances do not register."""
    arranging: Rules | None = None
    """By which gateways change labels; None: they do not."""
    notices: bool = False
    """See `Shape`."""
    delays: int = 0
    """Another number gives the same plan other delays."""

    @property
    def config(self) -> InstanceConfig:
        """Of the first instance; vocabulary, block size and context are those of all."""
        return self.instances[0]

    def __str__(self) -> str:
        config = self.config
        return (
            f"scenario {self.scenario}, seed {self.seed}: {len(self.requests)} requests, {len(self.faults)} "
            f"faults, {self.num_gateways} gateways, blocks of {config.block_size}, "
            f"max_model_len {config.max_model_len}, max_waiting {config.max_waiting}, prefix caching "
            f"{'on' if config.enable_prefix_caching else 'off'}, "
            f"headroom {'adaptive' if config.admission_headroom is None else config.admission_headroom}, "
            + "; ".join(
                f"{one.name}: {one.tensor_parallel_size} ranks, {one.num_blocks} blocks, {one.max_num_seqs} "
                f"slots, {one.max_num_batched_tokens} tokens a step"
                for one in self.instances
            )
            + ("" if len(self.instances) == 1 else self._about_handovers())
        )

    def _about_handovers(self) -> str:
        config = self.config
        return (
            f"; {'one host' if self.one_host else 'several hosts'}, {config.simulated_layers} layers, "
            f"{config.simulated_kv_heads} KV heads, lease {config.lease_s:g} s, max_preparing "
            f"{config.max_preparing}, reserve timeout {config.reserve_timeout_s:g} s, credit wait "
            f"{config.credit_wait_s:g} s, threshold {self.threshold}, {self.page_s:g} s a page"
        )


def simulated_config(**fields: Any) -> InstanceConfig:
    """The configuration of an instance with a simulated executor.  Nothing reads what is said here alone."""
    unread: dict[str, Any] = {
        "model": "",
        "executor": "simulated",
        "model_impl": "auto",
        "device": "cpu",
        "dtype": "bfloat16",
        "quantization_group_size": 128,
        "quantize_head": 16,
        "gpu_memory_utilization": 0.9,
        "attention_backend": "auto",
        "enforce_eager": False,
        "deterministic": False,
        "overlap_steps": False,
        "weight_cache_verify": False,
        "startup_timeout_s": 600.0,
        "transfer": "auto",
        "transfer_checksums": False,
        "transfer_encryption": True,
        "record_max_bytes": 1 << 30,
        "log_level": "info",
        "log_format": "text",
        "note_steps": True,
    }
    return InstanceConfig(**{**unread, **fields})
