"""`baton serve --ray` on a real Ray with nodes that come and go (all on this machine, as in Ray's tests)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.launch.limits import OptionError
from baton.launch.options import ServeOptions
from baton.launch.placing import placement
from baton.launch.placing.placement import Placement, arguments_of, check_ray, make_placing
from baton.launch.placing.spec import Placed, Report, Standing
from baton.protocol.rules.cluster_secret import NO_SECRETS
from tests.deploy.test_chart import free_ports, until_ok

pytest.importorskip("ray", reason="`make deploy-check` installs it")

from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
PATIENCE_S = 180


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without places, and two nodes with one each."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
    made.nodes_with_places = [made.add_node(**NODE) for _ in range(2)]
    yield made
    made.shutdown()


class Server:
    """`baton serve --ray` as a process."""

    def __init__(self, cluster: Cluster, folder: Path, *flags: str, port: int | None = None) -> None:
        self.port = free_ports(1)[0] if port is None else port
        folder.mkdir(exist_ok=True)
        self.log = folder / f"log-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "baton.cli.main", "serve", "--port", str(self.port)]
        command += ["--ray", cluster.address, "--instance-cpus", "1", "--kv-cache-memory-bytes", "64MB"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*command, *flags], stdout=log, stderr=log)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=120)

    def instances(self) -> dict[str, Any]:
        shown: dict[str, Any] = self.http.get("/cluster/instances").json()
        return shown

    def ready(self) -> list[str]:
        return [one["name"] for one in self.instances()["instances"] if one["state"] == "ready"]

    def until(self, holds: Callable[[], object]) -> float:
        """Returns after how many seconds it did."""
        started = time.monotonic()
        while not holds():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() - started < PATIENCE_S, self.log.read_text()
            time.sleep(0.2)
        return time.monotonic() - started

    def driver(self) -> int:
        """The process with Ray's driver."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = [pid for pid in children if b"placing.driver" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return int(pid)


@pytest.fixture
def serve(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*flags: str, port: int | None = None) -> Server:
        servers.append(Server(cluster, tmp_path, *flags, port=port))
        until_ok(f"http://127.0.0.1:{servers[-1].port}/ready", servers[-1].process, servers[-1].log)
        return servers[-1]

    yield start
    for one in servers:
        one.http.close()
        if one.process.poll() is None:
            one.process.terminate()
            one.process.wait(90)


def processes_of(port: int) -> list[int]:
    """Of instances that join that server."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"--instance" in words and f"127.0.0.1:{port}".encode() in words:
            found.append(int(entry.parent.name))
    return found


def answer(http: httpx.Client, seed: int) -> str:
    body = {
        "prompt": f"{seed}: The old man",
        "max_tokens": 300,
        "ignore_eos": True,
        "seed": seed,
        "stream": True,
    }
    text = []
    with http.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.status_code == 200, stream.read()
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += [choice["text"] for choice in event["choices"]]
    return "".join(text)


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
    cluster.nodes_with_places.append(cluster.add_node(**NODE))
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


def test_an_instance_that_ends_is_started_again(serve: Callable[..., Server]) -> None:
    server = serve("--mixed", "1")
    (before,) = processes_of(server.port)
    os.kill(before, signal.SIGKILL)
    server.until(lambda: processes_of(server.port) not in ([], [before]) and server.ready())


def test_ray_that_is_not_there_is_said(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "baton.cli.main", "serve", "--port", str(port), "--mixed", "1"]
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


def test_who_has_no_node_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    placing = make_placing(ServeOptions(ray="auto", mixed=2), (), 1, NO_SECRETS)
    watched = Placement(placing)
    here = Standing("mixed-0", "mixed", "placed", {"CPU": 4.0}, "n" * 40)
    watched._read(Report(instances=(here, Standing("mixed-1", "mixed", "waiting", {"CPU": 4.0}))))
    assert watched.describe() == [
        {"name": "mixed-1", "label": "mixed", "state": "waiting", "needs": {"CPU": 4.0}}
    ]
    assert "mixed-1: no node has CPU 4 free" in caplog.text
