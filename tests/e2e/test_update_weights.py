"""`baton serve` gets other weights while it is busy, and profiles itself."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

import baton
from tests.e2e.killing import engines
from tests.e2e.server import Server, child_pids
from tests.e2e.test_cluster import Joined, handed_over, instances, until
from tests.e2e.test_kill import wait_metric
from tests.e2e.test_load import wait_clean

FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16")
OPEN = ("--weights-dir", "/", "--profile-dir", "/")


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("weights") / "other"
    shutil.copytree(Path(baton.__file__).parent / "assets" / "baton-tiny", target)
    tensors = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * 0.3
        tensors[name] = (tensor.float() + noise).to(tensor.dtype)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def ask(client: openai.OpenAI, number: int, max_tokens: int = 40):
    """A prompt that shares its first blocks with all others, so that a stale cache would be noticed."""
    return client.completions.create(
        model="",
        prompt="The orchestra plays on, and the conductor lifts the baton once more. " * 3 + str(number),
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
    )


def answers(server: Server) -> list[str]:
    client = server.client()
    return [ask(client, number).choices[0].text for number in range(6)]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "many"), [(1, 1800), (2, 500)])
def test_new_weights_under_load(other_weights: Path, tmp_path: Path, ranks: int, many: int) -> None:
    """`many` tokens take a while."""
    flags = (*FLAGS, "--tensor-parallel-size", str(ranks))
    with Server(*flags, model=str(other_weights)) as reference:
        expected = answers(reference)
    with Server(*flags, *OPEN) as server, ThreadPoolExecutor(16) as pool:
        old = answers(server)
        assert old != expected
        client = server.client()
        with client.completions.create(
            model="", prompt="one two", max_tokens=many, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream))
            running = [pool.submit(ask, client, number, many) for number in range(12)]
            wait_metric(server, "baton:num_requests_running", 10)
            response = server.http.post("/update_weights", json={"path": str(other_weights)})
            assert response.status_code == 200, response.text
            assert response.json()["preempted_requests"] >= 10
            pieces = 1 + sum(1 for chunk in stream if chunk.choices)
        assert pieces > 10
        for future in running:
            completion = future.result(200)
            assert completion.usage.completion_tokens == many
            assert completion.choices[0].finish_reason == "length"
        assert answers(server) == expected
        wait_clean(server)

        wrong = server.http.post("/update_weights", json={"path": str(tmp_path)})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "path")
        assert answers(server) == expected

        traces = tmp_path / "traces"
        assert server.http.post("/start_profile", json={"directory": str(traces)}).json()["profiling"]
        ask(client, 1, 8)
        assert server.http.post("/start_profile", json={"directory": str(traces)}).status_code == 400
        assert server.http.post("/stop_profile").json() == {"profiling": False}
        assert server.http.post("/stop_profile").status_code == 400
        files = sorted(traces.iterdir())
        assert [file.name.split("-")[1] for file in files] == [f"rank{rank}" for rank in range(ranks)]
        assert all(json.loads(file.read_text())["traceEvents"] for file in files)

        os.kill(server.children()["worker"][0], signal.SIGKILL)
        wait_metric(server, "baton:instance_restarts_total", 1)
        server.wait_ready()
        assert answers(server) == expected, "the next incarnation has the new weights too"


def test_the_simulated_executor_has_no_profile_and_takes_any_directory(tmp_path: Path) -> None:
    with Server(
        "--executor", "simulated", "--max-model-len", "256", "--tensor-parallel-size", "2", *OPEN
    ) as server:
        response = server.http.post("/start_profile", json={"directory": str(tmp_path)})
        assert response.status_code == 400
        assert "not supported by the simulated executor" in response.json()["error"]["message"]
        response = server.http.post("/update_weights", json={"path": str(tmp_path)})
        assert (response.status_code, response.json()["path"]) == (200, str(tmp_path))


def test_an_instance_may_join_with_the_new_weights(other_weights: Path) -> None:
    """From a directory of its own: pages are named alike on both sides, so requests are handed over."""
    with Server("--prefill", "1", "--disaggregation-threshold", "0", *FLAGS, *OPEN) as server:
        server.http.post("/update_weights", json={"path": str(other_weights)}).raise_for_status()
        client = server.client()
        expected = ask(client, 1).choices[0].text
        copy = other_weights.parent / "copy"
        shutil.copytree(other_weights, copy)
        with Joined(server, str(copy), "--label", "decode", "--name", "d", *FLAGS):
            until(lambda: instances(server).get("d", {}).get("state") == "ready", "d is ready")
            assert ask(client, 1).choices[0].text == expected
            assert handed_over(server) == 1


def test_two_instances_change_together_and_one_that_starts_again_has_them(tmp_path: Path) -> None:
    (new := tmp_path / "new").mkdir()
    flags = ("--executor", "simulated", "--max-model-len", "256", "--mixed", "2")
    with Server(*flags, "--weights-dir", str(tmp_path)) as server:
        answer = server.http.post("/update_weights", json={"path": str(new)}).json()
        assert set(answer["instances"]) == set(instances(server)), answer
        refusal = server.http.post("/update_weights", json={"path": str(tmp_path / "missing")})
        assert refusal.status_code == 400
        assert "no instance was changed" in refusal.json()["error"]["message"]
        expected = {"generation": 1, "name": str(new), "path": str(new)}
        os.kill(server.children()["worker"][0], signal.SIGKILL)
        wait_metric(server, "baton:instance_restarts_total", 1)
        server.wait_ready()
        until(
            lambda: [entry["weights"] for entry in instances(server).values()] == [expected, expected],
            "both have what was decided",
        )


def test_one_instance_that_cannot_keeps_all_from_changing(other_weights: Path, tmp_path: Path) -> None:
    """1P2D under load.  One instance cannot open the files; all refuse another model; then all change."""
    shutil.copytree(other_weights, wrong := tmp_path / "wrong")
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    flags = ("--prefill", "1", "--decode", "2", "--disaggregation-threshold", "0", *FLAGS)
    with Server(*flags, "--quantize-head", "8", *OPEN) as server, ThreadPoolExecutor(8) as pool:
        before = answers(server)
        given = {name: entry["weights"] for name, entry in instances(server).items()}
        computed = server.metric("baton:generation_tokens_total")
        running = [pool.submit(ask, server.client(), number, 600) for number in range(6)]
        wait_metric(server, "baton:generation_tokens_total", computed + 24)
        poor = child_pids(engines(server)["decode-1"])[0]
        limits = resource.prlimit(poor, resource.RLIMIT_NOFILE)
        resource.prlimit(poor, resource.RLIMIT_NOFILE, (3, limits[1]))
        refusal = server.http.post("/update_weights", json={"path": str(other_weights)})
        resource.prlimit(poor, resource.RLIMIT_NOFILE, limits)
        said = refusal.json()["error"]["message"]
        assert refusal.status_code == 400, said
        assert "decode-1: " in said
        assert "Too many open files" in said
        assert "prefill-0: " not in said
        assert "no instance was changed" in said
        refusal = server.http.post("/update_weights", json={"path": str(wrong)})
        said = refusal.json()["error"]["message"]
        assert (refusal.status_code, said.count("is another model: num_layers is 1")) == (400, 3)
        for future in running:
            assert future.result(200).choices[0].finish_reason == "length"
        assert answers(server) == before
        assert {name: entry["weights"] for name, entry in instances(server).items()} == given
        response = server.http.post("/update_weights", json={"path": str(other_weights)})
        assert set(response.raise_for_status().json()["instances"]) == set(given)
        changed = answers(server)
        assert changed != before
        os.kill(engines(server)["decode-0"], signal.SIGKILL)
        wait_metric(server, "baton:instance_restarts_total", 1)
        server.wait_ready()
        assert answers(server) == changed
        memory = server.http.get("/debug/memory").json()
        images = [row["image_bytes"] for row in memory["processes"] if row["process"].endswith(" rank 0")]
        assert len(images) == 3
        assert min(images) > 0
