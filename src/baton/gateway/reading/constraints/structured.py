"""What a request says of the form of its answer: one description, whichever of the fields says it.

`response_format` (OpenAI), `structured_outputs` (vLLM) and the older `guided_…`; at most one of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from baton.gateway.api.formats import ResponseFormat
from baton.gateway.api.schemas import SamplingFields
from baton.gateway.errors import BadRequest
from baton.gateway.reading.constraints.structural import structural_tag
from baton.grammar.description import (
    Choice,
    Content,
    Grammar,
    GrammarError,
    Json,
    Regex,
    Structure,
    Tag,
    Tagged,
)
from baton.grammar.limits import MAX_DESCRIPTION_BYTES
from baton.protocol.params.structured_outputs import StructuredOutputs, asks_nothing

_FARTHEST = int(sys.float_info.max)
_OBJECT = Json({"type": "object"})


FIELDS = (
    "response_format",
    "structured_outputs",
    "structural_tag",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_json_object",
)
"""Of a body: those that say what its answers must be."""


class Asked(msgspec.Struct, frozen=True):
    """A description, and which field asked for it."""

    structure: Structure
    field: str


class _Frame(msgspec.Struct):
    begin: str
    end: str
    schema: Any = True


class _Tags(msgspec.Struct):
    """vLLM's `structural_tag`, its older form."""

    structures: list[_Frame]
    triggers: list[str]
    type: str = "structural_tag"


def asked_by(request: SamplingFields) -> Asked | None:
    """None: the answer is free.  Raises `BadRequest`."""
    fields = [name for name in FIELDS if not asks_nothing(getattr(request, name))]
    if request.response_format is not None and request.response_format.type == "text":
        _check_text(request.response_format)
        fields.remove("response_format")
    if not fields:
        return None
    if len(fields) > 1:
        raise BadRequest(f"{fields[1]}: not together with {fields[0]}; give one of them", param=fields[1])
    field = fields[0]
    if request.response_format is not None and field == "response_format":
        return _response_format(request.response_format)
    if request.structured_outputs is not None and field == "structured_outputs":
        return asked_for(request.structured_outputs)
    kind = field.removeprefix("guided_")
    return asked_for(StructuredOutputs(**{kind: getattr(request, field)}), {kind: field})


def asked_for(wanted: StructuredOutputs, names: Mapping[str, str] | None = None) -> Asked:
    """`names`: what the fields are called where they do not stand in `structured_outputs`.  Raises
    `BadRequest`."""
    names = names or {}
    kinds = wanted.kinds
    problem = wanted.problem()
    if problem is not None:
        field = names.get(kinds[0], "structured_outputs") if kinds else "structured_outputs"
        raise BadRequest(f"{field}: {problem}", param=field)
    kind = kinds[0]
    field = names.get(kind, f"structured_outputs.{kind}")
    value = getattr(wanted, kind)
    spaces = 0 if wanted.disable_any_whitespace else None
    content: Content
    match kind:
        case "json":
            content = Json(_parsed(field, value), spaces)
        case "json_object":
            content = Json(_OBJECT.schema, spaces)
        case "regex":
            content = Regex(value)
        case "choice":
            content = Choice(list(value))
        case "grammar":
            content = Grammar(value)
        case _:
            content = _tags(field, _parsed(field, value))
    return _asked(content, field)


def _check_text(wanted: ResponseFormat) -> None:
    """Raises `BadRequest` for a schema that `text` would leave out."""
    for name in ("schema", "json_schema"):
        if getattr(wanted, name) is not None:
            raise BadRequest(
                f"response_format.{name}: goes with type json_schema, not with text",
                param=f"response_format.{name}",
            )


def _response_format(wanted: ResponseFormat) -> Asked:
    match wanted.type:
        case "json_object":
            if wanted.json_schema is not None:
                raise BadRequest(
                    "response_format.json_schema: goes with type json_schema, not with json_object",
                    param="response_format.json_schema",
                )
            return _asked(_object(wanted.schema), "response_format")
        case "json_schema":
            field = "response_format.json_schema"
            if wanted.schema is not None:
                raise BadRequest(
                    "response_format.schema: goes into response_format.json_schema, with its name",
                    param="response_format.schema",
                )
            if wanted.json_schema is None:
                raise BadRequest(f"{field}: it is missing; give an object with name and schema", param=field)
            field += ".schema"
            if wanted.json_schema.schema is None:
                raise BadRequest(f"{field}: it is missing; give a JSON schema", param=field)
            return _asked(Json(_parsed(field, wanted.json_schema.schema)), field)
        case "structural_tag":
            tags = {"structures": wanted.structures, "triggers": wanted.triggers}
            if wanted.format is not None:
                tags = {"format": wanted.format}
            return _asked(_tags("response_format", tags), "response_format")
    raise BadRequest(
        f"response_format.type: {wanted.type!r} must be text, json_object, json_schema or structural_tag",
        param="response_format.type",
    )


def _object(schema: Any) -> Json:
    """llama.cpp's and others' `json_object` with a schema: an object that it allows as well."""
    if schema is None:
        return _OBJECT
    return Json({"type": "object", "allOf": [_parsed("response_format.schema", schema)]})


def _asked(content: Content, field: str) -> Asked:
    return described(Structure(content), field)


def described(structure: Structure, field: str) -> Asked:
    """Raises `BadRequest` for what is too long."""
    asked = Asked(structure, field)
    try:
        size = len(_encoded(asked))
    except OverflowError:  # (an integer of more than 64 bits: as a bound it is what its double is)
        try:
            asked = msgspec.convert(_with_doubles(msgspec.to_builtins(asked)), Asked)
        except RecursionError:
            raise BadRequest(f"{field}: is nested too deeply", param=field) from None
        size = len(_encoded(asked))
    if size > MAX_DESCRIPTION_BYTES:
        raise BadRequest(
            f"{field}: of {size} bytes; at most {MAX_DESCRIPTION_BYTES} are possible",
            param=field,
            code="too_costly",
        )
    return asked


def _encoded(asked: Asked) -> bytes:
    try:
        return msgspec.msgpack.encode(asked)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"{asked.field}: cannot be read as JSON: {error}", param=asked.field) from None


def _with_doubles(value: Any) -> Any:
    match value:
        case Mapping():
            return {name: _with_doubles(one) for name, one in value.items()}
        case list():
            return [_with_doubles(one) for one in value]
        case int() if abs(value) >= 2**63:
            return float(max(-_FARTHEST, min(_FARTHEST, value)))
    return value


def _parsed(field: str, value: Any) -> Any:
    """Schemas may come as their text."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadRequest(f"{field}: is not JSON: {error}", param=field) from None


def _tags(field: str, value: Any) -> Content:
    if isinstance(value, Mapping) and value.get("format") is not None:
        try:
            return structural_tag(value)
        except GrammarError as error:
            raise BadRequest(f"{field}: {error}", param=field) from None
        except RecursionError:
            raise BadRequest(f"{field}.format: is nested too deeply", param=field) from None
    try:
        tags = msgspec.convert(value, _Tags)
    except msgspec.ValidationError as error:
        raise BadRequest(
            f"{field}: give structures, each with begin, schema and end, and triggers: {error}", param=field
        ) from None
    frames = [Tag(one.begin, Json(_parsed(field, one.schema)), one.end) for one in tags.structures]
    return Tagged(frames, tags.triggers)
