"""/v1/completions through the real client of OpenAI."""

from __future__ import annotations

import asyncio

import pytest

from baton.gateway.text.tokenizer import Tokenizer
from baton.protocol.codec import unpack_int32
from tests.gateway.conftest import BOS, END
from tests.gateway.harness import GatewayServer

PROMPT = "the quick brown fox"


def answer_with(server: GatewayServer, tokenizer: Tokenizer, text: str, end: int | None = END) -> list[int]:
    """Scripts the engine to answer every request with `text`; returns the tokens of the text."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    script = ids if end is None else [*ids, end]
    server.engine.behaviour.answer = lambda prompt: lambda i: script[i % len(script)]
    return ids


def test_a_text_is_completed(server: GatewayServer, tokenizer: Tokenizer):
    ids = answer_with(server, tokenizer, " jumps over 😀")
    server.engine.behaviour.num_cached = 3
    done = server.openai().completions.create(model="tiny", prompt=PROMPT, max_tokens=100)
    choice = done.choices[0]
    assert (choice.text, choice.finish_reason, choice.index) == (" jumps over 😀", "stop", 0)
    assert choice.logprobs is None
    assert choice.stop_reason is None
    assert done.object == "text_completion"
    assert done.id.startswith("cmpl-")
    assert done.model == "tiny"
    usage = done.usage
    num_prompt = len(tokenizer.encode(PROMPT))
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, len(ids) + 1)
    assert usage.total_tokens == num_prompt + len(ids) + 1
    assert usage.prompt_tokens_details.cached_tokens == 3


def test_the_default_is_sixteen_tokens(server: GatewayServer):
    done = server.openai().completions.create(model="alias", prompt=PROMPT)
    assert done.usage.completion_tokens == 16
    assert done.choices[0].finish_reason == "length"
    assert done.model == "alias"


def test_every_parameter_reaches_the_engine(server: GatewayServer, tokenizer: Tokenizer):
    server.openai().completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=-1,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"17": 2},
        logprobs=2,
        user="me",
        extra_body={
            "top_k": 1 << 70,
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "stop_token_ids": [20, 30],
            "priority": -3,
            "cache_salt": "mine",
            "prompt_logprobs": 1,
            "spaces_between_special_tokens": False,
            "ignore_eos": True,
        },
        extra_headers={"X-Request-Id": "abc-1"},
    )
    submit = server.engine.submits[0]
    sampling, stopping = submit.sampling, submit.stopping
    assert sampling.seed == (1 << 64) - 1
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.5,
        0.9,
        (1 << 31) - 1,
        0.1,
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.25, -0.5)
    assert (sampling.repetition_penalty, dict(sampling.logit_bias.items())) == (1.5, {17: 2.0})
    assert (sampling.logprobs, sampling.prompt_logprobs) == (2, 1)
    assert (stopping.max_tokens, stopping.min_tokens, stopping.stop_token_ids) == (7, 2, (20, 30))
    assert (submit.name, submit.priority, submit.cache_salt) == ("abc-1", -3, "mine")
    assert list(unpack_int32(submit.prompt)) == tokenizer.encode(PROMPT)


def test_the_models_defaults_and_seeds(byte_level, vocab):
    """Two servers with the same --seed draw the same seeds in the same order; without one they differ."""
    defaults = {"temperature": 0.6, "top_k": 20}
    drawn = []
    for seed in (7, 7, None):
        with GatewayServer(byte_level, eos=END, vocab=vocab, defaults=defaults, seed=seed) as server:
            for _ in range(2):
                server.openai().completions.create(model="tiny", prompt="a", max_tokens=1, n=2, top_p=0.5)
            samplings = [submit.sampling for submit in server.engine.submits]
        drawn.append([sampling.seed for sampling in samplings])
        assert {(s.temperature, s.top_k, s.top_p) for s in samplings} == {(0.6, 20, 0.5)}
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0] + drawn[2])) == 8


def test_the_tokenizers_own_end_counts_where_no_configuration_names_one(byte_level, vocab, tokenizer):
    with GatewayServer(byte_level, eos=None, vocab=vocab) as server:
        answer_with(server, tokenizer, "x")
        done = server.openai().completions.create(model="tiny", prompt="a", max_tokens=9)
        assert server.engine.submits[0].stopping.stop_token_ids == (END,)
        assert (done.choices[0].text, done.choices[0].finish_reason) == ("x", "stop")


def test_n_choices_have_seeds_of_their_own(server: GatewayServer):
    done = server.openai().completions.create(model="tiny", prompt=PROMPT, n=3, seed=42, max_tokens=2)
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    seeds = [submit.sampling.seed for submit in server.engine.submits]
    assert seeds[0] == 42
    assert len(set(seeds)) == 3
    num_prompt = len(unpack_int32(server.engine.submits[0].prompt))
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (num_prompt, 6)


@pytest.mark.parametrize("as_ids", [False, True])
def test_many_prompts(server: GatewayServer, tokenizer: Tokenizer, as_ids):
    texts = ["the cat", "hello world"]
    ids = [tokenizer.encode(text) for text in texts]
    prompt = ids if as_ids else texts
    done = server.openai().completions.create(
        model="tiny", prompt=prompt, n=2, seed=1, max_tokens=5, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    sent = [list(unpack_int32(submit.prompt)) for submit in server.engine.submits]
    assert sent == [ids[0], ids[0], ids[1], ids[1]]
    seeds = [submit.sampling.seed for submit in server.engine.submits]
    assert seeds[:2] == seeds[2:]
    assert done.usage.prompt_tokens == sum(map(len, ids))
    repeated = [tokenizer.decode((row * 5)[:5]) for row in ids]
    assert [choice.text for choice in done.choices] == [repeated[0]] * 2 + [repeated[1]] * 2


def test_one_prompt_of_ids(server: GatewayServer):
    server.openai().completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=1)
    assert list(unpack_int32(server.engine.submits[0].prompt)) == [5, 6, 7]


def test_special_tokens_of_the_prompt(server: GatewayServer, tokenizer: Tokenizer):
    create = server.openai().completions.create
    create(model="tiny", prompt="the", max_tokens=1)
    create(model="tiny", prompt="the", max_tokens=1, extra_body={"add_special_tokens": False})
    first, second = (list(unpack_int32(submit.prompt)) for submit in server.engine.submits)
    assert first == [BOS, *second]


def test_special_tokens_of_the_answer(server: GatewayServer, tokenizer: Tokenizer):
    server.engine.behaviour.answer = lambda prompt: lambda i: [END, 50][i % 2]
    options = {"ignore_eos": True}
    and_shown = options | {"skip_special_tokens": False}
    create = server.openai().completions.create
    hidden = create(model="tiny", prompt="the", max_tokens=2, extra_body=options)
    shown = create(model="tiny", prompt="the", max_tokens=2, extra_body=and_shown)
    assert shown.choices[0].text == "<|end|>" + hidden.choices[0].text


def test_end_of_text_and_named_stop_tokens(server: GatewayServer, tokenizer: Tokenizer):
    """The stop token counts, but its text is left out unless it is asked for."""
    ids = answer_with(server, tokenizer, " cat sat")
    stop = ids[-1]
    create = server.openai().completions.create
    for late in (False, True):
        server.engine.behaviour.stop_late = late
        options = {"stop_token_ids": [stop], "return_token_ids": True}
        choice = create(model="tiny", prompt="the", max_tokens=50, extra_body=options).choices[0]
        assert (choice.text, choice.finish_reason) == (tokenizer.decode(ids[:-1]), "stop")
        assert (choice.stop_reason, choice.token_ids) == (stop, ids)
        options["include_stop_str_in_output"] = True
        choice = create(model="tiny", prompt="the", max_tokens=50, extra_body=options).choices[0]
        assert choice.text == " cat sat"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_per_message", [1, 3])
@pytest.mark.parametrize(
    ("stop", "include", "expected", "reason"),
    [
        ("sat on", False, " the cat ", "sat on"),
        ("sat on", True, " the cat sat on", "sat on"),
        (["zzz", "t o", "sat"], False, " the cat ", "sat"),
        (["never"], False, " the cat sat on the mat 😀", None),
        ("mat 😀", False, " the cat sat on the ", "mat 😀"),
    ],
)
def test_stop_strings(server, tokenizer, stream, tokens_per_message, stop, include, expected, reason):
    text = " the cat sat on the mat 😀"
    answer_with(server, tokenizer, text)
    server.engine.behaviour.tokens_per_message = tokens_per_message
    server.engine.behaviour.step_s = 0.002
    done = server.openai().completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=200,
        stop=stop,
        stream=stream,
        extra_body={"include_stop_str_in_output": include},
    )
    choices = [chunk.choices[0] for chunk in done] if stream else done.choices
    assert "".join(choice.text for choice in choices) == expected
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", reason)
    server.engine.wait_for(lambda: server.engine.num_running == 0, "the cancel")


def test_tokens_after_a_stop_string_do_not_count(server: GatewayServer, tokenizer: Tokenizer):
    """They had arrived with the same message."""
    ids = answer_with(server, tokenizer, " the cat sat")
    server.engine.behaviour.tokens_per_message = 100
    done = server.openai().completions.create(
        model="tiny",
        prompt="the",
        max_tokens=50,
        stop="the",
        logprobs=1,
        extra_body={"return_token_ids": True},
    )
    choice = done.choices[0]
    assert done.usage.prompt_tokens_details.cached_tokens == 0
    assert tokenizer.decode(ids[:1]).strip() == "the"
    assert choice.text == " "
    assert choice.token_ids == ids[:1]
    assert len(choice.logprobs.tokens) == done.usage.completion_tokens == 1


def test_cached_tokens_are_known_when_a_stop_string_ends_the_answer(server, tokenizer: Tokenizer):
    """The instance's own word of the end never comes."""
    answer_with(server, tokenizer, " the cat sat")
    server.engine.behaviour.num_cached = 2
    done = server.openai().completions.create(model="tiny", prompt=PROMPT, max_tokens=50, stop="cat")
    assert done.choices[0].stop_reason == "cat"
    assert done.usage.prompt_tokens_details.cached_tokens == 2


