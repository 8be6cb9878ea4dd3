"""Request bodies: OpenAI's fields and vLLM's extensions, decoded by msgspec.

Every field may be null, which means "not given".  A wrong type is a `BadRequest` that names the field.
Fields that would change the answer and that Baton does not support are refused by name; fields that are
unknown are accepted, with one warning a name in the log.

A body may hold millions of small values, and a decoder does nothing else until it is through, so long ones
are read in a helper (`reader.py`).  What nobody reads is only skimmed (`Raw`), and a prompt of too many
lists is refused before one is made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from baton.gateway.api import fields as f
from baton.gateway.api.content import refuse_parts
from baton.gateway.api.fields import MAX_SEQUENCES
from baton.gateway.api.formats import ResponseFormat
from baton.gateway.api.unknown import MAX_WARNED, UNSUPPORTED, Refusal, is_refused, unknown_in
from baton.gateway.errors import BadRequest
from baton.protocol.params.repetition import RepetitionDetection
from baton.protocol.params.structured_outputs import StructuredOutputs


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Without effect: there is none."""


class SamplingFields(msgspec.Struct, kw_only=True):
    """What both endpoints have; names and meanings as in `SamplingParams`."""

    model: str | None = None
    n: f.Choices | None = None
    temperature: f.Temperature | None = None
    top_p: f.TopP | None = None
    top_k: f.TopK | None = None
    min_p: f.MinP | None = None
    presence_penalty: f.Penalty | None = None
    frequency_penalty: f.Penalty | None = None
    repetition_penalty: f.RepetitionPenalty | None = None
    logit_bias: f.LogitBias | None = None
    stop: f.Stop | None = None
    stop_token_ids: f.StopTokenIds | None = None
    ignore_eos: bool | None = None
    max_tokens: f.TokenCount | None = None
    min_tokens: f.TokenCount | None = None
    seed: f.Seed | None = None
    prompt_logprobs: f.Logprobs | None = None
    return_routed_experts: bool | None = None
    routed_experts_prompt_start: f.RoutesStart | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    timings: bool | None = None
    """The answer says where its time went."""
    return_progress: bool | None = None
    """A stream says how far its prompt is."""
    priority: f.Priority | None = None
    cache_salt: f.CacheSalt | None = None
    request_id: f.RequestId | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: f.Anything | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    structural_tag: f.Anything | None = None
    bad_words: f.BadWords | None = None
    allowed_token_ids: f.AllowedTokenIds | None = None
    logprob_token_ids: f.LogprobTokenIds | None = None
    repetition_detection: RepetitionDetection | None = None
    truncate_prompt_tokens: f.Truncation | None = None
    """A longer prompt is cut to so many tokens; -1: to what the context has room for."""
    truncation_side: f.TruncationSide | None = None
    """Default: left."""
    metadata: f.Ignored = f.nothing()
    service_tier: f.Ignored = f.nothing()
    store: f.Ignored = f.nothing()
    session_id: f.Ignored = f.nothing()
    vllm_xargs: f.Ignored = f.nothing()
    length_penalty: f.Ignored = f.nothing()
    stream_interval: f.Ignored = f.nothing()
    mm_payload: f.Ignored = f.nothing()
    return_mm_kwargs: f.Ignored = f.nothing()

    def sampling(self) -> dict[str, Any]:
        """The fields that `SamplingParams` knows by the same names."""
        return {name: getattr(self, name) for name in _SAMPLING_NAMES}


_SAMPLING_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "seed",
    "prompt_logprobs",
    "return_routed_experts",
    "routed_experts_prompt_start",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "bad_words",
    "allowed_token_ids",
    "logprob_token_ids",
    "repetition_detection",
)


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: f.Prompt = f.nothing()
    """A text, a list of texts, a list of token ids, or a list of lists of token ids; see `decode_prompt`."""
    best_of: f.Choices | None = None
    echo: bool | None = None
    logprobs: f.Logprobs | None = None


