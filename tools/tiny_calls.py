"""Calls of functions, and short thoughts: what `baton-tiny` learns in its second stage.

Theory. A model of this size cannot know functions, but it can read them: names, descriptions, parameters and
values are drawn at random here, so that a call can only be right by being put together from the prompt. Three
things make that easy enough. The chat template shows a function as `What it does. {"name": "weather",
"arguments": {"city": string}}`, so the call is nearly a copy of that line. What the function answered stands
behind a space, as it will in the assistant's sentence. And a value that stands behind a space in the user's
words (" Paris") is written in the call by the same tokens but for that space ("Par", "is"): a segment of a
document ends where such a token does, and a segment is what is encoded at once.

`Turn`s are made first and written as segments (text, loss weight) later, exactly as the chat template writes
them (`tests/test_tiny_corpus.py` compares both).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import tiny_words as w
from tiny_corpus import END, READ, SAY, START, SYSTEMS, Segment, keys, recall_messages, reply
from tiny_examples import known_wish
from tiny_talk import (
    Count,
    arithmetic,
    code_word,
    copying,
    fact,
    listing,
    short_answer,
    story_sentence,
)
from tiny_wishes import CITIES, SKIES, Json, Wish, random_wish, text_value

Pieces = Callable[[str], list[str]]  # the tokens of a text, as texts

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
RESULT, RESULT_END = "<tool_response>", "</tool_response>"
TOOLS, TOOLS_END = "<tools>", "</tools>"
MARKERS = [THINK, THINK_END, CALL, CALL_END, RESULT, RESULT_END, TOOLS, TOOLS_END]


@dataclass
class Turn:
    """One message: what it says, in parts that are encoded each for itself, and an assistant's thoughts."""

    role: str
    parts: list[str]
    thought: str | None = None
    thought_end: str = "\n" + THINK_END + "\n\n"
    calls: list[Json] = field(default_factory=list)

    @property
    def message(self) -> Json:
        """As the API takes it."""
        if self.calls:
            calls = [{"type": "function", "function": one} for one in self.calls]
            return {"role": self.role, "content": "", "tool_calls": calls}
        return {"role": self.role, "content": "".join(self.parts)}


def schema_text(schema: Json) -> str:
    """A parameter's kind, as the chat template writes it."""
    if "enum" in schema:
        return "|".join(json.dumps(one) for one in schema["enum"])
    return str(schema.get("type", "any"))


def tool_text(tool: Json) -> str:
    """A function, as the chat template writes it."""
    function = tool["function"]
    schema = function.get("parameters") or {}
    shown = ", ".join(
        f'"{name}": {"" if name in schema.get("required", ()) else "optional "}{schema_text(one)}'
        for name, one in schema.get("properties", {}).items()
    )
    about = function.get("description", "")
    return f'{about}{" " if about else ""}{{"name": "{function["name"]}", "arguments": {{{shown}}}}}\n'


def written(turns: Sequence[Turn], tools: Sequence[Json]) -> list[Segment]:
    """The segments of a conversation, as the chat template writes it."""
    out: list[Segment] = []
    system = "".join(turns[0].parts) if turns[0].role == "system" else ""
    if tools:
        lines = "".join(tool_text(one) for one in tools)
        head = f"{system}\n\n" if system else ""
        out.append((f"{START}system\n{head}{TOOLS}\n{lines}{TOOLS_END}{END}\n", READ))
    for turn in turns[1:] if tools and system else turns:
        if turn.role != "assistant":
            text = "".join(turn.parts)
            text = f"{RESULT} {text}{RESULT_END}" if turn.role == "tool" else text
            out.append((f"{START}{turn.role}\n", READ))
            out.append((f"{text}{END}", READ))
        elif turn.thought is not None:
            out.append((f"{START}assistant\n{THINK}\n", READ))
            out += [(turn.thought, SAY), (turn.thought_end, SAY)]
        else:
            out.append((f"{START}assistant\n", READ))
        if turn.role == "assistant":
            out += [(part, SAY) for part in turn.parts]
            out.append((END, SAY))
        out.append(("\n", READ))
    return out


def call_parts(wish: Wish, pieces: Pieces) -> list[str]:
    """The call of a wish, in parts as they are to be encoded."""
    parts = [f'{CALL}\n{{"name": "{wish.function.name}", "arguments": {{']
    listed = [one.name for one in wish.function.parameters if one.name in wish.arguments]
    for index, name in enumerate(listed):
        given = wish.arguments[name]
        parts[-1] += f'{", " if index else ""}"{name}": '
        kind = next(one.kind for one in wish.function.parameters if one.name == name)
        if kind != "string" or given.quoted:
            parts[-1] += json.dumps(given.json)
        else:
            parts[-1] += '"'
            first, *rest = pieces(f" {given.json}")
            parts += [one for one in (first.removeprefix(" "), *rest) if one]
            parts.append('"')
    return [*parts[:-1], f"{parts[-1]}}}}}\n{CALL_END}"]


