"""`baton scale` beside a real server: it advises what the load wants, and changes nothing; and
`baton plan` on what a server recorded."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from baton.simulation.capacity.trace import read_trace
from tests.conftest import GENEROUS_S
from tests.e2e.server import Server
from tests.e2e.test_auto_labels import FLAGS, load
from tests.e2e.test_cluster import instances

BATON = (sys.executable, "-m", "baton", "scale")


@contextmanager
def scale(url: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*BATON, url, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], 3 * GENEROUS_S)
    assert ready, "nothing was advised"
    return process.stdout.readline()


def test_prompts_that_press_are_advised_an_instance_more() -> None:
    with Server(*FLAGS, "--prefill", "1", "--decode", "1", "--slo", "ttft:2000 itl:400") as server:
        server.wait_ready()
        with (
            load(server, clients=12, prompt=400, tokens=1),
            scale(server.url, "--watch", "--json", "--bounds", "2:3") as process,
        ):
            told = json.loads(next_line(process))
            process.send_signal(signal.SIGINT)
            assert process.wait(GENEROUS_S) == 0
        assert (told["what"], told["label"]) == ("add", "prefill")
        assert told["wanted"] == {"prefill": 2, "decode": 1}
        assert "prompts press more than streams" in told["why"]
        assert told["pressure"]["prefill"] > 0.95
        assert {one["label"] for one in instances(server).values()} == {"prefill", "decode"}

        quiet = subprocess.run([*BATON, server.url], capture_output=True, text=True, timeout=GENEROUS_S)
        assert quiet.returncode == 0, quiet.stderr
        first, *_, last = quiet.stdout.splitlines()
        assert first == "instances: 1 decode, 1 prefill; promised: ttft:2000 itl:400"
        assert last.startswith("nothing to change")


def test_who_is_not_there_or_will_not_tell() -> None:
    nobody = subprocess.run([*BATON, "127.0.0.1:9"], capture_output=True, text=True, timeout=GENEROUS_S)
    assert nobody.returncode == 1
    assert "error: http://127.0.0.1:9: the server does not answer" in nobody.stderr
    with Server("--executor", "simulated", "--admin-key", "sesame") as server:
        server.wait_ready()
        refused = subprocess.run([*BATON, server.url], capture_output=True, text=True, timeout=GENEROUS_S)
    assert refused.returncode == 1
    assert "401" in refused.stderr
    assert "--api-key" in refused.stderr


def test_flags_that_are_wrong_say_what_to_give() -> None:
    for flag, value in (("--bounds", "8:2"), ("--slo", "soon")):
        ended = subprocess.run([*BATON, flag, value], capture_output=True, text=True, timeout=GENEROUS_S)
        assert ended.returncode == 2
        assert flag in ended.stderr


def test_a_recording_is_a_trace(tmp_path: Path) -> None:
    """Of two instances, one of which prefills: what clients asked, whichever of them answered."""
    tape, random = tmp_path / "tape", Random(1)
    sizes = [(300, 20), (120, 5), (64, 1)]
    prompts = [[random.randrange(10, 250) for _ in range(prompt)] for prompt, _ in sizes]
    roles = ("--prefill", "1", "--decode", "1", "--disaggregation-threshold", "0")
    with Server(*FLAGS, *roles, "--record", str(tape)) as server:
        server.wait_ready()

        def ask(prompt: list[int], tokens: int, **more: object) -> None:
            body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **more}
            server.http.post("/v1/completions", json=body).raise_for_status()

        for prompt, (_, tokens) in zip(prompts, sizes, strict=True):
            ask(prompt, tokens)
        ask(prompts[0], 7)  # its beginning is cached
        ask([random.randrange(10, 250) for _ in range(90)], 3, n=2, temperature=1.0)
        assert server.stop() == 0
    found = read_trace(tape)
    assert [(one.prompt, one.output) for one in found[:3]] == sizes
    assert 0 < found[3].prompt < 300
    assert found[3].output == 7
    assert [one.output for one in found[4:]] == [3, 3]
    assert found[0].at == 0
    assert [one.at for one in found] == sorted(one.at for one in found)
    assert found[1].at > 0.002 * 20  # (a step takes 2 ms at least)
    plan = ("plan", "--trace", str(tape), "--slo", "ttft:2000 itl:400", "--step-cost", "0.002,0.001,0.02")
    told = subprocess.run([*BATON[:-1], *plan], capture_output=True, text=True, timeout=GENEROUS_S)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("6 requests in ")