def test_stop_strings_wait_for_min_tokens(server: GatewayServer, tokenizer: Tokenizer):
    ids = answer_with(server, tokenizer, " the cat the hat")
    done = server.openai().completions.create(
        model="tiny", prompt="the", max_tokens=50, stop="the", extra_body={"min_tokens": len(ids) - 3}
    )
    assert done.choices[0].text.startswith(" the cat")


def test_a_stream_is_the_whole_in_pieces(server: GatewayServer, tokenizer: Tokenizer):
    """A character of several tokens comes in one piece."""
    ids = answer_with(server, tokenizer, " naïve 😀日本語 café")
    begins = [tokenizer.decode(ids[:count], skip_special_tokens=False) for count in range(len(ids))]
    inside = next(count for count, begin in enumerate(begins) if begin.endswith("\ufffd"))
    server.engine.behaviour.hold_after = inside  # the engine stops in the middle of a character
    chunks = []
    for chunk in server.openai().completions.create(model="tiny", prompt=PROMPT, max_tokens=100, stream=True):
        chunks.append(chunk)
        if "".join(chunk.choices[0].text for chunk in chunks) == begins[inside].rstrip("\ufffd"):
            server.engine.wait_held(1)
            server.engine.behaviour.hold_after = None
    texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == " naïve 😀日本語 café"
    assert not any("\ufffd" in text for text in texts)
    assert server.engine.behaviour.hold_after is None
    assert len(texts) >= 2
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_broken_characters_come_at_the_end(server: GatewayServer, tokenizer: Tokenizer):
    half = next(token for token in range(400) if tokenizer.token_bytes(token) == b"\xf0")
    server.engine.behaviour.answer = lambda prompt: lambda i: half
    for stream in (False, True):
        done = server.openai().completions.create(model="tiny", prompt="a", max_tokens=3, stream=stream)
        choices = [chunk.choices[0] for chunk in done] if stream else done.choices
        assert "".join(choice.text for choice in choices) == "\ufffd" * 3


