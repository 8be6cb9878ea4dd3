"""A conversation never dies: what Baton gives out is taken back in all three APIs, however it was cut, and
one conversation makes one prompt, whichever of them it comes by."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from anthropic.types import ContentBlock
from openai.types.chat import ChatCompletionMessage
from openai.types.responses import ResponseOutputItem
from pydantic import TypeAdapter

from baton.gateway.api.calls import call_id
from baton.gateway.errors import BadRequest
from baton.gateway.generation.generation import Completion
from baton.gateway.parsing.choice import Formats
from baton.gateway.parsing.deltas import Parsed, Said
from baton.gateway.parsing.formats import CALLS
from baton.gateway.reading.jobs import Job, with_more
from baton.gateway.reading.reader import Found, Reader
from baton.gateway.reading.settings import Settings
from baton.gateway.rendering.chat import _MESSAGE, ChatOptions, ChatRenderer
from baton.gateway.rendering.messages import MessageOptions, MessageRenderer
from baton.gateway.responses.output import Output
from tests.gateway.parsing.fixtures import Answer, answers, broken, read
from tests.gateway.reading.chat_templates import ALL, OWN, SHOW_CALLS, SHOW_THOUGHTS

USER = {"role": "user", "content": "Go on, please."}
_READERS: dict[str, Reader] = {}
_BLOCK: TypeAdapter[Any] = TypeAdapter(ContentBlock)
_ITEM: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)


def reader_of(name: str, **settings: Any) -> Reader:
    if settings:
        return Reader(
            Settings(max_model_len=100_000, template=ALL[name], formats=Formats("hermes"), **settings)
        )
    if name not in _READERS:
        _READERS[name] = Reader(
            Settings(max_model_len=100_000, template=ALL[name], formats=Formats("hermes"))
        )
    return _READERS[name]


def found_in(name: str, job: Job, body: dict[str, Any], **settings: Any) -> Found:
    data = [msgspec.json.encode(body)]
    data = with_more(b"", data) if job == "responses" else data
    _, found, _ = reader_of(name, **settings).read(job, b"".join(data))
    return found


def prompt(name: str, job: Job, body: dict[str, Any]) -> str:
    found = found_in(name, job, body)
    assert found.failure is None, (name, job, found.failure, body)
    return found.texts[0]


# -- what an API gives out, as its client dumps it and sends it back


def chat_message(parsed: Parsed) -> dict[str, Any]:
    """Of an answer, with all that an SDK dumps."""
    generation: Any = SimpleNamespace(request_id="r", created=1, sequences=[None], num_choices=1)
    options = ChatOptions(
        model="m",
        top_logprobs=None,
        prompt_logprobs=None,
        token_ids=False,
        include_usage=False,
        continuous_usage=False,
        routed_experts=False,
    )
    names: Any = None
    completion = Completion(0, finish_reason="length", parsed=parsed)
    return {**_MESSAGE, **ChatRenderer(generation, options, names)._message(completion)}


def blocks(parsed: Parsed) -> list[dict[str, Any]]:
    generation: Any = SimpleNamespace(request_id="r")
    renderer = MessageRenderer(generation, MessageOptions(model="m", max_tokens=9))
    found: Any = msgspec.json.decode(
        msgspec.json.encode(renderer._blocks(Completion(0, finish_reason="length", parsed=parsed)))
    )
    return [_BLOCK.validate_python(one).model_dump() for one in found]


def items(answer: Answer, text: str) -> list[dict[str, Any]]:
    output = Output("t", lambda own: call_id(own or "own", short=False), tells=False, encrypted=True)
    parser = answer.parser()
    for delta in [*parser.push(text), *parser.finish()]:
        output.add(delta)
    output.close("incomplete")
    given = [msgspec.json.decode(data) for _, data in output.items]
    return [_ITEM.validate_python(one).model_dump() for one in given]


def histories(answer: Answer, text: str) -> Iterator[tuple[Job, dict[str, Any]]]:
    """The answer to this text as each API gives it, as part of a conversation that goes on."""
    parsed = read(answer, [text])
    message = ChatCompletionMessage.model_validate(chat_message(parsed)).model_dump()
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "done"}
        for call in message.get("tool_calls") or ()
    ]
    yield "chat", {"messages": [USER, message, *results, USER]}
    given = blocks(parsed)
    done: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "done"}
        for block in given
        if block["type"] == "tool_use"
    ]
    said = [{"type": "text", "text": USER["content"]}]
    turns = [USER, {"role": "assistant", "content": given}, {"role": "user", "content": done + said}]
    yield "messages", {"messages": turns, "max_tokens": 5}
    output = items(answer, text)
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
        for item in output
        if item["type"] == "function_call"
    ]
    yield "responses", {"input": [USER, *output, *outputs, USER]}


def cuts(text: str) -> list[str]:
    """Beginnings: at every other place, and around each mark."""
    marks = {
        place for mark in re.finditer(r"[<>{}\[\]\"\\|:,]", text) for place in (mark.start(), mark.end())
    }
    return [text[:place] for place in sorted({*range(0, len(text), 9), *marks, len(text)})]


def words(text: str) -> list[str]:
    """Letters that no JSON writes otherwise."""
    return re.findall(r"[A-Za-z]{3,}", re.sub(r"\\(u[0-9a-fA-F]{0,4}|.|$)", " ", text))


_ENDS = re.compile(r"[A-Za-z0-9.+-]*$")
_OPEN_STRING = re.compile(r'^(?:[^"\\]|\\.|"(?:[^"\\]|\\.)*")*"(?:[^"\\]|\\.)*\\?$', re.DOTALL)


def said_in(call: dict[str, Any]) -> list[str]:
    """Words of a call that its prompt must have; of a number or a word like `true`, where it was cut, nothing
    is known."""
    arguments = call["function"]["arguments"]
    try:
        json.loads(arguments)
    except ValueError:
        if not _OPEN_STRING.match(arguments):
            arguments = _ENDS.sub("", arguments)
    return [call["function"]["name"], *words(arguments)]


def check_history(name: str, answer: Answer, text: str, seen: set[Any]) -> int:
    """How many conversations were read."""
    count = 0
    parsed = read(answer, [text])
    key = msgspec.json.encode(
        (parsed.content, parsed.reasoning, [(call.name, call.arguments) for call in parsed.calls])
    )
    if key in seen:
        return 0
    seen.add(key)
    for job, body in histories(answer, text):
        made = prompt(name, job, body)
        count += 1
        for part in parsed.parts:
            if isinstance(part, Said) and (not part.reasoning or name in SHOW_THOUGHTS):
                for piece in re.findall(r"\S+", "".join(part.pieces)):
                    assert piece in made, (name, job, text, made)
        if name in SHOW_CALLS and job != "messages":  # (an object there: what is complete in the arguments)
            for call in chat_message(parsed).get("tool_calls") or ():
                assert [word for word in said_in(call) if word not in made] == [], (name, job, text, made)
    return count


def by_format() -> list[list[Answer]]:
    """Of each format: all that it may call, with what was thought and said before, and without."""
    return [
        [answer for answer in answers() if answer.calls is calls and answer.called][::5]
        + [answer for answer in answers() if answer.calls is calls and not answer.called][:2]
        for calls in CALLS.values()
    ]


def test_what_is_given_out_is_taken_back_however_it_was_cut() -> None:
    count = 0
    for number, some in enumerate(by_format()):
        for answer in some:
            name = SHOW_CALLS[number % len(SHOW_CALLS)]
            seen: set[Any] = set()
            count += sum(check_history(name, answer, text, seen) for text in cuts(answer.text))
    print(f"{count} conversations")
    assert count > 5_000


@pytest.mark.parametrize("name", OWN)
def test_what_is_broken_is_taken_back_by_every_template(name: str) -> None:
    seen: set[Any] = set()
    count = sum(check_history(name, answer, answer.text, seen) for answer in broken(per=1)[::3])
    assert count > 150


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "more",
    [
        {
            "name": None,
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": [],
        },
        {"provider_specific_fields": {"a": 1}, "images": [], "thinking_blocks": None, "token_ids": None},
        {
            "additional_kwargs": {},
            "response_metadata": {"finish_reason": "stop"},
            "type": "ai",
            "id": "run-1",
        },
        {"reasoning": None, "reasoning_content": "", "thinking": None, "reasoning_details": [], "phase": "x"},
        {"cache_control": {"type": "ephemeral"}, "metadata": {}, "timestamp": 5, "parsed": None},
    ],
    ids=["openai", "litellm", "langchain", "thoughts", "others"],
)
def test_what_clients_write_beside_says_nothing(name: str, more: dict[str, Any]) -> None:
    turn = {"role": "assistant", "content": "Yes."}
    plain = prompt(name, "chat", {"messages": [USER, turn, USER]})
    assert prompt(name, "chat", {"messages": [USER, {**turn, **more}, USER]}) == plain


def test_other_shapes_of_answers() -> None:
    """A refusal, a call of the older kind, one of a tool that takes a text, results that are no parts."""
    refused = {"role": "assistant", "content": None, "refusal": "I cannot."}
    assert "I cannot." in prompt("chatml", "chat", {"messages": [USER, refused, USER]})
    older = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": "b"}'}}
    assert '"f", "arguments": {"a": "b"}' in prompt("chatml", "chat", {"messages": [USER, older, USER]})
    custom = {"id": "x", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    called = {"role": "assistant", "content": None, "tool_calls": [custom]}
    for result in ({"rows": [1, None]}, [{"rows": [1, None]}], ["rows", "null"], None, 5):
        tool = {"role": "tool", "tool_call_id": "x", "content": result}
        made = prompt("chatml", "chat", {"messages": [USER, called, tool]})
        assert '"patch", "arguments": {"input": "*** Begin"}' in made
        assert "rows" in made or result in (None, 5)
        output = {"type": "function_call_output", "call_id": "x", "output": result}
        call = {
            "type": "function_call",
            "call_id": "x",
            "name": "patch",
            "arguments": '{"input": "*** Begin"}',
        }
        assert prompt("chatml", "responses", {"input": [USER, call, output]}) == made


def test_documents_of_text_are_read() -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Once."}}
    parts = [{"type": "text", "text": "Found."}]
    search = {"type": "search_result", "source": "x", "title": "y", "content": parts}
    body = {"messages": [{"role": "user", "content": [document, search]}]}
    found = found_in("chatml", "messages", body)
    assert ("<user>Once.\nFound.<end>" in found.texts[0], found.notes) == (True, {})


def test_arguments_that_are_no_object_are_noted() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"city": "Par'}}
    body = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER]}
    found = found_in("chatml", "chat", body, refuses=True)
    assert found.notes == {"arguments": 1}
    assert '"arguments": {"city": "Par"}' in found.texts[0]
    assert '{"city": "Par</call>' in prompt("none_tells_calls", "chat", body), "as it was written"


# -- one conversation, built for three APIs

Turn = tuple[Any, ...]
CALLED = [("call00001", "weather", {"city": "Paris, é", "days": 3}), ("call00002", "time", {})]
CONVERSATIONS: dict[str, list[Turn]] = {
    "a text": [("user", ["Hi."])],
    "turns": [
        ("system", ["Be brief."]),
        ("user", ["Hi."]),
        ("assistant", "", ["Hello."], []),
        ("user", ["Well?"]),
    ],
    "parts": [
        ("system", ["One.", "Two."]),
        ("user", ["a ", " b"]),
        ("assistant", "", ["c", "d"], []),
        ("user", ["e"]),
    ],
    "empty parts": [("user", ["", "a", "", "b"]), ("assistant", "", ["", "c"], []), ("user", ["d", ""])],
    "thoughts": [("user", ["Hi."]), ("assistant", "I think.", ["Hello."], []), ("user", ["Well?"])],
    "only thoughts": [("user", ["Hi."]), ("assistant", "I think.", [], []), ("user", ["Well?"])],
    "calls": [
        ("system", ["Be brief."]),
        ("user", ["Weather?"]),
        ("assistant", "", [], CALLED[:1]),
        ("results", [("call00001", ["sunny"])]),
        ("assistant", "", ["Sunny."], []),
        ("user", ["Thanks."]),
    ],
    "calls, thoughts and a text": [
        ("user", ["Weather?"]),
        ("assistant", "I think.", ["I look."], CALLED),
        ("results", [("call00001", ["sunny", "warm"]), ("call00002", ["noon"])]),
        ("assistant", "Aha.", [], CALLED[:1]),
        ("results", [("call00001", ["rain"])]),
    ],
    "images": [
        ("user", ["Look.", None]),
        ("assistant", "", [], CALLED[:1]),
        ("results", [("call00001", [None])]),
        ("user", [None]),
    ],
}


def as_chat(turns: list[Turn]) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

    def content(texts: list[str | None]) -> list[dict[str, Any]]:
        return [image if text is None else {"type": "text", "text": text} for text in texts]

    messages: list[dict[str, Any]] = []
    for role, *rest in turns:
        match role:
            case "assistant":
                thought, texts, calls = rest
                message: dict[str, Any] = {**_MESSAGE, "content": content(texts) or None}
                message["reasoning_content"] = thought or None
                message["tool_calls"] = [
                    {
                        "id": id,
                        "type": "function",
                        "function": {"name": tool, "arguments": json.dumps(arguments, ensure_ascii=False)},
                    }
                    for id, tool, arguments in calls
                ]
                messages.append(message)
            case "results":
                messages += [
                    {"role": "tool", "tool_call_id": id, "content": content(texts)} for id, texts in rest[0]
                ]
            case _:
                messages.append({"role": role, "content": content(rest[0])})
    return {"messages": messages}


def as_messages(turns: list[Turn]) -> dict[str, Any]:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}

    def content(texts: list[str | None]) -> list[dict[str, Any]]:
        return [
            image if text is None else {"type": "text", "text": text, "citations": None} for text in texts
        ]

    body: dict[str, Any] = {"max_tokens": 5, "messages": []}
    messages: list[dict[str, Any]] = body["messages"]
    for role, *rest in turns:
        match role:
            case "system":
                body["system"] = content(rest[0])
            case "assistant":
                thought, texts, calls = rest
                thoughts = [{"type": "thinking", "thinking": thought, "signature": "x"}] if thought else []
                uses = [
                    {"type": "tool_use", "id": id, "name": tool, "input": value} for id, tool, value in calls
                ]
                messages.append({"role": "assistant", "content": [*thoughts, *content(texts), *uses]})
            case "results":
                results = [
                    {"type": "tool_result", "tool_use_id": id, "content": content(texts), "is_error": False}
                    for id, texts in rest[0]
                ]
                messages.append({"role": "user", "content": results})
            case _:
                messages.append({"role": role, "content": content(rest[0])})
    return body


def as_responses(turns: list[Turn]) -> dict[str, Any]:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}

    def content(texts: list[str | None], kind: str = "input_text") -> list[dict[str, Any]]:
        return [image if text is None else {"type": kind, "text": text} for text in texts]

    given: list[dict[str, Any]] = []
    for role, *rest in turns:
        match role:
            case "assistant":
                thought, texts, calls = rest
                if thought:
                    thoughts = [{"type": "reasoning_text", "text": thought}]
                    given.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": thoughts})
                if texts:
                    head = {"type": "message", "id": "msg_1", "status": "completed", "phase": None}
                    given.append({**head, "role": "assistant", "content": content(texts, "output_text")})
                given += [
                    {
                        "type": "function_call",
                        "id": None,
                        "call_id": id,
                        "name": tool,
                        "status": "incomplete",
                        "arguments": json.dumps(value, ensure_ascii=False),
                    }
                    for id, tool, value in calls
                ]
            case "results":
                given += [
                    {"type": "function_call_output", "call_id": id, "output": content(texts)}
                    for id, texts in rest[0]
                ]
            case _:
                given.append({"type": "message", "role": role, "content": content(rest[0])})
    return {"input": given}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("which", CONVERSATIONS)
def test_one_conversation_makes_one_prompt(name: str, which: str) -> None:
    turns = CONVERSATIONS[which]
    made = {
        job: prompt(name, job, body)
        for job, body in (
            ("chat", as_chat(turns)),
            ("messages", as_messages(turns)),
            ("responses", as_responses(turns)),
        )
    }
    assert made["chat"] == made["messages"] == made["responses"]
    if name in SHOW_CALLS and "calls" in which:
        assert all(word in made["chat"] for word in ("weather", "Paris", "days"))
        assert "I look." in made["chat"] or which == "calls"
    if name in SHOW_THOUGHTS and "thoughts" in which:
        assert "I think." in made["chat"]
    if which == "images" and name not in ("characters",):
        assert "[image left out: this model reads text]" in made["chat"]


@pytest.mark.parametrize("name", ALL)
def test_what_is_said_on_both_sides_of_a_call(name: str) -> None:
    """One content in a chat; blocks and items in the order in which they came in the others."""
    call = {"id": "call00001", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    content = "I look.\nSo be it."
    chat = [
        USER,
        {"role": "assistant", "content": content, "reasoning": "Hm.\nAh.", "tool_calls": [call]},
        USER,
    ]
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call00001", "name": "time", "input": {}},
        {"type": "thinking", "thinking": "Ah.", "signature": ""},
        {"type": "text", "text": "So be it."},
    ]
    items = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "call00001", "name": "time", "arguments": "{}"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Ah."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So be it."}]},
    ]
    made = [
        prompt(name, "chat", {"messages": chat}),
        prompt(name, "messages", {"messages": [USER, {"role": "assistant", "content": blocks}, USER]}),
        prompt(name, "responses", {"input": [USER, *items, USER]}),
    ]
    assert made[0] == made[1] == made[2]


def test_no_template_of_the_tests_is_missing() -> None:
    assert set(SHOW_CALLS) | set(SHOW_THOUGHTS) <= set(ALL)
    assert len(ALL) * len(CONVERSATIONS) > 100


# -- what other servers and older clients leave in a conversation


def test_results_may_be_any_json_in_all_three() -> None:
    """Rows may have a `type` as well: they are no parts of a message."""
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    item = {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"}
    use = {"type": "tool_use", "id": "x", "name": "f", "input": {}}
    for given in (
        {"rows": [1, None]},
        [{"rows": 1}],
        5,
        True,
        ["rows", "null"],
        [],
        [{"type": "house", "price": 5}, {"type": "flat", "price": 3}],
        [{"text": "a"}, {"type": "text", "text": "b"}],
        "rows",
        None,
    ):
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "x", "content": given}
        block = {"type": "tool_result", "tool_use_id": "x", "content": given}
        turns = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [block]}]
        output = {"type": "function_call_output", "call_id": "x", "output": given}
        bodies: list[tuple[Job, dict[str, Any]]] = [
            ("chat", {"messages": [USER, turn, result]}),
            ("messages", {"messages": turns, "max_tokens": 5}),
            ("responses", {"input": [USER, item, output]}),
        ]
        made = [prompt("chatml", job, body) for job, body in bodies]
        assert made[0] == made[1] == made[2], given
        assert "left out" not in made[0]
        assert '"price": 5' in made[0] or "house" not in str(given)


@pytest.mark.parametrize("name", ALL)
def test_an_answer_that_ends_in_a_call_is_no_prefill(name: str) -> None:
    """As where the server was paused within it."""
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
    turn = {"role": "assistant", "content": "Well.", "tool_calls": [call]}
    use = {"type": "tool_use", "id": "call00001", "name": "f", "input": {"a": "b"}}
    blocks = [USER, {"role": "assistant", "content": [{"type": "text", "text": "Well."}, use]}]
    made = prompt(name, "messages", {"messages": blocks, "max_tokens": 5})
    assert made == prompt(name, "chat", {"messages": [USER, turn]})


@pytest.mark.parametrize("name", SHOW_THOUGHTS)
def test_thoughts_as_parts_beside_a_message(name: str) -> None:
    for more in (
        {"thinking_blocks": [{"type": "thinking", "thinking": "I think.", "signature": "x"}]},
        {"reasoning_details": [{"type": "reasoning.text", "text": "I think.", "index": 0}]},
        {"reasoning": {"content": "I think."}, "reasoning_content": ""},
    ):
        turn = {"role": "assistant", "content": "Yes.", **more}
        plain = {"role": "assistant", "content": "Yes.", "reasoning": "I think."}
        made = prompt(name, "chat", {"messages": [USER, turn, USER]})
        assert made == prompt(name, "chat", {"messages": [USER, plain, USER]})
        assert "I think." in made
    item = {"type": "reasoning", "summary": [], "content": "I think."}
    empty = {"type": "message", "role": "assistant", "content": None}
    assert "I think." in prompt(name, "responses", {"input": [USER, item, empty, USER]})
    block = {"type": "thinking", "thinking": None, "signature": "x"}
    blocks = [USER, {"role": "assistant", "content": [block, {"type": "text", "text": "Yes."}]}, USER]
    assert "Yes." in prompt(name, "messages", {"messages": blocks, "max_tokens": 5})


@pytest.mark.parametrize("name", SHOW_CALLS)
def test_calls_and_results_of_the_older_kind_and_without_ids(name: str) -> None:
    older = [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "gave"},
    ]
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    newer = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "gave"},
    ]
    made = [prompt(name, "chat", {"messages": [USER, *turns]}) for turns in (older, newer)]
    assert made[0] == made[1]
    assert "gave" in made[0]


def test_arguments_that_are_an_object_in_a_text() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": json.dumps('{"a": "b"}')}}
    body = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER]}
    assert '"arguments": {"a": "b"}' in prompt("chatml", "chat", body)


@pytest.mark.parametrize("name", SHOW_CALLS)
def test_results_come_in_the_order_of_their_calls(name: str) -> None:
    """Many templates do not show which is whose."""
    ids = ["call00001", "call00002", "call00003"]
    function = {"name": "f", "arguments": "{}"}
    turn = {"role": "assistant", "content": None}
    turn["tool_calls"] = [{"id": id, "type": "function", "function": function} for id in ids]
    blocks = [{"type": "tool_use", "id": id, "name": "f", "input": {}} for id in ids]
    given = [{"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"} for id in ids]
    made = set()
    for order in (ids, ids[::-1], [ids[1], ids[2], ids[0]]):
        results = [{"role": "tool", "tool_call_id": id, "content": f"of {id}"} for id in order]
        made.add(prompt(name, "chat", {"messages": [USER, turn, *results]}))
        uses = [{"type": "tool_result", "tool_use_id": id, "content": f"of {id}"} for id in order]
        turns = [USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": uses}]
        made.add(prompt(name, "messages", {"messages": turns, "max_tokens": 5}))
        outputs = [{"type": "function_call_output", "call_id": id, "output": f"of {id}"} for id in order]
        made.add(prompt(name, "responses", {"input": [USER, *given, *outputs]}))
    assert len(made) == 1
    assert re.findall("of call0000.", made.pop()) == [f"of {id}" for id in ids]


@pytest.mark.parametrize("given", [[], {}, ["x"], {"a": 1}, 1.5])
def test_ids_that_are_none_are_refused_by_their_place(given: Any) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for id, result, where in (
        (given, "x", r"messages[1].tool_calls[0].id"),
        ("x", given, r"messages[2].tool_call_id"),
    ):
        turn = {"role": "assistant", "content": None, "tool_calls": [{**call, "id": id}]}
        body = {"messages": [USER, turn, {"role": "tool", "tool_call_id": result, "content": "r"}]}
        failure = found_in("chatml", "chat", body).failure
        assert failure is not None
        assert failure.message == f"{where}: must be a text"


def test_numbers_are_ids() -> None:
    call = {"id": 5, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    body = {"messages": [USER, turn, {"role": "tool", "tool_call_id": 5, "content": "gave"}]}
    assert "gave" in prompt("chatml", "chat", body)


def test_a_chats_calls_among_items_are_refused_and_not_dropped() -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}
    with pytest.raises(BadRequest, match=r"input\[1\].tool_calls: are of chats"):
        found_in("chatml", "responses", {"input": [USER, turn]})
