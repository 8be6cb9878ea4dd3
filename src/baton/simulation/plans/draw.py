"""Plans from seeds.

Theory.  Each kind of fault is switched on or off for a whole plan by a coin of its own, and so are the odd
kinds of clients: a run in which everything goes wrong at once hides what only shows when one thing does, and
the other way round.

The clocks of a cluster's processes differ by at most `CLUSTER_DRIFT` in rate: leases are durations on each
side's own clock, and D uses only `TRUST` (0.95) of one, so they hold as long as no clock runs more than
1 / 0.95 = 5.2 % faster than another.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from msgspec.structs import replace as replace_in

from baton.gateway.arranging.arranger import Rules
from baton.gateway.arranging.slo import Slo
from baton.gateway.cluster.member import Label
from baton.protocol.config import CostModel, InstanceConfig
from baton.protocol.params.pooling import Pooling, PoolingKind
from baton.protocol.params.sampling import Constraint, Sampling, Stopping
from baton.simulation.plans.late import draw_steps
from baton.simulation.plans.plan import (
    CLUSTER_DRIFT,
    GATEWAY_FAULTS,
    PEER_FAULTS,
    POISON,
    RARE,
    STEP_TIMEOUT_S,
    VOCAB_SIZE,
    ClientKind,
    Fault,
    FaultKind,
    RequestSpec,
    RunPlan,
    Shape,
    simulated_config,
)

_INITIALS: dict[Label, str] = {"mixed": "m", "prefill": "p", "decode": "d"}


def draw_plan(seed: int, shape: Shape) -> RunPlan:
    """The plan that the seed stands for in this scenario."""
    random = Random(seed)
    faults_on = [
        kind for kind in shape.faults if random.random() < shape.fault_chance or kind in shape.always
    ]
    clients_on = {
        kind
        for kind in shape.clients
        if random.random() < shape.client_chance * (0.5 if kind == "floods" else 1.0)
    }
    labels = random.choice(shape.clusters)
    instances = tuple(
        draw_steps(seed, place, _draw_pace(Random((seed << 8) + place), one), shape)
        for place, one in enumerate(_draw_instances(random, shape, labels, clients_on))
    )
    num_gateways = random.randint(shape.min_gateways, shape.max_gateways)
    requests = _draw_requests(random, shape, instances[0], num_gateways, clients_on)
    if shape.bursts is not None:
        requests = _draw_bursts(random, shape.bursts, instances[0], requests)
    if shape.flows:
        requests = _draw_floods(random, shape, instances[0], requests)
    faults = [
        fault
        for kind in faults_on
        for fault in _draw_faults(random, kind, shape, instances, num_gateways)
        if len(instances) > 1 or kind not in PEER_FAULTS
    ]
    for index, burden in shape.burdens:
        faults += _draw_burden(random, index, burden)
    return RunPlan(
        seed=seed,
        scenario=shape.name,
        instances=instances,
        labels=labels,
        num_gateways=num_gateways,
        ticket_entries=random.choice((2, 8, 64)),
        report_room=random.choice((1, 4, 1000)),
        usual_delay=random.choice(shape.usual_delay),
        drift=random.choice(shape.drift or (0.0, 0.01, 0.2 if len(labels) == 1 else CLUSTER_DRIFT)),
        extreme_clocks=bool(shape.drift),
        faults_end=shape.seconds + 0.5,
        requests=requests,
        faults=tuple(faults),
        one_host=random.random() < 0.5 and not shape.far,
        page_s=random.choice((1e-5, 1e-4, 2e-3, 2e-2)),
        threshold=random.choice((0, 0, 0, 8, None)),
        kinds=(*faults_on, *sorted(clients_on)),
        ttl_s=random.choice(shape.ttl_s) if shape.ttl_s else None,
        arranging=_draw_rules(Random((seed << 8) + 255)) if shape.arranged else None,
        notices=shape.notices,
    )


def _draw_rules(random: Random) -> Rules:
    """As fast as a run is short, and with promises that are easy, hard or impossible to keep."""
    look_s = random.choice((0.01, 0.03))
    return Rules(
        slo=Slo(random.choice((0.005, 0.05, 0.5)), random.choice((0.002, 0.012, 0.04, 0.2))),
        look_s=look_s,
        window_s=random.choice((3, 10)) * look_s,
        looks=random.choice((1, 2, 3)),
        cool_down_s=random.choice((1, 3, 8)) * look_s,
        longest_cool_down_s=0.5,
        calm=random.choice((0.05, 0.5)),
        gain=random.choice((0.02, 0.1)),
        stale_s=random.choice((0.06, 0.2)),
    )


def _draw_instances(
    random: Random, shape: Shape, labels: tuple[Label, ...], clients: set[ClientKind]
) -> tuple[InstanceConfig, ...]:
    block_size = random.choice((2, 4, 4, 8))
    max_model_len = random.randint(*shape.max_model_len)
    longest = -(-(max_model_len - 1) // block_size)
    max_waiting = random.randint(3, 24) if "floods" in clients else 1000
    if shape.max_waiting is not None:
        max_waiting = random.randint(*shape.max_waiting)
    headroom = random.choice(shape.headroom)
    caching = random.random() < 0.8
    cost = CostModel(base=random.choice((0.001, 0.01, 0.03)), per_prefill_token=0.0002)
    in_cluster = len(labels) > 1
    max_ranks = min(shape.max_ranks, 2) if in_cluster else shape.max_ranks  # (heads are divided evenly)
    layers, heads = (random.choice((1, 2, 4)), random.choice((1, 2, 4))) if in_cluster else (1, 1)
    lease, preparing = random.choice(shape.lease_s), random.choice((1, 2, 64))
    reserve_timeout = random.choice(shape.reserve_timeout_s)
    credit_wait = random.choice(shape.credit_wait_s)
    load_interval = random.choice(shape.load_interval_s) if shape.load_interval_s else 0.05
    full = {index for index, burden in shape.burdens if burden == "full"}
    instances = []
    for index, label in enumerate(labels):
        spare = shape.spare_blocks if index not in full else (0, 0)
        name = f"{_INITIALS[label]}{labels[:index].count(label)}"
        instances.append(
            simulated_config(
                max_model_len=max_model_len,
                tensor_parallel_size=random.choice((1, 1, 1, 2, 2, 3)[: 3 + max_ranks]),
                block_size=block_size,
                num_blocks=max(1, longest + random.randint(*spare)),
                max_num_seqs=1 if index in full else random.choice(shape.slots),
                max_num_batched_tokens=random.choice(shape.step_tokens),
                auto_step_tokens=False,
                max_waiting=max_waiting,
                admission_headroom=headroom,
                enable_prefix_caching=caching,
                step_timeout_s=STEP_TIMEOUT_S,
                vocab_size=VOCAB_SIZE,
                simulated_cost=cost,
                simulated_real_time=False,
                simulated_layers=layers,
                simulated_kv_heads=heads,
                name=name,
                peer_endpoint=f"sim://{name}" if in_cluster else "",
                max_preparing=preparing,
                reserve_timeout_s=reserve_timeout,
                credit_wait_s=credit_wait,
                lease_s=lease,
                load_interval_s=load_interval,
            )
        )
    return tuple(instances)


def _draw_pace(random: Random, instance: InstanceConfig) -> InstanceConfig:
    """Half of the instances choose how much of whose prompts a step computes."""
    if random.random() < 0.5:
        return instance
    return replace_in(
        instance,
        auto_step_tokens=True,
        max_num_batched_tokens=random.choice((instance.max_num_batched_tokens, 64)),
        itl_target_s=random.choice((None, None, 0.001, 0.02)),
        ttft_target_s=random.choice((None, None, 0.05)),
    )


def _draw_requests(
    random: Random, shape: Shape, config: InstanceConfig, num_gateways: int, clients: set[ClientKind]
) -> tuple[RequestSpec, ...]:
    families = [tuple(random.randrange(POISON) for _ in range(24)) for _ in range(3)]
    alike = None
    if "alike" in clients:
        length = random.randint(config.block_size, max(config.block_size, config.max_model_len // 3))
        alike = (length, random.choice((4, 8, config.max_model_len - length - 2)))
    requests = []
    at = 0.3 * random.random()
    pace = random.choice((0.1, 0.4, 0.8)) * shape.seconds / max(shape.num_requests, 1)
    for number in range(shape.num_requests):
        burst = 5 if "floods" in clients else 1
        if random.random() * burst < 1.0:
            at += random.expovariate(1 / pace) * burst
        requests.append(
            _draw_request(
                random, number, min(at, shape.seconds), config, num_gateways, clients, families, alike
            )
        )
    return tuple(requests)


def _draw_floods(
    random: Random, shape: Shape, config: InstanceConfig, requests: tuple[RequestSpec, ...]
) -> tuple[RequestSpec, ...]:
    """The same requests as floods of the shape's flows, which begin one after the other."""
    sizes = [(random.randint(1, 8), random.choice((1, 2, 4, 8))) for _ in shape.flows]
    begins = [random.choice((0.0, 0.0, shape.seconds / 2)) * random.random() for _ in shape.flows]
    often = [random.choice((1, 2, 6)) for _ in shape.flows]
    floods = []
    for spec in requests:
        length, max_tokens = sizes[index := random.choices(range(len(shape.flows)), often)[0]]
        floods.append(
            replace(
                spec,
                at=begins[index] + random.uniform(0.0, shape.seconds / 5),
                prompt=tuple(random.randrange(POISON) for _ in range(length)),
                stopping=Stopping(min(max_tokens, config.max_model_len - length)),
                flow=shape.flows[index],
                gateway=0 if shape.flooded and random.random() < 0.8 else spec.gateway,
            )
        )
    return tuple(floods)


