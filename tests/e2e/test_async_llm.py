"""`AsyncLLM`: many streams at once, ends of every kind; and answers taken apart, of both Python APIs."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.gateway.errors import InstanceUnavailable
from baton.gateway.parsing.deltas import Content, Reasoning
from baton.llm import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams, StructuredOutputs
from baton.llm.hops import Hop
from baton.llm.streams import Stream, Streams
from tests.conftest import GENEROUS_S
from tests.e2e.server import alive, child_pids
from tests.e2e.test_llm import engines
from tests.observe.timings import check_timings

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
LONG = SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True)
HELLO = [{"role": "user", "content": "Hello!"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}{% endif %}"
    "{%- for message in messages %}{{ message.content }}{%- endfor %}"
    "{#- <tool_call> -#}{%- if opens %}<think>\n</think>\n{% else %}<think>\n{% endif %}"
)


def small(**options: Any) -> AsyncLLM:
    return AsyncLLM(executor="simulated", **{"num_gpu_blocks_override": 64, "max_model_len": 256, **options})


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that thinks and calls as Qwen does."""
    path = tmp_path_factory.mktemp("template") / "qwen.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def blocking(template: Path) -> Iterator[LLM]:
    with LLM(chat_template=str(template)) as running:
        yield running


@pytest.fixture(scope="module")
def model(template: Path) -> Iterator[AsyncLLM]:
    """The embedded one."""
    llm = AsyncLLM(chat_template=str(template))
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def slow() -> Iterator[AsyncLLM]:
    """Whose answers of 2,000 tokens last longer than the tests wait, so that they can be left."""
    llm = small(simulated_cost="0.05", max_model_len=2048, num_gpu_blocks_override=512)
    yield llm
    llm.shutdown()


async def last_of(outputs: Any, last: RequestOutput | None = None) -> RequestOutput:
    """`last`: what has come already."""
    async for output in outputs:
        last = output
    assert last is not None
    assert last.finished
    return last


async def ledger(llm: AsyncLLM) -> dict[str, Any]:
    query = llm._background._client.query("ledger")
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(query, llm._background.loop))


async def nothing_is_held(llm: AsyncLLM) -> None:
    """Waits for that."""
    async with asyncio.timeout(GENEROUS_S):
        while (await ledger(llm))["held"] or llm._background._client.in_flight:
            await asyncio.sleep(0.01)
    assert llm.num_unfinished_requests == 0


# -- what comes


def test_a_thousand_streams_are_what_llm_answers(model: AsyncLLM, blocking: LLM) -> None:
    prompts = [f"Story {i}:" for i in range(1000)]
    params = [SamplingParams(max_tokens=12, seed=i) for i in range(1000)]

    async def ask(number: int) -> tuple[list[int], str]:
        kind = (DELTA, RequestOutputKind.CUMULATIVE, FINAL)[number % 3]
        ids: list[int] = []
        text = ""
        async for output in model.generate(prompts[number], params[number].replace(output_kind=kind)):
            for one in output.outputs:
                ids = ids + one.token_ids if kind is DELTA else one.token_ids
                text = text + one.text if kind is DELTA else one.text
        return ids, text

    async def everybody() -> list[tuple[list[int], str]]:
        async with asyncio.timeout(2 * GENEROUS_S):
            return await asyncio.gather(*map(ask, range(1000)))

    expected = [one.outputs[0] for one in blocking.generate(prompts, params, use_tqdm=False)]
    assert asyncio.run(everybody()) == [(one.token_ids, one.text) for one in expected]


async def test_each_kind_of_output(model: AsyncLLM) -> None:
    params = SamplingParams(n=2, max_tokens=24, seed=3, logprobs=1, prompt_logprobs=0)
    whole = await last_of(model.generate("Once upon a time", params.replace(output_kind=FINAL)))
    several = [one async for one in model.generate("Once upon a time", params)]
    assert several[-1].outputs == whole.outputs
    assert several[-1].prompt_logprobs == whole.prompt_logprobs != None  # noqa: E711
    assert [one.timings is None for one in several] == [True] * (len(several) - 1) + [False]
    check_timings(whole.timings, "prefill")
    check_timings(several[-1].timings, "prefill")
    assert [one.finished for one in several] == [False] * (len(several) - 1) + [True]
    for one in several:
        for output, end in zip(one.outputs, whole.outputs, strict=True):
            assert end.token_ids[: len(output.token_ids)] == output.token_ids
            assert end.text.startswith(output.text)
    deltas = [one async for one in model.generate("Once upon a time", params.replace(output_kind=DELTA))]
    for index, end in enumerate(whole.outputs):
        mine = [output for one in deltas for output in one.outputs if output.index == index]
        assert "".join(output.text for output in mine) == end.text
        assert [token for output in mine for token in output.token_ids] == end.token_ids
        assert [one for output in mine for one in output.logprobs or ()] == end.logprobs
        assert mine[-1].finish_reason == end.finish_reason


