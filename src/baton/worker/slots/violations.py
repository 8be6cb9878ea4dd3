"""Commands that no correct engine sends, and how they are told."""

from __future__ import annotations

import numpy as np

from baton.executor.base import Int32Array
from baton.protocol.codec import MalformedMessage, unpack_int32
from baton.protocol.messages.commands import Abort, Admit, Grow, Preempt, Reprioritize

OfSlot = Admit | Grow | Reprioritize | Preempt | Abort


class ProtocolViolation(RuntimeError):
    """A command that no correct engine sends; the message names the slot's state and the command."""


def unpack(command: Admit | Grow, data: bytes, name: str) -> Int32Array:
    """The numbers of a field.  Raises `ProtocolViolation`."""
    try:
        return np.array(unpack_int32(data), np.int32)
    except MalformedMessage as error:
        raise ProtocolViolation(f"{describe(command)}: {name}: {error}") from None


def describe(command: OfSlot) -> str:
    text = f"{type(command).__name__} of slot {command.slot}, epoch {command.epoch}"
    if isinstance(command, Admit):
        text += f", {len(command.tokens) // 4} tokens, {command.num_prompt} prompt, "
        text += f"{command.num_computed} computed, {len(command.blocks) // 4} blocks"
    elif isinstance(command, Grow):
        text += f", {len(command.blocks) // 4} blocks"
    return text
