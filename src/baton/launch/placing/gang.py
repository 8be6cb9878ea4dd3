"""What Ray has of one instance, actors and a placement group: placed, found again, taken away.

Theory.  An instance on one host has a group with one bundle, and one actor, and Ray starts both again when
they are lost.  An instance on several hosts has a bundle and an actor for each, on nodes of Ray that all
differ (STRICT_SPREAD).  Of such a group Ray may reschedule a part, which then waits for ever while another
group has the rest of the nodes; and a leader that comes back elsewhere has another address.  So Ray starts
none of these actors again: once one is lost, the driver takes the whole instance away and places it anew.

Groups and actors are detached and named, so that they outlive the driver and are found by the next one.
Every function here calls Ray, and may wait for it; the driver gives each a deadline.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from baton.launch.placing.spec import Placed, Placing, Standing, State

_STATES: Mapping[str, State] = {"PENDING": "waiting", "PREPARED": "waiting", "CREATED": "placed"}
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 30.0
_STOOD_S = 60.0
"""An instance that was lost sooner is placed anew more slowly each time."""

Group = Mapping[str, Any]
"""An entry of Ray's table of placement groups."""


class Gang:
    """What Ray has of one instance."""

    def __init__(self, placing: Placing, instance: Placed) -> None:
        self._placing = placing
        self.instance = instance
        self.name = f"{placing.cluster}-{instance.name}"
        """Of the placement group, and of the actor that has the engine."""
        self.names = [self.name, *(f"{self.name}/{number}" for number in range(1, placing.nodes))]
        """Of the actors, one a host."""
        self._asked: list[Any] = []
        """A call to each actor, which fails with the reason why it could not be made."""
        self._placed_at: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._not_before = 0.0

    def find(self, groups: Mapping[str, Group], actors: Collection[str], now: float) -> bool:
        """Whether all of it is there, placed by an earlier driver; it is taken over then, else taken away."""
        if self.name in groups and all(name in actors for name in self.names):
            self._placed_at = now
            return True
        self._take_away(groups, actors)
        return False

    def turn(self, groups: Mapping[str, Group], actors: Collection[str], now: float) -> str:
        """Places it if nothing of it is there, and takes it away if a part is missing.  Returns why it was
        lost, for people; "": it was not."""
        if self._placed_at is None:
            if now >= self._not_before and self.name not in groups and not self._mine(actors):
                self._place()
                self._placed_at = now
            return ""
        missing = len(self.names) - len(self._mine(actors))
        broken = self._placing.nodes > 1 and groups.get(self.name, {}).get("state") == "RESCHEDULING"
        if not missing and not broken and self.name in groups:
            return ""
        self._pause_s = min(_LAST_PAUSE_S, 2 * self._pause_s)
        if now - self._placed_at > _STOOD_S:
            self._pause_s = _FIRST_PAUSE_S
        self._placed_at, self._not_before = None, now + self._pause_s
        why = self._why()
        self._take_away(groups, actors)
        return why or ("a host of it is lost" if self._placing.nodes > 1 else "its actor has ended")

    def standing(self, groups: Mapping[str, Group]) -> Standing:
        """How it stands."""
        group = groups.get(self.name, {})
        state = _STATES.get(group.get("state", "PENDING"), "moving")
        nodes = [str(node) for node in group.get("bundles_to_node_id", {}).values() if node]
        return Standing(
            self.instance.name,
            self.instance.label,
            state,
            needs_of(self._placing),
            self._placing.nodes,
            tuple(nodes),
        )

    def _mine(self, actors: Collection[str]) -> list[str]:
        return [name for name in self.names if name in actors]

    def _place(self) -> None:
        """Asks for the resources and the actors.  Waits for neither."""
        from ray.util import placement_group

        placing = self._placing
        bundles = [needs_of(placing) for _ in range(placing.nodes)]
        strategy = "STRICT_PACK" if placing.nodes == 1 else "STRICT_SPREAD"
        group = placement_group(bundles, strategy=strategy, name=self.name, lifetime="detached")
        leader = self._actor(group, 0, "")
        address = leader.leads.remote() if placing.nodes > 1 else ""
        # (Ray makes the others when it knows what `leads` has returned.)
        others = [self._actor(group, number, address) for number in range(1, placing.nodes)]
        self._asked = [one.place.remote() for one in (leader, *others)]

    def _actor(self, group: Any, node: int, leader: Any) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from baton.launch.placing.actor import InstanceActor

        placing = self._placing
        remote = ray.remote(InstanceActor).options(
            name=self.names[node],
            lifetime="detached",
            max_restarts=-1 if placing.nodes == 1 else 0,
            max_concurrency=2,
            num_cpus=placing.cpus,
            num_gpus=placing.gpus,
            memory=placing.memory or None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
        )
        arguments = [*placing.arguments, "--name", self.instance.name, "--label", self.instance.label]
        return remote.remote(
            arguments,
            loopback=placing.loopback,
            secrets=placing.secrets,
            stop_after_s=placing.stop_after_s,
            node=node,
            nodes=placing.nodes,
            leader=leader,
        )

    def _why(self) -> str:
        """What Ray says of an actor that could not be made."""
        import ray

        for one in self._asked:
            if ray.wait([one], timeout=0)[0]:
                try:
                    ray.get(one)
                except Exception as error:
                    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                    return lines[-1][:300] if lines else type(error).__name__
        return ""

    def _take_away(self, groups: Mapping[str, Group], actors: Collection[str]) -> None:
        take_away(self._mine(actors), [self.name] if self.name in groups else [])


