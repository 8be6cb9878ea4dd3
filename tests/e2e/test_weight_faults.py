"""SIGKILL while a weight image is filled, at the start and for new weights; new weights on two hosts.

A worker that fills an image has it mapped to be written; all others map it to be read.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

import baton
from baton.bench.left_behind import Belongings
from tests.e2e.killing import engines
from tests.e2e.server import Server, alive, child_pids, is_engine
from tests.e2e.test_cluster import Joined, instances, until
from tests.e2e.test_weight_images import mapped

FLAGS = ("--dtype", "bfloat16", "--quantization", "int4", "--max-model-len", "512", "--max-num-seqs", "8")
CLUSTER = ("--prefill", "1", "--decode", "2", "--disaggregation-threshold", "0", *FLAGS)
_TRIES = 8
"""An image may have been filled before anybody looked."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Two checkpoints with the embedded model's tokenizer, so large that filling an image takes a while."""
    from transformers import AutoConfig, AutoModelForCausalLM

    first = tmp_path_factory.mktemp("wide") / "first"
    shutil.copytree(Path(baton.__file__).parent / "assets" / "baton-tiny", first)
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "head_dim": 64}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4}
    path = first / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(first), dtype=torch.bfloat16)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if json.loads(path.read_text()).get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    save_file(tensors, first / "model.safetensors", {"format": "pt"})
    shutil.copytree(first, second := first.parent / "second")
    changed = load_file(second / "model.safetensors")
    for name, tensor in changed.items():
        if "proj" in name:
            changed[name] = tensor.roll(1, 0).contiguous()
    save_file(changed, second / "model.safetensors", {"format": "pt"})
    yield first, second
    shutil.rmtree(first.parent)


def filler(launcher: int) -> int | None:
    """The worker that has an image mapped to be written."""
    for engine in filter(is_engine, child_pids(launcher)):
        for worker in child_pids(engine):
            try:
                lines = Path(f"/proc/{worker}/maps").read_text().splitlines()
            except OSError:
                continue
            if any(" rw-s " in line and "memfd:baton-weights" in line for line in lines):
                return worker
    return None


def catch(launcher: int, done: Callable[[], bool]) -> int | None:
    """The first filler; None if there is none until it is `done`."""
    while not done():
        found = filler(launcher)
        if found is not None:
            return found
    return None


def tree(pid: int) -> list[int]:
    return [pid, *(one for child in child_pids(pid) for one in tree(child))]


