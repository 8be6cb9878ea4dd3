"""A few lines for the person who started a server; on a terminal not wider than it, and nothing twice."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping

from baton.gateway.errors import ApiError
from baton.gateway.instances.client import ClusterClient
from baton.gateway.instances.connection import InstanceClient
from baton.launch.planning.plan import ServerPlan
from baton.observe.logs import erasing
from baton.observe.memory import Memory, memory_of_all, sum_of
from baton.version import __version__

_INDENT = " " * 12


async def announce(
    plan: ServerPlan,
    client: ClusterClient,
    processes: Callable[[], Mapping[str, int]],
    address: str,
    started: float,
    *,
    placed: int = 0,
) -> None:
    """At once where it will answer, then each instance as it becomes ready, and when requests are served.
    `placed`: instances that Ray starts."""
    say(f"Baton {__version__} loads {plan.served.name}; it will answer at {address}")
    mine = list(client.instances.values())
    if placed:
        say(f"  Ray places {placed} instance{'s' if placed > 1 else ''}")
    elif not mine:
        say("  no instance runs here; start some with: baton serve --instance --join HOST:PORT")
    config = plan.instance
    say(
        f"  model     {plan.served.name} ({plan.architecture}), {plan.served.dtype or config.dtype}, "
        f"{config.max_model_len:,} tokens of context"
    )
    details: dict[str, list[str]] = {}
    await asyncio.gather(*(_announce_instance(link, len(mine) > 1, details) for link in mine))
    for detail, names in details.items():
        whose = "" if len(details) == 1 else f"{', '.join(names)}: "
        say(f"  running   {whose}{detail}")
    await client.ready()
    took = time.monotonic() - started
    say(
        *await asyncio.to_thread(_memory, processes()),
        f"  address   {address}/v1  (ready in {took:.1f} s; /docs describes the API)",
    )


_ITS_OWN = re.compile(r", (?:made here|shared|from the weight cache)(?=\))|KV \d+ MB(?: \([^)]*\))?,? ?")
"""In what instances say: who has made their weights, and the size of the pool, which the line before has."""


async def _announce_instance(link: InstanceClient, named: bool, details: dict[str, list[str]]) -> None:
    """On a terminal, what several instances say of themselves goes into `details`, with their names."""
    try:
        welcome = await link.ready()
    except ApiError:
        return  # its supervisor says why
    tokens = welcome.num_blocks * welcome.block_size
    if named and erasing():
        say(f"  {link.name:<9} ready, {tokens:,} tokens of KV cache")
        details.setdefault(_ITS_OWN.sub("", welcome.detail), []).append(link.name)
    elif named:
        say(f"  {link.name:<9} {tokens:,} tokens of KV cache; {welcome.detail}")
    else:
        say(
            f"  KV cache  {welcome.num_blocks:,} blocks of {welcome.block_size} = {tokens:,} tokens",
            f"  running   {welcome.detail}",
        )


def _memory(processes: Mapping[str, int]) -> list[str]:
    """What they use, by instance: nothing where the system does not say."""
    try:
        found = memory_of_all(processes)
    except OSError:
        return []
    owners: dict[str, list[Memory]] = {}
    for process, memory in found.items():
        name, _, what = process.partition(" ")
        owner = name if what == "engine" or what.startswith("rank ") else "the server"
        owners.setdefault(owner, []).append(memory)
    said = [f"  memory    {_parts(sum_of(found.values()))}, as PSS of all processes (/debug/memory)"]
    return said + [f"            {owner}: {_parts(sum_of(its))}" for owner, its in owners.items()]


def _parts(memory: Memory) -> str:
    parts = (f"image {memory.image / 1e6:.0f}", f"KV {memory.kv_pool / 1e6:.0f}")
    return f"{memory.pss / 1e6:.0f} MB: {', '.join(parts)}, private {memory.private / 1e6:.0f}"


def _filled(line: str, width: int) -> str:
    """Addresses and names stay in one piece."""
    wrapper = textwrap.TextWrapper(width, subsequent_indent=_INDENT)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(line)


def say(*lines: str) -> None:
    text = "\n".join(lines)
    if erasing():
        width = max(40, shutil.get_terminal_size().columns - 1)
        text = "\n".join(_filled(line, width) for line in lines)
    sys.stdout.write(f"{erasing()}{text}\n")
    sys.stdout.flush()