def test_usage_of_a_stream(server: GatewayServer):
    server.engine.behaviour.step_s = 0.002
    create = server.openai().completions.create
    options = {"include_usage": True}
    chunks = list(create(model="tiny", prompt="the", max_tokens=4, stream=True, stream_options=options))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    options["continuous_usage_stats"] = True
    server.engine.behaviour.hold_after = 1
    counts = []
    for chunk in create(model="tiny", prompt=[50], max_tokens=4, stream=True, stream_options=options):
        counts.append(chunk.usage.completion_tokens)
        server.engine.behaviour.hold_after = (
            counts[-1] + 1
        )  # a token a chunk: the next comes when this is read
    assert counts == [1, 2, 3, 4, 4]


async def test_many_streams_of_many_choices(server: GatewayServer, tokenizer: Tokenizer):
    """Chunks of choices are interleaved and say whose they are."""
    server.engine.behaviour.hold_after = 5
    prompts = ["the quick brown", "hello hello world", "the cat sat on"]
    begun = set()

    async def one(prompt: str) -> list[str]:
        async with server.async_openai() as client:
            texts = ["", "", ""]
            order = []
            stream = await client.completions.create(
                model="tiny", prompt=prompt, n=3, stream=True, max_tokens=20, extra_body={"ignore_eos": True}
            )
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                    order.append(choice.index)
                    begun.add((prompt, choice.index))
                if len(begun) == 9:  # until here no choice can have come to its end
                    server.engine.behaviour.hold_after = None
            assert order != sorted(order)
            return texts

    for prompt, texts in zip(prompts, await asyncio.gather(*map(one, prompts)), strict=True):
        ids = tokenizer.encode(prompt)
        assert texts == [tokenizer.decode((ids * 20)[:20])] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: GatewayServer, tokenizer: Tokenizer, stream):
    ids = answer_with(server, tokenizer, " the cat", end=None)
    done = server.openai().completions.create(
        model="tiny", prompt=PROMPT, max_tokens=len(ids), logprobs=2, stream=stream
    )
    chunks = list(done) if stream else [done]
    tokens, values, tops, offsets = [], [], [], []
    for chunk in chunks:
        logprobs = chunk.choices[0].logprobs
        tokens += logprobs.tokens
        values += logprobs.token_logprobs
        tops += logprobs.top_logprobs
        offsets += logprobs.text_offset
    names = [tokenizer.token_text(token) for token in ids]
    assert tokens == names
    assert values == [-0.5] * len(ids)
    assert offsets == [sum(map(len, names[:i])) for i in range(len(ids))]
    for token, top in zip(ids, tops, strict=True):
        likelier = tokenizer.token_text(token + 1)
        assert top == {likelier: -0.25, tokenizer.token_text(token): -0.5}


