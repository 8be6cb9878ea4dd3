"""Measure how `baton-tiny` calls functions and thinks, through Baton: `python tools/eval_calls.py`.

Theory. A call counts only if the function's name and its arguments are exactly those wished for, as the
gateway's parser reads them, and nothing else was called or said; an answer only if it is exactly the sentence
expected, with what the function answered. Functions and wishes come from `tiny_wishes`, from seeds that
training does not have, so that nearly every function is one never seen. `FOREIGN` are functions and wishes
of words and forms that the generator does not make. All is greedy, and no grammar is on (tool choice `auto`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from baton import LLM, SamplingParams
from baton.gateway.parsing.choice import Formats
from baton.gateway.parsing.parser import parse
from baton.gateway.parsing.plan import Parsing
from tiny_calls import Turn, answer_to, any_wish, call_json, distinct, plain_turns, refused_turns, twice
from tiny_examples import known_wish
from tiny_wishes import Function, Json, Parameter, Value, Wish, random_wish


def of(name: str, about: str, text: str, **given: Any) -> Wish:
    """A wish for a function whose parameters are all required."""
    kinds = {str: "string", int: "integer", float: "number", bool: "boolean"}
    listed = tuple(Parameter(key, kinds[type(value)]) for key, value in given.items())
    return Wish(
        text,
        "",
        Function(name, about, listed),
        {key: Value(value, str(value)) for key, value in given.items()},
    )


FOREIGN = [
    of("get_horoscope", "Get today's horoscope.", "What is the horoscope of Leo?", sign="Leo"),
    of("get_stock_price", "Get a stock price.", "What is the stock price of NVDA?", ticker="NVDA"),
    of("get_population", "Returns the population.", "What is the population of Japan?", country="Japan"),
    of("lookup_order", "Looks up an order.", "Look up the order A-7731.", order_id="A-7731"),
    of("set_timer", "Sets a timer.", "Set a timer for 15 minutes.", minutes=15),
    of("square_root", "Computes the square root.", "What is the square root of 144?", number=144),
    of("get_user", "Fetch a user by id.", "Fetch the user 4711.", user_id=4711),
    of("play_song", "Plays a song.", 'Play the song "Yellow River".', title="Yellow River"),
    of("delete_file", "Deletes a file.", "Delete the file report.txt.", path="report.txt"),
    of(
        "distance", "Distance of cities.", "The distance with start Rome, end Bari.", start="Rome", end="Bari"
    ),
]


@dataclass
class Case:
    """What is asked, and what is expected."""

    messages: list[Json]
    tools: list[Json] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    text: str = ""
    thinking: bool = False


def wished(wishes: list[Wish], others: list[Wish], rng: Random, thinking: bool = False) -> Case:
    """Wishes, the functions for them among others."""
    tools = {wish.function.name: wish.function.tool for wish in [*wishes, *others]}
    listed = list(tools.values())
    rng.shuffle(listed)
    text = " ".join(wish.text for wish in wishes if wish.text)
    return Case(
        [{"role": "user", "content": text}], listed, [call_json(wish) for wish in wishes], thinking=thinking
    )


def one(rng: Random) -> Case:
    """A function of random words, alone."""
    return wished([random_wish(rng)], [], rng)


def simple(rng: Random) -> Case:
    """A function of random words with one parameter at most, alone."""
    while len((wish := random_wish(rng)).function.parameters) > 1:
        pass
    return wished([wish], [], rng)


def known(rng: Random) -> Case:
    """Weather, time, sums, searches, messages, prices, lights."""
    return wished([known_wish(rng)], [], rng)


def several(rng: Random) -> Case:
    """One of two to four functions."""
    wish, *others = distinct([any_wish(rng) for _ in range(rng.randint(2, 4))])
    return wished([wish], others, rng)


def two(rng: Random) -> Case:
    """Two calls at once: of two functions, or of one."""
    while True:
        if rng.random() < 0.3:
            wishes = twice(rng, known_wish(rng))
        else:
            wishes = distinct([any_wish(rng), any_wish(rng)])
        if len(wishes) == 2:
            return wished(wishes, [], rng)


def thinking(rng: Random) -> Case:
    """As `one`, with thoughts first."""
    return wished([any_wish(rng)], [], rng, thinking=True)


def answered(rng: Random) -> Case:
    """What a function answered is told."""
    wish = any_wish(rng)
    found, text = answer_to(rng, wish)
    case = wished([wish], [], rng)
    call = Turn("assistant", [], calls=case.calls).message
    return Case([*case.messages, call, {"role": "tool", "content": found}], case.tools, [], text)


def unfit(rng: Random) -> Case:
    """No function fits the wish."""
    while True:
        other = any_wish(rng)
        (asked, told) = refused_turns(rng, other, False)
        tools = [any_wish(rng).function.tool]
        if other.topic not in json.dumps(tools) and other.text in asked.parts:
            return Case([asked.message], tools, [], "".join(told.parts))


def talk(rng: Random, thinking: bool = False) -> Case:
    """Small talk beside functions."""
    asked, told = plain_turns(rng, False)
    tools = [any_wish(rng).function.tool] if not thinking else []
    return Case([asked.message], tools, [], "".join(told.parts), thinking)


def thoughtful(rng: Random) -> Case:
    """Small talk with thoughts, no functions."""
    return talk(rng, thinking=True)


class Talk:
    """The model, and how its answers are read."""

    def __init__(self, model: str | None, threads: int | None) -> None:
        self.llm = LLM(model, dtype="bfloat16", log_level="error", num_threads=threads)
        self.formats = Formats("hermes", "qwen3", True)

    def answers(self, cases: list[Case]) -> list[tuple[list[Json], str, str]]:
        """Calls, text and thoughts of each."""
        tokenizer = self.llm.get_tokenizer()
        prompts = [
            tokenizer.render_chat(
                case.messages, tools=case.tools or None, variables={"enable_thinking": case.thinking}
            )
            for case in cases
        ]
        ids = [{"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in prompts]
        limit = SamplingParams(temperature=0, max_tokens=200, skip_special_tokens=False)
        outputs = self.llm.generate(ids, limit, use_tqdm=False)
        return [self.read(case, one.outputs[0].text) for case, one in zip(cases, outputs, strict=True)]

    def read(self, case: Case, text: str) -> tuple[list[Json], str, str]:
        """An answer, taken apart."""
        names = frozenset(tool["function"]["name"] for tool in case.tools)
        parsing = Parsing(formats=self.formats, thinking=case.thinking, calling=bool(case.tools), tools=names)
        parsed = parse(parsing.parser(), text.removesuffix("<|im_end|>"))
        calls = []
        for call in parsed.calls:
            try:
                arguments = json.loads("".join(call.arguments))
            except ValueError:
                arguments = "".join(call.arguments)
            calls.append({"name": call.name, "arguments": arguments})
        return calls, "".join(parsed.content), "".join(parsed.reasoning).strip()


def measure(talk: Talk, name: str, cases: list[Case]) -> None:
    """Print the share that is right, and some that are not."""
    right, wrong = 0, []
    for case, (calls, text, thoughts) in zip(cases, talk.answers(cases), strict=True):
        if calls == case.calls and text == case.text and bool(thoughts) == case.thinking:
            right += 1
        else:
            said = case.messages[0]["content"]
            wrong.append(f"  {said!r} -> {calls or ''} {text!r}, not {case.calls or ''} {case.text!r}")
    print(f"{name}: {right}/{len(cases)} = {right / len(cases):.1%}", flush=True)
    print("\n".join(wrong[:4]), flush=True)


KINDS: dict[str, Callable[[Random], Case]] = {
    "one function, one parameter at most": simple,
    "one function, up to four parameters": one,
    "functions that examples have": known,
    "one of two to four functions": several,
    "two calls": two,
    "one function, with thoughts": thinking,
    "what a function answered": answered,
    "no function fits": unfit,
    "small talk beside a function": talk,
    "small talk, with thoughts": thoughtful,
}


def main() -> None:
    """Parse the arguments, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a directory (default: the embedded model)")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    talk = Talk(options.model, options.threads)
    with talk.llm:
        for name, make in KINDS.items():
            rngs = (Random(f"eval {name}/{options.seed}/{index}") for index in range(options.prompts))
            measure(talk, name, [make(rng) for rng in rngs])
        measure(talk, "functions of others", [wished([wish], [], Random(0)) for wish in FOREIGN])
    print(f"({time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    main()