async def test_a_slow_consumer_misses_nothing(model: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=64, seed=1, ignore_eos=True, output_kind=DELTA)
    outputs = model.generate([5, 6, 7], params)
    first = await anext(outputs)
    while model._background._client.in_flight:
        await asyncio.sleep(0.01)
    rest = [one async for one in outputs]
    assert len(rest) <= 2, "what came meanwhile is one output"
    assert sum(len(one.outputs[0].token_ids) for one in (first, *rest)) == 64


async def test_wrong_requests_are_named(slow: AsyncLLM) -> None:
    running = slow.generate([5, 6], LONG, "mine")
    await anext(running)
    for outputs, words in (
        (slow.generate([5], LONG, "mine"), "request_id: 'mine' is running already"),
        (slow.generate([5], LONG, "a b"), "request_id: .* must be"),
        (slow.generate([7] * 2048), "leaves no room"),
        (slow.generate({"text": "x"}), 'prompt: a mapping needs "prompt"'),
        (slow.generate([5], {"max_tokens": 5}), "sampling_params: .* must be SamplingParams"),
        (slow.chat([{"role": "user", "content": "x"}], {"max_tokens": 5}), "must be SamplingParams"),
        (slow.chat([{"role": "user"}]), r"messages\[0\]"),
        (slow.generate([5], SamplingParams(stop_token_ids=[10**6])), "stop_token_ids: token id"),
    ):
        with pytest.raises(ValueError, match=words):
            await anext(outputs)
    await running.aclose()
    await nothing_is_held(slow)


# -- the end, of every kind


@pytest.mark.parametrize("way", ["break", "aclose", "cancel", "abort"])
async def test_an_iterator_that_is_left_frees_its_blocks(slow: AsyncLLM, way: str) -> None:
    outputs = slow.generate([5, 6, 7], LONG, "left")
    if way == "break":
        async for _ in outputs:
            break
        del outputs
        gc.collect()
    elif way == "aclose":
        await anext(outputs)
        await outputs.aclose()
    elif way == "cancel":
        task = asyncio.create_task(last_of(outputs))
        while not (await ledger(slow))["held"]:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        first = await anext(outputs)
        await slow.abort(["left", "nobody"])
        last = await last_of(outputs)
        assert last.outputs[0].finish_reason == "abort"
        ids = first.outputs[0].token_ids
        assert last.outputs[0].token_ids[: len(ids)] == ids
    await nothing_is_held(slow)


async def test_streams_go_on_after_the_loss_of_a_worker(slow: AsyncLLM) -> None:
    params = [LONG.replace(max_tokens=16, temperature=1, seed=seed) for seed in range(8)]

    async def everybody() -> list[list[int]]:
        asked = [last_of(slow.generate([5, 6, i], one)) for i, one in enumerate(params)]
        return [one.outputs[0].token_ids for one in await asyncio.gather(*asked)]

    undisturbed = await everybody()
    streams = [slow.generate([5, 6, i], one) for i, one in enumerate(params)]
    begun = await asyncio.gather(*map(anext, streams))
    restarts = slow._background._client.restarts["instance-0"]
    (worker,) = child_pids(slow._background._supervisor.pid)
    os.kill(worker, signal.SIGKILL)
    async with asyncio.timeout(2 * GENEROUS_S):
        found = [one.outputs[0].token_ids for one in await asyncio.gather(*map(last_of, streams, begun))]
        while slow._background._client.restarts["instance-0"] == restarts:
            await asyncio.sleep(0.01)
    assert found == undisturbed
    await nothing_is_held(slow)


