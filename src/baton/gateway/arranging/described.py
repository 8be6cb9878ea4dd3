"""What a gateway shows of its cluster (`GET /cluster/instances`), read back into what is decided from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from baton.gateway.arranging.measured import InstanceView, Label, Snapshot, Traffic
from baton.gateway.arranging.slo import Slo, read_slo


class _Instance(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    label: Label
    state: str
    draining: bool
    in_flight: int
    decoding: int
    queued_tokens: int
    reported_ago_s: float | None
    max_num_seqs: int | None
    num_blocks: int | None
    running: int | None
    waiting: int | None
    free_blocks: int | None
    prefill_tokens_per_s: float | None
    decode_step_s: float | None


class _Counters(msgspec.Struct, frozen=True):
    requests: int
    prompt_tokens: int
    first: int
    late: int
    ended: int
    slow: int


class _Arranging(msgspec.Struct, frozen=True):
    labels: bool
    bounds: list[int] | None


class _Shown(msgspec.Struct, frozen=True):
    instances: list[_Instance]
    traffic: _Counters
    slo: str
    arranging: _Arranging | None


class Described(msgspec.Struct, frozen=True):
    """A cluster as one gateway shows it."""

    seen: Snapshot
    slo: Slo
    """What the gateway counts late and slow requests by."""
    changes_labels: bool
    """The gateway, or another one of the cluster, changes labels itself."""
    changes_number: bool


def read_described(body: Mapping[str, Any], now: float) -> Described:
    """`now`: when it was shown, on the reader's clock.  Raises `ValueError` for what no gateway shows."""
    shown = msgspec.convert(body, _Shown)
    instances = tuple(_view(one) for one in shown.instances)
    traffic = Traffic(*msgspec.structs.astuple(shown.traffic))
    arranging = shown.arranging
    return Described(
        Snapshot(now, instances, traffic),
        read_slo(shown.slo) if shown.slo else Slo(),
        arranging is not None and arranging.labels,
        arranging is not None and arranging.bounds is not None,
    )


def _view(one: _Instance) -> InstanceView:
    ready = one.state == "ready"
    num_blocks = one.num_blocks or 1
    return InstanceView(
        name=one.name,
        label=one.label,
        serves=ready and not one.draining,
        ready=ready,
        age_s=(one.reported_ago_s or 0.0) if one.in_flight else 0.0,
        queued_tokens=one.queued_tokens,
        decoding=one.decoding,
        reported=(one.running or 0) + (one.waiting or 0),
        in_flight=one.in_flight,
        slots=one.max_num_seqs or 1,
        num_blocks=num_blocks,
        free_blocks=num_blocks if one.free_blocks is None else one.free_blocks,
        prefill_tokens_per_s=one.prefill_tokens_per_s or 0.0,
        decode_step_s=one.decode_step_s or 0.0,
        removable=True,
    )
