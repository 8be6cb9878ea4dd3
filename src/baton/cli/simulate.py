"""`baton simulate`: a cluster with faults in one thread, from one seed."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

_REPORT_LINES = 120
_TELL_EVERY = 1000


def simulate(
    scenario: Annotated[
        str, typer.Option(help="Kind of run; `list` shows them, `all` runs all of them.")
    ] = "standard",
    seeds: Annotated[
        str, typer.Option(help="Seeds A:B (B not included), or a number of fresh ones.")
    ] = "0:200",
    seed: Annotated[int | None, typer.Option(help="Only this seed.")] = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="With --seed: print what happened and write a Chrome trace.")
    ] = False,
    request: Annotated[int | None, typer.Option(help="With --timeline: mark this request's life.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Where --timeline writes the trace.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Do not stop at the first violation.")
    ] = False,
    explore: Annotated[
        str | None,
        typer.Option(help="Instead: every interleaving of this small scenario, or of `all`."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Run fresh seeds for so long instead of --seeds.")
    ] = None,
) -> None:
    """Run engine, workers and gateway in a simulated cluster with faults, and check its rules.

    One seed always gives the same run.  Exits with 1 if a rule was broken, and shows how.
    """
    if explore is not None:
        from baton.simulation.explorer.explorer import run_explore

        raise typer.Exit(run_explore(explore))
    from baton.simulation.plans.scenarios import SCENARIOS

    if scenario == "list":
        for shape in SCENARIOS.values():
            typer.echo(f"{shape.name:<12} {shape.about}")
        return
    if scenario != "all" and scenario not in SCENARIOS:
        raise typer.BadParameter(f"{scenario!r} is none of {', '.join(SCENARIOS)}", param_hint="--scenario")
    if timeline and (seed is None or scenario == "all"):
        raise typer.BadParameter("needs --seed, and a --scenario", param_hint="--timeline")
    if timeline and seed is not None:
        _show(scenario, seed, request, trace)
        return
    names = list(SCENARIOS) if scenario == "all" else [scenario]
    if minutes is not None:
        failed = _soak(names, minutes, jobs)
    else:
        wanted = range(seed, seed + 1) if seed is not None else _seeds(seeds)
        failed = False
        for name in names:
            failed = _run(name, wanted, jobs, keep_going) or failed
            if failed and not keep_going:
                break
    if failed:
        raise typer.Exit(1)


def _seeds(text: str) -> range:
    first, colon, last = text.partition(":")
    try:
        if colon:
            return range(int(first), int(last))
        start = secrets.randbits(32)
        return range(start, start + int(first))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither A:B nor a number", param_hint="--seeds") from None


def _run(scenario: str, seeds: range, jobs: int, keep_going: bool) -> bool:
    """Returns whether a rule was broken."""
    from baton.simulation.plans.scenarios import SCENARIOS
    from baton.simulation.runner import Summary, run_seeds

    def tell(summary: Summary) -> None:
        if summary.seeds % _TELL_EVERY == 0:
            typer.echo(f"  {summary.seeds:,} of {len(seeds):,} seeds, {summary.seconds:.0f} s", err=True)

    summary = run_seeds(SCENARIOS[scenario], seeds, jobs=jobs, keep_going=keep_going, progress=tell)
    typer.echo(f"{scenario} {seeds.start}:{seeds.stop}  {summary}")
    for failure in summary.failures:
        typer.echo(f"seed {failure.seed}: {failure.rule}: {failure.text}")
    if summary.failures:
        from baton.simulation.report import explain_failure

        typer.echo(explain_failure(scenario, summary.failures[0].seed, last=_REPORT_LINES))
    return bool(summary.failures)


def _soak(scenarios: list[str], minutes: float, jobs: int) -> bool:
    """In turns, so that each of them gets a part of any time."""
    import itertools
    import time

    until = time.monotonic() + 60 * minutes
    for scenario in itertools.cycle(scenarios):
        if time.monotonic() >= until:
            break
        if _run(scenario, _seeds("2000" if len(scenarios) == 1 else "200"), jobs, False):
            return True
    return False


def _show(scenario: str, seed: int, request: int | None, trace: Path | None) -> None:
    from baton.simulation.plans.draw import draw_plan
    from baton.simulation.plans.scenarios import SCENARIOS
    from baton.simulation.runner import run_plan

    outcome, world = run_plan(draw_plan(seed, SCENARIOS[scenario]), recording=True)
    typer.echo(world.plan)
    typer.echo(world.timeline.render(request=request))
    path = trace or Path(f"simulate-{scenario}-{seed}.json")
    world.timeline.write_chrome_trace(path)
    typer.echo(f"{outcome.events} events; {path} opens in https://ui.perfetto.dev")
    if outcome.violation is not None:
        typer.echo(f"VIOLATION {outcome.violation}")
        raise typer.Exit(1)
