"""Flags of `baton serve` about who may do what, how much of the server a client may take, and how users share
it."""

from __future__ import annotations

from typing import Annotated

import typer

RIGHTS = "Rights"
LIMITS = "HTTP limits"
USERS = "Users"

ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        envvar="BATON_API_KEY",
        help="Clients must send one of these as a bearer token. Repeatable.",
        rich_help_panel=RIGHTS,
    ),
]
AdminKeys = Annotated[
    list[str] | None,
    typer.Option(
        envvar="BATON_ADMIN_KEY",
        help="Operators (pause, weights, profiles, instances, statistics) must send one of these as a "
        "bearer token; an instance that joins sends the first. Without one, only requests from this "
        "machine may operate the server. Repeatable.",
        rich_help_panel=RIGHTS,
    ),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        help="A name under which requests from this machine may ask the server, besides addresses and "
        "localhost. Repeatable.",
        rich_help_panel=RIGHTS,
    ),
]
AllowedOrigins = Annotated[
    list[str] | None,
    typer.Option(
        help="Origin whose web pages may ask the server from a browser (CORS), such as "
        "https://chat.example; '*': every page, but not as an operator. Repeatable.",
        rich_help_panel=RIGHTS,
    ),
]
MinPriority = Annotated[
    int | None,
    typer.Option(
        help="Best (lowest) `priority` that a request with a user's key may ask for. "
        "Default: 0 if there is an API key, else any.",
        rich_help_panel=RIGHTS,
    ),
]
ProfileDir = Annotated[
    str | None,
    typer.Option(help="Directory below which /start_profile may write.", rich_help_panel=RIGHTS),
]
WeightsDir = Annotated[
    str | None,
    typer.Option(help="Directory below which checkpoints for /update_weights lie.", rich_help_panel=RIGHTS),
]
MaxHeadBytes = Annotated[
    int,
    typer.Option(
        "--h11-max-incomplete-event-size",
        help="Bytes of a request's head at most; more is answered 431.",
        rich_help_panel=LIMITS,
    ),
]
MaxHeaders = Annotated[
    int,
    typer.Option(
        "--h11-max-header-count",
        help="Headers of a request at most; more are answered 431.",
        rich_help_panel=LIMITS,
    ),
]
TimeoutHead = Annotated[
    float, typer.Option(help="Seconds for the head of a request; then 408.", rich_help_panel=LIMITS)
]
TimeoutBody = Annotated[
    float,
    typer.Option(help="Seconds without progress of a request's body; then 408.", rich_help_panel=LIMITS),
]
TimeoutWrite = Annotated[
    float,
    typer.Option(
        help="Seconds in which a client reads nothing of what waits for it; then its connection is cut.",
        rich_help_panel=LIMITS,
    ),
]
TimeoutKeepAlive = Annotated[
    float,
    typer.Option(help="Seconds that a connection stays open between two requests.", rich_help_panel=LIMITS),
]
LimitConcurrency = Annotated[
    int | None,
    typer.Option(
        help="Connections at most: a further one takes the place of one that waits for its client, or is "
        "answered 503. Default: as many as files may be open.",
        rich_help_panel=LIMITS,
    ),
]
MaxBodyMemory = Annotated[
    str,
    typer.Option(
        help="Bytes of all requests' bodies in memory at most, such as 1GiB; then 503.",
        rich_help_panel=LIMITS,
    ),
]
ShutdownGrace = Annotated[
    float,
    typer.Option(
        help="Seconds after SIGTERM in which everything is served as before and only /ready says 503, so "
        "that load balancers look for another server. Ctrl-C does not wait.",
        rich_help_panel=LIMITS,
    ),
]
FairQueuing = Annotated[
    bool,
    typer.Option(
        help="Within a priority, serve users fairly by tokens: by API key, and by the field `user` within "
        "one.",
        rich_help_panel=USERS,
    ),
]
FairWeights = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="TOML file of the shares of API keys, read again on SIGHUP: `default = 1.0` and a table "
        "`[weights]` of keys, or their ids, and numbers.",
        rich_help_panel=USERS,
    ),
]
SaltByKey = Annotated[
    bool,
    typer.Option(
        "--salt-by-key",
        help="No cached prompt is shared between API keys, so that nobody can find out what others ask.",
        rich_help_panel=USERS,
    ),
]