def victim(what: str, launcher: int, worker: int) -> int:
    if what == "worker":
        return worker
    if what == "engine":
        return next(engine for engine in child_pids(launcher) if worker in child_pids(engine))
    if what == "fork server":
        return next(
            pid
            for pid in child_pids(launcher)
            if b"baton.launch.instances.processes.fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
    return launcher


def answers(server: Server) -> list[str]:
    return [
        server.client()
        .completions.create(
            model="",
            prompt=[5 + (7 * number + token) % 200 for token in range(40)],
            max_tokens=12,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        .choices[0]
        .text
        for number in range(4)
    ]


def all_ready(server: Server) -> None:
    until(lambda: {entry["state"] for entry in instances(server).values()} == {"ready"}, "all are ready")


def images_of(server: Server) -> list[set[str]]:
    return [mapped(worker) for worker in server.children()["worker"]]


@pytest.fixture(scope="module")
def expected(wide: tuple[Path, Path]) -> list[list[str]]:
    """What the two checkpoints answer."""
    found = []
    for path in wide:
        with Server(*FLAGS, model=str(path)) as server:
            found.append(answers(server))
    assert found[0] != found[1]
    return found


class Attacked(Server):
    """Somebody is killed while its first image is filled."""

    class Died(RuntimeError):
        """The launcher, before it said its address."""

        def __init__(self, belongings: Belongings) -> None:
            super().__init__("the launcher was killed")
            self.belongings = belongings

    def __init__(self, what: str, *flags: str, model: str) -> None:
        self.what = what
        self.killed = 0
        self.belongings = Belongings()
        super().__init__(*flags, model=model)

    def _wait_for_address(self) -> str:
        there = threading.Event()
        killer = threading.Thread(target=self._kill, args=(there,))
        killer.start()
        try:
            return super()._wait_for_address()
        except RuntimeError:
            if self.what == "launcher":
                raise Attacked.Died(self.belongings) from None
            raise
        finally:
            there.set()
            killer.join()

    def _kill(self, there: threading.Event) -> None:
        launcher = self.process.pid
        worker = catch(launcher, there.is_set)
        if worker is not None:
            self.belongings.look(tree(launcher))
            self.killed = victim(self.what, launcher, worker)
            os.kill(self.killed, signal.SIGKILL)


def nothing_left(belongings: Belongings) -> None:
    until(lambda: not [line for line in belongings.left() if "held by" in line], "memory is free")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["worker", "engine", "fork server"])
def test_another_worker_fills_the_image_if_one_is_killed(
    wide: tuple[Path, Path], expected: list[list[str]], what: str
) -> None:
    for _ in range(_TRIES):
        with Attacked(what, *CLUSTER, model=str(wide[0])) as server:
            if not server.killed:
                continue
            server.wait_ready()
            assert not alive(server.killed)
            until(
                lambda one=server: all(e["state"] == "ready" for e in instances(one).values()),
                "all are ready",
            )
            assert answers(server) == expected[0]
            found = images_of(server)
            assert len(found) == 3
            assert len(found[0]) == 1
            assert found[1:] == [found[0]] * 2
            server.belongings.look(tree(server.process.pid))
        nothing_left(server.belongings)
        return
    pytest.skip("images are filled too fast here")


@pytest.mark.slow
def test_nothing_is_left_if_the_launcher_is_killed_while_an_image_is_filled(wide: tuple[Path, Path]) -> None:
    for _ in range(_TRIES):
        try:
            with Attacked("launcher", *CLUSTER, model=str(wide[0])):
                continue  # (too late)
        except Attacked.Died as died:
            nothing_left(died.belongings)
            return
    pytest.skip("images are filled too fast here")


@pytest.mark.slow
def test_kills_while_new_weights_are_prepared(wide: tuple[Path, Path], expected: list[list[str]]) -> None:
    """Of who fills the new image: nothing changes anywhere, and the next update is well."""
    belongings = Belongings()
    with (
        Server(*CLUSTER, "--weights-dir", "/", model=str(wide[0])) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        launcher, now = server.process.pid, 0

        def update() -> httpx.Response:
            return httpx.post(f"{server.url}/update_weights", json={"path": str(wide[1 - now])}, timeout=200)

        for what in ("worker", "engine"):
            for _ in range(_TRIES):
                given = {name: entry["weights"] for name, entry in instances(server).items()}
                future = pool.submit(update)
                worker = catch(launcher, future.done)
                if worker is None:
                    assert future.result().status_code == 200
                    now = 1 - now
                    continue
                names = {pid: name for name, pid in engines(server).items()}
                name = names[victim("engine", launcher, worker)]
                os.kill(victim(what, launcher, worker), signal.SIGKILL)
                refusal = future.result()
                assert refusal.status_code == 503, refusal.text
                said = refusal.json()["error"]["message"]
                assert f"{name}: " in said
                assert "no instance was changed" in said
                until(
                    lambda: all(entry["state"] == "ready" for entry in instances(server).values()),
                    "all ready",
                )
                assert {name: entry["weights"] for name, entry in instances(server).items()} == given
                assert answers(server) == expected[now]
                until(lambda: len(set.union(*images_of(server))) == 1, "what was prepared is gone")
                break
        assert update().status_code == 200
        now = 1 - now
        assert answers(server) == expected[now]
        until(lambda: len(set.union(*images_of(server))) == 1, "the old image is gone")
        # The launcher, which is the gateway: nothing of either image stays.
        for _ in range(_TRIES):
            future = pool.submit(update)
            if catch(launcher, future.done) is not None:
                break
            now = 1 - now
        belongings.look(tree(launcher))
        os.kill(launcher, signal.SIGKILL)
        assert isinstance(future.exception() or future.result(), httpx.TransportError | httpx.Response)
    assert belongings.images() >= 1
    nothing_left(belongings)


class Elsewhere(Joined):
    """An instance that sees an empty directory where the server sees `hidden`."""

    def __init__(self, server: Server, hidden: Path, *flags: str) -> None:
        self._hidden = hidden
        super().__init__(server, *flags)

    def prefix(self) -> list[str]:
        return [*NAMESPACE, "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(self._hidden)]


NAMESPACE = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--map-root-user", "--mount")


def can_hide(directory: Path) -> bool:
    try:
        command = [*NAMESPACE, "mount", "-t", "tmpfs", "none", str(directory)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
def test_an_instance_of_another_host_takes_part_in_both_phases(
    tmp_path: Path, wide: tuple[Path, Path]
) -> None:
    """It joins from a launcher of its own, has an image of its own, and lacks a checkpoint."""
    (hidden := tmp_path / "hidden").mkdir()
    if not can_hide(hidden):
        pytest.skip("this system has no mount namespaces for users")
    first, second = wide
    shutil.copytree(second, hidden / "new")
    decode = (str(first), "--label", "decode", "--name", "d", *FLAGS)
    flags = ("--prefill", "1", "--disaggregation-threshold", "0", *FLAGS, "--weights-dir", "/")
    with Server(*flags, model=str(first)) as server, Elsewhere(server, hidden, *decode) as joined:
        until(lambda: instances(server).get("d", {}).get("state") == "ready", "d is ready")
        before = answers(server)
        (own,) = images_of(server)
        (theirs,) = (mapped(pid) for engine in tree(joined.process.pid) for pid in [engine] if mapped(pid))
        assert len(own) == len(theirs) == 1
        assert own != theirs
        began = time.monotonic()
        stream = server.client().completions.create(
            model="", prompt="one two", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        refusal = server.http.post("/update_weights", json={"path": str(hidden / "new")}, timeout=200)
        said = refusal.json()["error"]["message"]
        assert refusal.status_code == 400, said
        assert "d: " in said
        assert "prefill-0: " not in said
        assert "no instance was changed" in said
        assert sum(1 for chunk in stream if chunk.choices) > 10, time.monotonic() - began
        assert answers(server) == before
        until(lambda: images_of(server) == [own], "what was prepared is gone")
        answer = server.http.post("/update_weights", json={"path": str(second)}, timeout=200)
        assert set(answer.raise_for_status().json()["instances"]) == {"prefill-0", "d"}
        assert answers(server) != before
        for name in ("prefill-0", "d"):
            assert instances(server)[name]["weights"]["path"] == str(second)
