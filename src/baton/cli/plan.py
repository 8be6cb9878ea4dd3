"""`baton plan`: how many instances a trace needs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from baton.gateway.arranging.slo import Slo
    from baton.simulation.capacity.load import Asked
    from baton.simulation.capacity.machine import Machine
    from baton.simulation.capacity.planning import Plan, Run


def plan(
    trace: Annotated[
        Path,
        typer.Option(
            help="Requests: lines of JSON with timestamp (ms), input_length, output_length; what "
            "`baton bench serve --save-result --save-detailed` wrote; or the directory of "
            "`baton serve --record`."
        ),
    ],
    slo: Annotated[str, typer.Option(help='What clients are promised, in ms: "ttft:500 itl:50".')],
    step_cost: Annotated[
        str,
        typer.Option(
            help="Seconds of an instance's step: base,each token of a prompt,each sequence that decodes,"
            "each token of context. What a step takes on your machine."
        ),
    ],
    wanted: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of the requests that is to be within --slo.")
    ] = 0.99,
    most: Annotated[int, typer.Option(min=1, max=1024, help="Instances that may be needed, at most.")] = 64,
    load: Annotated[
        float, typer.Option(min=0.001, max=1000.0, help="So many times as many requests a second.")
    ] = 1.0,
    slots: Annotated[int, typer.Option(min=1, help="--max-num-seqs of an instance.")] = 256,
    kv_tokens: Annotated[
        int, typer.Option(min=64, help="Tokens that an instance's KV cache holds.")
    ] = 200_000,
    startup: Annotated[float, typer.Option(min=0.0, help="Seconds until an instance serves.")] = 60.0,
    out: Annotated[Path | None, typer.Option(help="Also write the result there, as JSON.")] = None,
) -> None:
    """Say how many instances a trace of requests needs, of which kind, and what one less would cost.

    Simulates clusters whose steps take what --step-cost says, with the routing of `baton serve` and roles as
    --auto-labels changes them. Exits with 1 if not even --most instances are enough.
    """
    from baton.gateway.arranging.slo import read_slo
    from baton.launch.options.engine import cost_parts
    from baton.protocol.config import CostModel
    from baton.simulation.capacity.machine import Machine
    from baton.simulation.capacity.planning import plan_for
    from baton.simulation.capacity.trace import TraceError, read_trace

    try:
        promised = read_slo(slo)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--slo") from None
    try:
        cost = CostModel(*cost_parts(step_cost))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--step-cost") from None
    if cost.base <= 0:
        raise typer.BadParameter("a step takes more than 0 seconds", param_hint="--step-cost")
    try:
        requests = read_trace(trace)
    except TraceError as error:
        raise typer.BadParameter(str(error), param_hint="--trace") from None
    requests = [one._replace(at=one.at / load) for one in requests]
    longest = max(one.prompt + one.output for one in requests)
    if longest > kv_tokens:
        raise typer.BadParameter(
            f"a request of it has {longest:,} tokens, more than {kv_tokens:,}",
            param_hint="--kv-tokens",
        )
    target = None if promised.itl_s == math.inf else 0.9 * promised.itl_s
    machine = Machine(cost=cost, slots=slots, kv_tokens=kv_tokens, itl_target_s=target, startup_s=startup)
    seconds = requests[-1].at
    typer.echo(f"{len(requests):,} requests in {seconds:,.0f} s; {promised} for {100 * wanted:g} % of them")
    typer.echo(f"{'instances':>9} {'good':>7} {'late':>7} {'slow':>7}   mean (most) of each kind")
    found = plan_for(requests, machine, promised, wanted=wanted, most=most, tell=_print_run)
    _print_plan(found)
    best = _best_split(requests, machine, promised, found.chosen.instances)
    if best is not None:
        typer.echo(f"best fixed split of as many, chosen afterwards: {best[0]}, good: {best[1]:.4f}")
    if out is not None:
        out.write_text(json.dumps(_as_json(found, best), indent=2) + "\n")
    if not found.enough:
        raise typer.Exit(1)


def _print_run(run: Run) -> None:
    good = run.goodput
    typer.echo(f"{run.instances:>9} {good.share:>7.4f} {good.late:>7,} {good.slow:>7,}   {_kinds(run)}")


def _kinds(run: Run) -> str:
    named = [f"{label} {run.shares[label]:.1f} ({most})" for label, most in run.most.items() if most]
    return ", ".join(named)


def _print_plan(found: Plan) -> None:
    chosen, count = found.chosen, found.chosen.instances
    told = f"{count} instance{'s' if count > 1 else ''}"
    if not found.enough:
        typer.echo(f"not enough: {told} answer {100 * chosen.goodput.share:.2f} % as promised")
        return
    typer.echo(f"\n{told}: {_kinds(chosen)}; {chosen.changes} labels changed")
    for other, words in ((count - 1, "one less"), (count + 1, "one more")):
        if other in found.runs:
            share = found.runs[other].goodput.share
            typer.echo(f"{words}: good {share:.4f} ({share - chosen.goodput.share:+.4f})")


def _best_split(
    requests: list[Asked], machine: Machine, promised: Slo, instances: int
) -> tuple[str, float] | None:
    """Of fixed labels; None: a single instance has none."""
    from baton.simulation.capacity.goodput import goodput
    from baton.simulation.capacity.planning import run_with, split

    found = []
    for prefills in range(1, instances):
        run = run_with(requests, split(prefills, instances), machine, promised, arranged=False)
        name = f"{prefills} prefill, {instances - prefills} decode"
        found.append((name, goodput(run.requests, promised).share))
    return max(found, key=lambda entry: entry[1], default=None)


def _as_json(found: Plan, best: tuple[str, float] | None) -> dict[str, Any]:
    return {
        "instances": found.chosen.instances,
        "enough": found.enough,
        "best_fixed_split": None if best is None else {"labels": best[0], "good": best[1]},
        "runs": [
            {
                "instances": run.instances,
                "good": run.goodput.share,
                "late": run.goodput.late,
                "slow": run.goodput.slow,
                "mean": run.shares,
                "most": run.most,
                "labels_changed": run.changes,
            }
            for run in found.runs.values()
        ],
    }
