"""Messages in a few words, for timelines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.executor.base import StepBatch
from baton.protocol.codec import unpack_int32, unpack_int64
from baton.protocol.messages.commands import (
    Abort,
    Admit,
    Command,
    Control,
    DropFetch,
    Fetch,
    Grow,
    Pace,
    Preempt,
    Reprioritize,
)
from baton.protocol.messages.handover import Cancel as PeerCancel
from baton.protocol.messages.handover import (
    Handoff,
    PeerMessage,
    Progress,
    Refused,
    Renew,
    Renewed,
    Reserve,
    Reserved,
)
from baton.protocol.messages.handover import Routed as PeerRouted
from baton.protocol.messages.reports import (
    Fetched,
    LayersDone,
    Report,
    StepReport,
    StepRoutes,
    StepsRan,
    WorkerFailed,
)
from baton.protocol.messages.requests import (
    Cancel,
    Failing,
    FromEngine,
    Hello,
    Load,
    Outputs,
    QueryReply,
    Routed,
    Submit,
    ToEngine,
    Welcome,
)

if TYPE_CHECKING:
    from baton.engine.core import EngineCore
    from baton.simulation.parties.instance import EngineProcess


def to_engine(message: ToEngine) -> str:
    match message:
        case Hello():
            return f"Hello({message.gateway})"
        case Submit():
            generated = f", {len(message.generated) // 4} generated" if message.generated else ""
            decoders = ", ".join(target.incarnation for target in message.decoders)
            return (
                f"Submit({message.name} as id {message.id}{generated}"
                f"{', to be handed over to ' if decoders else ''}{decoders})"
            )
        case Cancel():
            return f"Cancel(id {message.id})"
    return f"Query({message.what})"


def number_of(message: ToEngine) -> int | None:
    """The client's number, of a message that names it."""
    return number_in(message.name) if isinstance(message, Submit) else None


def number_in(name: str) -> int | None:
    """The client's number in the name of a request; None for a request of somebody else."""
    return int(name[1:]) if name[:1] == "r" and name[1:].isdigit() else None


def from_engine(message: FromEngine) -> str:
    match message:
        case Welcome():
            return f"Welcome({message.incarnation})"
        case QueryReply():
            return f"QueryReply({message.body if len(message.body) < 3 else '…'})"
        case Load():
            return f"Load({message.running} running, {message.waiting} waiting)"
        case Failing():
            return f"Failing({message.message})"
        case Outputs():
            parts = [
                f"id {number}: token {token}"
                for number, token in zip(unpack_int64(message.ids), unpack_int32(message.tokens), strict=True)
            ]
            parts += [f"id {end.id}: {end.reason} {end.code}".strip() for end in message.finished]
            return "Outputs(" + "; ".join(parts) + ")"
        case Routed():
            runs = [f"id {number}: {run.first} to {run.stop}" for number, run in message.runs]
            return f"Routed({'; '.join(runs)})"


def peer(message: PeerMessage) -> str:
    """Between engines."""
    match message:
        case Renew():
            return f"Renew({message.handovers})"
        case Renewed():
            return f"Renewed(unknown {message.unknown})"
    name = f"{type(message).__name__}({message.id}/{message.attempt}"
    match message:
        case Reserve():
            return f"{name}: {message.name}, {(len(message.prompt) + len(message.generated)) // 4} tokens)"
        case Reserved():
            return f"{name}: {message.num_cached_blocks} blocks cached)"
        case Refused():
            return f"{name}: {message.code}{', will send Credit' * message.credit})"
        case Progress():
            return (
                f"{name}: pages from {message.first} are {list(unpack_int32(message.blocks))}, "
                f"{message.complete} complete, {message.layers} layers of the others)"
            )
        case Handoff():
            return (
                f"{name}: pages from {message.first} are {list(unpack_int32(message.blocks))}, "
                f"tokens {list(unpack_int32(message.tokens))})"
            )
        case PeerRouted():
            return f"{name}: {message.routes.first} to {message.routes.stop})"
        case PeerCancel():
            return f"{name} by {'P' if message.by_p else 'D'}: {message.reason})"
    return f"{name})"