def test_logprobs_zero_is_the_chosen_token_only(server: GatewayServer, tokenizer: Tokenizer):
    ids = answer_with(server, tokenizer, " the cat", end=None)
    done = server.openai().completions.create(model="tiny", prompt="a", max_tokens=1, logprobs=0)
    assert done.choices[0].logprobs.top_logprobs == [{tokenizer.token_text(ids[0]): -0.5}]
    done = server.openai().completions.create(
        model="tiny", prompt="a", max_tokens=1, logprobs=0, extra_body={"return_tokens_as_token_ids": True}
    )
    assert done.choices[0].logprobs.tokens == [f"token_id:{ids[0]}"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo(server: GatewayServer, tokenizer: Tokenizer, stream):
    answer_with(server, tokenizer, " jumps")
    done = server.openai().completions.create(
        model="tiny", prompt=["the cat", "hello"], max_tokens=9, echo=True, stream=stream
    )
    texts = {0: "", 1: ""}
    for chunk in done if stream else [done]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "the cat jumps", 1: "hello jumps"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_scores_the_prompt(server: GatewayServer, tokenizer: Tokenizer, max_tokens, stream):
    ids = tokenizer.encode(PROMPT)
    done = server.openai().completions.create(
        model="tiny", prompt=PROMPT, max_tokens=max_tokens, echo=True, logprobs=1, stream=stream
    )
    (chunk,) = list(done) if stream else [done]
    logprobs = chunk.choices[0].logprobs
    names = [tokenizer.token_text(token) for token in ids + ids[:max_tokens]]
    assert logprobs.tokens == names
    assert logprobs.token_logprobs == [None] + [-0.5] * (len(names) - 1)
    assert logprobs.top_logprobs[0] is None
    assert logprobs.top_logprobs[1][names[1]] == -0.5
    shown = ["", *names[1 : len(ids)]]  # (the tokenizer added a BOS that is not in the text)
    places = [sum(map(len, shown[:i])) for i in range(len(ids) + max_tokens)]
    assert logprobs.text_offset == places
    assert chunk.choices[0].text == PROMPT
    assert chunk.choices[0].finish_reason == "length"
    if not stream:
        assert done.usage.completion_tokens == max_tokens


def test_prompt_logprobs(server: GatewayServer, tokenizer: Tokenizer):
    ids = tokenizer.encode("the cat")
    done = server.openai().completions.create(
        model="tiny", prompt="the cat", max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    logprobs = done.choices[0].prompt_logprobs
    assert logprobs[0] is None
    assert len(logprobs) == len(ids)
    likelier, chosen = ids[1] + 1, ids[1]
    assert logprobs[1] == {
        str(likelier): {"logprob": -0.25, "rank": 1, "decoded_token": tokenizer.token_text(likelier)},
        str(chosen): {"logprob": -0.5, "rank": 2, "decoded_token": tokenizer.token_text(chosen)},
    }


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids(server: GatewayServer, tokenizer: Tokenizer, stream):
    ids = tokenizer.encode("the cat")
    done = server.openai().completions.create(
        model="tiny", prompt="the cat", max_tokens=6, stream=stream, extra_body={"return_token_ids": True}
    )
    choices = [chunk.choices[0] for chunk in (done if stream else [done])]
    assert choices[0].prompt_token_ids == ids
    assert [token for choice in choices for token in choice.token_ids] == (ids * 6)[:6]


SPLIT = "A 🚀 b c"
"""Its third character is three tokens of the test's tokenizer."""


def offsets_of(server: GatewayServer, *, stream: bool, **ask) -> tuple[str, list[int]]:
    done = server.openai().completions.create(model="tiny", logprobs=0, stream=stream, **ask)
    chunks = list(done) if stream else [done]
    places = [at for chunk in chunks if chunk.choices for at in chunk.choices[0].logprobs.text_offset]
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices), places


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_where_a_character_is_several_tokens(server: GatewayServer, tokenizer: Tokenizer, stream):
    """Offsets point into the text that the client has, of an echoed prompt and of what follows."""
    ids = answer_with(server, tokenizer, SPLIT)
    prompt = tokenizer.encode(SPLIT)
    pieces = tokenizer.detokenizer()
    lengths = [len(pieces.push((token,))) for token in ids]
    assert 0 in lengths, "no token of the text is a part of a character"
    text, places = offsets_of(server, stream=stream, prompt=SPLIT, echo=True, max_tokens=len(ids))
    assert text == SPLIT + SPLIT
    inside = [sum(lengths[:i]) for i in range(len(ids))]
    assert places == [0, *inside, *(len(SPLIT) + at for at in inside)]
    assert len(places) == len(prompt) + len(ids)


@pytest.mark.parametrize("tokens", [1, 2, 3, 40])
@pytest.mark.parametrize("stop", ["e quick br", "e quick gr", " the"])
def test_offsets_stay_inside_of_a_text_that_a_stop_string_cuts(
    server: GatewayServer, tokenizer: Tokenizer, stop: str, tokens: int
):
    """In however many pieces it comes; where the beginning of a stop string is none, they are those of a text
    without."""
    answer_with(server, tokenizer, " the quick brown fox", end=None)
    ask = {"prompt": "a", "max_tokens": 12, "echo": True}
    server.engine.behaviour.tokens_per_message = tokens
    text, places = offsets_of(server, stream=False, stop=[stop], **ask)
    assert offsets_of(server, stream=True, stop=[stop], **ask) == (text, places)
    assert places == sorted(places)
    assert max(places) <= len(text)
    whole = offsets_of(server, stream=False, **ask)
    if "gr" in stop:
        assert (text, places) == whole
    else:
        assert text == ("a" if stop == " the" else "a th")
        assert places == [min(at, len(text)) for at in whole[1][: len(places)]]


def test_offsets_of_tokens_that_are_not_shown(server: GatewayServer, tokenizer: Tokenizer):
    ids = [BOS, *tokenizer.encode("the", add_special_tokens=False), BOS]
    server.engine.behaviour.answer = lambda prompt: lambda i: ids[i % len(ids)]
    ask = {"prompt": "a", "max_tokens": len(ids)}
    shown = len(tokenizer.token_text(BOS))
    assert offsets_of(server, stream=False, **ask)[1][:2] == [0, 0]
    places = offsets_of(server, stream=False, extra_body={"skip_special_tokens": False}, **ask)[1]
    assert places[:2] == [0, shown]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_ids_shows_special_tokens(server: GatewayServer, tokenizer: Tokenizer, stream):
    ids = [BOS, *tokenizer.encode("the cat", add_special_tokens=False), END]
    ask = {"prompt": ids, "echo": True, "max_tokens": 0}
    text, places = offsets_of(server, stream=stream, **ask)
    assert text == tokenizer.decode(ids, skip_special_tokens=False) == "<|bos|>the cat<|end|>"
    assert places == [sum(len(tokenizer.token_text(token)) for token in ids[:i]) for i in range(len(ids))]


def test_echo_and_prompt_logprobs_have_counts_of_their_own(server: GatewayServer):
    def counts(logprobs: int, prompt_logprobs: int) -> tuple[set[int], set[int]]:
        done = server.openai().completions.create(
            model="tiny",
            prompt=[50, 52, 54],
            max_tokens=2,
            echo=True,
            logprobs=logprobs,
            extra_body={"prompt_logprobs": prompt_logprobs},
        )
        choice = done.choices[0]
        return (
            {len(top) for top in choice.logprobs.top_logprobs[1:]},
            {len(entries) for entries in choice.prompt_logprobs[1:]},
        )

    # (The engine's chosen token is the second most likely one: it is among the five, and beside the one.)
    assert counts(1, 5) == ({2}, {5})
    assert counts(5, 1) == ({5}, {2})


def test_what_was_not_asked_for_is_null(server: GatewayServer):
    """openai-python raises AttributeError for a key that is absent."""
    done = server.openai().completions.create(model="tiny", prompt="a", max_tokens=2)
    choice = done.choices[0]
    assert (choice.token_ids, choice.prompt_token_ids, choice.prompt_logprobs) == (None, None, None)
    assert (done.system_fingerprint, done.service_tier, done.kv_transfer_params) == (None, None, None)
    for chunk in server.openai().completions.create(model="tiny", prompt="a", max_tokens=3, stream=True):
        assert (chunk.choices[0].token_ids, chunk.choices[0].prompt_token_ids) == (None, None)


def test_whole_numbers_may_be_written_as_floats(server: GatewayServer):
    with server.http() as http:
        body = {"prompt": "a", "n": 2.0, "max_tokens": 3e0, "logprobs": 1.0, "seed": 7.0}
        answer = http.post("/v1/completions", json=body).raise_for_status().json()
    assert len(answer["choices"]) == 2
    assert answer["usage"]["completion_tokens"] == 6
    assert server.engine.submits[0].sampling.seed == 7
