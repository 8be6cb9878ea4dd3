"""/v1/chat/completions through the real client of OpenAI."""

from __future__ import annotations

import msgspec
import openai
import pytest

from baton.gateway.text.tokenizer import Tokenizer
from baton.protocol.codec import unpack_int32
from tests.gateway.api.test_completions import answer_with
from tests.gateway.conftest import END
from tests.gateway.harness import GatewayServer

USER = [{"role": "user", "content": "hello"}]


def prompt_of(server: GatewayServer, tokenizer: Tokenizer) -> str:
    ids = unpack_int32(server.engine.submits[-1].prompt)
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_a_chat_is_answered(server: GatewayServer, tokenizer: Tokenizer):
    ids = answer_with(server, tokenizer, "hello world 😀")
    done = server.openai().chat.completions.create(model="tiny", messages=USER)
    choice = done.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "hello world 😀")
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("stop", 0, None)
    assert done.object == "chat.completion"
    assert done.id.startswith("chatcmpl-")
    assert done.usage.completion_tokens == len(ids) + 1
    assert prompt_of(server, tokenizer) == "<|start|>user\nhello<|end|><|start|>assistant\n"


def test_tool_results_after_a_call_without_text(server: GatewayServer, tokenizer: Tokenizer):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    server.openai().chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    assert "<|start|>assistant\n<|end|><|start|>tool\n42<|end|>" in prompt_of(server, tokenizer)
    long = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 33
    with pytest.raises(openai.BadRequestError, match="context"):  # rendered, then too long
        server.openai().chat.completions.create(model="tiny", messages=long)


def test_the_default_is_the_rest_of_the_context(server: GatewayServer):
    server.openai().chat.completions.create(model="tiny", messages=USER)
    submit = server.engine.submits[0]
    assert submit.stopping.max_tokens == 256 - len(unpack_int32(submit.prompt))
    server.openai().chat.completions.create(
        model="tiny", messages=USER, max_completion_tokens=3, max_tokens=9
    )
    assert server.engine.submits[1].stopping.max_tokens == 3


def test_a_small_pool_bounds_the_default(server: GatewayServer):
    """Asking for more than the KV cache ever holds would be refused by the engine."""

    async def shrink(blocks: int) -> int:
        welcome = server.instance.welcome
        server.instance.member.welcome = msgspec.structs.replace(welcome, num_blocks=blocks)
        return welcome.num_blocks

    before = server.call(shrink(4))
    try:
        server.openai().chat.completions.create(model="tiny", messages=USER)
        submit = server.engine.submits[0]
        assert submit.stopping.max_tokens == 4 * 16 + 1 - len(unpack_int32(submit.prompt))
    finally:
        server.call(shrink(before))


def test_a_stream_of_choices(server: GatewayServer, tokenizer: Tokenizer):
    answer_with(server, tokenizer, "hello world 😀")
    server.engine.behaviour.step_s = 0.002
    chunks = list(
        server.openai().chat.completions.create(
            model="tiny", messages=USER, n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    texts, roles, ends = ["", ""], [[], []], [[], []]
    for chunk in chunks[:-1]:
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index].append(choice.delta.role)
            ends[choice.index].append(choice.finish_reason)
    assert texts == ["hello world 😀"] * 2
    for role, end in zip(roles, ends, strict=True):
        assert role == ["assistant"] + [None] * (len(role) - 1)
        assert end == [None] * (len(end) - 1) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 2 * (len(tokenizer.encode("hello world 😀")))


async def test_the_clients_own_stream_helper(server: GatewayServer, tokenizer: Tokenizer):
    answer_with(server, tokenizer, "hello world")
    async with (
        server.async_openai() as client,
        client.chat.completions.stream(model="tiny", messages=USER) as stream,
    ):
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "hello world"
    assert final.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: GatewayServer, tokenizer: Tokenizer, stream):
    ids = answer_with(server, tokenizer, "café", end=None)
    done = server.openai().chat.completions.create(
        model="tiny", messages=USER, logprobs=True, top_logprobs=2, max_tokens=len(ids), stream=stream
    )
    items = []
    for chunk in done if stream else [done]:
        if chunk.choices[0].logprobs is not None:
            items += chunk.choices[0].logprobs.content
    assert len(items) == len(ids)
    for token, item in zip(ids, items, strict=True):
        assert (item.token, item.logprob) == (tokenizer.token_text(token), -0.5)
        assert bytes(item.bytes) == tokenizer.token_bytes(token)
        assert [top.logprob for top in item.top_logprobs] == [-0.25, -0.5]
        assert bytes(item.top_logprobs[0].bytes) == tokenizer.token_bytes(token + 1)
    assert b"".join(bytes(item.bytes) for item in items).decode() == "café"


def test_logprobs_without_alternatives(server: GatewayServer):
    done = server.openai().chat.completions.create(model="tiny", messages=USER, logprobs=True, max_tokens=2)
    assert [item.top_logprobs for item in done.choices[0].logprobs.content] == [[], []]