def number_of_peer(message: PeerMessage) -> int | None:
    """The client's number, of a message that names it."""
    return number_in(message.name) if isinstance(message, Reserve) else None


def command(command: Command, core: EngineCore | None = None) -> str:
    if isinstance(command, Control):
        return f"Control({command.action})"
    if isinstance(command, Pace):
        return f"Pace({command.decoding(1, 0):.2g} s, {command.token:.2g} s a token)"
    if isinstance(command, DropFetch):
        return f"DropFetch({command.ids})"
    if isinstance(command, Fetch):
        whole = command.first_layer == 0 and command.num_layers == -1
        layers = "" if whole else f", {command.num_layers} layers from {command.first_layer}"
        return (
            f"Fetch({command.id}, pages {list(unpack_int32(command.pages))} into "
            f"{list(unpack_int32(command.blocks))}{layers})"
        )
    name = ""
    if core is not None and core.ready:
        request = core.scheduler.slots[command.slot]
        name = f"{request.name} " if request is not None else ""
    where = f"{name}slot {command.slot}, epoch {command.epoch}"
    match command:
        case Admit():
            tokens = len(command.tokens) // 4
            return (
                f"Admit({where}, {tokens} tokens of which {command.num_prompt} prompt, "
                f"{command.num_computed} computed, blocks {list(unpack_int32(command.blocks))})"
            )
        case Grow():
            return f"Grow({where}, blocks {list(unpack_int32(command.blocks))})"
        case Reprioritize():
            return f"Reprioritize({where}, priority {command.priority}{', patient' * command.patient})"
        case Preempt():
            return f"Preempt({where})"
        case Abort():
            return f"Abort({where})"


def request_on(engine: EngineProcess, command: Command) -> int | None:
    """The client's number of the request on the command's slot."""
    if isinstance(command, Control | Fetch | DropFetch | Pace):
        return None
    request: Any = engine.core.scheduler.slots[command.slot]
    return None if request is None else number_in(request.name)


def report(report: Report) -> str:
    if isinstance(report, WorkerFailed):
        return f"WorkerFailed({report.message})"
    if isinstance(report, Fetched):
        return f"Fetched({report.id}, rank {report.rank}{', ' * bool(report.error)}{report.error})"
    if isinstance(report, LayersDone):
        return f"LayersDone(slots {list(unpack_int32(report.slots))}, {report.layers} layers)"
    if isinstance(report, StepsRan):
        return f"StepsRan({report.first} to {report.first + len(report.began) - 1})"
    if isinstance(report, StepRoutes):
        runs = [f"slot {slot}/{epoch}: {run.first} to {run.stop}" for slot, epoch, run in report.runs]
        return f"StepRoutes({'; '.join(runs)})"
    if not isinstance(report, StepReport):
        return f"{type(report).__name__}(rank {report.rank})"
    parts = [f"step {report.step}"] if report.step else ["no step"]
    chunks = zip(unpack_int32(report.prefill_slots), unpack_int32(report.prefill_computed), strict=True)
    parts += [f"slot {slot}: {computed} computed" for slot, computed in chunks]
    columns = (unpack_int32(report.slots), unpack_int32(report.epochs), unpack_int32(report.tokens))
    parts += [f"slot {slot}/{epoch}: token {token}" for slot, epoch, token in zip(*columns, strict=True)]
    parts += [f"Closed({end.reason.value}) slot {end.slot}/{end.epoch}" for end in report.closings]
    return "StepReport(" + "; ".join(parts) + ")"


def batch(batch: StepBatch) -> str:
    drafts = [0] * len(batch.slots) if batch.drafts is None else batch.drafts.tolist()
    rows = zip(batch.slots.tolist(), batch.starts.tolist(), batch.counts.tolist(), drafts, strict=True)
    return ", ".join(
        f"slot {slot} at {start}"
        if count == 1
        else f"slot {slot} {start}–{start + count - 1}" + (f" ({drafted} drafts)" if drafted else "")
        for slot, start, count, drafted in rows
    )
