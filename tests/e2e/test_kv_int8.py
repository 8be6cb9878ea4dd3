"""`--kv-cache-dtype int8` through servers: the same answers however requests are cut or handed over."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.bench.left_behind import Belongings
from baton.model.checkpoint.config import ModelConfig
from baton.model.checkpoint.hub import resolve_model
from tests.e2e.killing import engines
from tests.e2e.mixed_requests import make_asks
from tests.e2e.server import Server, child_pids
from tests.e2e.test_disaggregation import ask_all, clean_ledgers, learn_from, stats
from tests.e2e.test_kill import wait_metric
from tests.e2e.test_update_weights import other_weights

__all__ = ["other_weights"]  # (a fixture)

BLOCK = 32
NIXL = any(importlib.util.find_spec(name) for name in ("nixl_cu13", "nixl_cu12"))
TIGHT = ("--num-gpu-blocks-override", "40", "--max-model-len", "1024", "--admission-headroom", "0")
FLAGS = ("--kv-cache-dtype", "int8", "--dtype", "bfloat16", "--block-size", str(BLOCK))


def page_bytes() -> int:
    """A byte a number; a scale of four for each position and head of keys and of values."""
    model = ModelConfig.from_directory(resolve_model(None))
    return model.num_layers * 2 * model.num_kv_heads * BLOCK * (model.head_dim + 4)


def answers(server: Server, prompts: range) -> list[str]:
    """Short prompts of their own and long answers, all of one request: twelve at once do not fit."""
    return [
        choice.text
        for choice in server.client()
        .completions.create(
            model="",
            prompt=[[3 + (7 * number + token) % 200 for token in range(40)] for number in prompts],
            max_tokens=150,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        .choices
    ]


def answer(server: Server, number: int) -> str:
    return answers(server, range(number, number + 1))[0]


@pytest.mark.slow
def test_answers_are_those_of_requests_alone_in_one_instance_and_in_two() -> None:
    asks = make_asks(24, seed=8, longest_prompt=400, longest_output=60)
    with Server(*FLAGS, *TIGHT) as one:
        learn_from(one, asks)
        hits = one.metric("baton:prefix_cache_hits_total")
        wrong = ask_all(one, asks, at_once=24)
        assert not wrong, f"{len(wrong)} of {len(asks)}:\n" + "\n".join(wrong[:5])
        assert one.metric("baton:prefix_cache_hits_total") > hits
        alone = [answer(one, number) for number in range(12)]
        before = one.metric("baton:num_preemptions_total")
        assert answers(one, range(12)) == alone
        assert one.metric("baton:num_preemptions_total") > before
    with Server("--prefill", "1", "--decode", "1", "--disaggregation-threshold", "0", *FLAGS) as two:
        wrong = ask_all(two, asks, at_once=8)
        assert not wrong, f"{len(wrong)} of {len(asks)}:\n" + "\n".join(wrong[:5])
        clean_ledgers(two)
        counts = stats(two)["decode-0"]
        assert counts["arrived"] > 0
        assert counts["fetched_bytes"] > 0
        # Whole pages of half the size and scales, or layers of such.
        layer_bytes = page_bytes() // ModelConfig.from_directory(resolve_model(None)).num_layers
        assert counts["fetched_bytes"] % layer_bytes == 0
        assert not two.warnings(), "\n".join(two.warnings()[:10])
        before = counts["fetched_bytes"]
        prompt = [3 + token % 200 for token in range(7 * BLOCK + 5)]
        two.client().completions.create(model="", prompt=prompt, max_tokens=4, temperature=0)
        clean_ledgers(two)
        assert stats(two)["decode-0"]["fetched_bytes"] - before == 8 * page_bytes()


@pytest.fixture(scope="module")
def alone(other_weights: Path) -> list[list[str]]:
    """What one instance answers, with the embedded model and with the other weights."""
    found = []
    for model in (None, str(other_weights)):
        with Server(*FLAGS, model=model) as one:
            found.append([answer(one, number) for number in range(4)])
    assert found[0] != found[1]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["shared_memory", "tcp", "nixl"])
def test_new_weights_a_kill_and_a_recording(
    other_weights: Path, tmp_path: Path, alone: list[list[str]], transfer: str
) -> None:
    if transfer == "nixl" and not NIXL:
        pytest.skip("needs the extra [nixl]")
    flags = ("--prefill", "1", "--decode", "1", "--disaggregation-threshold", "0", "--transfer", transfer)
    belongings = Belongings()
    with (
        Server(*flags, *FLAGS, "--weights-dir", "/", "--record", str(tmp_path)) as two,
        ThreadPoolExecutor(4) as pool,
    ):

        def answers() -> list[str]:
            return list(pool.map(lambda number: answer(two, number), range(4)))

        assert answers() == alone[0]
        assert stats(two)["decode-0"]["arrived"] == 4
        two.http.post("/update_weights", json={"path": str(other_weights)}).raise_for_status()
        assert answers() == alone[1], "nothing that was cached with the old weights is used"
        computed = two.metric("baton:generation_tokens_total")
        running = pool.submit(answers_of, two, 4)
        wait_metric(two, "baton:generation_tokens_total", computed + 1)
        os.kill(child_pids(engines(two)["decode-0"])[0], signal.SIGKILL)
        assert running.result(200) == alone[1]
        wait_metric(two, "baton:instance_restarts_total", 1)
        two.wait_ready()
        assert answers() == alone[1]
        clean_ledgers(two)
        belongings.look([two.process.pid, *two.children()["engine"], *two.children()["worker"]])
    assert belongings.left() == []
    replayed = subprocess.run(
        [sys.executable, "-m", "baton", "replay", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def answers_of(server: Server, count: int) -> list[str]:
    return [answer(server, number) for number in range(count)]
