"""Who may do what: four kinds of rights, the table that says which route needs which, and how it is proven.

| right | who has it | what it opens |
| --- | --- | --- |
| open | all clients | what load balancers, orchestrators and scrapers read; nothing of a client is in it |
| user | clients with one of `--api-key`; all, if there is none | `/v1/*`, rankings, `/tokenize`, … |
| operator | clients with one of `--admin-key` | everything that changes or shows the server |
| member | instances that sign with the cluster's secret; operators, but for joining | the instances |

Without an admin key operators are those on this machine: peers on loopback or on a unix socket.  A browser on
this machine is one too, and sends what any web page tells it.  So such a request must not come from a foreign
page: its `Host` is an address, `localhost`, this machine's name or one of `--allowed-host` (else the page's
name was pointed here, "DNS rebinding"), and its `Origin`, which browsers add, is this server itself or one of
`--allowed-origins`.  A request that a proxy on this machine passed on comes from elsewhere.  The same holds
for the routes of users where there is no API key.

Joining (`PUT`) is for members.  Where the server has no secret, those on this machine may join that would be
operators; instances of other machines need the secret, or `--insecure-cluster` and the admin key.

A path that is not in the table does not exist, whatever is routed: a new route has a right, or nothing
reaches it.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from starlette.routing import compile_path
from starlette.types import Scope

from baton.gateway.access import Access, key_id
from baton.gateway.errors import ApiError, Forbidden, NotFound, Unauthorized, UnsupportedMediaType
from baton.gateway.http.members import Members, NoMember, is_signed
from baton.protocol.rules.signing import Signed

Right = Literal["open", "user", "operator", "member"]

RIGHTS: dict[str, Right] = {
    "/": "open",
    "/health": "open",
    "/ping": "open",
    "/load": "open",
    "/ready": "open",
    "/metrics": "open",
    "/version": "open",
    "/openapi.json": "open",
    "/docs": "open",
    "/ui": "open",
    "/v1/models": "user",
    "/v1/models/{name:path}": "user",
    "/v1/completions": "user",
    "/v1/chat/completions": "user",
    "/v1/chat/completions/render": "user",
    "/v1/completions/render": "user",
    "/v1/responses": "user",
    "/v1/responses/input_tokens": "user",
    "/v1/responses/compact": "user",
    "/v1/responses/{name}": "user",
    "/v1/responses/{name}/input_items": "user",
    "/v1/messages": "user",
    "/v1/messages/count_tokens": "user",
    "/v1/embeddings": "user",
    "/classify": "user",
    "/v1/rerank": "user",
    "/v2/rerank": "user",
    "/rerank": "user",
    "/v1/score": "user",
    "/score": "user",
    "/tokenize": "user",
    "/detokenize": "user",
    "/tokenizer_info": "user",
    "/server_info": "operator",
    "/stats": "operator",
    "/debug/ledger": "operator",
    "/debug/memory": "operator",
    "/debug/overview": "operator",
    "/ui/events": "operator",
    "/debug/requests": "operator",
    "/debug/timeline": "operator",
    "/pause": "operator",
    "/resume": "operator",
    "/is_paused": "operator",
    "/reset_prefix_cache": "operator",
    "/update_weights": "operator",
    "/start_profile": "operator",
    "/stop_profile": "operator",
    "/cluster/instances": "member",
    "/cluster/instances/{name}": "member",
}
"""Of each route, by its path as it is declared.  All methods of a path need the same."""

_PATTERNS = [(compile_path(path)[0], right) for path, right in RIGHTS.items() if "{" in path]
_BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
_FORWARDED = (b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"forwarded", b"via")
"""Headers that proxies add."""


class Caller(NamedTuple):
    """Who sent a request, as far as that is known."""

    right: Right
    key: str = ""
    """`key_id` of the key that was sent, if it is one of ours; "": none was needed."""
    signed: Signed | None = None
    """A member's signature; the body is still to be compared with it."""


def right_of(path: str) -> Right | None:
    """Which right a request's path needs; None: there is nothing."""
    right = RIGHTS.get(path)
    if right is None:
        right = next((right for pattern, right in _PATTERNS if pattern.match(path)), None)
    return right


def without_right(paths: Iterable[str]) -> list[str]:
    """Those of an application's routes that are not in the table."""
    return sorted(path for path in set(paths) if path not in RIGHTS)


