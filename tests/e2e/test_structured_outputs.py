"""Answers in a form, from the embedded model and over HTTP: whatever ends by itself is valid."""

from __future__ import annotations

import json
import re

import jsonschema_rs
import pytest
from openai import BadRequestError, OpenAI

from tests.e2e.server import Server

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "role": {"enum": ["admin", "user"]},
    },
    "required": ["name", "age", "role"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "user", "schema": SCHEMA, "strict": True}}
VALID = jsonschema_rs.validator_for(SCHEMA)
USER = [{"role": "user", "content": "A user, please."}]


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client: OpenAI, **fields):
    fields = {"max_tokens": 80, "temperature": 1.0, "seed": 3} | fields
    return client.chat.completions.create(model="baton-tiny", messages=USER, **fields)


def check(text: str, reason: str) -> None:
    if reason == "stop":
        assert VALID.is_valid(json.loads(text)), text
    else:
        assert reason == "length"
        assert text.startswith("{")


def test_each_of_several_answers_is_valid_and_streams_the_same(client: OpenAI):
    whole = ask(client, n=6, response_format=FORMAT)
    for choice in whole.choices:
        check(choice.message.content, choice.finish_reason)
    assert len({choice.message.content for choice in whole.choices}) > 1
    assert any(choice.finish_reason == "stop" for choice in whole.choices)
    pieces = [""] * 6
    for chunk in ask(client, n=6, response_format=FORMAT, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert pieces == [choice.message.content for choice in whole.choices]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"structured_outputs": {"regex": "[A-Z][a-z]{2,5}"}}, "[A-Z][a-z]{2,5}"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"structured_outputs": {"grammar": 'start: "x" "y"~2'}}, "xyy"),
        ({"guided_regex": "a|b"}, "a|b"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"guided_json": {"const": [1, None]}}, r"\[\s*1\s*,\s*null\s*\]"),
        ({"structured_outputs": {"json": '{"const": true}'}}, "true"),
    ],
)
def test_each_field_binds_the_answer(client: OpenAI, fields, expected):
    choice = ask(client, extra_body=fields).choices[0]
    assert choice.finish_reason == "stop"
    assert re.fullmatch(expected, choice.message.content)


def test_completions_json_objects_and_tags(client: OpenAI):
    found = client.completions.create(
        model="baton-tiny",
        prompt="A list:",
        max_tokens=200,
        extra_body={
            "structured_outputs": {"json": {"type": "array", "items": {"type": "null"}, "maxItems": 2}}
        },
    )
    assert found.choices[0].finish_reason == "stop"
    assert set(json.loads(found.choices[0].text)) <= {None}
    text = ask(client, response_format={"type": "json_object"}, max_tokens=30).choices[0].message.content
    assert text.startswith("{")
    frame = {"begin": "<f>", "schema": {"const": 5}, "end": "</f>"}
    tags = {"type": "structural_tag", "structures": [frame], "triggers": ["<f>"]}
    text = ask(client, max_tokens=30, extra_body={"response_format": tags}).choices[0].message.content
    assert re.fullmatch(r"(?s)((?!<f>).|<f>5</f>)*", text)
    frame = {
        "type": "tag",
        "begin": "<f>",
        "content": {"type": "regex", "pattern": "[0-9]{2}"},
        "end": "</f>",
    }
    text = {"type": "any_text", "max_chars": 5}
    format = {"type": "tags_with_separator", "tags": [frame, {**frame, "begin": "<g>", "content": text}]}
    tags = {"type": "structural_tag", "format": {**format, "separator": ",", "at_least_one": True}}
    either = r"(<f>[0-9]{2}</f>|<g>(?s:.{0,5})</f>)"
    for field in ({"response_format": tags}, {"structured_outputs": {"structural_tag": json.dumps(tags)}}):
        choices = ask(client, n=8, max_tokens=40, temperature=1.5, extra_body=field).choices
        for choice in choices:
            if choice.finish_reason == "stop":
                assert re.fullmatch(f"{either}(,{either})*", choice.message.content)
        assert any(choice.finish_reason == "stop" for choice in choices)


def test_other_parameters_keep_their_meaning(client: OpenAI):
    """Log-probabilities are those of the tokens that may come; stops, penalties, a bias do what they do."""
    choices = {"structured_outputs": {"choice": ["red", "green"]}}
    found = ask(client, logprobs=True, top_logprobs=5, extra_body=choices).choices[0]
    first = found.logprobs.content[0]
    allowed = {"r", "re", "red", "g", "gr", "gre", "gree", "green"}
    assert {one.token for one in first.top_logprobs} <= allowed
    assert sum(2.718281828**one.logprob for one in first.top_logprobs) == pytest.approx(1.0, abs=1e-3)
    assert ask(client, stop="e", extra_body=choices).choices[0].message.content in ("r", "gr")
    ends = ask(client, extra_body={**choices, "ignore_eos": True, "min_tokens": 9}, max_tokens=20).choices[0]
    assert ends.finish_reason == "stop"  # (nothing else may follow)
    long = {"structured_outputs": {"regex": "a{1,40}"}, "ignore_eos": True}
    assert set(ask(client, max_tokens=8, extra_body=long).choices[0].message.content) == {"a"}
    biased = ask(client, temperature=0, logit_bias={"50": 100}, frequency_penalty=1.5, response_format=FORMAT)
    check(biased.choices[0].message.content, biased.choices[0].finish_reason)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex: not together with",
        ),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json: is not JSON"),
        (
            {"guided_json": {"items": {"not": {"multipleOf": 2}}}},
            "guided_json: items.not: the keyword not cannot",
        ),
        ({"structured_outputs": {"structural_tag": {"format": {}}}}, "structured_outputs.structural_tag"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "xml"}}},
            "response_format: Invalid value 'xml' - at `format.type`",
        ),
        ({"structured_outputs": {"structural_tag": {"structures": 5}}}, "structured_outputs.structural_tag"),
        ({"guided_choice": ["x" * 300_000]}, "guided_choice: of 3000"),
        ({"guided_regex": "(?=a)"}, "guided_regex"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(client: OpenAI, fields, named):
    with pytest.raises(BadRequestError) as caught:
        ask(client, extra_body=fields)
    assert named in caught.value.message
