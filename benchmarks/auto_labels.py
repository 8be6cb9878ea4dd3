"""A day whose load turns, on a cost model: labels that the gateway changes beside every fixed split.

    python benchmarks/auto_labels.py [--hour 300] [--instances 4] [--slo "ttft:2000 itl:50"] [--deaths 4]
                                     [--seed 1] [--out day.json] [--plot docs/day.svg]

At night documents are read and summed up (long prompts, short answers), by day people chat (short prompts,
long answers), at 13 h comes a burst of documents.  `--deaths` instances die, one after the other, over the
day; each is back after a minute.  All clusters get the same requests and the same deaths.  An hour is
`--hour` seconds long (3600: as it is; everything else is in real seconds, so a shorter one is harder for who
must adapt).

Goodput: requests whose first token and whose answer were within the SLO.  "Best split": of all P:D splits,
the one that did best, chosen afterwards, over the day or in each hour.  Steady: hours whose load is as in the
hour before.  Goals: in steady hours at least 0.98 of the best split of that hour, over the day above the
best one.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from random import Random

from _common import Table, machine, print_machine, write_json
from baton.gateway.arranging.measured import Label
from baton.gateway.arranging.slo import Slo, read_slo
from baton.protocol.config import CostModel
from baton.simulation.capacity.cluster import Capacity
from baton.simulation.capacity.goodput import by_time, goodput
from baton.simulation.capacity.load import Asked, day, rates, standard_day
from baton.simulation.capacity.machine import Machine
from baton.simulation.capacity.planning import ORDER, first_labels, run_with, split
from baton.simulation.capacity.plot import Line, Panel, svg

COST = CostModel(base=0.015, per_prefill_token=1e-4, per_decode_sequence=3e-4)
QUARTERS = 96


def main() -> None:
    options = read_options()
    slo = read_slo(options.slo)
    facts = machine()
    print_machine(facts)
    hours = standard_day()
    requests = day(hours, options.hour, options.seed)
    model = Machine(cost=COST, itl_target_s=0.9 * slo.itl_s if slo.itl_s < 1e9 else None)
    deaths = draw_deaths(options.deaths, 24 * options.hour, options.instances, options.seed)
    table = Table(
        f"{len(requests):,} requests, {options.instances} instances, {len(deaths)} deaths, SLO {slo}",
        ["labels", "good over the day", "late", "slow", "worst hour", "labels changed"],
    )
    runs: dict[str, Capacity] = {}
    clusters: dict[str, list[Label]] = {
        f"{number} prefill, {options.instances - number} decode": split(number, options.instances)
        for number in range(1, options.instances)
    }
    clusters |= {"all mixed": ["mixed"] * options.instances, "--auto-labels": first_labels(options.instances)}
    for name, labels in clusters.items():
        run = run_with(requests, labels, model, slo, deaths, arranged=name == "--auto-labels")
        runs[name] = run
        found = goodput(run.requests, slo)
        worst = min(one.share for one in by_time(run.requests, slo, options.hour))
        cells = (f"{found.share:.4f}", found.late, found.slow, f"{worst:.3f}", len(run.changes))
        table.row(name, *cells)
    table.print()
    shares = {
        name: [one.share for one in by_time(run.requests, slo, options.hour)] for name, run in runs.items()
    }
    own = shares["--auto-labels"]
    splits = [name for name in runs if name.endswith("decode")]
    best = [max(shares[name][hour] for name in splits) for hour in range(24)]
    steady = [hour for hour in range(24) if hours[hour].steady]
    total = {name: goodput(run.requests, slo).share for name, run in runs.items()}
    ratios = {hour: own[hour] / best[hour] for hour in steady if best[hour]}
    least = min(ratios, key=lambda hour: ratios[hour])
    of_best = sum(own[hour] for hour in steady) / sum(best[hour] for hour in steady)
    best_day = max(splits, key=lambda name: total[name])
    print(f"steady hours, of the best split of each: {of_best:.4f}; least: {ratios[least]:.4f} ({least} h)")
    print(f"over the day: {total['--auto-labels']:.4f}; the best split, {best_day}: {total[best_day]:.4f}")
    changes = [
        {"hour": round(at / options.hour, 2), "what": str(change), "why": change.why}
        for at, change in runs["--auto-labels"].changes
    ]
    result = {
        "machine": facts,
        "setting": vars(options),
        "requests": len(requests),
        "deaths": [(round(at / options.hour, 2), place) for at, place in deaths],
        "over_the_day": total,
        "by_hour": shares,
        "steady": {"hours": steady, "of_the_best_split": of_best, "least": ratios[least]},
        "changes": changes,
    }
    write_json(options.out, result)
    if options.plot:
        text = picture(requests, runs, ("--auto-labels", best_day, "all mixed"), slo, options.hour)
        Path(options.plot).write_text(text)
        print(f"written: {options.plot}")


def draw_deaths(count: int, seconds: float, instances: int, seed: int) -> list[tuple[float, int]]:
    """One in each of so many equal parts of the day, at any moment of it."""
    random, part = Random(seed), seconds / max(count, 1)
    return [((number + random.random()) * part, random.randrange(instances)) for number in range(count)]


def picture(
    requests: list[Asked], runs: dict[str, Capacity], names: tuple[str, ...], slo: Slo, hour_s: float
) -> str:
    width = 24 * hour_s / QUARTERS
    prompts, answers = zip(*[(a, b) for _, a, b in rates(requests, width)], strict=True)
    arranged = runs["--auto-labels"]
    counts = []
    for quarter in range(QUARTERS):
        middle = (quarter + 0.5) * width
        counts.append(Counter(next(labels for at, labels in reversed(arranged.history) if at <= middle)))
    good = {name: [one.share for one in by_time(runs[name].requests, slo, width)] for name in names}
    roles = [Line(label, [float(count[label]) for count in counts]) for label in ORDER]
    return svg(
        "A day that turns from long prompts to long answers and back",
        [
            Panel("tokens a second", "", [Line("of prompts", prompts), Line("of answers", answers)]),
            Panel("instances, --auto-labels", "", roles, stacked=True),
            Panel("good requests", "", [Line(name, values) for name, values in good.items()]),
        ],
    )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hour", type=float, default=300.0, help="seconds of an hour")
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--slo", default="ttft:2000 itl:50")
    parser.add_argument("--deaths", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="where to write the result as JSON")
    parser.add_argument("--plot", help="where to draw it, as SVG")
    return parser.parse_args()


if __name__ == "__main__":
    main()