class Guard:
    """Decides about requests, by their heads alone."""

    def __init__(self, access: Access) -> None:
        self._users = _table(access.api_keys, "user")
        self._operators = _table(access.admin_keys, "operator")
        self._known = self._users + self._operators
        self._hosts = frozenset(
            host.lower() for host in (*access.allowed_hosts, access.host_name, "localhost")
        )
        self._any_origin = "*" in access.allowed_origins
        self._origins = frozenset(origin.lower().rstrip("/") for origin in access.allowed_origins) - {"*"}
        bound = access.min_priority
        self._insecure_cluster = access.insecure_cluster
        self.members = Members(access.cluster_secrets)
        self._min_priority = 0 if bound is None and access.api_keys else bound

    def check(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Caller:
        """Who asks.  Raises `ApiError`: 401, 403, 404 or 415; or `Unheard`."""
        right = right_of(scope["path"])
        if right == "open":
            return Caller("open")
        if right == "member":
            caller = self._member(scope, headers)
        else:
            caller = self._operator(scope, headers) if right == "operator" else self._user(scope, headers)
        if right is None:
            raise NotFound(
                f"there is nothing at {scope['path'][:200]}; GET /docs lists the paths", code="not_found"
            )
        if scope["method"] in _BODY_METHODS:
            _check_body(headers)
        return caller

    def min_priority(self, caller: Caller) -> int | None:
        """The best `priority` that the caller may ask for; None: any."""
        return None if caller.right == "operator" else self._min_priority

    def _user(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Caller:
        caller = self._keyed(headers)
        if caller is not None:
            return caller
        if self._users:
            raise _unauthorized("the API key")
        if is_local(scope):
            self._check_no_page(headers, any_origin=self._any_origin)
        return Caller("user")

    def _member(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Caller:
        if is_signed(headers):
            return Caller("member", signed=self.members.check(scope, headers))
        if scope["method"] == "PUT":
            if self.members.accepted:
                raise NoMember(
                    "only members of the cluster join: start the instance with the same --cluster-secret "
                    "FILE as this server",
                    code="member_required",
                )
            near = is_local(scope) and not any(name in headers for name in _FORWARDED)
            if not near and not self._insecure_cluster:
                raise NoMember(
                    "an instance of another machine joins with the cluster's secret: `baton cluster secret > "
                    "FILE`, and --cluster-secret FILE at the server and at the instance",
                    code="member_required",
                )
        return self._operator(scope, headers)

    def _operator(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Caller:
        caller = self._keyed(headers)
        if caller is not None:
            if caller.right == "operator":
                return caller
            raise Forbidden(
                f"{scope['path'][:200]} is for operators, and this is a user's key; send one of --admin-key",
                code="operator_required",
            )
        if self._operators:
            raise _unauthorized("the admin key")
        if self._users and (headers.get(b"authorization") or headers.get(b"x-api-key")):
            raise _unauthorized("the key")
        if not is_local(scope) or any(name in headers for name in _FORWARDED):
            raise Forbidden(
                f"{scope['path'][:200]} is for operators: without --admin-key they are those on the server's "
                "own machine, asking it directly; ask from there, or start the server with --admin-key",
                code="operator_required",
            )
        self._check_no_page(headers, any_origin=False)
        return Caller("operator")

    def _keyed(self, headers: Mapping[bytes, bytes]) -> Caller | None:
        """Compares with every key, in a time that does not tell how much of one is right."""
        if not self._known:
            return None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = [key.strip()] if scheme.lower() == b"bearer" else []
        if b"x-api-key" in headers:  # (Anthropic's way)
            given.append(headers[b"x-api-key"].strip())
        found = None
        for key in given:
            for known, caller in self._known:
                if hmac.compare_digest(key, known):
                    found = found or caller
        return found

    def _check_no_page(self, headers: Mapping[bytes, bytes], *, any_origin: bool) -> None:
        """Raises `Forbidden` if a browser sent this for a page of another site."""
        host = headers.get(b"host", b"").decode("latin-1").strip().lower()
        name = _host_name(host)
        if host and name not in self._hosts and not _is_address(name):
            raise Forbidden(
                f"Host: this server does not know itself as {name[:100]!r}; ask it by its address or as "
                "localhost, or start it with --allowed-host, or with keys",
                code="host_not_allowed",
            )
        origin = headers.get(b"origin", b"").decode("latin-1").strip().lower()
        if not origin or any_origin or origin.rstrip("/") in self._origins:
            return
        if _netloc(origin) != host:
            raise Forbidden(
                f"Origin: pages of {origin[:100]!r} may not do this; start the server with --allowed-origins",
                code="origin_not_allowed",
            )


def is_local(scope: Scope) -> bool:
    """The peer is on this machine: on loopback, or on a unix socket."""
    server = scope.get("server")
    if server is not None and server[1] is None:  # (a unix socket's path)
        return True
    client = scope.get("client")  # None: it left before anybody asked for its address
    return client is not None and is_loopback(client[0])


@lru_cache(1024)
def is_loopback(address: str) -> bool:
    """Of an address in numbers; IPv6 ones may have a zone."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return parsed.is_loopback


def _netloc(origin: str) -> str:
    """HOST:PORT of an origin as a `Host` header has it; "" for those without (`null`)."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _host_name(host: str) -> str:
    """A `Host` header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


@lru_cache(1024)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _check_body(headers: Mapping[bytes, bytes]) -> None:
    """Raises `UnsupportedMediaType` unless there is no body, or one of JSON as it is."""
    given = headers.get(b"content-type")
    has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
    media_type = (given or b"").partition(b";")[0].strip().lower()
    if media_type != b"application/json" and (has_body or given is not None):
        shown = media_type.decode("latin-1")[:100] or "none"
        raise UnsupportedMediaType(
            f"Content-Type: send application/json, not {shown}", param=None, code="unsupported_media_type"
        )
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"identity", b""):
        raise UnsupportedMediaType(
            f"Content-Encoding: {encoding.decode('latin-1')[:50]!r} is not read here; send the body as it is",
            code="unsupported_content_encoding",
        )


def _table(keys: Sequence[str], right: Right) -> list[tuple[bytes, Caller]]:
    return [(key.encode(), Caller(right, key_id(key))) for key in keys]


def _unauthorized(what: str) -> ApiError:
    return Unauthorized(
        f"{what} is missing or wrong; send it as 'Authorization: Bearer KEY', or as 'x-api-key: KEY'",
        code="invalid_api_key",
    )
