"""Renders the Helm chart with each values file, and checks what comes out: `make deploy-check`.

Nothing is applied to a cluster, and nothing is fetched.  For each values file of `deploy/helm/values`:

* Helm itself renders the chart, values.schema.json included (`helm-python-sdk`: Helm's library in a wheel);
* every object is validated against Kubernetes' own schemas of the oldest and of the newest version in
  `VERSIONS`, strictly: an unknown field is an error (`kubernetes-validate`);
* objects of KEDA and of Prometheus' operator are read into models that are generated from their definitions,
  and must come out as they went in (`cloudcoil.models.*`).  For Gateway API's HTTPRoute there is no such
  package: the fields that the chart may write are checked by `HTTP_ROUTE`, from the API's reference;
* the arguments and variables of each container are read by the `baton` command itself;
* names that objects use of each other exist: selectors, ports, volumes, Services, scale targets, leaders.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import cloudcoil.models.keda.v1alpha1 as keda
import cloudcoil.models.prometheus_operator.v1 as operator
import helm_python as helm
import jsonschema_rs
import kubernetes_validate
import yaml

from baton.cli.main import app
from baton.launch.instances.joining import joined
from baton.launch.options import ServeOptions
from baton.launch.planning.node_options import check_nodes
from baton.protocol.rules.cluster_secret import NO_SECRETS

Object = dict[str, Any]

ROOT = Path(__file__).parent.parent
CHART = ROOT / "deploy/helm/baton"
VALUES = ROOT / "deploy/helm/values"
VERSIONS = ("1.29", "1.37")
RELEASE, NAMESPACE = "demo", "llm"
SECRET = {"cluster-secret": "", "admin-key": "operator", "api-key": "user"}
MODELS = {"ScaledObject": keda.ScaledObject, "PodMonitor": operator.PodMonitor}
_NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
HTTP_ROUTE = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "gateway.networking.k8s.io/v1"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["parentRefs", "rules"],
            "properties": {
                "parentRefs": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 32,
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["name"],
                        "properties": {
                            "group": {"type": "string"},
                            "kind": {"type": "string"},
                            "name": _NAME,
                            "namespace": _NAME,
                            "sectionName": _NAME,
                            "port": {"type": "integer"},
                        },
                    },
                },
                "hostnames": {"type": "array", "maxItems": 16, "items": {"type": "string"}},
                "rules": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "matches": {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "additionalProperties": False,
                                    "properties": {
                                        "path": {
                                            "type": "object",
                                            "additionalProperties": False,
                                            "properties": {
                                                "type": {"enum": ["Exact", "PathPrefix"]},
                                                "value": {"type": "string", "pattern": "^/"},
                                            },
                                        }
                                    },
                                },
                            },
                            "backendRefs": {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "additionalProperties": False,
                                    "required": ["name", "port"],
                                    "properties": {"name": _NAME, "port": {"type": "integer"}},
                                },
                            },
                            "timeouts": {
                                "type": "object",
                                "additionalProperties": False,
                                "properties": {
                                    "request": {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}


class Wrong(Exception):
    """What does not hold, for people."""


def render(values: dict[str, Any]) -> list[Object]:
    """The objects of a release, as Helm renders them.  Raises `helm.HelmError`."""
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        files = chart.render(values=values, name=RELEASE, namespace=NAMESPACE)
    documents = (yaml.safe_load_all(text) for name, text in files.items() if name.endswith(".yaml"))
    return [one for document in documents for one in document if one]


def containers(objects: list[Object]) -> Iterator[tuple[Object, Object]]:
    """(workload, container) of each."""
    for one in objects:
        if one["kind"] in ("Deployment", "StatefulSet"):
            for container in one["spec"]["template"]["spec"]["containers"]:
                yield one, container


def environment(workload: Object, container: Object, ip: str, secret: dict[str, str]) -> dict[str, str]:
    """The variables that Kubernetes would set, in a pod with this address and a Secret with these keys."""
    fields = {
        "status.podIP": ip,
        "metadata.name": f"{workload['metadata']['name']}-0",
        "metadata.labels['apps.kubernetes.io/pod-index']": "0",
    }
    found: dict[str, str] = {}
    for one in container["env"]:
        source = one.get("valueFrom", {})
        if "fieldRef" in source:
            found[one["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            found[one["name"]] = secret.get(source["secretKeyRef"]["key"], "")
        else:
            found[one["name"]] = one["value"]
    return found


def arguments(container: Object, variables: dict[str, str]) -> list[str]:
    """Those of the command, `$(NAME)` replaced as Kubernetes does it."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in variables:
            raise Wrong(f"{container['name']}: $({match[1]}) is no variable of the container")
        return variables[match[1]]

    return [re.sub(r"\$\(([A-Za-z_]\w*)\)", value, argument) for argument in container["args"]]