def test_roles_and_parts(server: GatewayServer, tokenizer: Tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
        {
            "role": "assistant",
            "content": "ok",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "7", "tool_call_id": "1"},
    ]
    server.openai().chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    assert prompt_of(server, tokenizer) == (
        "<|start|>system\nbe brief<|end|><|start|>user\na\nb<|end|><|start|>assistant\nok<|end|>"
        "<|start|>tool\n7<|end|><|start|>assistant\n"
    )


def test_other_roles_are_the_templates_to_judge(server: GatewayServer, tokenizer: Tokenizer):
    call = {"name": "f", "arguments": "{}"}
    messages = [
        {"role": "context", "content": "a"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "7"},
        {"role": "critic", "content": "b"},
    ]
    server.openai().chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    assert (
        "<|start|>context\na<|end|><|start|>assistant\n<|end|><|start|>tool\n7<|end|><|start|>critic\nb"
        in (prompt_of(server, tokenizer))
    )


def test_template_switches(server: GatewayServer, tokenizer: Tokenizer):
    create = server.openai().chat.completions.create
    extra = {"chat_template_kwargs": {"shout": True}}
    create(model="tiny", messages=USER, max_tokens=1, extra_body=extra)
    assert prompt_of(server, tokenizer).endswith("assistant\nLOUD ")
    messages = [*USER, {"role": "assistant", "content": "well, "}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    create(model="tiny", messages=messages, max_tokens=1, extra_body=extra)
    assert prompt_of(server, tokenizer).endswith("assistant\nwell, ")


def test_what_asks_for_nothing_is_accepted(server: GatewayServer):
    done = server.openai().chat.completions.create(
        model="tiny",
        messages=USER,
        max_tokens=1,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        metadata={"a": "b"},
        store=False,
        parallel_tool_calls=True,
        extra_body={"guided_json": None, "best_of": 1},
    )
    assert done.usage.completion_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids(server: GatewayServer, tokenizer: Tokenizer, stream):
    ids = answer_with(server, tokenizer, "hello world")
    done = server.openai().chat.completions.create(
        model="tiny", messages=USER, stream=stream, extra_body={"return_token_ids": True}
    )
    chunks = list(done) if stream else [done]
    tokens = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or []]
    assert tokens == [*ids, END]
    prompts = [chunk.prompt_token_ids for chunk in chunks if getattr(chunk, "prompt_token_ids", None)]
    assert prompts == [list(unpack_int32(server.engine.submits[0].prompt))]


def test_a_stream_says_the_prompts_ids_first(server: GatewayServer, tokenizer: Tokenizer):
    answer_with(server, tokenizer, "hello world")
    stream = server.openai().chat.completions.create(
        model="tiny", messages=USER, n=2, stream=True, extra_body={"return_token_ids": True}
    )
    first, second, *rest = list(stream)
    ids = list(unpack_int32(server.engine.submits[0].prompt))
    for chunk in (first, second):
        assert chunk.choices[0].delta.role == "assistant"
        assert (chunk.prompt_token_ids, getattr(chunk.choices[0], "token_ids", None)) == (ids, None)
    assert not any(getattr(chunk, "prompt_token_ids", None) for chunk in rest)


def test_counts_grow_with_the_chunks(server: GatewayServer, tokenizer: Tokenizer):
    """The chunk that says the role brings no token, and no chunk counts those of later ones."""
    ids = answer_with(server, tokenizer, "hello world", end=None)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        server.openai().chat.completions.create(
            model="tiny",
            messages=USER,
            n=2,
            max_tokens=len(ids),
            stream=True,
            stream_options=options,
            extra_body={"return_token_ids": True},
        )
    )
    seen = 0
    for chunk in chunks:
        seen += sum(len(getattr(choice, "token_ids", None) or ()) for choice in chunk.choices)
        assert chunk.usage.completion_tokens == seen
    assert [chunk.usage.completion_tokens for chunk in chunks[:2]] == [0, 0]
    assert seen == 2 * len(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_not_asked_for_is_null(server: GatewayServer, stream):
    """openai-python raises AttributeError for a key that is absent."""
    done = server.openai().chat.completions.create(model="tiny", messages=USER, max_tokens=2, stream=stream)
    if stream:
        chunks = list(done)
        assert chunks[0].prompt_token_ids is None
        assert not hasattr(chunks[0].choices[0], "token_ids")  # (of a chunk without tokens)
        assert [chunk.choices[0].token_ids for chunk in chunks[1:]] == [None] * (len(chunks) - 1)
        return
    assert (done.prompt_logprobs, done.prompt_token_ids, done.kv_transfer_params) == (None, None, None)
    message = done.choices[0].message
    assert (message.tool_calls, message.reasoning_content, message.function_call) == (None, None, None)
    assert done.choices[0].token_ids is None
