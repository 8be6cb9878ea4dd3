"""`baton top`: what `/ui` shows, in a terminal: instances with their load, totals, the open requests.

It asks `/debug/overview` once an interval, and the server makes nothing while nobody asks.  A server that
does not answer is asked again, with what it said last on the screen; one that refuses is not asked again, as
a wrong key stays wrong.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

_PATH = "/debug/overview"
_DEADLINE_S = 5.0
_MOST_BYTES = 64 << 20
_NAME = 16
"""Characters of a name that are shown, at the expense of columns that matter less."""
_TEXTS = 3
"""Columns of a table that are texts; the others are numbers."""
_ROWS = 20
"""Requests that are listed where it is not known how many lines there are."""


class Refused(Exception):
    """The server answers that it will not tell; the message says why."""


class Away(Exception):
    """The server does not answer; the message says how."""


def top(
    url: Annotated[
        str, typer.Argument(help="Address of the server, such as http://127.0.0.1:8000.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str, typer.Option(help="Key of an operator: one of the server's --admin-key.", envvar="BATON_TOP_KEY")
    ] = "",
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.2, max=3600)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print how it stands now, and leave.")] = False,
) -> None:
    """Show a running server: instances, load, KV use, tokens a second, open requests.

    Without a terminal, or with --once, it prints once and leaves.  Ctrl-C leaves.
    """
    if not url.startswith(("http://", "https://")):
        url = f"http://{url}"
    address = url.rstrip("/").removesuffix("/v1") + _PATH
    try:
        if once or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
            _print_once(address, api_key)
        else:
            _watch(url, address, api_key, interval)
    except KeyboardInterrupt:
        return
    except (Refused, Away) as error:
        typer.echo(f"error: {url}: {error}", err=True)
        raise typer.Exit(1) from None


def ask(address: str, api_key: str, key: str = "instances") -> dict[str, Any]:
    """What the server tells there: an object with this key.  Raises `Refused` or `Away`."""
    request = urllib.request.Request(address)
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=_DEADLINE_S) as answer:
            found = json.loads(answer.read(_MOST_BYTES))
    except urllib.error.HTTPError as error:
        why = _reason(error)
        if error.code >= 500:
            raise Away(why) from None
        raise Refused(why) from None
    except urllib.error.URLError as error:
        raise Away(f"the server does not answer: {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise Away(f"the server does not answer: {error or type(error).__name__}") from None
    except ValueError:
        raise Refused(f"what answers there is no Baton server, or an older one ({address})") from None
    if not isinstance(found, dict) or key not in found:
        raise Refused(f"what answers there is no Baton server, or an older one ({address})")
    return found


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        message = str(json.loads(error.read(1 << 16))["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        message = str(error.reason)
    hint = " (--api-key)" if error.code in (401, 403) else ""
    return f"{error.code}: {message}{hint}"


def _print_once(address: str, api_key: str) -> None:
    from rich.console import Console

    Console(soft_wrap=True).print(screen(ask(address, api_key), None, _ROWS))


def _watch(url: str, address: str, api_key: str, interval: float) -> None:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console()
    last: dict[str, Any] | None = None
    shown: Group | Text = Text(f"asking {url} …")
    with Live(shown, console=console, screen=True, auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            try:
                now = ask(address, api_key)
                room = max(1, console.size.height - len(now["instances"]) - 9)
                shown, trouble = screen(now, last, room, console.size.width), ""
                last = now
            except Away as error:
                trouble = f"{url}: {error}; asking again"
            # (Above it: what does not fit is left out at the bottom.)
            live.update(Group(Text(trouble, style="red"), shown) if trouble else shown, refresh=True)
            time.sleep(max(0.0, interval - (time.monotonic() - began)))


def screen(now: dict[str, Any], last: dict[str, Any] | None, rows: int, width: int | None = None) -> Group:
    """What is shown of an overview; `last`: an earlier one, for what is told a second; `width`: columns of
    the terminal, if there is one: what matters least goes where they are too few."""
    from rich.console import Group
    from rich.text import Text

    instances = now["instances"]
    blocks = sum(one["num_blocks"] or 0 for one in instances)
    free = sum(_free(one) for one in instances)
    state = "paused" if now["paused"] else "stops soon" if now["leaving"] else now["state"]
    figures = [
        f"open {now['open']:,}",
        f"running {sum(one['running'] or 0 for one in instances):,}",
        f"waiting {sum(one['waiting'] or 0 for one in instances):,}",
        f"KV {_percent(blocks - free, blocks)}",
        f"tokens/s {_rate(now, last, 'generated_tokens')}",
        f"prompt tokens/s {_rate(now, last, 'prompt_tokens')}",
        f"handed over {now['totals']['handed_over']:,}",
        f"continued {now['totals']['continued']:,}",
    ]
    title = Text.assemble(
        (f"{now['model']} {now['version']}  ", "bold"), (state, "green" if state == "ready" else "red")
    )
    parts: list[Any] = [title, Text("\n".join(_lines(figures, width))), Text(), _instances(instances, width)]
    if now["requests"]:
        parts += [Text(), _requests(now, rows, width)]
    left = now["open"] - min(rows, len(now["requests"]))
    if left > 0:
        parts.append(Text(f"and {left:,} more", style="dim"))
    return Group(*parts)


def _lines(figures: list[str], width: int | None) -> list[str]:
    """They end between figures, not within."""
    lines = figures[:1]
    for figure in figures[1:]:
        together = f"{lines[-1]}   {figure}"
        if width is None or len(together) <= width:
            lines[-1] = together
        else:
            lines.append(figure)
    return lines


def _instances(instances: list[dict[str, Any]], width: int | None) -> Table:
    rows = []
    for one in instances:
        state = "paused" if one["paused"] else one["state"]
        if one["draining"]:
            state = "drained" if one["drained"] else "draining"
        total = one["num_blocks"] or 0
        numbers = (
            one["running"] or 0,
            one["waiting"] or 0,
            _percent(total - _free(one), total),
            one["restarts"],
        )
        rows.append((one["name"], one["label"], state, *numbers))
    return _table("instance label state running waiting KV restarts", rows, ("restarts", "label"), width)


def _requests(now: dict[str, Any], most: int, width: int | None) -> Table:
    rows = [
        (name, state, at, f"{now['now'] - arrived:.1f}", prompt, generated)
        for name, arrived, prompt, generated, state, at in now["requests"][:most]
    ]
    return _table("request state at seconds prompt generated", rows, ("prompt", "at", "state"), width)


def _table(names: str, rows: list[tuple[Any, ...]], least: tuple[str, ...], width: int | None) -> Table:
    """`least`: the columns that go first where `width` is too small; the first one is cut where that is not
    enough.  From the fourth on they are numbers."""
    from rich.table import Table
    from rich.text import Text

    head = names.split()
    texts = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    wide = [max(len(text[place]) for text in [head, *texts]) for place in range(len(head))]
    shown = list(range(len(head)))
    for name in least:
        if width is not None and min(wide[0], _NAME) + sum(wide[place] + 2 for place in shown[1:]) > width:
            shown.remove(head.index(name))
    if width is not None:
        wide[0] = min(wide[0], max(1, width - sum(wide[place] + 2 for place in shown[1:])))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for place in shown:
        side: Literal["left", "right"] = "right" if place >= _TEXTS else "left"
        table.add_column(head[place], justify=side, no_wrap=True, width=wide[place])
    for text in texts:
        good = {"state": "green" if text[2] == "ready" else "red"} if head[0] == "instance" else {}
        table.add_row(*(Text(text[place], style=good.get(head[place], "")) for place in shown))
    return table


def _free(one: dict[str, Any]) -> int:
    free = one["free_blocks"]
    return (one["num_blocks"] or 0) if free is None else int(free)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def _rate(now: dict[str, Any], last: dict[str, Any] | None, key: str) -> str:
    """Of a total, a second; a server that has been started again begins anew."""
    if last is None or now["now"] <= last["now"]:
        return "–"
    more = max(0, now["totals"][key] - last["totals"][key])
    return f"{more / (now['now'] - last['now']):,.0f}"
