"""Killing processes: what was in flight is answered, service comes back, nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.server import Server, alive
from tests.e2e.test_load import wait_clean
from tests.e2e.workload import model_name


def _shared_files(pid: int) -> list[str]:
    """Those in /dev/shm that a process has mapped: they would be left behind if it were killed."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line]


def wait_metric(server: Server, name: str, least: float, deadline_s: float = 60.0) -> None:
    deadline = time.monotonic() + deadline_s
    while (value := server.metric(name)) < least:
        assert time.monotonic() < deadline, f"{name} is {value}, not {least}, after {deadline_s} s"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "engine"])
def test_kill_under_load(victim: str) -> None:
    with Server("--tensor-parallel-size", "2", "--dtype", "float32") as server:
        old = server.children()
        del old["helper"]  # they live as long as the server
        assert len(old["engine"]) == 1
        assert len(old["worker"]) == 2
        assert not any(_shared_files(pid) for pids in old.values() for pid in pids)

        async def stream(client: openai.AsyncOpenAI, outcome: list[str]) -> None:
            """Streams until the end, over the loss of the instance."""
            try:
                response = await client.completions.create(
                    model=await model_name(client),
                    prompt="once upon a time",
                    max_tokens=600,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                async for chunk in response:
                    if chunk.choices and chunk.choices[0].finish_reason:
                        outcome.append(chunk.choices[0].finish_reason)
                        return
                outcome.append("ended without a reason")
            except openai.APIError as error:
                outcome.append(f"error: {error.message}")

        async def waiting(client: openai.AsyncOpenAI, outcome: list[str]) -> None:
            """Not streamed."""
            answer = await client.completions.create(
                model=await model_name(client),
                prompt="hello",
                max_tokens=600,
                extra_body={"ignore_eos": True},
            )
            outcome.append(answer.choices[0].finish_reason)

        async def scenario() -> tuple[list[str], list[str]]:
            streams: list[str] = []
            others: list[str] = []
            async with server.async_client() as client:
                tasks = [asyncio.create_task(stream(client, streams)) for _ in range(12)]
                tasks += [asyncio.create_task(waiting(client, others)) for _ in range(4)]
                await asyncio.to_thread(wait_metric, server, "baton:num_requests_running", 16)
                os.kill(old[victim][-1], signal.SIGKILL)
                await asyncio.to_thread(wait_metric, server, "baton:instance_restarts_total", 1)
                await asyncio.to_thread(server.wait_ready)
                await asyncio.wait_for(asyncio.gather(*tasks), 150)
            return streams, others

        streams, others = asyncio.run(scenario())
        assert streams == ["length"] * 12
        assert others == ["length"] * 4
        assert not any(alive(pid) for pids in old.values() for pid in pids)
        client = server.client()
        name = client.models.list().data[0].id
        assert client.completions.create(model=name, prompt="hi", max_tokens=4).usage.completion_tokens > 0
        wait_clean(server)
        current = server.children()
    deadline = time.monotonic() + 60
    while any(alive(pid) for pids in current.values() for pid in pids):
        assert time.monotonic() < deadline, "a child outlived the server"
        time.sleep(0.05)


def test_children_die_with_a_killed_server() -> None:
    with Server() as server:
        children = server.children()
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        deadline = time.monotonic() + 60
        while any(alive(pid) for pids in children.values() for pid in pids):
            assert time.monotonic() < deadline, f"still alive: {children}"
            time.sleep(0.02)
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url + "/health", timeout=2)


def test_stopping_is_clean() -> None:
    server = Server()
    children = server.children()
    assert server.stop() == 0
    assert not any(alive(pid) for pids in children.values() for pid in pids)
    assert not server.warnings()


SLOW_STEPS = ("--executor", "simulated", "--simulated-cost")
"""Steps that take a time of their own, so that no request has ended before the test acts."""


def wait_deaf(server: Server, deadline_s: float = 60.0) -> None:
    """Until the server takes no new request: it has noticed that it is to stop."""
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            if "shuts down" in httpx.get(f"{server.url}/health", timeout=5).text:
                return
        except httpx.HTTPError:
            return
        assert time.monotonic() < deadline, "the server goes on as before"
        time.sleep(0.05)


def _ask_many(server: Server, count: int, then: Callable[[], None]) -> list[str]:
    """Half streams, half whole answers; `then` happens when all run.  Returns how each ended."""

    async def one(client: openai.AsyncOpenAI, stream: bool) -> str:
        ask = dict(model="baton-tiny", prompt="hello", extra_body={"ignore_eos": True})
        try:
            if not stream:
                answer = await client.completions.create(max_tokens=1200, **ask)
                return str(answer.choices[0].finish_reason)
            async for chunk in await client.completions.create(max_tokens=1500, stream=True, **ask):
                if chunk.choices and chunk.choices[0].finish_reason:
                    return str(chunk.choices[0].finish_reason)
            return "ended without a reason"
        except openai.APIError as error:
            return f"error: {error.message}"

    async def scenario() -> list[str]:
        async with server.async_client() as client:
            tasks = [asyncio.create_task(one(client, number % 2 == 0)) for number in range(count)]
            await asyncio.to_thread(wait_metric, server, "baton:num_requests_running", count)
            then()
            return await asyncio.wait_for(asyncio.gather(*tasks), 150)

    return asyncio.run(scenario())


@pytest.mark.slow
def test_an_engine_that_hangs_is_noticed() -> None:
    """Stopped, not dead: no pidfd says so, unanswered questions do."""
    with Server(*SLOW_STEPS, "0.005") as server:
        (engine,) = server.children()["engine"]
        ends = _ask_many(server, 6, lambda: os.kill(engine, signal.SIGSTOP))
        assert ends == ["length"] * 6
        assert not alive(engine)
        wait_clean(server)


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_stopping_under_load_answers_everybody(signals: int) -> None:
    with Server(*SLOW_STEPS, "0.2", "--shutdown-timeout", "1" if signals == 1 else "600") as server:

        def stop() -> None:
            server.process.send_signal(signal.SIGTERM)
            if signals == 2:
                wait_deaf(server)  # two signals that are pending at the same time are one
                server.process.send_signal(signal.SIGTERM)

        ends = _ask_many(server, 6, stop)
        assert all("shuts down" in end for end in ends), ends
        assert server.process.wait(60) == 0
        assert not server.warnings(), server.warnings()
