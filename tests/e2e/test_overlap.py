"""A server whose steps overlap gives the tokens of one whose steps do not: over hand-overs, and with pools so
small that requests are preempted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.e2e.server import Server
from tests.e2e.test_disaggregation import clean_ledgers, stats

FLAGS = (
    *("--executor", "simulated", "--simulated-cost", "0.002", "--disaggregation-threshold", "0"),
    *("--prefill", "1", "--decode", "1", "--block-size", "16", "--num-gpu-blocks-override", "40"),
    *("--admission-headroom", "0"),
)


def answers(server: Server) -> list[str]:
    """Of 12 requests that come at once; together they need more blocks than an instance has."""
    model = server.http.get("/v1/models").raise_for_status().json()["data"][0]["id"]

    def ask(number: int) -> str:
        prompt = [(number * 7 + place) % 200 + 5 for place in range(30 + number * 5)]
        body = {"model": model, "prompt": prompt, "max_tokens": 90, "temperature": 0, "ignore_eos": True}
        answer = server.http.post("/v1/completions", json=body).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == 90
        text: str = answer["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(12) as threads:
        return list(threads.map(ask, range(12)))


def test_steps_that_overlap_give_the_same_tokens() -> None:
    with Server(*FLAGS, "--speculation", "off") as server:
        expected = answers(server)
    with Server(*FLAGS, "--overlap-steps", "on") as server:
        assert answers(server) == expected
        assert sum(one["taken"] for one in stats(server).values()) > 0
        assert server.metric("baton:num_preemptions_total") > 0
        clean_ledgers(server)
