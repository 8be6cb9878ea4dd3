"""`baton serve --ray` on a real Ray with nodes that come and go (all on this machine, as in Ray's tests)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.launch.limits import OptionError
from baton.launch.options import ServeOptions
from baton.launch.placing import placement
from baton.launch.placing.placement import Placement, arguments_of, check_ray, make_placing
from baton.launch.placing.spec import Placed, Report, Standing
from baton.launch.planning.node_options import check_nodes
from baton.protocol.rules.cluster_secret import NO_SECRETS
from tests.deploy.started import free_ports

pytest.importorskip("ray", reason="`make deploy-check` installs it")

from ray.cluster_utils import Cluster

from tests.deploy.ray_server import PATIENCE_S, Server, add_node, answer, processes_of, ray_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without places, and two nodes with one each."""
    with ray_cluster(0) as made:
        made.nodes_with_places = [add_node(made) for _ in range(2)]
        yield made


@pytest.fixture
def serve(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*flags: str, port: int | None = None) -> Server:
        servers.append(Server(cluster.address, tmp_path, *flags, port=port))
        servers[-1].until_ready()
        return servers[-1]

    yield start
    for one in servers:
        one.close()


@pytest.mark.timeout(600)
def test_a_node_that_is_lost_loses_no_answer(cluster: Cluster, serve: Callable[..., Server]) -> None:
    server = serve("--mixed", "2")
    server.until(lambda: len(server.ready()) == 2)
    assert server.instances()["unplaced"] == []
    expected = {seed: answer(server.http, seed) for seed in range(4)}
    wrong: list[str] = []
    counts = dict.fromkeys(expected, 0)
    lost, end = threading.Event(), threading.Event()

    def ask(seed: int) -> None:
        after = 0
        while not end.is_set() or after == 0:
            known = lost.is_set()
            try:
                text = answer(server.http, seed)
            except Exception as error:
                wrong.append(f"{seed}: {error!r}")
                return
            if text != expected[seed]:
                wrong.append(f"{seed}: {text!r}")
            counts[seed] += 1
            after += known

    clients = [threading.Thread(target=ask, args=(seed,)) for seed in expected]
    for one in clients:
        one.start()
    server.until(lambda: all(counts.values()))
    cluster.remove_node(cluster.nodes_with_places.pop(), allow_graceful=False)
    lost.set()
    server.until(lambda: server.instances()["unplaced"])
    (unplaced,) = server.instances()["unplaced"]
    assert unplaced["needs"] == {"CPU": 1.0}
    assert unplaced["state"] in ("waiting", "moving")
    assert unplaced["name"] in ("mixed-0", "mixed-1")
    end.set()
    for one in clients:
        one.join(PATIENCE_S)
    assert wrong == []
    cluster.nodes_with_places.append(add_node(cluster))
    server.until(lambda: len(server.ready()) == 2 and not server.instances()["unplaced"])
    assert answer(server.http, 0) == expected[0]
    server.process.terminate()
    assert server.process.wait(90) == 0, server.log.read_text()
    assert processes_of(server.port) == []


@pytest.mark.timeout(600)
def test_what_a_killed_server_leaves_is_ended(serve: Callable[..., Server]) -> None:
    """By its driver; and if that is killed as well, by the next server of this name."""
    server = serve("--mixed", "1")
    (before,) = processes_of(server.port)
    os.kill(server.driver(), signal.SIGKILL)
    server.process.kill()
    server.process.wait()
    assert processes_of(server.port) == [before], "the instance waits for a server"
    after = serve("--mixed", "1", port=server.port)
    # (What was left joins the new server first, which is ready by it.)
    after.until(lambda: processes_of(after.port) not in ([], [before]) and after.ready() == ["mixed-0"])
    assert "ended what an earlier server left in Ray: baton-" in after.log.read_text()
    driver = after.driver()
    after.process.kill()
    after.process.wait()
    deadline = time.monotonic() + PATIENCE_S
    while processes_of(after.port) or Path(f"/proc/{driver}").exists():
        assert time.monotonic() < deadline, "the driver ends what it placed when its server is gone"
        time.sleep(0.2)