def check_object(one: Object) -> None:
    """By the schemas of its kind.  Raises `Wrong`."""
    kind = one["kind"]
    if kind in MODELS:
        read = MODELS[kind].model_validate(one).model_dump(mode="json", by_alias=True, exclude_unset=True)
        if read != one:
            raise Wrong(f"{kind}: fields that its definition does not have")
    elif kind == "HTTPRoute":
        try:
            jsonschema_rs.validate(HTTP_ROUTE, one)
        except jsonschema_rs.ValidationError as error:
            raise Wrong(f"HTTPRoute: {error.message}") from None
    else:
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(one, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                raise Wrong(f"{kind}, Kubernetes {version}: {error.message}") from None


def check_command(workload: Object, container: Object) -> None:
    """`baton` takes the container's arguments and variables.  Raises `Wrong`."""
    variables = environment(workload, container, "127.0.0.1", SECRET)
    variables.pop("BATON_CLUSTER_SECRET_FILE", None)  # of a volume that is not here
    given = arguments(container, variables)
    with _nothing_runs() as ran, mock.patch.dict(os.environ, {k: v for k, v in variables.items() if v}):
        try:
            app(given, standalone_mode=False)
        except BaseException as error:
            raise Wrong(f"{container['name']}: baton {' '.join(given)}: {error!r}") from error
    if not ran:
        raise Wrong(f"{container['name']}: baton {' '.join(given)} starts neither a server nor an instance")


@contextmanager
def _nothing_runs() -> Iterator[list[Any]]:
    ran: list[Any] = []
    with (
        mock.patch("baton.launch.server.run_server", ran.append),
        mock.patch.object(joined, "run_joined", lambda options: ran.append(_check_joined(options))),
        mock.patch("baton.launch.instances.node.run_node", ran.append),
        mock.patch("baton.launch.instances.processes.starting.begin"),
    ):
        yield ran


def _check_joined(options: ServeOptions) -> None:
    """As far as it can be known where the instance does not run.  Raises `OptionError`."""
    joined._check(options, NO_SECRETS)
    check_nodes(replace(options, leader=None, host="10.0.0.1"))
    if options.tensor_parallel_size % options.nodes:
        raise Wrong(f"--tensor-parallel-size {options.tensor_parallel_size}: {options.nodes} nodes share it")


def check_hosts(objects: list[Object]) -> None:
    """The hosts of an instance find its leader, a pod of a StatefulSet by its Service.  Raises `Wrong`."""
    sets = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "StatefulSet"}
    services = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "Service"}
    for workload, container in containers(objects):
        given = dict(pairwise(container["args"]))
        if "--node" not in given:
            continue
        name, (pod, _, service) = workload["metadata"]["name"], given["--leader"].partition(".")
        service = service.partition(":")[0]
        leader, _, index = pod.rpartition("-")
        if leader not in sets or index != "$(POD_INDEX)" or sets[leader]["serviceName"] != service:
            raise Wrong(f"{name}: no pod {pod}.{service}")
        if not services[service].get("publishNotReadyAddresses"):
            raise Wrong(
                f"{name}: Service {service} names the leader only when it is ready, which needs its hosts"
            )
        of_leader = sets[leader]["template"]["spec"]["containers"][0]["args"]
        count = int(dict(pairwise(of_leader)).get("--nodes", 1))
        if not 0 < int(given["--node"]) < count:
            raise Wrong(f"{name}: --node {given['--node']} of {count}")
        if sets[leader].get("replicas") != workload["spec"].get("replicas"):
            raise Wrong(f"{name}: as many pods as {leader} has")