def call_json(wish: Wish) -> Json:
    """The call as the API has it."""
    listed = [one.name for one in wish.function.parameters if one.name in wish.arguments]
    return {"name": wish.function.name, "arguments": {name: wish.arguments[name].json for name in listed}}


def twice(rng: Random, wish: Wish) -> list[Wish]:
    """A question about one thing becomes one about two things, if it can."""
    ((name, given),) = wish.arguments.items() if len(wish.arguments) == 1 else (("", None),)
    if given is None or not isinstance(given.json, str) or given.quoted or not wish.answer.startswith("The "):
        return [wish]
    kind = next(one.kind for one in wish.function.parameters if one.name == name)
    if kind != "string" or wish.text.count(given.said) != 1 or wish.answer.count(given.said) != 1:
        return [wish]
    other = text_value(rng, named=given.json in CITIES)
    if other.quoted or other.said in wish.text:
        return [wish]
    before = wish.text.split(given.said)[0].split()[-1]
    joint = f" and {before} " if rng.random() < 0.5 else " and "
    first = replace(wish, text=wish.text.replace(given.said, f"{given.said}{joint}{other.said}"))
    answer = wish.answer.replace(given.said, other.said)
    return [first, replace(wish, text="", arguments={name: other}, answer=answer)]


def any_wish(rng: Random) -> Wish:
    """Of random words mostly."""
    return known_wish(rng) if rng.random() < 0.3 else random_wish(rng)


def distinct(wishes: list[Wish]) -> list[Wish]:
    """Without those whose function has a name or a topic that was there before."""
    names, topics, out = set[str](), set[str](), list[Wish]()
    for wish in wishes:
        if wish.function.name not in names and wish.topic not in topics:
            out.append(wish)
            names.add(wish.function.name)
            topics.add(wish.topic)
    return out


def result(rng: Random, topic: str) -> str:
    """What a function answers."""
    kind = rng.random()
    if kind < 0.2 or (topic == "weather" and kind < 0.7):
        sky = rng.choice(SKIES)
        warm = f"{rng.randint(-9, 39)} {rng.choice(['degrees', 'degrees', 'C'])}"
        return rng.choice([sky, warm, f"{sky}, {warm}", f"{sky} and {warm}", f"{warm} and {sky}"])
    if kind < 0.32 or topic == "numbers":
        return rng.choice([str(rng.randint(0, 99999)), f"{rng.randint(0, 999)}.{rng.randint(0, 99)}"])
    if kind < 0.47 or (topic == "time" and kind < 0.8):
        return f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    if kind < 0.7:
        return " ".join(rng.sample(w.WORDS, rng.randint(1, 4)))
    if kind < 0.85:
        return code_word(rng)
    if kind < 0.88:
        return json.dumps(rng.choice(w.WORDS))
    names = rng.sample(w.WORDS, rng.randint(1, 3))
    return json.dumps({one: rng.choice([rng.randint(0, 999), rng.choice(w.WORDS)]) for one in names})


def answer_to(rng: Random, wish: Wish) -> tuple[str, str]:
    """What the function answers, and what the assistant says then."""
    if rng.random() < 0.15:
        sky = rng.choice(SKIES).capitalize()
        text = rng.choice([story_sentence(rng), f"{sky} in {rng.choice(CITIES)}.", f"It is {sky.lower()}."])
        text += f" {story_sentence(rng)}" * (rng.random() < 0.2)
        return text, text
    text = result(rng, wish.topic)
    return text, f"{wish.answer} {text}."


def thoughts_of(rng: Random, text: str) -> tuple[str, str]:
    """Thoughts and their end, now and then cut off as a budget of tokens does."""
    if rng.random() < 0.1:
        return text[: rng.randint(0, len(text))], THINK_END + rng.choice(["", "\n", "\n\n"])
    return text, "\n" + THINK_END + "\n\n"


def small_talk(rng: Random) -> tuple[str, str, str]:
    """A short question, its answer, and a thought about it."""
    kind = rng.random()
    if kind < 0.2:
        return (*arithmetic(rng), "I work out the numbers.")
    if kind < 0.4:
        return (*copying(rng), "I repeat the words.")
    if kind < 0.5:
        return (*listing(rng), "I write a list.")
    if kind < 0.7:
        return (*fact(rng), "I know this.")
    return (*short_answer(rng), "I can answer this at once.")