@pytest.mark.timeout(600)
def test_a_driver_that_is_killed_is_replaced_by_one_that_takes_the_instances_over(
    serve: Callable[..., Server],
) -> None:
    server = serve("--mixed", "1")
    (before,) = processes_of(server.port)
    os.kill(server.driver(), signal.SIGKILL)
    server.until(lambda: "Ray answers again; still there: mixed-0" in server.log.read_text())
    server.until(lambda: not server.instances()["unplaced"])
    assert processes_of(server.port) == [before]
    assert "Ray's driver ended with -9; instances that run go on" in server.log.read_text()
    server.process.terminate()
    assert server.process.wait(PATIENCE_S) == 0, server.log.read_text()
    assert processes_of(server.port) == []


@pytest.mark.timeout(900)
def test_an_instance_on_two_nodes_is_lost_with_one_and_comes_back(
    cluster: Cluster, serve: Callable[..., Server]
) -> None:
    exact = ("--dtype", "float32")
    alone = serve("--mixed", "1", *exact)
    expected = answer(alone.http, 7)
    alone.close()
    server = serve("--mixed", "1", "-tp", "2", "--nodes", "2", *exact)
    assert answer(server.http, 7) == expected
    before = processes_of(server.port)
    assert len(before) == 2, "a process on each node"
    (first,) = server.instances()["instances"]
    cluster.remove_node(cluster.nodes_with_places.pop(), allow_graceful=False)
    server.until(lambda: "mixed-0 is lost and placed anew" in server.log.read_text())
    server.until(lambda: server.instances()["unplaced"])
    (unplaced,) = server.instances()["unplaced"]
    assert (unplaced["needs"], unplaced["hosts"]) == ({"CPU": 1.0}, 2)
    cluster.nodes_with_places.append(add_node(cluster))
    server.until(lambda: server.ready() and not server.instances()["unplaced"])
    (second,) = server.instances()["instances"]
    assert second["incarnation"] != first["incarnation"]
    assert not set(before) & set(processes_of(server.port))
    assert answer(server.http, 7) == expected
    os.kill(max(processes_of(server.port)), signal.SIGKILL)
    server.until(lambda: server.log.read_text().count("mixed-0 is lost and placed anew") == 2)
    server.until(lambda: server.ready() and not server.instances()["unplaced"])
    assert answer(server.http, 7) == expected
    server.process.terminate()
    assert server.process.wait(PATIENCE_S) == 0, server.log.read_text()
    assert processes_of(server.port) == []


