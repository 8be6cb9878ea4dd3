"""The Helm chart: what it renders is valid, mistakes are found, what it starts is a cluster that answers."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from baton.version import __version__
from tests.deploy.started import free_ports, until_ok

pytest.importorskip("helm_python", reason="`make deploy-check` installs it")
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import helm_python as helm

import check_deploy as deploy

SMALL = yaml.safe_load((deploy.VALUES / "small.yaml").read_text())
FULL = yaml.safe_load((deploy.VALUES / "disaggregated.yaml").read_text())
SEVERAL = yaml.safe_load((deploy.VALUES / "several-hosts.yaml").read_text())
Objects = list[dict[str, Any]]


@pytest.mark.parametrize("file", sorted(path.name for path in deploy.VALUES.glob("*.yaml")))
def test_what_the_chart_renders_is_valid(file: str) -> None:
    assert deploy.check(yaml.safe_load((deploy.VALUES / file).read_text()))


def test_the_chart_is_of_this_version() -> None:
    assert yaml.safe_load((deploy.CHART / "Chart.yaml").read_text())["appVersion"] == __version__


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"instances": {"mixed": {}}}, "auth: give existingSecret"),
        ({"auth": {"existingSecret": "x"}}, "instances: name at least one label"),
        ({**SMALL, "instances": {"decoder": {}}}, "decoder"),
        ({**SMALL, "gateway": {"replcas": 2}}, "replcas"),
        ({**SMALL, "model": "--host"}, "model"),
        ({**SMALL, "httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
        ({**SMALL, "instances": {"mixed": {"nodes": 2}}}, "instances.mixed.collectiveEncryption=off"),
        ({**SMALL, "instances": {"mixed": {"nodes": 0}}}, "nodes"),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=message):
        deploy.render(values)


def test_two_gateways_are_never_disrupted_together() -> None:
    kinds = [(one["kind"], one["metadata"]["name"]) for one in deploy.render(FULL)]
    assert ("PodDisruptionBudget", "demo-baton-gateway") in kinds
    kinds = [(one["kind"], one["metadata"]["name"]) for one in deploy.render(SMALL)]
    assert ("PodDisruptionBudget", "demo-baton-gateway") not in kinds, (
        "one that may not go would block a node"
    )


def test_what_grows_by_itself_has_no_number() -> None:
    """An upgrade of the release would set it back."""
    sets = {
        one["metadata"]["name"]: one["spec"] for one in deploy.render(FULL) if one["kind"] == "StatefulSet"
    }
    assert sets["demo-baton-prefill"]["replicas"] == 2
    assert "replicas" not in sets["demo-baton-decode"]


def test_kubernetes_waits_longer_than_the_server() -> None:
    for workload, container in deploy.containers(deploy.render(FULL)):
        args = container["args"]
        waits = [
            int(args[i + 1]) for i, arg in enumerate(args) if arg in ("--drain-delay", "--shutdown-timeout")
        ]
        assert workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > sum(waits) + 5


def test_pods_of_an_instance_on_several_hosts_find_their_leader_by_their_number() -> None:
    objects = deploy.render(SEVERAL)
    sets = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "StatefulSet"}
    decoders = ["demo-baton-decode", *(f"demo-baton-decode-n{number}" for number in (1, 2, 3))]
    assert sorted(sets) == sorted([*decoders, "demo-baton-prefill", "demo-baton-prefill-n1"])
    args = sets["demo-baton-decode-n3"]["template"]["spec"]["containers"][0]["args"]
    assert args[args.index("--node") + 1] == "3"
    leader = args[args.index("--leader") + 1]
    assert leader == "demo-baton-decode-$(POD_INDEX).demo-baton-instances:8009"
    assert "--join" not in args
    chosen = [set["selector"]["matchLabels"] for set in sets.values()]
    assert len({tuple(sorted(one.items())) for one in chosen}) == len(sets), "each set has pods of its own"
    grown = [one["spec"]["scaleTargetRef"]["name"] for one in objects if one["kind"] == "ScaledObject"]
    assert sorted(grown) == sorted(decoders), "all hosts of the instances grow alike"


def kind(objects: Objects, name: str) -> dict[str, Any]:
    return next(one for one in objects if one["kind"] == name)


def pod(objects: Objects) -> dict[str, Any]:
    found: dict[str, Any] = kind(objects, "StatefulSet")["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize(
    "spoil",
    [
        lambda all: pod(all).update(restartpolicy="Always"),
        lambda all: pod(all)["containers"][0]["args"].append("--no-such-flag"),
        lambda all: pod(all)["containers"][0]["args"].append("$(NODE_IP)"),
        lambda all: pod(all)["containers"][0]["readinessProbe"]["httpGet"].update(port="http"),
        lambda all: pod(all)["containers"][0]["volumeMounts"].append({"name": "x", "mountPath": "/x"}),
        lambda all: pod(all)["containers"][0]["args"].remove("--instance"),
        lambda all: kind(all, "Service")["spec"]["selector"].update(app="x"),
        lambda all: kind(all, "ScaledObject")["spec"].update(minReplicas=1),
        lambda all: kind(all, "ScaledObject")["spec"]["scaleTargetRef"].update(name="x"),
        lambda all: kind(all, "PodMonitor")["spec"]["podMetricsEndpoints"][0].update(port="metrics"),
        lambda all: kind(all, "StatefulSet")["spec"].update(serviceName="x"),
    ],
)
def test_mistakes_are_found(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Objects], None]) -> None:
    objects = copy.deepcopy(deploy.render(FULL))
    monkeypatch.setattr(deploy, "render", lambda values: objects)
    spoil(objects)
    with pytest.raises(deploy.Wrong):
        deploy.check(FULL)


def set_of(objects: Objects, name: str) -> dict[str, Any]:
    return next(
        one["spec"] for one in objects if (one["kind"], one["metadata"]["name"]) == ("StatefulSet", name)
    )


def args_of(objects: Objects, name: str) -> list[str]:
    found: list[str] = set_of(objects, name)["template"]["spec"]["containers"][0]["args"]
    return found


def service_of_hosts(objects: Objects) -> dict[str, Any]:
    return next(
        one["spec"]
        for one in objects
        if (one["kind"], one["metadata"]["name"]) == ("Service", "demo-baton-instances")
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda all: all.remove(kind(all, "StatefulSet")), "no pod|no StatefulSet"),
        (
            lambda all: service_of_hosts(all).pop("publishNotReadyAddresses"),
            "only when it is ready",
        ),
        (lambda all: set_of(all, "demo-baton-prefill-n1").update(replicas=2), "as many pods"),
        (lambda all: args_of(all, "demo-baton-prefill-n1").extend(["--node", "2"]), "--node 2 of 2"),
        (lambda all: args_of(all, "demo-baton-decode").extend(["--nodes", "3"]), "3 nodes share it"),
    ],
)
def test_mistakes_between_hosts_are_found(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Objects], None], message: str
) -> None:
    objects = copy.deepcopy(deploy.render(SEVERAL))
    monkeypatch.setattr(deploy, "render", lambda values: objects)
    spoil(objects)
    with pytest.raises(deploy.Wrong, match=message):
        deploy.check(SEVERAL)


# --- what the chart starts, started here ---------------------------------------------------------------


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Callable[[str, list[str], dict[str, str]], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, args: list[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
        """As a pod runs it: with these variables only, a home that is not there, a /tmp of its own."""
        tmp = tmp_path / name
        (tmp / "cache").mkdir(parents=True)
        inside = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "TMPDIR": str(tmp)}
        inside |= {key: value for key, value in variables.items() if value}
        inside |= {"XDG_CACHE_HOME": str(tmp / "cache"), "HF_HOME": str(tmp / "cache")}
        command = [sys.executable, "-m", "baton", *args]
        with (tmp / "log").open("wb") as log:
            process = subprocess.Popen(command, env=inside, cwd="/", stdout=log, stderr=log)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_pods_of_a_release_are_a_cluster(pods: Any, tmp_path: Path, nodes: int) -> None:
    """Each container's own command and variables; probes by HTTP; SIGTERM ends all within their time."""
    port, leads, *probes = free_ports(2 + nodes)
    spread = {"nodes": nodes, "collectiveEncryption": "off", "args": ["--tensor-parallel-size", str(nodes)]}
    values = {
        **SMALL,
        "gateway": {"port": port, "drainDelay": 0, "shutdownTimeout": 5},
        "instances": {"mixed": spread},
        "instanceDefaults": {"shutdownTimeout": 5},
    }
    command = [sys.executable, "-m", "baton", "cluster", "secret"]
    (tmp_path / "cluster-secret").write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    (tmp_path / "cluster-secret").chmod(0o440)
    running: dict[str, subprocess.Popen[bytes]] = {}
    hosts = {
        "demo-baton-gateways": "127.0.0.1",
        "demo-baton-mixed-0.demo-baton-instances:8009": f"127.0.0.1:{leads}",
        "127.0.0.1:8009": f"127.0.0.1:{leads}",
    }
    probed: dict[str, int] = {}
    for workload, container in deploy.containers(deploy.render(values)):
        name = workload["metadata"]["name"]
        variables = deploy.environment(workload, container, "127.0.0.1", deploy.SECRET)
        variables["BATON_CLUSTER_SECRET_FILE"] = str(tmp_path / "cluster-secret")
        args = deploy.arguments(container, variables)
        for there, here in hosts.items():
            args = [arg.replace(there, here) for arg in args]
        if "--probe-port" in args:
            probed[name] = probes[len(probed)]
            args[args.index("--probe-port") + 1] = str(probed[name])
        running[name] = pods(name, args, variables)
    gateway = running["demo-baton-gateway"]
    until_ok(f"http://127.0.0.1:{port}/health", gateway, tmp_path / "demo-baton-gateway/log")
    for name, probe in probed.items():
        until_ok(f"http://127.0.0.1:{probe}/ready", running[name], tmp_path / name / "log")
    until_ok(f"http://127.0.0.1:{port}/ready", gateway, tmp_path / "demo-baton-gateway/log")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http:
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
        assert http.post("/v1/chat/completions", json=body).status_code == 401
        key = {"authorization": "Bearer user"}
        answer = http.post("/v1/chat/completions", json=body, headers=key)
        assert answer.json()["usage"]["completion_tokens"] > 0
        shown = http.get("/cluster/instances", headers={"authorization": "Bearer operator"}).json()
        (instance,) = shown["instances"]
        assert (instance["name"], instance["label"]) == ("demo-baton-mixed-0", "mixed")
    assert len(probed) == nodes
    # As when replicas are taken away: all pods of an instance at once.
    for name in probed:
        running[name].send_signal(signal.SIGTERM)
    for name in probed:
        assert running[name].wait(60) == 0, (tmp_path / name / "log").read_text()
        assert "ERROR" not in (tmp_path / name / "log").read_text()
    gateway.send_signal(signal.SIGTERM)
    assert gateway.wait(60) == 0, (tmp_path / "demo-baton-gateway/log").read_text()
