"""The lines of a batch: requests in, answers out.  Pure.

A line of the output says of which line of the input it is, by its `id`: `batch_req_NUMBER_DIGEST`, with the
line's number (from 1) and a digest of its bytes.  So a run that goes on knows which lines are done, also
where two lines have the same `custom_id`, and sees that it was given another input.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, NamedTuple

import msgspec

MAX_LINE = 64 << 20
"""Bytes of a line: more than any server reads."""
URLS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/score",
        "/score",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/classify",
    }
)
_ID = re.compile(r"batch_req_(\d{1,18})_([0-9a-f]{16})\Z")


class Request(NamedTuple):
    """A line that can be sent."""

    number: int
    id: str
    custom_id: str
    url: str
    body: bytes


class BadLine(NamedTuple):
    """A line that cannot: why not."""

    number: int
    id: str
    custom_id: str | None
    message: str
    param: str | None


class _Line(msgspec.Struct):
    custom_id: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    method: str = "POST"
    url: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    body: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class _Body(msgspec.Struct):
    stream: Any = None


class _Done(msgspec.Struct):
    id: str


_LINE = msgspec.json.Decoder(_Line)
_BODY = msgspec.json.Decoder(_Body)
_DONE = msgspec.json.Decoder(_Done)


def line_id(number: int, line: bytes) -> str:
    digest = hashlib.blake2b(line.strip(), digest_size=8).hexdigest()
    return f"batch_req_{number}_{digest}"


def read_line(number: int, line: bytes) -> Request | BadLine:
    """`line`: with or without the line break at its end; not empty."""
    name = line_id(number, line)

    def bad(message: str, param: str | None = None, custom_id: str | None = None) -> BadLine:
        return BadLine(number, name, custom_id, f"line {number}: {message}", param)

    if len(line) > MAX_LINE:
        return bad(f"of more than {MAX_LINE >> 20} MiB; split the request")
    try:
        found = _LINE.decode(line)
    except msgspec.ValidationError as error:
        return bad(f"must be an object with custom_id, method, url and body: {error}")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return bad(f"is not JSON: {error}")
    custom_id = _text(found.custom_id)
    if not custom_id:
        return bad("custom_id: give a text that tells this request from the others", "custom_id")
    url = _text(found.url)
    if found.method != "POST":
        return bad(f"method: {found.method[:20]!r} must be 'POST'", "method", custom_id)
    if url not in URLS:
        wrong = "it is missing" if url is None else f"{url[:100]!r} is not possible in a batch"
        return bad(f"url: {wrong}; give one of {', '.join(sorted(URLS))}", "url", custom_id)
    body = bytes(found.body)
    try:
        stream = _BODY.decode(body).stream
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return bad("body: give an object, the body of the request", "body", custom_id)
    if stream not in (None, False):
        return bad("body.stream: answers of a batch are not streamed; leave it out", "body.stream", custom_id)
    return Request(number, name, custom_id, url, body)


def answered(request: Request, status: int, request_id: str, body: bytes) -> bytes:
    """The line of an answer, or of an error of the server; with its line break."""
    content = _as_json(body)
    response = {"status_code": status, "request_id": request_id, "body": content}
    error = None if status < 400 else _error_of(status, body)
    return _encoded(request.id, request.custom_id, response, error)


def refused(line: BadLine) -> bytes:
    """The line of a request that was not sent."""
    error = {
        "message": line.message,
        "type": "invalid_request_error",
        "param": line.param,
        "code": "invalid_line",
    }
    response = {"status_code": 400, "request_id": "", "body": {"error": error}}
    return _encoded(line.id, line.custom_id, response, error)


def done_line(line: bytes) -> tuple[int, str] | None:
    """(number of the input's line, its id) of a complete line of an output; None: it is none."""
    try:
        found = _DONE.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    match = _ID.match(found.id)
    return None if match is None else (int(match[1]), found.id)


def _encoded(name: str, custom_id: str | None, response: Any, error: Any) -> bytes:
    return (
        msgspec.json.encode({"id": name, "custom_id": custom_id, "response": response, "error": error})
        + b"\n"
    )


def _text(raw: msgspec.Raw) -> str | None:
    try:
        value = msgspec.json.decode(bytes(raw) or b"null")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return value if isinstance(value, str) else None


def _as_json(body: bytes) -> Any:
    """As it came, without being taken apart; a text where it is no JSON, of a proxy for example."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return body[:4096].decode(errors="replace")
    return msgspec.Raw(body.replace(b"\n", b" ") if b"\n" in body else body)


def _error_of(status: int, body: bytes) -> Any:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        found = None
    error = found.get("error") if isinstance(found, dict) else None
    return error if isinstance(error, dict) else {"message": f"the server answered {status}", "code": None}
