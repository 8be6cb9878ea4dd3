"""What binds the answers to a request, described where its body is read: nobody else needs the schemas.

A schema may be megabytes of small values, and to decode or encode it takes milliseconds.  So the gateway's
event loop gets a description as bytes of a bounded length (`MAX_DESCRIPTION_BYTES`), or a refusal, and passes
the bytes on to the helper that tries it (`helpers/grammars.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.gateway.api.schemas import ChatRequest, SamplingFields
from baton.gateway.api.tools import Tools
from baton.gateway.errors import BadRequest
from baton.gateway.parsing.choice import Formats
from baton.gateway.reading.constraints.calling import structure_of
from baton.gateway.reading.constraints.functions import Function, functions_of, loosened
from baton.gateway.reading.constraints.structured import Asked, asked_by, described
from baton.gateway.reading.failure import Failure


class Binding(msgspec.Struct, array_like=True, frozen=True):
    """One description of the answers."""

    asked: bytes = b""
    """An encoded `Asked`; none: the answers are free."""
    field: str = ""
    """The one that asked for it, in a chat's names."""
    failure: Failure | None = None
    """Why there is none."""

    @classmethod
    def of(cls, asked: Asked | None) -> Binding:
        return cls() if asked is None else cls(msgspec.msgpack.encode(asked), asked.field)


def text_bindings(request: SamplingFields) -> list[Binding]:
    """What binds all of the text."""
    try:
        asked = asked_by(request)
    except BadRequest as error:
        return [Binding(failure=Failure.of(error))]
    return [] if asked is None else [Binding.of(asked)]


def chat_bindings(request: ChatRequest, formats: Formats, tools: Tools, *, thinking: bool) -> list[Binding]:
    """Calls that are demanded, schemas of strict tools, the form of the answer.  The first that can be kept
    binds the answers; the last one's failure is the request's.

    There are two where what some tools' schemas ask need not be kept: with it, and without.
    """
    functions = functions_of(tools)
    loose = loosened(functions, tools)
    choices = [functions] if loose == functions else [functions, loose]
    found = [_binding(request, formats, tools, these, thinking) for these in choices]
    return [] if found == [Binding()] else found


def _binding(
    request: ChatRequest, formats: Formats, tools: Tools, functions: Sequence[Function], thinking: bool
) -> Binding:
    try:
        asked = asked_by(request)
        structure = structure_of(
            formats,
            tools,
            functions,
            parallel=request.parallel_tool_calls is not False,
            thinking=thinking,
            content=None if asked is None else asked.structure.content,
            budget=_budget(request, formats),
        )
        if structure is None:
            return Binding()
        return Binding.of(described(structure, "tools" if asked is None else asked.field))
    except BadRequest as error:
        return Binding(failure=Failure.of(error))


def _budget(request: ChatRequest, formats: Formats) -> int | None:
    """Tokens of reasoning at most.  Raises `BadRequest`."""
    budget = request.thinking_token_budget
    if budget is None or budget < 0:
        return None
    if not formats.thinks:
        raise BadRequest(
            "thinking_token_budget: how this model writes reasoning is not known; start the server with "
            "--reasoning-parser",
            param="thinking_token_budget",
            code="unsupported_parameter",
        )
    return budget
