"""What a person is shown of a failing seed."""

from __future__ import annotations

from baton.simulation.plans.draw import draw_plan
from baton.simulation.plans.scenarios import SCENARIOS
from baton.simulation.runner import run_plan
from baton.simulation.shrink import named_in, shrink


def explain_failure(scenario: str, seed: int, *, last: int | None = None, max_runs: int = 1000) -> str:
    """Runs the seed again, makes its plan smaller and tells what happens in it."""
    plan = draw_plan(seed, SCENARIOS[scenario])
    first, _ = run_plan(plan)
    if first.violation is None:
        return f"seed {seed} of {scenario} breaks no rule any more"
    small = shrink(plan, first.violation, max_runs=max_runs)
    _, world = run_plan(small.plan, recording=True)
    request = next(iter(named_in(small.violation.text)), None)
    ended = "" if small.whole else ", until the time was over"
    lines = [
        f"seed {seed} breaks {first.violation}",
        f"  run it again: baton simulate --scenario {scenario} --seed {seed} --timeline",
        f"made smaller in {small.runs} runs{ended}: {small.plan}",
        *(f"  {spec}" for spec in small.plan.requests),
        *(f"  fault: {fault}" for fault in small.plan.faults),
        f"breaks {small.violation}",
        world.timeline.render(request=request, last=last),
    ]
    return "\n".join(lines)