def _draw_bursts(
    random: Random, sizes: tuple[int, int], config: InstanceConfig, requests: tuple[RequestSpec, ...]
) -> tuple[RequestSpec, ...]:
    """The same requests in bursts.  Those of one come within moments, or while the first is computed."""
    bursts: list[RequestSpec] = []
    longest = config.max_model_len - 4
    impatient, brief = random.choice((0.0, 0.3, 0.6)), random.choice((8, 48))
    while len(bursts) < len(requests):
        of_one = requests[len(bursts) : len(bursts) + random.randint(*sizes)]
        length = random.randint(config.block_size, min(longest, 2 * config.max_num_batched_tokens))
        common = [random.randrange(POISON) for _ in range(length)]
        salt, within = random.choice(("", "", "tenant")), random.choice((0.0, 0.0, 0.002, 0.02))
        own = random.choice((0, 0, config.block_size + 1))  # (it is followed too)
        tails = [[random.randrange(POISON) for _ in range(own)] for _ in range(2)]
        for spec in of_one:
            odd = random.random() < 0.2
            prompt = [*common, *random.choice(tails)][:longest]
            if odd:
                prompt[random.randrange(len(prompt)) :] = [random.randrange(POISON)]
            most = min(spec.stopping.max_tokens, brief, config.max_model_len - len(prompt))
            bursts.append(
                replace(
                    spec,
                    at=of_one[0].at + random.uniform(0.0, within),
                    prompt=tuple(prompt),
                    sampling=spec.sampling
                    if spec.sampling.routes_from is None
                    else replace_in(spec.sampling, routes_from=random.randrange(len(prompt))),
                    stopping=Stopping(
                        most, min(spec.stopping.min_tokens, most), spec.stopping.stop_token_ids
                    ),
                    salt=salt if random.random() < 0.9 else "other",
                    cancel_after_s=random.choice((0.005, 0.02, 0.06)) * random.random()
                    if random.random() < impatient
                    else None,
                    cancel_after_tokens=None,
                )
            )
    return tuple(bursts)


