"""Ray's driver, in a process of its own: `python -m baton.launch.placing.driver`, which the server starts.

Theory.  An instance has a placement group of its own with a single bundle: groups of several bundles may be
rescheduled in part after the loss of a node, and then wait for each other for ever.  Groups and actors are
detached and named, so that they outlive this process, are found by the next one, and are placed again by Ray
when their node is gone.  The server's process does not import Ray, whose threads and crashes stay here.

The first line on stdin is a `Placing`.  What follows, or its end (the server died), ends all instances; if
this process is killed too, the next one with the same cluster name ends them before it places its own.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from baton.launch.placing.spec import Placed, Placing, Report, Standing, State

NAMESPACE = "baton"
_LOOK_S = 1.0
_SWEEP_S = 10.0
"""What instances of an earlier server get to end."""
_PLACES: Mapping[str, State] = {"PENDING": "waiting", "PREPARED": "waiting", "CREATED": "placed"}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the server's affair
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what Ray prints is no report
    placing = msgspec.json.decode(sys.stdin.buffer.readline(), type=Placing)
    try:
        run(placing, out.write)
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        out.write(msgspec.json.encode(Report(error=text[:500])) + b"\n")
        sys.exit(1)


def run(placing: Placing, write: Any) -> None:
    """Until stdin says something or ends.  Raises what Ray raises when it cannot be reached."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

    def report(**what: Any) -> None:
        write(msgspec.json.encode(Report(**what)) + b"\n")

    ray.init(**_where(placing), namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=True)
    swept = sweep(placing.cluster, _SWEEP_S)
    if swept:
        report(note=f"ended what an earlier server left in Ray: {', '.join(swept)}")
    actors: list[Any] = []
    try:
        actors += [_place(placing, instance) for instance in placing.instances]
        told: tuple[Standing, ...] = ()
        while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
            standing = look(placing)
            if standing != told:
                told = standing
                report(instances=standing)
    finally:
        _end(actors, [name_of(placing.cluster, one.name) for one in placing.instances], placing.stop_after_s)
        ray.shutdown()


def name_of(cluster: str, instance: str) -> str:
    """Of the instance's actor, and of its placement group."""
    return f"{cluster}-{instance}"


def look(placing: Placing) -> tuple[Standing, ...]:
    """How all stand."""
    from ray.util import placement_group_table

    groups: dict[str, dict[str, Any]] = {
        entry["name"]: entry for entry in placement_group_table().values() if entry["state"] != "REMOVED"
    }
    found = []
    for one in placing.instances:
        group = groups.get(name_of(placing.cluster, one.name), {})
        nodes = [str(node) for node in group.get("bundles_to_node_id", {}).values() if node]
        state = _PLACES.get(group.get("state", "PENDING"), "moving")
        found.append(Standing(one.name, one.label, state, needs_of(placing), nodes[0] if nodes else ""))
    return tuple(found)


def needs_of(placing: Placing) -> dict[str, float]:
    """Of one instance, as Ray counts it."""
    needs = {"CPU": placing.cpus, "GPU": placing.gpus, "memory": float(placing.memory)}
    return {key: amount for key, amount in needs.items() if amount}


def sweep(cluster: str, seconds: float) -> list[str]:
    """Ends the actors and placement groups of this name that are there.  Returns their names."""
    import ray
    from ray.util import list_named_actors, placement_group_table

    prefix = f"{cluster}-"
    names = [name for name in list_named_actors() if name.startswith(prefix)]
    groups = [
        entry["name"]
        for entry in placement_group_table().values()
        if entry["name"].startswith(prefix) and entry["state"] != "REMOVED"
    ]
    actors = []
    for name in names:
        try:
            actors.append(ray.get_actor(name))
        except ValueError:
            pass  # gone meanwhile
    _end(actors, groups, seconds)
    return sorted({*names, *groups})


def _where(placing: Placing) -> dict[str, Any]:
    if placing.address != "local":
        return {"address": placing.address}
    # Of its own, for this machine: no dashboard; objects are none, so their store is as small as may be.
    return {"address": "local", "include_dashboard": False, "object_store_memory": 80 << 20}


def _place(placing: Placing, instance: Placed) -> Any:
    """Asks for the resources and the actor.  Neither waits for them."""
    import ray
    from ray.util import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from baton.launch.placing.actor import InstanceActor

    name = name_of(placing.cluster, instance.name)
    group = placement_group([needs_of(placing)], strategy="STRICT_PACK", name=name, lifetime="detached")
    remote = ray.remote(InstanceActor).options(
        name=name,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=2,
        num_cpus=placing.cpus,
        num_gpus=placing.gpus,
        memory=placing.memory or None,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
    )
    arguments = [*placing.arguments, "--name", instance.name, "--label", instance.label]
    return remote.remote(
        arguments, loopback=placing.loopback, secrets=placing.secrets, stop_after_s=placing.stop_after_s
    )


def _end(actors: list[Any], groups: list[str], seconds: float) -> None:
    """Drains the instances side by side, then takes their actors and groups away."""
    import ray
    from ray.util import get_placement_group, remove_placement_group

    if actors:
        ray.wait([one.stop.remote() for one in actors], num_returns=len(actors), timeout=seconds)
    for one in actors:
        ray.kill(one)
    for name in groups:
        try:
            remove_placement_group(get_placement_group(name))
        except ValueError:
            pass  # gone meanwhile


if __name__ == "__main__":
    main()
