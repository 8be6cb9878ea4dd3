"""The real server with the embedded model, through the real `openai` client."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from tokenizers import Tokenizer

from tests.e2e.server import Server
from tests.e2e.test_kill import wait_metric
from tests.e2e.test_load import wait_clean

MODEL = "baton-tiny"


def test_chat_streams_a_sensible_answer(server: Server) -> None:
    client = server.client()
    question = [{"role": "user", "content": "Hello! Who are you?"}]
    whole = client.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=40)
    text = whole.choices[0].message.content
    assert "Baton" in text
    assert whole.choices[0].finish_reason == "stop"
    pieces = client.chat.completions.create(
        model=MODEL,
        messages=question,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(pieces)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    # (Tokens that come faster than they are sent share a chunk.)
    pieces = client.chat.completions.create(
        model=MODEL, messages=question, max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    assert sum(bool(c.choices and c.choices[0].delta.content) for c in pieces) > 2


def test_recall_over_a_long_prompt(server: Server) -> None:
    """A thousand tokens of context: a wrong KV block shows as a wrong answer."""
    rng = random.Random(5)
    filler = (
        "The river runs past the old mill. A cat sleeps on the warm stone. "
        "Many people walk through the park in the morning. The baker sells fresh bread. "
    )
    client = server.client()
    found = 0
    for _ in range(5):
        word = f"{rng.choice(['maple', 'cedar', 'amber', 'coral'])}-{rng.randint(1000, 9999)}"
        text = f"The code word is {word}. " + filler * 14 + "What is the code word?"
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=24
        )
        assert answer.usage.prompt_tokens > 700
        found += word in answer.choices[0].message.content
    assert found >= 4


def test_the_same_prompt_again_comes_from_the_prefix_cache(server: Server) -> None:
    client = server.client()
    prompt = "one two three four five " * 40
    ask = dict(model=MODEL, prompt=prompt, temperature=0, max_tokens=8)
    first = client.completions.create(**ask)
    second = client.completions.create(**ask)
    assert first.choices[0].text == second.choices[0].text
    assert second.usage.prompt_tokens_details.cached_tokens > 64


def test_n_choices_seeds_and_logprobs(server: Server) -> None:
    client = server.client()
    ask = dict(model=MODEL, prompt="The", max_tokens=12, temperature=1.0, seed=3, n=3, logprobs=2)
    one, two = client.completions.create(**ask), client.completions.create(**ask)
    assert [c.text for c in one.choices] == [c.text for c in two.choices]
    assert len({c.text for c in one.choices}) > 1
    logprobs = one.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
    assert all(value <= 0 for value in logprobs.token_logprobs)


def test_echo_scores_the_prompt(server: Server) -> None:
    answer = server.client().completions.create(
        model=MODEL, prompt="Hello there, friend", max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    values = answer.choices[0].logprobs.token_logprobs
    assert values[0] is None
    assert len(values) == answer.usage.prompt_tokens + 1
    assert all(value <= 0 for value in values[1:])


def test_offsets_point_into_the_text(server: Server) -> None:
    """Of an echoed prompt with characters that are several tokens, and of what follows, streamed or not."""
    client = server.client()
    prompt = "A 🚀 naïve 日本語 test:"
    ask = dict(model=MODEL, prompt=prompt, max_tokens=12, echo=True, logprobs=1, temperature=0)
    whole = client.completions.create(**ask).choices[0]
    assert whole.text.startswith(prompt)
    offsets = whole.logprobs.text_offset
    assert offsets == sorted(offsets)
    assert max(offsets) <= len(whole.text)
    exact = 0
    for token, at in zip(whole.logprobs.tokens, offsets, strict=True):
        if token.isascii() and whole.text.startswith(token, at):
            exact += bool(token)
    assert exact >= 15
    chunks = [chunk.choices[0] for chunk in client.completions.create(stream=True, **ask) if chunk.choices]
    assert "".join(choice.text for choice in chunks) == whole.text
    assert [at for choice in chunks for at in choice.logprobs.text_offset] == offsets
    ids = server.http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
    by_ids = client.completions.create(**{**ask, "prompt": ids}).choices[0]
    text = server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert by_ids.text.startswith(text), "echoed ids are shown as the model sees them"
    assert by_ids.logprobs.tokens == whole.logprobs.tokens
    both = client.completions.create(**ask, extra_body={"prompt_logprobs": 4}).choices[0]
    assert max(len(top) for top in both.logprobs.top_logprobs[1:]) <= 2
    assert min(len(top) for top in both.prompt_logprobs[1:]) >= 4


def test_a_chat_stream_with_everything(server: Server) -> None:
    client = server.client()
    ask = dict(
        model=MODEL,
        messages=[{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hello!"}],
        max_completion_tokens=20,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body={"return_token_ids": True},
    )
    whole = client.chat.completions.create(**ask)
    options = {"include_usage": True, "continuous_usage_stats": True}
    first, *rest, last = client.chat.completions.create(stream=True, stream_options=options, **ask)
    assert (first.choices[0].delta.role, first.usage.completion_tokens) == ("assistant", 0)
    assert first.prompt_token_ids == whole.prompt_token_ids
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)
    seen: list[int] = []
    items = []
    for chunk in rest:
        seen += chunk.choices[0].token_ids or []
        assert chunk.usage.completion_tokens == len(seen)
        if chunk.choices[0].logprobs is not None:
            items += chunk.choices[0].logprobs.content
    assert seen == whole.choices[0].token_ids
    assert [item.token for item in items] == [item.token for item in whole.choices[0].logprobs.content]
    assert all(len(item.top_logprobs) == 3 for item in items)
    message = whole.choices[0].message
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == message.content
    # (What was not asked for is null, not absent.)
    plain = client.chat.completions.create(
        **{**ask, "logprobs": False, "top_logprobs": None, "extra_body": {}}
    )
    assert (plain.prompt_token_ids, plain.prompt_logprobs, plain.choices[0].token_ids) == (None, None, None)
    assert (plain.choices[0].message.tool_calls, plain.choices[0].message.reasoning_content) == (None, None)


def test_the_models_root_is_its_tokenizers_directory(server: Server) -> None:
    (card,) = server.client().models.list()
    tokenizer = Tokenizer.from_file(f"{card.root}/tokenizer.json")
    ids = server.http.post("/tokenize", json={"prompt": "Hello there"}).json()["tokens"]
    assert tokenizer.encode("Hello there").ids == ids
    assert [model["id"] for model in server.http.get("/v1/models/").json()["data"]] == [card.id]


def test_stop_string_and_token_ids(server: Server) -> None:
    client = server.client()
    whole = client.completions.create(model=MODEL, prompt="Count: 1, 2, 3,", temperature=0, max_tokens=24)
    text = whole.choices[0].text
    stop = text[4:7]
    cut = client.completions.create(
        model=MODEL, prompt="Count: 1, 2, 3,", temperature=0, max_tokens=24, stop=[stop]
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    ids = server.http.post("/tokenize", json={"model": MODEL, "prompt": "Count: 1, 2, 3,"}).json()["tokens"]
    by_ids = client.completions.create(model=MODEL, prompt=ids, temperature=0, max_tokens=24)
    assert by_ids.choices[0].text == text


def test_errors_name_the_field(server: Server) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model=MODEL, prompt=[5] * 3000)
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.completions.create(model="nobody", prompt="x")
    # What LiteLLM and LangChain look for before they shorten a conversation.
    long = [{"role": "user", "content": "word " * 5000}]
    words = "This model's maximum context length is 2048 tokens. However, "
    for ask in (dict(messages=long), dict(messages=[{"role": "user", "content": "x"}], max_tokens=4000)):
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            client.chat.completions.create(model=MODEL, **ask)
        assert caught.value.code == "context_length_exceeded"
    for field, value in (("n", 129), ("cache_salt", ""), ("top_logprobs", 3), ("use_beam_search", 0)):
        with pytest.raises(openai.BadRequestError, match=field) as caught:
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}], extra_body={field: value}
            )
        assert caught.value.param == field


def test_async_client_and_a_client_that_goes_away(server: Server) -> None:
    async def scenario() -> None:
        async with server.async_client() as client:
            stream = await client.completions.create(
                model=MODEL, prompt="go on", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(scenario())
    wait_clean(server)
    assert server.metric("baton:num_requests_running") == 0


def test_queue_bound_is_a_429() -> None:
    flags = ("--max-num-seqs", "1", "--max-waiting", "2", "--executor", "simulated")
    with Server(*flags, "--simulated-cost", "0.05") as small:

        async def scenario() -> list[object]:
            async with small.async_client() as client:
                ask = dict(model=MODEL, prompt="x", extra_body={"ignore_eos": True})
                first = asyncio.create_task(client.completions.create(max_tokens=1900, **ask))
                await asyncio.to_thread(wait_metric, small, "baton:num_requests_running", 1)
                more = [client.completions.create(max_tokens=4, **ask) for _ in range(5)]
                calls = [asyncio.create_task(call) for call in more]
                for _, refused in zip(range(3), asyncio.as_completed(calls), strict=False):
                    with pytest.raises(openai.RateLimitError):
                        await refused
                first.cancel()  # the two that wait can run
                return await asyncio.gather(*calls, return_exceptions=True)

        outcomes = asyncio.run(scenario())
        rejected = [o for o in outcomes if isinstance(o, openai.RateLimitError)]
        assert len(rejected) == 3
        assert float(rejected[0].response.headers["retry-after"]) > 0
        assert sum(not isinstance(o, Exception) for o in outcomes) == 2
        wait_clean(small)


def test_metrics_and_health(server: Server) -> None:
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/ready").status_code == 200
    server.client().completions.create(model=MODEL, prompt="count me", max_tokens=4)
    text = server.http.get("/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions"):
        assert f"baton:{name}" in text
    # (What vLLM's dashboards look at.)
    assert server.metric("baton:iteration_tokens_total_count") == server.metric("baton:engine_steps_total")
    assert server.metric("baton:iteration_tokens_total_sum") > server.metric("baton:generation_tokens_total")
    assert 'enable_prefix_caching="True"' in text
    for part in ("inference", "prefill", "decode"):
        assert server.metric(f"baton:request_{part}_time_seconds_count") > 0
    assert server.metric("baton:request_params_n_sum") > 0
    assert server.metric("baton:request_params_max_tokens_sum") > 0
    assert server.metric("baton:generation_tokens_total") > 0


def test_a_pause_ends_what_runs_and_a_later_request_waits(server: Server) -> None:
    """As vLLM's /pause does by default: a trainer gets what has been generated, and then changes weights."""
    ask = dict(model=MODEL, prompt="go on", temperature=0, extra_body={"ignore_eos": True})
    stream = server.client().completions.create(max_tokens=1900, stream=True, **ask)
    first = next(stream)
    with ThreadPoolExecutor(1) as pool:
        answer = server.http.post("/pause").raise_for_status().json()
        try:
            assert answer["aborted"] == 1
            *rest, last = stream
            assert last.choices[0].finish_reason == "abort"
            text = "".join(chunk.choices[0].text for chunk in [first, *rest, last])
            late = pool.submit(server.client().completions.create, max_tokens=4, **ask)
            wait_metric(server, "baton:num_requests_waiting", 1)
            assert server.metric("baton:instance_paused") == 1
            assert server.http.get("/ready").status_code == 503
            assert not late.done()
        finally:
            server.http.post("/resume").raise_for_status()
        other = late.result(120).choices[0].text
        assert text
        assert text.startswith(other) or other.startswith(text)
    wait_clean(server)


def test_pause_waits_for_what_runs(server: Server) -> None:
    ask = dict(model=MODEL, prompt="go on", extra_body={"ignore_eos": True})
    stream = server.client().completions.create(max_tokens=400, stream=True, **ask)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        paused = pool.submit(server.http.post, "/pause?mode=wait")
        try:
            *_, last = stream
            assert last.choices[0].finish_reason == "length"
            assert paused.result(120).json()["status"] == "paused"
        finally:
            server.http.post("/resume").raise_for_status()
    wait_clean(server)


def test_pause_holds_tokens_and_resume_lets_them_go(server: Server) -> None:
    assert server.http.post("/pause?mode=keep").status_code == 200
    try:
        with pytest.raises(openai.APITimeoutError):
            server.client().with_options(timeout=1.0).completions.create(
                model=MODEL, prompt="x", max_tokens=4
            )
    finally:
        assert server.http.post("/resume").status_code == 200
    assert server.client().completions.create(model=MODEL, prompt="x", max_tokens=4).choices
    wait_clean(server)
