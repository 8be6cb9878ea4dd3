"""`baton scale`: what `--auto-labels` and `--autoscale` would do with a running cluster, as advice.

It asks `/cluster/instances` once an interval and gives what it shows to the function that decides in a
server (`gateway/arranging`).  A server that does not answer is asked again; one that refuses is not.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.top import Away, Refused, ask

if TYPE_CHECKING:
    from baton.gateway.arranging.advising import Advisor
    from baton.gateway.arranging.arranger import Change
    from baton.gateway.arranging.described import Described

_PATH = "/cluster/instances"
_LOOKS = 15
"""That are enough to see what is wanted now, without --watch."""


def scale(
    url: Annotated[
        str, typer.Argument(help="Address of a gateway, such as http://127.0.0.1:8000.")
    ] = "http://127.0.0.1:8000",
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on until Ctrl-C, with a line for each advice.")
    ] = False,
    slo: Annotated[
        str | None,
        typer.Option(
            help='What clients are promised, in ms: "ttft:500 itl:50". As the server has it, '
            "if it is not given."
        ),
    ] = None,
    bounds: Annotated[
        str, typer.Option(metavar="MIN:MAX", help="Fewest and most instances that are advised.")
    ] = "1:64",
    startup: Annotated[
        float,
        typer.Option(
            help="Seconds until an added instance serves: for so long no other one is advised.", min=1
        ),
    ] = 300.0,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=1, max=5)] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each advice.")] = False,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key of an operator: one of the server's --admin-key.", envvar="BATON_TOP_KEY"),
    ] = None,
) -> None:
    """Advise which instances to add, to drain and to label otherwise, and why.

    For clusters whose instances Kubernetes, Slurm or you start: the same function decides that
    `baton serve --auto-labels --autoscale` obeys. Without --watch it looks for some seconds, and leaves.
    """
    from baton.gateway.arranging.advising import Advisor
    from baton.gateway.arranging.arranger import Rules
    from baton.gateway.arranging.slo import Slo, read_bounds, read_slo

    try:
        promised = read_slo(slo) if slo else None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--slo") from None
    try:
        least_most = read_bounds(bounds)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--bounds") from None
    advisor = Advisor(Rules(slo=Slo(), bounds=least_most, adding_s=startup), promised)
    if not url.startswith(("http://", "https://")):
        url = f"http://{url}"
    address = url.rstrip("/").removesuffix("/v1") + _PATH
    try:
        _look(advisor, address, api_key or "", interval, watch=watch, as_json=as_json)
    except KeyboardInterrupt:
        return
    except (Refused, Away) as error:
        typer.echo(f"error: {url}: {error}", err=True)
        raise typer.Exit(1) from None


def _look(
    advisor: Advisor, address: str, api_key: str, interval: float, *, watch: bool, as_json: bool
) -> None:
    """Raises `Refused`, and `Away` if the server never answered or nobody watches."""
    looks, trouble = 0, ""
    while watch or looks < _LOOKS:
        began = time.monotonic()
        try:
            shown = _read(ask(address, api_key))
        except Away as error:
            if not looks or not watch:
                raise
            if str(error) != trouble:
                typer.echo(f"{error}; asking again", err=True)
            trouble = str(error)
        else:
            trouble = ""
            change = advisor.look(shown)
            if not looks and not as_json:
                typer.echo(_beginning(advisor, shown))
            looks += 1
            if change is not None:
                typer.echo(_line(advisor, change) if as_json else _text(advisor, change))
                if not watch:
                    return
        time.sleep(max(0.0, interval - (time.monotonic() - began)))
    if as_json:
        typer.echo(json.dumps({"at": time.time(), "what": "nothing", **_standing(advisor)}))
    else:
        why = f" (it waits for {advisor.arranger.waits_for})" if advisor.arranger.waits_for else ""
        typer.echo(f"nothing to change{why}; pressure: {advisor.arranger.pressures or 'not known'}")


def _read(body: dict[str, Any]) -> Described:
    from baton.gateway.arranging.described import read_described

    try:
        return read_described(body, time.monotonic())
    except ValueError as error:
        raise Refused(f"what answers there is no Baton server, or an older one: {error}") from None


def _standing(advisor: Advisor) -> dict[str, Any]:
    pressures = advisor.arranger.pressures
    return {
        "instances": dict(advisor.counts),
        "pressure": None if pressures is None else {k: round(v, 3) for k, v in pressures._asdict().items()},
        "waits_for": advisor.arranger.waits_for,
    }


def _line(advisor: Advisor, change: Change) -> str:
    told = {
        "at": time.time(),
        "what": change.kind,
        "name": change.name,
        "label": change.label,
        "why": change.why,
        **_standing(advisor),
        "wanted": advisor.wanted(change),
    }
    return json.dumps(told)


def _text(advisor: Advisor, change: Change) -> str:
    what = f"add one ({change.label})" if change.kind == "add" else str(change)
    after = ", ".join(f"{count} {label}" for label, count in sorted(advisor.wanted(change).items()))
    return f"{time.strftime('%H:%M:%S')}  {what}: {change.why}; then {after}"


def _beginning(advisor: Advisor, shown: Described) -> str:
    counts = ", ".join(f"{count} {label}" for label, count in sorted(advisor.counts.items())) or "none"
    lines = [f"instances: {counts}; promised: {str(advisor.arranger.rules.slo) or 'nothing'}"]
    if shown.changes_number:
        lines.append("this server adds and drains instances itself (--autoscale); do not do it as well")
    elif shown.changes_labels:
        lines.append("this server changes labels itself (--auto-labels); advice is about their number")
    return "\n".join(lines)