def _draw_request(
    random: Random,
    number: int,
    at: float,
    config: InstanceConfig,
    num_gateways: int,
    clients: set[ClientKind],
    families: list[tuple[int, ...]],
    alike: tuple[int, int] | None,
) -> RequestSpec:
    """`alike`: of so many tokens that are the same, and one that is not; and so many are wanted."""
    longest = config.max_model_len
    max_tokens = random.choice((1, 2, 4, 8, 16, 32, 32))
    length = random.randint(1, max(1, longest // 2))
    if "prefixes" in clients:
        family = random.choice(families)
        prompt = [
            *family[: min(length, len(family))],
            *(random.randrange(POISON) for _ in range(random.randint(0, 3))),
        ]
    else:
        prompt = [random.randrange(POISON) for _ in range(length)]
    if alike is not None:
        prompt = [*(families[0] * 2)[: alike[0]], random.randrange(POISON)]
        max_tokens = alike[1]
    if "poison" in clients and random.random() < 0.05:
        prompt[0] = POISON
    if "huge" in clients and random.random() < 0.05:
        max_tokens = longest
    else:
        prompt = prompt[: longest - 1]
        max_tokens = min(max_tokens, longest - len(prompt))
    stops = tuple(sorted({random.randrange(POISON) for _ in range(random.choice((0, 0, 0, 1, 4)))}))
    cancels = "cancels" in clients and random.random() < 0.3
    by_time = random.random() < 0.6
    wants_logprobs = "logprobs" in clients and random.random() < 0.2
    gateway = random.randrange(num_gateways)
    sampling = Sampling(
        seed=random.getrandbits(63),
        temperature=random.choice((0.0, 1.0)),
        logprobs=1 if wants_logprobs else None,
        prompt_logprobs=0 if wants_logprobs and random.random() < 0.5 else None,
    )
    stopping = Stopping(
        max_tokens, min_tokens=min(random.choice((0, 0, 2)), max_tokens), stop_token_ids=stops
    )
    if "routes" in clients and random.random() < 0.8:
        first = random.choice((0, 0, random.randrange(len(prompt))))
        sampling = replace_in(sampling, routes_from=first)
    if "constrained" in clients and random.random() < 0.8:
        least, late = stopping.min_tokens, random.choice((0, 0, 0, 1, 3, 12))
        grammar = f"residues {random.choice((1, 2, 3))}, late {late}"
        sampling = replace_in(sampling, constraint=Constraint(grammar, least, random.random() < 0.2))
        more = random.sample(range(POISON), random.choice((0, 2, 8)))
        stopping = Stopping(max_tokens, 0, tuple(sorted({*stops, *more})))
    if "pools" in clients and random.random() < 0.8:
        kind: PoolingKind = random.choice(("last", "last", "mean", "first", "labels"))
        labels = (3, 1) if kind == "labels" else ()
        sampling = Sampling(0, 0.0, pooling=Pooling(kind, random.choice((0, 5)), False, labels))
        stopping = Stopping(1)
    return RequestSpec(
        number=number,
        at=at,
        gateway=gateway,
        prompt=tuple(prompt),
        sampling=sampling,
        stopping=stopping,
        priority=random.choice((-1, 0, 0, 1)) if "priorities" in clients else 0,
        salt=random.choice(("", "", "tenant")) if "prefixes" in clients else "",
        cancel_after_s=random.choice((0.0, 0.001, 0.02, 0.1)) * random.random()
        if cancels and by_time
        else None,
        cancel_after_tokens=random.randint(1, max_tokens) if cancels and not by_time else None,
        slow_s=random.choice((0.0, 0.05)) if "slow" in clients else 0.0,
    )


def _draw_faults(
    random: Random,
    kind: FaultKind,
    shape: Shape,
    instances: tuple[InstanceConfig, ...],
    num_gateways: int,
) -> list[Fault]:
    count = 1 if kind in RARE else random.randint(1, 4)
    faults = []
    for _ in range(count):
        at, target, amount = random.uniform(0.0, shape.seconds), 0, 0.0
        instance = random.randrange(len(instances))
        if kind in ("crash_rank", "fail_rank", "hang_rank", "stall_rank", "stall_fetch", "slow_fetch"):
            target = random.randrange(instances[instance].tensor_parallel_size)
        elif kind in GATEWAY_FAULTS:
            target = random.randrange(num_gateways)
        elif kind in PEER_FAULTS and len(instances) > 1:
            target = random.choice([other for other in range(len(instances)) if other != instance])
        if kind.startswith("crash"):
            at, amount = 0.0, float(int(2 ** random.uniform(0.0, 9.0)))
        elif kind.startswith("stall") or kind in ("freeze", "slow_fetch", "linger_peer"):
            amount = random.choice((0.01, 0.1, 1.0)) * random.random()
        elif kind == "hang_rank":
            amount = 1.5 * STEP_TIMEOUT_S
        elif kind in ("pause", "slow_link", "slow_peer"):
            amount = random.choice((0.01, 0.3)) * random.random()
        elif kind == "partition":
            amount = random.choice((0.1, 1.0, 3.0)) * random.random()
        else:
            amount = float(random.getrandbits(30))  # keys what the fault draws for itself
        faults.append(Fault(kind, at, target, amount, instance))
    return faults


def _draw_burden(random: Random, index: int, burden: str) -> list[Fault]:
    """What makes an instance the slow one or the dying one.  (A full one has a small pool.)"""
    if burden == "slow":
        slow = random.choice((0.02, 0.2, 0.6))
        return [Fault("slow_peer", 0.0, -1, slow, index), Fault("slow_fetch", 0.0, 0, slow, index)]
    if burden == "lagging":  # less than a lease, but not much
        delay, page = random.uniform(0.01, 0.05), random.uniform(0.1, 0.6)
        return [Fault("slow_peer", 0.0, -1, delay, index), Fault("slow_fetch", 0.0, 0, page, index)]
    if burden == "dying":
        points = sorted(int(2 ** random.uniform(0.0, 9.0)) for _ in range(3))
        return [
            Fault("crash_engine", 0.0, 0, float(point + 1 + gap), index) for gap, point in enumerate(points)
        ]
    return []