def assistant(rng: Random, parts: list[str], thought: str, thinking: bool, **more: Any) -> Turn:
    """What the assistant says, with its thoughts where it thinks."""
    if not thinking:
        return Turn("assistant", parts, **more)
    text, end = thoughts_of(rng, thought)
    return Turn("assistant", parts, text, end, **more)


def plain_turns(rng: Random, thinking: bool) -> list[Turn]:
    """Small talk."""
    ask, answer, thought = small_talk(rng)
    return [Turn("user", [ask]), assistant(rng, [answer], thought, thinking)]


def refused_turns(rng: Random, wish: Wish, thinking: bool) -> list[Turn]:
    """A wish that no function fits."""
    while wish.topic not in wish.text:
        wish = any_wish(rng)
    thought = f"The user asks about the {wish.topic}. I have no function for that."
    return [
        Turn("user", [wish.text]),
        assistant(rng, [f"I have no function for the {wish.topic}."], thought, thinking),
    ]


def called_turns(rng: Random, wishes: Sequence[Wish], thinking: bool, pieces: Pieces) -> list[Turn]:
    """Wishes, the calls, what the functions answer, and what the assistant says then."""
    parts: list[str] = []
    for wish in wishes:
        made = call_parts(wish, pieces)
        parts += [f"\n{made[0]}" if parts else made[0], *made[1:]]
    topics = " and the ".join(dict.fromkeys(wish.topic for wish in wishes))
    thought = f"The user asks about the {topics}. I have a function for that."
    before = [rng.choice([story_sentence(rng), "Hello!", "Hi!", "OK."])] if rng.random() < 0.1 else []
    turns = [Turn("user", [" ".join([*before, *(wish.text for wish in wishes if wish.text)])])]
    turns.append(assistant(rng, parts, thought, thinking, calls=[call_json(wish) for wish in wishes]))
    answers = [answer_to(rng, wish) for wish in wishes]
    turns += [Turn("tool", [text]) for text, _ in answers]
    thought = "The function has answered. I tell the user."
    turns.append(assistant(rng, [" ".join(answer for _, answer in answers)], thought, thinking))
    return turns


def call_turns(rng: Random, pieces: Pieces) -> tuple[list[Turn], list[Json]]:
    """A conversation with functions."""
    thinking = rng.random() < 0.3
    wishes = distinct([any_wish(rng) for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4)))])
    tools = [wish.function.tool for wish in wishes]
    turns: list[Turn] = []
    if rng.random() < 0.25:
        turns.append(Turn("system", [rng.choice(SYSTEMS)]))
    rng.shuffle(wishes)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.random()
        if kind < 0.12 and len(wishes) > 1:
            turns += called_turns(rng, [wishes.pop(), wishes.pop()], thinking, pieces)
        elif kind < 0.78 and wishes:
            wish = wishes.pop()
            several = twice(rng, wish) if rng.random() < 0.15 else [wish]
            turns += called_turns(rng, several, thinking, pieces)
        elif kind < 0.86:
            other = any_wish(rng)
            names, topics = [one["function"]["name"] for one in tools], " ".join(map(tool_text, tools))
            if other.function.name not in names and other.topic not in topics:
                turns += refused_turns(rng, other, thinking)
        else:
            turns += plain_turns(rng, thinking)
    if all(turn.role == "system" for turn in turns):
        turns += plain_turns(rng, thinking)
    return turns, tools


def think_turns(rng: Random, tokens: int, count: Count) -> list[Turn]:
    """A conversation without functions: thoughts and small talk, a wish, or a code word that was told."""
    kind = rng.random()
    if kind < 0.3 and tokens > 80:
        pairs = [(key, code_word(rng)) for key in keys(rng, rng.choice((1, 1, 2, 3)))]
        key, val = rng.choice(pairs)
        told = recall_messages(rng, tokens - 50, count, pairs, key)
        turns = [Turn(one["role"], [one["content"]]) for one in told]
        return [*turns, assistant(rng, [reply(key, val)], f"I look for the {key}.", True)]
    if kind < 0.45:
        return refused_turns(rng, any_wish(rng), rng.random() < 0.5)
    turns = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        turns += plain_turns(rng, True)
    return turns


def call_document(rng: Random, tokens: int, count: Count, pieces: Pieces) -> list[Segment]:
    """A document of the second stage, of about `tokens` tokens at most."""
    if rng.random() < 0.22:
        return written(think_turns(rng, tokens, count), [])
    return written(*call_turns(rng, pieces))