class ChatFields(Protocol):
    """How messages become a prompt."""

    messages: list[dict[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    reasoning_effort: str | None
    documents: list[dict[str, Any]] | None


class ChatRequest(SamplingFields, kw_only=True):
    messages: f.Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: f.AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: f.Logprobs | None = None
    tools: f.Tools | None = None
    tool_choice: f.ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: f.ReasoningEffort | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: f.Budget | None = None
    documents: f.Documents | None = None
    echo: bool | None = None
    """The answer begins with the last message's text, if that is of the same role."""
    web_search_options: f.Anything | None = None
    """Offers a search, which this server does not have: left out, as a tool of that kind is."""


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    messages: f.Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: f.Tools | None = None
    tool_choice: f.ToolChoice | None = None
    reasoning_effort: f.ReasoningEffort | None = None
    documents: f.Documents | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[f.TokenId] | None = None
    model: str | None = None


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = re.compile(rb"\s*\[\s*(.)", re.DOTALL)
_PATH = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>.*?)`$")
_LIMIT = re.compile(r"Expected `(\w+)` (of length )?(>=|<=|>|<) (\S+)$")
_SIGNS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_NUMBER_BYTES = 32  # no integer of a request is written longer
_HALF_PAIR = re.compile(
    rb"\\u[dD][89aAbB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89aAbB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)

T = TypeVar("T", bound=msgspec.Struct)


class _Reader(NamedTuple):
    """How one kind of body is read: takes longer to make than a body to read."""

    names: frozenset[str]
    """Of its fields."""
    integers: frozenset[str]
    """Of those that are a whole number."""
    members: dict[str, frozenset[str]]
    """Of those that are objects with names of their own."""
    decoder: msgspec.json.Decoder[Any]


@cache
def _reader(kind: type[msgspec.Struct]) -> _Reader:
    fields = msgspec.structs.fields(kind)
    integers = {
        field.encode_name
        for field in fields
        if any(isinstance(one, msgspec.inspect.IntType) for one in _alternatives(field.type))
    }
    members = {
        field.encode_name: frozenset(member.encode_name for member in one.fields)
        for field in fields
        for one in _alternatives(field.type)
        if isinstance(one, msgspec.inspect.StructType)
    }
    names = frozenset(field.encode_name for field in fields)
    return _Reader(names, frozenset(integers), members, msgspec.json.Decoder(kind))


def _alternatives(kind: Any) -> list[msgspec.inspect.Type]:
    """What a field may be: the members of a union, without what is said of them."""
    known = msgspec.inspect.type_info(kind)
    members = known.types if isinstance(known, msgspec.inspect.UnionType) else (known,)
    return [one.type if isinstance(one, msgspec.inspect.Metadata) else one for one in members]


def decode_body(body: bytes, kind: type[T]) -> tuple[T, list[str]]:
    """(the body, names in it, and in its objects, that nobody knows).  Raises `BadRequest`."""
    try:
        fields = _FIELDS.decode(body)
    except msgspec.ValidationError:
        raise BadRequest("the body must be a JSON object") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(body, error) from None
    reader = _reader(kind)
    refused: Mapping[str, Refusal] = getattr(kind, "UNSUPPORTED", UNSUPPORTED)
    changed = False
    unknown: list[str] = []
    for name, value in fields.items():
        if name not in reader.names:
            if not is_refused(name, value, refused) and len(unknown) < MAX_WARNED:
                unknown.append(name)
        elif name in reader.integers and (whole := _whole(value)) is not None:
            fields[name], changed = whole, True
        elif name in reader.members:
            unknown += unknown_in(name, value, reader.members[name])
    try:
        decoded: T = reader.decoder.decode(msgspec.json.encode(fields) if changed else body)
    except msgspec.ValidationError as error:
        message = str(error)
        where = _PATH.search(message)
        name = where["path"].replace("[...]", "") if where else ""
        text = ("a key " if where and where["key"] else "") + _reworded(_PATH.sub("", message))
        field = re.split(r"[.\[]", name)[0]
        if field in ("query", "queries", "documents", "text_1", "text_2"):
            refuse_parts(bytes(fields[field]), field)
        raise BadRequest(f"{name or 'body'}: {text}", param=field or None) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(body, error) from None
    return decoded, unknown


def _reworded(text: str) -> str:
    """What msgspec says of a value beyond its limits, in the words of other errors."""
    found = _LIMIT.match(text)
    if found is None:
        return text.replace("`", "")
    kind, length, sign, limit = found.groups()
    what = {"str": "characters", "array": "items"}.get(kind, "entries") if length else ""
    return f"must be {'of ' if length else ''}{_SIGNS[sign]} {limit.removesuffix('.0')} {what}".rstrip()


def _whole(raw: msgspec.Raw) -> msgspec.Raw | None:
    """`1.0` as `1`, for clients whose language has one kind of number; None: it stays as it is."""
    data = bytes(raw)
    if len(data) > _NUMBER_BYTES or not (b"." in data or b"e" in data or b"E" in data):
        return None
    try:
        value = msgspec.json.decode(data)
    except msgspec.MsgspecError:  # a number out of range: the decoder of the body says so
        return None
    if not isinstance(value, float) or not value.is_integer():
        return None
    return msgspec.Raw(msgspec.json.encode(int(value)))


def _not_json(body: bytes, error: Exception) -> BadRequest:
    if _HALF_PAIR.search(body):
        return BadRequest(
            "the body is not JSON: a text has half of a surrogate pair, which is no character "
            "(\\ud800 to \\udfff without its other half); leave it out"
        )
    return BadRequest(f"the body is not JSON: {error}")


def decode_prompt(
    raw: msgspec.Raw, field: str = "prompt"
) -> str | list[str] | list[int] | list[list[int]] | None:
    """The `prompt` of a completion request, or what is like it in another field; None if it was not given.
    Raises `BadRequest`."""
    data = bytes(raw)
    if not data or data == b"null":
        return None
    kind: Any = str
    begin = _LIST.match(data)
    if begin is not None:
        kind = {b'"': list[str], b"[": list[list[int]]}.get(begin[1], list[int])
        if begin[1] == b"[" and data.count(b"[") - 1 > MAX_SEQUENCES:
            raise _bad_prompt(field, f"at most {MAX_SEQUENCES} prompts; send several requests")
    try:
        prompt: str | list[str] | list[int] | list[list[int]] = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        refuse_parts(data, field)
        text = _PATH.sub("", str(error)).replace("`", "")
        raise _bad_prompt(
            field,
            f"give a text, a list of texts, a list of token ids, or a list of such lists: {text}",
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _not_json(data, error) from None
    if kind == list[str] and len(prompt) > MAX_SEQUENCES:
        raise _bad_prompt(field, f"at most {MAX_SEQUENCES} prompts, not {len(prompt)}; send several requests")
    return prompt


def _bad_prompt(field: str, what: str) -> BadRequest:
    return BadRequest(f"{field}: {what}", param=field)