def check_names(objects: list[Object]) -> None:
    """What objects say of each other is there.  Raises `Wrong`."""
    services = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "Service"}
    pods = [one["spec"]["template"] for one, _ in containers(objects)]
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    if len(names) != len(objects):
        raise Wrong("two objects of one kind have the same name")
    for one in objects:
        spec, name = one.get("spec", {}), f"{one['kind']} {one['metadata']['name']}"
        selector = spec.get("selector") or spec.get("podSelector")
        if selector:
            labels = selector.get("matchLabels", selector)
            chosen = [pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]
            if not chosen:
                raise Wrong(f"{name}: selects no pod")
            ports = {
                port["name"] for pod in chosen for each in pod["spec"]["containers"] for port in each["ports"]
            }
            used = [port["targetPort"] for port in spec.get("ports", ())]
            used += [port["port"] for port in spec.get("podMetricsEndpoints", ())]
            for port in used:
                if port not in ports:
                    raise Wrong(f"{name}: no port {port!r}")
        if one["kind"] == "StatefulSet" and spec["serviceName"] not in services:
            raise Wrong(f"{name}: no Service {spec['serviceName']}")
        if one["kind"] == "ScaledObject":
            target = spec["scaleTargetRef"]
            if (target["kind"], target["name"]) not in names:
                raise Wrong(f"{name}: no {target['kind']} {target['name']}")
        if one["kind"] == "HTTPRoute":
            for backend in (backend for rule in spec["rules"] for backend in rule["backendRefs"]):
                if backend["port"] not in [port["port"] for port in services[backend["name"]]["ports"]]:
                    raise Wrong(f"{name}: no port {backend['port']} of Service {backend['name']}")
    for one, container in containers(objects):
        spec = one["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        missing = {mount["name"] for mount in container["volumeMounts"]} - volumes
        ports = {port["name"] for port in container["ports"]}
        probed = {
            container[f"{probe}Probe"]["httpGet"]["port"] for probe in ("startup", "liveness", "readiness")
        }
        if missing or not probed <= ports:
            raise Wrong(
                f"{one['metadata']['name']}: no volume or port {', '.join(missing | (probed - ports))}"
            )
        joined = [value for value in container["args"] if value.startswith("http://")]
        for url in joined:
            host, _, port = url.removeprefix("http://").partition(":")
            if host not in services or int(port) not in [entry["port"] for entry in services[host]["ports"]]:
                raise Wrong(f"{one['metadata']['name']}: no Service for {url}")


def check(values: dict[str, Any]) -> list[Object]:
    """Everything.  Returns the objects.  Raises `Wrong` or `helm.HelmError`."""
    objects = render(values)
    for one in objects:
        check_object(one)
    for workload, container in containers(objects):
        check_command(workload, container)
    check_names(objects)
    check_hosts(objects)
    return objects


def main() -> int:
    failed = 0
    for finding in helm.lint(CHART)["errors"]:
        failed += 1
        print(f"{CHART.name}: {finding}")
    for file in [CHART / "values.yaml", *sorted(VALUES.glob("*.yaml"))]:
        values = yaml.safe_load(file.read_text())
        if file.parent == CHART:
            values = {
                "auth": {"existingSecret": "baton"},
                "instances": {"mixed": {}},
            }  # these have no defaults
        try:
            objects = check(values)
        except (Wrong, helm.HelmError) as error:
            failed += 1
            print(f"{file.name:20} WRONG  {error}")
            continue
        kinds = [one["kind"] for one in objects]
        counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        print(f"{file.name:20} valid for Kubernetes {' and '.join(VERSIONS)}: {counted}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
