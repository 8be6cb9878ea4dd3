"""Calls of tools that take a text: whatever their grammar allows is what clients get, in every format."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from baton.gateway.api.custom import InputReader, arguments_of, input_of
from baton.gateway.api.tools import read_tools, shown
from baton.gateway.errors import BadRequest
from baton.gateway.parsing.choice import Formats, choose
from baton.gateway.parsing.formats import CALLS
from baton.gateway.parsing.parser import parse
from baton.gateway.parsing.plan import Parsing
from baton.gateway.reading.constraints.calling import structure_of
from baton.gateway.reading.constraints.functions import functions_of
from baton.grammar.checking import Checker
from baton.grammar.description import GrammarError, Lark, Structure
from baton.grammar.vocabulary import matching_tokenizer
from tests.gateway.parsing.fixtures import meaning
from tests.gateway.parsing.patches import GRAMMAR, is_patch

FORMATS = sorted(CALLS)


def tool(definition: str, syntax: str = "lark") -> dict[str, Any]:
    grammar = {"definition": definition, "syntax": syntax}
    return {"type": "custom", "custom": {"name": "edit", "format": {"type": "grammar", "grammar": grammar}}}


def walk(structure: Structure, special: dict[str, int], rng: random.Random, closing: str) -> str | None:
    """What a model of random choices writes, which likes what closes things; None: it did not end."""
    end = 256 + len(special)
    tokenizer = matching_tokenizer([bytes([byte]) for byte in range(256)], special, end)
    matcher = LLMatcher(tokenizer, Checker(special).check(structure), log_level=0)
    names = {token: name.encode() for name, token in special.items()}
    text = b""
    for _ in range(1500):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: end + 1]).tolist()
        assert allowed, (matcher.get_error(), text)
        if end in allowed:
            return text.decode()
        liked = [one for one in allowed if 256 <= one < end or chr(one) in closing]
        plain = [one for one in allowed if one < 127 or 256 <= one < end] or allowed
        token = rng.choice(liked if liked and rng.random() < 0.7 else plain)
        assert matcher.consume_token(token), matcher.get_error()
        text += names.get(token) or bytes([token])
    return None


def formats_of(name: str) -> Formats:
    return choose("", name, "none" if name != "openai" else "openai_gptoss")


def demanded(name: str, tools: list[dict[str, Any]]) -> tuple[Formats, Any, Structure]:
    formats, read = formats_of(name), read_tools(tools, "required")
    made = structure_of(formats, read, functions_of(read), parallel=False, thinking=False)
    assert made is not None
    return formats, read, made


def inputs_in(formats: Formats, tools: Any, text: str) -> list[str]:
    parsing = Parsing(formats=formats, thinking=False, calling=True, tools=tools.names, types=tools.types)
    _, _, calls = meaning(parse(parsing.parser(), text))
    for name, arguments, _ in calls:
        assert name == "edit"
        assert json.loads(arguments)["input"] == input_of(arguments)
    return [input_of(arguments) for _, arguments, _ in calls]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_patch_is_always_a_patch(name: str, special: bool) -> None:
    """Under the grammar that agents send for theirs, whatever the model chooses."""
    formats, read, structure = demanded(name, [tool(GRAMMAR)])
    marks = sorted(formats.markers) if special or formats.is_harmony else []
    rng, ended = random.Random(name), 0
    for _ in range(12):
        text = walk(structure, {mark: 256 + i for i, mark in enumerate(marks)}, rng, '\n\\n*"}]<|,)')
        if text is not None:
            ended += 1
            (patch,) = inputs_in(formats, read, text)
            assert is_patch(patch), patch
    assert ended >= 4


REGULAR = [
    (r'start: /[^x]{2}/s "\"\\" | "q"i', 'ab"\\'),
    ('start: (PAIR ";" LF)+\nPAIR: /[a-z]+/ "=" /"[^"\\n]*"/\n%import common.LF', 'a="b\t";\nc="";\n'),
    ("start: WS? NUMBER WORD?\n%import common (WS, NUMBER, WORD)", "\n\t 12.5abc"),
    ('start: "a".."c" ~ 2..3 /(?i:X\\n)/ -> named', "abX\n"),
    ("start: /\\p{L}+\\x{22}[\\x09\\u00e9]./", 'ä"\t\x01'),
    ('start: /(a|\\\\)+\\/\\/[[:punct:]&&[^"]]?/', "a\\//'"),
]


@pytest.mark.parametrize(("grammar", "text"), REGULAR, ids=range(len(REGULAR)))
def test_what_a_grammar_allows_is_written_in_json(grammar: str, text: str) -> None:
    """The text itself is allowed by the grammar as it is, and the text as JSON by the one that is made."""
    assert allows(f"%llguidance {{}}\n{grammar}\n", text)
    written = json.dumps(text, ensure_ascii=False)[1:-1]
    made = Checker({}).check(Structure(Lark(grammar)))
    assert allows(made, written)
    for at in range(len(written)):
        damaged = written[:at] + written[at + 1 :]
        try:
            still = json.loads(f'"{damaged}"')
        except ValueError:
            still = None
        if still is None or json.dumps(still, ensure_ascii=False)[1:-1] != damaged:  # (written otherwise)
            assert not allows(made, damaged), damaged
        else:
            assert allows(made, damaged) == allows(f"%llguidance {{}}\n{grammar}\n", still), damaged


def allows(grammar: str, text: str) -> bool:
    matcher = LLMatcher(
        matching_tokenizer([bytes([byte]) for byte in range(256)], {}, 256), grammar, log_level=0
    )
    data = text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


RECURSIVE = """start: value
value: ESCAPED_STRING | NUMBER | "[" [value ("," value)*] "]"
%import common (ESCAPED_STRING, NUMBER, WS)
%ignore WS
"""


def test_a_grammar_that_refers_to_itself_is_kept_in_json() -> None:
    formats, read, structure = demanded("hermes", [tool(RECURSIVE)])
    rng, ended, nested = random.Random(5), 0, 0
    for _ in range(20):
        text = walk(structure, {}, rng, '"\\]}<0')
        if text is not None:
            (made,) = inputs_in(formats, read, text)
            assert allows(f"%llguidance {{}}\n{RECURSIVE}", made), made
            ended, nested = ended + 1, nested + ("[" in made)
    assert ended >= 5
    assert nested


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_an_expression_is_kept(name: str) -> None:
    formats, read, structure = demanded(name, [tool(r'[a-c"]{2}/\n[^\d]', "regex")])
    rng = random.Random(3)
    texts = [walk(structure, {}, rng, "") for _ in range(5)]
    for text in texts:
        assert text is not None
        (made,) = inputs_in(formats, read, text)
        assert made[:2].strip('abc"') == ""
        assert made[2:4] == "/\n"
        assert len(made) == 5


REFUSED = [
    ("start: /a(?=b)/", "hermes", "not supported in an expression"),
    ("start: b", "hermes", "there is no b"),
    ('other: "x"', "hermes", "has no rule 'start'"),
    ("start: <|x|>", "hermes", "tokens cannot stand"),
    ('start: ~A\nA: "x"', "hermes", "~ before a terminal"),
    ("%declare X\nstart: X", "hermes", "%declare is not supported"),
    ("start[max_tokens=5]: /x/", "hermes", "leave it out"),
    ('start: "x"\nstart: "y"', "hermes", "more than once"),
    ('start: value\nvalue: "[" value "]" | /"+/ value?', "hermes", "so may what follows it"),
    ('start: "(" start? ")"', "qwen3_coder", "refers to itself"),
    ('start: "a', "hermes", "has no end"),
    ("start: /[a/", "hermes", "has no end"),
]


@pytest.mark.parametrize(("grammar", "name", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_kept_is_refused(grammar: str, name: str, words: str) -> None:
    with pytest.raises((GrammarError, BadRequest), match=words):
        Checker({}).check(demanded(name, [tool(grammar)])[2])


def test_a_custom_tool_is_a_function_for_the_model() -> None:
    (function,) = shown([tool("start: /x/")]) or []
    assert function["type"] == "function"
    assert function["function"]["parameters"]["required"] == ["input"]
    assert "start: /x/" in function["function"]["parameters"]["properties"]["input"]["description"]


TEXTS = ["", 'a\n"b"\\ é😀\t', "\ud7ff", "{}", '{"input": "x"}']


@pytest.mark.parametrize("text", TEXTS)
def test_arguments_become_the_text_again_however_they_are_cut(text: str) -> None:
    rng = random.Random(text)
    for arguments in (arguments_of(text), json.dumps({"input": text}), json.dumps({"input": text}, indent=2)):
        for _ in range(30):
            reader, at, found = InputReader(), 0, ""
            while at < len(arguments):
                end = at + rng.randint(1, 5)
                found += reader.push(arguments[at:end])
                at = end
            assert found == text
            assert not reader.is_open


@pytest.mark.parametrize("arguments", ["{}", '{"patch": "x"}', "[1]", '{"input": 5}', "no JSON"])
def test_other_arguments_are_given_as_they_are(arguments: str) -> None:
    assert input_of(arguments) == arguments