@pytest.mark.timeout(900)
def test_a_ray_that_is_gone_costs_no_answer_and_is_found_again(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with ray_cluster(1, port=port) as ray:
        server = Server(ray.address, tmp_path, "--mixed", "1")
        try:
            server.until_ready()
            expected = answer(server.http, 3)
            (gcs,) = ray.head_node.all_processes["gcs_server"]
            gcs.process.kill()
            server.until(lambda: [one["state"] for one in server.instances()["unplaced"]] == ["unknown"])
            assert answer(server.http, 3) == expected, "the instance does not need Ray"
            ray.remove_node(ray.head_node, allow_graceful=False)
            with ray_cluster(1, port=port):
                server.until(lambda: server.ready() and not server.instances()["unplaced"])
                assert answer(server.http, 3) == expected
                told = server.log.read_text()
                assert told.count("Ray does not answer; instances that run go on") == 1
                assert told.count("Ray answers again; still there: no instance") == 1
                server.process.terminate()
                assert server.process.wait(PATIENCE_S) == 0, server.log.read_text()
                assert processes_of(server.port) == []
        finally:
            server.close()


@pytest.mark.timeout(600)
def test_a_driver_outlives_neither_ray_nor_its_server(tmp_path: Path) -> None:
    with ray_cluster(1) as ray:
        server = Server(ray.address, tmp_path, "--mixed", "1")
        try:
            server.until_ready()
            driver = server.driver()
            ray.remove_node(ray.head_node, allow_graceful=False)
            server.process.kill()
            server.process.wait()
            deadline = time.monotonic() + PATIENCE_S
            while Path(f"/proc/{driver}").exists() or processes_of(server.port):
                assert time.monotonic() < deadline, "it waits for a Ray that is gone"
                time.sleep(0.2)
        finally:
            server.close()


def test_an_instance_that_ends_is_started_again(serve: Callable[..., Server]) -> None:
    server = serve("--mixed", "1")
    (before,) = processes_of(server.port)
    os.kill(before, signal.SIGKILL)
    server.until(lambda: processes_of(server.port) not in ([], [before]) and server.ready())


def test_ray_that_is_not_there_is_said(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "baton", "serve", "--port", str(port), "--mixed", "1"]
    environment = {**os.environ, "RAY_gcs_rpc_server_reconnect_timeout_s": "1"}
    ended = subprocess.run(
        [*command, "--ray", f"127.0.0.1:{free_ports(1)[0]}"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment,
    )
    assert ended.returncode == 1
    assert re.search(r"error: --ray 127\.0\.0\.1:\d+: ", ended.stderr)


# --- without Ray -----------------------------------------------------------------------------------------


def test_a_python_without_ray_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'baton-llm\[ray\]'"):
        check_ray(ServeOptions(ray="auto", mixed=1))


def test_flags_that_do_not_go_together() -> None:
    with pytest.raises(OptionError, match="--ray: say how many"):
        check_ray(ServeOptions(ray="auto"))
    with pytest.raises(OptionError, match="--uds"):
        check_ray(ServeOptions(ray="auto", mixed=1, uds="/tmp/x"))


def test_instances_get_the_flags_of_the_model_and_the_engine() -> None:
    options = ServeOptions(
        model="/models/a",
        max_model_len=1024,
        enable_prefix_caching=False,
        kv_cache_memory_bytes="1GiB",
        served_model_name=("a", "b"),
        port=9,
        admin_key=("secret",),
        ray="auto",
        mixed=1,
        instance_cpus=8,
        tensor_parallel_size=2,
    )
    placing = make_placing(options, (Placed("mixed-0", "mixed"),), 8000, NO_SECRETS)
    given = list(placing.arguments)
    assert given[0] == "/models/a"
    pairs = " ".join(given)
    for one in ("--max-model-len 1024", "--no-enable-prefix-caching", "--kv-cache-memory-bytes 1073741824"):
        assert one in pairs
    assert "--served-model-name a --served-model-name b" in pairs
    assert "--join 127.0.0.1:8000 --num-threads 4" in pairs
    assert "secret" not in pairs
    assert "--port" not in given
    assert arguments_of(ServeOptions()) == ()


def test_of_an_instance_on_several_hosts_each_has_the_cpus() -> None:
    options = ServeOptions(ray="auto", mixed=1, instance_cpus=8, tensor_parallel_size=4, nodes=2)
    check_nodes(options)
    placing = make_placing(options, (), 8000, NO_SECRETS)
    assert placing.nodes == 2
    assert " ".join(placing.arguments).endswith("--num-threads 4")
    with pytest.raises(OptionError, match="--collective-encryption off"):
        check_nodes(replace(options, host="0.0.0.0"))


def test_who_has_no_node_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    placing = make_placing(ServeOptions(ray="auto", mixed=2), (), 1, NO_SECRETS)
    watched = Placement(placing)
    here = Standing("mixed-0", "mixed", "placed", {"CPU": 4.0}, nodes=("n" * 40,))
    watched._read(Report(instances=(here, Standing("mixed-1", "mixed", "waiting", {"CPU": 4.0}))))
    assert watched.describe() == [
        {"name": "mixed-1", "label": "mixed", "state": "waiting", "needs": {"CPU": 4.0}, "hosts": 1}
    ]
    assert "mixed-1: no node has CPU 4 free" in caplog.text