class Leaving:
    """What Ray has of an instance that is not wanted any more: it drains, and is taken away then."""

    def __init__(self, name: str, actors: Collection[str], *, runs: bool, until: float) -> None:
        """`name`: as `Gang.name`.  `runs`: it has its resources, so there is something to drain."""
        self._name = name
        self._actors = [one for one in actors if one == name or one.startswith(f"{name}/")]
        # (Relays end with their leader.)
        self._stopped = [actor.stop.remote() for actor in _actors([name])] if runs else []
        self._until = until if self._stopped else 0.0

    def over(self, groups: Mapping[str, Group], now: float) -> bool:
        """Takes it away once it has drained, or its time is over; whether that is so."""
        import ray

        if now < self._until and not ray.wait(self._stopped, timeout=0)[0]:
            return False
        take_away(self._actors, [self._name] if self._name in groups else [])
        return True


def needs_of(placing: Placing) -> dict[str, float]:
    """Of each host of an instance, as Ray counts it."""
    needs = {"CPU": placing.cpus, "GPU": placing.gpus, "memory": float(placing.memory)}
    return {key: amount for key, amount in needs.items() if amount}


def table() -> tuple[dict[str, Group], set[str]]:
    """The placement groups that are there, by name, and the names of all actors."""
    from ray.util import list_named_actors, placement_group_table

    entries = placement_group_table().values()
    return {one["name"]: one for one in entries if one["state"] != "REMOVED"}, set(list_named_actors())


def stop(names: Collection[str], seconds: float) -> None:
    """Has these actors drain and end their processes, side by side."""
    import ray

    calls = [actor.stop.remote() for actor in _actors(names)]
    if calls:
        ray.wait(calls, num_returns=len(calls), timeout=seconds)


def take_away(actors: Collection[str], groups: Collection[str]) -> None:
    """At once; the processes of the actors end with these."""
    import ray
    from ray.util import get_placement_group, remove_placement_group

    for actor in _actors(actors):
        ray.kill(actor)
    for name in groups:
        try:
            remove_placement_group(get_placement_group(name))
        except ValueError:
            pass  # gone meanwhile


def _actors(names: Collection[str]) -> list[Any]:
    import ray

    found = []
    for name in sorted(names):
        try:
            found.append(ray.get_actor(name))
        except ValueError:
            pass  # gone meanwhile
    return found
