"""Anthropic's messages as a chat's: blocks, results of tools, turns, system messages, prefills."""

from __future__ import annotations

from typing import Any

import pytest

from baton.gateway.anthropic.conversations import conversation_of
from baton.gateway.anthropic.signatures import sign, thoughts_in
from baton.gateway.api.content import Notes
from baton.gateway.api.messages import read_messages
from baton.gateway.errors import BadRequest


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": blocks[0] if isinstance(blocks[0], str) else list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {**user(*blocks), "role": "assistant"}


def system(words: str) -> dict[str, Any]:
    return {"role": "system", "content": words}


def use(id: str, name: str = "f", **input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": input}


def result(id: str, content: Any = "done", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


def read(*messages: dict[str, Any], head: Any = None) -> list[dict[str, Any]]:
    return read_messages(conversation_of(head, messages).messages, notes=Notes())


def said(*messages: dict[str, Any], head: Any = None) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in read(*messages, head=head)]


def test_texts_and_blocks() -> None:
    given = [user("Hi."), assistant(text("Hello."), text("And?")), user(text("Well."))]
    assert said(*given, head="Be brief.") == [
        ("system", "Be brief."),
        ("user", "Hi."),
        ("assistant", "Hello.\nAnd?"),
        ("user", "Well."),
    ]
    assert said(*given[:1], head=[text("One."), text("Two.")])[0] == ("system", "One.\nTwo.")


def test_messages_of_one_role_are_one_turn() -> None:
    given = [user("a"), user("b"), assistant("c"), assistant("d"), user("e")]
    assert said(*given) == [("user", "a\n\nb"), ("assistant", "c\n\nd"), ("user", "e")]


def test_results_of_tools_are_messages_of_their_own() -> None:
    """In their order, right after their calls, whatever the user writes beside them."""
    calls = assistant(text("I look."), use("1", "weather", city="Rome"), use("2"))
    given = user(text("Note this."), result("1", [text("sunny"), text("warm")]), result("2", None))
    found = read(user("Hi."), calls, given)
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "tool", "user"]
    _, called, first, second, last = found
    assert called["content"] == "I look."
    assert [call["function"] for call in called["tool_calls"]] == [
        {"name": "weather", "arguments": {"city": "Rome"}},
        {"name": "f", "arguments": {}},
    ]
    assert first == {"role": "tool", "tool_call_id": "1", "name": "weather", "content": "sunny\nwarm"}
    assert (second["tool_call_id"], second["content"], last["content"]) == ("2", "", "Note this.")


@pytest.mark.parametrize(
    ("content", "shown"),
    [("no such file", "Error: no such file"), ("Error: x", "Error: x"), (None, "Error")],
)
def test_a_failed_tool_says_so(content: Any, shown: str) -> None:
    *_, last = said(user("a"), assistant(use("1")), user(result("1", content, is_error=True)))
    assert last == ("tool", shown)


def test_thoughts_go_to_the_template() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": sign()}
    hidden = {"type": "thinking", "thinking": "", "signature": sign("So é.")}
    redacted = {"type": "redacted_thinking", "data": "xyz"}
    _, answer, *_ = read(user("a"), assistant(thought, redacted, hidden, text("b")), user("c"))
    assert (answer["content"], answer["reasoning_content"]) == ("b", "Hm.\nSo é.")
    _, answer, *_ = read(user("a"), assistant(thought, use("1")), user(result("1")))
    assert answer["reasoning_content"] == answer["reasoning"] == "Hm."


@pytest.mark.parametrize(
    "signature", [None, 5, "", "of another server", "baton1.", "baton1.é", "baton1.a", sign()]
)
def test_signatures_of_others_say_nothing(signature: Any) -> None:
    assert thoughts_in(signature) == ""


def test_system_messages_stay_where_they_are() -> None:
    """At the beginning they are the system prompt; later they join the user's turn, and the beginning of the
    prompt stays the same from turn to turn."""
    first = [system("Head."), user("a"), system("Note 1.")]
    assert said(*first, head="Top.") == [("system", "Top.\n\nHead."), ("user", "a\n\nNote 1.")]
    more = [*first, assistant("b"), system("Note 2."), user("c")]
    assert said(*more, head="Top.") == [
        *said(*first, head="Top."),
        ("assistant", "b"),
        ("user", "Note 2.\n\nc"),
    ]
    assert said(*first, assistant("b"), system("Note 2."))[-1] == ("user", "Note 2.")
    assert said(*first, assistant("b"), system("N"), assistant("d"), user("e"))[2:] == [
        ("assistant", "b"),
        ("user", "N"),
        ("assistant", "d"),
        ("user", "e"),
    ]


