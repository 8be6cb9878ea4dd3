"""Request bodies of operators and of instances that join."""

from __future__ import annotations

import msgspec

from baton.gateway.api import fields as f


class UpdateWeightsRequest(msgspec.Struct):
    path: f.Directory | None = None
    """Directory of a checkpoint, on the server."""


class StartProfileRequest(msgspec.Struct):
    directory: f.Directory | None = None
    """Where each rank writes its trace, on the server."""


class JoinRequest(msgspec.Struct, kw_only=True):
    """An instance registers itself, or says that it still lives."""

    incarnation: f.Incarnation | None = None
    endpoint: f.Endpoint | None = None
    """Of its engine's socket for gateways, as this server reaches it: `tcp://HOST:PORT?curve=KEY`,
    `ipc://PATH`."""
    label: f.Label | None = None
    ttl_s: f.Ttl | None = None
    """It counts as lost if it does not register again within so many seconds."""
    model: str | None = None
    """What it serves; compared with the names of what is served here, if it is given."""
    secret: str | None = None
    """What the engine proves itself with (`protocol/rules/proof.py`), of an instance without the cluster's
    secret."""
    salt: str | None = None
    """Of one with it: the engine's secret is made of this and the cluster's, and travels nowhere."""
    process: str | None = None
    """Of the supervisor that registers; the same for each incarnation that it starts.  Another
    process cannot take a name while the instance that has it is there."""
    checkpoint: str | None = None
    """Tells apart what it loads; compared, if both sides know it."""
    dtype: str | None = None
    """In which it computes, or `simulated`; compared, if both sides know it."""
    angles: str | None = None
    """`short` or `long`: of a model with LongRoPE; compared, if both sides have them."""


class InstanceRequest(msgspec.Struct, kw_only=True):
    label: f.Label | None = None
    state: f.InstanceState | None = None
    """`draining` or `active`."""
    move_after_s: f.MoveAfter | None = None
    """With `draining`: what still runs after so many seconds is continued elsewhere."""
