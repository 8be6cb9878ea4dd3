"""Flags of a server: where it listens, who may do what, how much a client may take, how users share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from baton.launch.limits import MAX_SECONDS
from baton.launch.options.flag import Options, flag


def _check_keys(keys: tuple[str, ...]) -> None:
    if not all(key.strip() for key in keys):
        raise ValueError("an empty key would let everybody in; leave it out or give a real one")


def _check_root_path(path: str) -> None:
    if path and (not path.startswith("/") or path.endswith("/")):
        raise ValueError("give a path that begins with / and does not end with one, such as /llm")


def _check_traces(endpoint: str) -> None:
    from baton.observe.tracing.collector import check_endpoint  # (slow, and rarely wanted)

    check_endpoint(endpoint)


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Options):
    title: ClassVar[str] = "Server"

    host: str = flag("127.0.0.1", "Address to listen on.")
    port: int = flag(
        8000,
        "Port to listen on; 0 takes a free one.",
        least=0,
        most=65535,
        unit="a number (0: any free one)",
    )
    uds: str | None = flag(
        None,
        "Path of a Unix socket to listen on instead of --host and --port; only this user may connect to it.",
        metavar="PATH",
        unset="TCP",
    )
    ssl_certfile: str | None = flag(
        None,
        "File with the server's certificate, and those that it depends on (PEM): serve HTTPS.",
        metavar="FILE",
        unset="HTTP",
    )
    ssl_keyfile: str | None = flag(
        None,
        "File with the certificate's private key (PEM).",
        metavar="FILE",
        unset="in --ssl-certfile",
    )
    root_path: str = flag(
        "",
        "Path under which a proxy shows the server, such as /llm: requests may come with it or without.",
        metavar="PATH",
        check=_check_root_path,
    )
    enable_log_requests: bool = flag(
        False, "Log each request: its id, the lengths of its prompts and its parameters, not the texts."
    )
    events_keep: int = flag(
        1000,
        "Requests whose way is kept for /debug/requests and /debug/timeline after they have ended; slow and "
        "failed ones are kept for longer, a quarter of this number of each. 0: none, and neither requests "
        "nor steps are noted.",
        least=0,
        most=100_000,
        unit="requests",
    )
    otlp_traces_endpoint: str | None = flag(
        None,
        "Collector of OpenTelemetry's traces that is told of each request: http://HOST:4317 (gRPC) or "
        "http://HOST:4318/v1/traces. What else OTEL_… variables say holds. Needs the extra `otel`.",
        metavar="URL",
        unset="no traces",
        check=_check_traces,
    )
    shutdown_timeout: float = flag(
        10.0,
        "Seconds that running requests get to finish on Ctrl-C.",
        least=0,
        most=MAX_SECONDS,
        unit="seconds",
    )
    drain_delay: float = flag(
        0.0,
        "Seconds after SIGTERM in which everything is served as before and only /ready says 503, so that "
        "load balancers look for another server; after them new connections are answered 503. Ctrl-C does "
        "not wait.",
        least=0,
        most=MAX_SECONDS,
        unit="seconds",
    )


@dataclass(frozen=True, kw_only=True)
class RightsOptions(Options):
    title: ClassVar[str] = "Rights"

    api_key: tuple[str, ...] = flag(
        (),
        "Clients must send one of these as a bearer token. Repeatable.",
        secret=True,
        check=_check_keys,
        unset="none is needed",
    )
    admin_key: tuple[str, ...] = flag(
        (),
        "Operators (pause, weights, profiles, instances, statistics) must send one of these as a bearer "
        "token; an instance that joins sends the first. Without one, only requests from this machine may "
        "operate the server. Repeatable.",
        secret=True,
        check=_check_keys,
        unset="none",
    )
    allowed_host: tuple[str, ...] = flag(
        (),
        "A name under which requests from this machine may ask the server, besides addresses and localhost. "
        "Repeatable.",
        unset="none",
    )
    allowed_origins: tuple[str, ...] = flag(
        (),
        "Origin whose web pages may ask the server from a browser (CORS), such as https://chat.example; "
        "'*': every page, but not as an operator. Repeatable.",
        unset="none",
    )
    min_priority: int | None = flag(
        None,
        "Best (lowest) `priority` that a request with a user's key may ask for.",
        least=-(2**31),
        most=2**31 - 1,
        unit="an integer",
        unset="0 if there is an API key, else any",
    )
    profile_dir: str | None = flag(
        None,
        "Directory below which /start_profile may write.",
        metavar="DIRECTORY",
        unset="none: there are no profiles",
    )
    weights_dir: str | None = flag(
        None,
        "Directory below which checkpoints for /update_weights lie.",
        metavar="DIRECTORY",
        unset="none: weights stay",
    )


@dataclass(frozen=True, kw_only=True)
class HttpOptions(Options):
    title: ClassVar[str] = "HTTP limits"

    h11_max_incomplete_event_size: int = flag(
        64 << 10,
        "Bytes of a request's head at most; more is answered 431.",
        least=1024,
        most=1 << 30,
        unit="bytes",
    )
    h11_max_header_count: int = flag(
        100,
        "Headers of a request at most; more are answered 431.",
        least=8,
        most=10**6,
        unit="a number",
    )
    timeout_head: float = flag(
        10.0,
        "Seconds for the head of a request; then 408.",
        least=0.001,
        most=MAX_SECONDS,
        unit="seconds",
    )
    timeout_body: float = flag(
        30.0,
        "Seconds without progress of a request's body; then 408.",
        least=0.001,
        most=MAX_SECONDS,
        unit="seconds",
    )
    timeout_write: float = flag(
        60.0,
        "Seconds in which a client reads nothing of what waits for it; then its connection is cut.",
        least=0.001,
        most=MAX_SECONDS,
        unit="seconds",
    )
    timeout_keep_alive: float = flag(
        120.0,
        "Seconds that a connection stays open between two requests; clients and proxies should give theirs "
        "up before, or a request may come while the server closes it.",
        least=0.001,
        most=MAX_SECONDS,
        unit="seconds",
    )
    sse_keep_alive_interval: float = flag(
        10.0,
        "Seconds of silence in a stream, also before its first token, after which a sign of life is sent, of "
        "a kind that the API's clients count (serving.md); 0: none.",
        least=0,
        most=MAX_SECONDS,
        unit="seconds",
    )
    early_headers_after: float = flag(
        0.0,
        "Seconds after which an answer that is not streamed begins: status 200, white space while it is "
        "made, then the body. What fails after that is an error's body under the status 200. 0: never.",
        least=0,
        most=MAX_SECONDS,
        unit="seconds",
    )
    limit_concurrency: int | None = flag(
        None,
        "Connections at most: a further one takes the place of one that waits for its client, or is answered "
        "503.",
        least=1,
        most=10**6,
        unit="a number",
        unset="as many as files may be open",
    )
    max_body_memory: int | str = flag(
        "256MiB",
        "Bytes of all requests' bodies in memory at most, such as 1GiB; then 503.",
        least=1 << 20,
        most=1 << 50,
        unit="bytes",
        size=True,
        metavar="SIZE",
    )

    responses_store: int = flag(
        0,
        "Answers of /v1/responses in memory at most, so that requests can go on from them "
        "(previous_response_id); the oldest go first. 0: none.",
        least=0,
        most=10**7,
        unit="a number",
    )
    responses_store_memory: int | str = flag(
        "64MiB",
        "Bytes that those answers may take, such as 1GiB.",
        least=1 << 20,
        most=1 << 50,
        unit="bytes",
        size=True,
        metavar="SIZE",
    )
    unknown_tools: Literal["skip", "refuse"] = flag(
        "skip",
        "What becomes of tools that the server does not have (web_search, computer, …) where a request only "
        "offers them: left out of the prompt, and named in the log and the header x-baton-skipped-tools; or "
        "the request is refused.",
    )


@dataclass(frozen=True, kw_only=True)
class UserOptions(Options):
    title: ClassVar[str] = "Users"

    fair_queuing: bool = flag(
        True,
        "Within a priority, serve users fairly by tokens: by API key, and by the field `user` within one.",
    )
    fair_weights: str | None = flag(
        None,
        "TOML file of the shares of API keys, read again on SIGHUP: `default = 1.0` and a table `[weights]` "
        "of keys, or their ids, and numbers.",
        metavar="FILE",
        unset="all weigh the same",
    )
    salt_by_key: bool = flag(
        False,
        "No cached prompt is shared between API keys, so that nobody can find out what others ask.",
    )