async def test_streams_end_with_an_error_if_nothing_comes_back() -> None:
    llm = small(simulated_cost="0.05", max_model_len=2048, num_gpu_blocks_override=512, max_restarts=0)
    streams = [llm.generate([5, i], LONG) for i in range(5)]
    await asyncio.gather(*(anext(one) for one in streams))
    os.kill(llm._background._supervisor.pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(InstanceUnavailable):
            async with asyncio.timeout(GENEROUS_S):
                await last_of(stream)
    with pytest.raises(InstanceUnavailable):
        await llm.check_health()
    await asyncio.to_thread(llm.shutdown)


async def test_a_shutdown_ends_streams_with_an_error() -> None:
    before = engines()
    async with small(simulated_cost="0.05", max_model_len=2048, num_gpu_blocks_override=512) as llm:
        await llm.check_health()
        (engine,) = engines() - before
        stream = llm.generate([5], LONG)
        await anext(stream)
    with pytest.raises(InstanceUnavailable, match="shut"):
        async with asyncio.timeout(GENEROUS_S):
            await last_of(stream)
    assert not alive(engine)
    llm.shutdown()
    with pytest.raises(RuntimeError, match="closed"):
        await anext(llm.generate([5], LONG))


async def test_streams_end_with_the_thread_that_drives_them() -> None:
    async def ready() -> None:
        """At once."""

    streams, stream = Streams(), Stream(Hop(asyncio.get_running_loop()), lambda: None, ready)
    streams.add("one", stream)
    waiting = asyncio.create_task(stream.news())
    await asyncio.to_thread(streams.end)
    with pytest.raises(InstanceUnavailable, match="shut down"):
        await waiting
    with pytest.raises(RuntimeError, match="shut down"):
        streams.add("two", stream)


def test_loops_may_follow_each_other(model: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0)
    one, other = (asyncio.run(last_of(model.generate("The sky", params))) for _ in range(2))
    assert one.outputs == other.outputs


def test_a_forgotten_one_takes_its_processes_along() -> None:
    llm = small()
    pid, thread = llm._background._supervisor.pid, llm._background._thread
    assert alive(pid)
    del llm
    gc.collect()
    thread.join(GENEROUS_S)
    assert not thread.is_alive()
    assert not alive(pid)


# -- answers taken apart


def both(blocking: LLM, model: AsyncLLM, messages: Any, params: SamplingParams, **options: Any) -> Any:
    """The answer, which both give."""
    (found,) = blocking.chat(messages, params, use_tqdm=False, **options)
    again = asyncio.run(last_of(model.chat(messages, params, **options)))
    without_ids: Callable[[Any], Any] = lambda calls: [(call.name, call.arguments) for call in calls]  # noqa: E731
    for field in ("text", "content", "reasoning", "finish_reason"):
        assert getattr(again.outputs[0], field) == getattr(found.outputs[0], field)
    assert without_ids(again.outputs[0].tool_calls) == without_ids(found.outputs[0].tool_calls)
    return found.outputs[0]


def test_reasoning_is_apart_and_bounded(blocking: LLM, model: AsyncLLM) -> None:
    """A schema binds the answer, not the thinking before it."""
    params = SamplingParams(
        max_tokens=60,
        seed=4,
        thinking_token_budget=5,
        structured_outputs=StructuredOutputs(choice=["yes", "no"]),
    )
    found = both(blocking, model, HELLO, params)
    assert found.content in ("yes", "no")
    assert found.reasoning
    assert found.text.startswith(found.reasoning + "</think>")
    assert len(blocking.get_tokenizer().encode(found.reasoning)) <= 6
    deltas = list(blocking.chat_deltas(HELLO, params))
    for kind, whole in ((Content, found.content), (Reasoning, found.reasoning)):
        assert "".join(one.text for one in deltas if isinstance(one, kind)) == whole
    assert "".join(blocking.chat_stream(HELLO, params)) == found.content
    with pytest.raises(ValueError, match="thinking_token_budget: -2 must be at least -1"):
        SamplingParams(thinking_token_budget=-2)


def test_a_demanded_call_is_one(blocking: LLM, model: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=80, seed=2, thinking_token_budget=3)
    options = {"chat_template_kwargs": {"opens": True}, "tools": [WEATHER], "tool_choice": "required"}
    found = both(blocking, model, HELLO, params, **options)
    (call,) = found.tool_calls[:1]
    assert (call.index, call.name) == (0, "weather")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    assert call.id.startswith("call_")
    assert "weather" not in (found.content or "")
    assert found.finish_reason in ("tool_calls", "length")

    async def pieces() -> tuple[set[str], str]:
        arguments, ids = "", set()
        delta = params.replace(output_kind=DELTA)
        async for output in model.chat(HELLO, delta, **options):
            for one in output.outputs[0].tool_calls if output.outputs else ():
                if one.index == 0:
                    ids |= {one.id} - {None}
                    arguments += one.arguments
        return ids, arguments

    ids, arguments = asyncio.run(pieces())
    assert len(ids) == 1
    assert arguments == call.arguments
    with pytest.raises(ValueError, match="tool_choice: 'required' needs tools"):
        blocking.chat(HELLO, params, tool_choice="required")


def test_a_prompts_budget_of_thoughts_is_kept(blocking: LLM) -> None:
    params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True, thinking_token_budget=3)
    (found,) = blocking.generate("Is it so? <think>", params, use_tqdm=False)
    thoughts, end, _ = found.outputs[0].text.partition("</think>")
    assert end
    assert len(blocking.get_tokenizer().encode(thoughts)) <= 4