def test_a_system_message_is_never_between_a_call_and_its_result() -> None:
    given = [user("a"), assistant(use("1")), system("Note."), user(result("1"))]
    assert said(*given)[2:] == [("tool", "done\n\nNote.")]
    given = [user("a"), assistant(use("1")), user(result("1")), system("Note.")]
    assert said(*given)[2:] == [("tool", "done\n\nNote.")]
    given = [user("a"), assistant(use("1")), system("Note."), user(result("1"), text("b"))]
    assert said(*given)[2:] == [("tool", "done"), ("user", "Note.\n\nb")]


@pytest.mark.parametrize("blocks", [True, False])
def test_an_attribution_that_changes_with_each_request_is_left_out(blocks: bool) -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch=%s;"
    for count in ("1", "2"):
        head = [text(line % count), text("You are.")] if blocks else line % count + "\nYou are."
        assert said(user("a"), head=head)[0] == ("system", "You are.")
    assert said(user(line % "1"))[0] == ("user", line % "1")


def test_prefills() -> None:
    given = [user("Greek for sun?"), assistant("It is (")]
    assert conversation_of(None, given).prefilled
    assert not conversation_of(None, given[:1]).prefilled
    for silent in (assistant(""), assistant({"type": "thinking", "thinking": "Hm"})):
        empty = conversation_of(None, [*given[:1], silent])
        assert (empty.prefilled, len(empty.messages)) == (False, 1)


def test_whether_tools_answered_last() -> None:
    given = [user("a"), assistant(use("1")), user(result("1"))]
    assert conversation_of(None, given).after_tools
    assert not conversation_of(None, given[:1]).after_tools


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "tool", "content": "a"}, r"messages\[1\].role: 'tool' must be 'user' or 'assistant'"),
        ({"role": "user"}, r"messages\[1\].content: must be a text or a list of blocks"),
        (user(5), r"messages\[1\].content\[0\]: must be a block"),
        (user({"text": "a"}), r"messages\[1\].content\[0\]: must be a block"),
        (user({"type": "text", "text": 5}), r"messages\[1\].content\[0\].text: must be a text"),
        (
            user(IMAGE),
            r"messages\[1\].content\[0\].type: 'image' is an image, and this model takes only text",
        ),
        (user({"type": "document"}), "'document' is a document"),
        (user({"type": "mcp_tool_result"}), "of a tool that Anthropic's servers run"),
        (assistant({"type": "server_tool_use"}), "of a tool that Anthropic's servers run"),
        (user({"type": "other"}), "'other' is not known here"),
        (
            user(use("1")),
            r"messages\[1\].content\[0\]: a block of type tool_use belongs to a message of role as",
        ),
        (assistant(result("0")), "tool_result belongs to a message of role user"),
        (user(result("1")), r"messages\[1\].content\[0\].tool_use_id: no tool_use before it has the id '1'"),
        (user({"type": "tool_result"}), r"messages\[1\].content\[0\].tool_use_id: must be a text"),
        (user(result("0", [IMAGE])), r"messages\[1\].content\[0\].content\[0\].type: 'image' is an image"),
        (assistant({"type": "tool_use", "id": "1", "name": "f"}), r"content\[0\].input: must be an object"),
        (assistant({"type": "tool_use", "id": "1", "input": {}}), r"content\[0\].name: must be a text"),
        ({"role": "system", "content": [IMAGE]}, "'image' is an image, and this model takes only text;"),
    ],
)
def test_what_is_refused(message: dict[str, Any], words: str) -> None:
    begun = assistant(use("0"), text("a"))
    given = [user("a"), message] if message["role"] == "assistant" else [begun, message]
    with pytest.raises(BadRequest, match=words) as caught:
        read_messages(conversation_of(None, given).messages)
    assert caught.value.param == "messages"


def test_there_must_be_a_turn() -> None:
    with pytest.raises(BadRequest, match="messages: give at least one message of role user"):
        conversation_of("a", [system("b")])
    with pytest.raises(BadRequest, match="messages: the last one has no text to continue"):
        conversation_of("a", [assistant("")])
    with pytest.raises(BadRequest, match=r"system\[0\].type: 'image' is an image"):
        read_messages(conversation_of([IMAGE], [user("b")]).messages)
