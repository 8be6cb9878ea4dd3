"""Functions of random words, and what users say who wish for them.

Theory. What a wish and its function share is a word ("the copper lantern" and `find_copper_lantern`, "Finds a
copper lantern."), and its arguments are words of the wish; everything else is drawn at random, so nothing can
be known by heart. `Wish.answer` begins the sentence that gives the function's result to the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import tiny_words as w
from tiny_talk import code_word, digits, pseudo_word, story_sentence

Json = dict[str, Any]

CITIES = [*w.CAPITALS.values(), "New York", "Hamburg", "Milan", "Boston", "Delhi", "Sydney", "Oxford", "Lyon"]


@dataclass(frozen=True)
class Value:
    """An argument: what stands in the call, and the words for it in the wish."""

    json: Any
    said: str
    quoted: bool = False  # it stands between quotes in the wish


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function."""

    name: str
    kind: str  # string, integer, number, boolean, enum
    choices: tuple[str, ...] = ()
    required: bool = True

    @property
    def schema(self) -> Json:
        """As JSON schema."""
        if self.kind == "enum":
            return {"type": "string", "enum": list(self.choices)}
        return {"type": self.kind}


@dataclass(frozen=True)
class Function:
    """A function that the model may call."""

    name: str
    about: str
    parameters: tuple[Parameter, ...]

    @property
    def tool(self) -> Json:
        """As the API takes it."""
        made: Json = {"name": self.name}
        if self.about:
            made["description"] = self.about
        made["parameters"] = {
            "type": "object",
            "properties": {one.name: one.schema for one in self.parameters},
            "required": [one.name for one in self.parameters if one.required],
        }
        return {"type": "function", "function": made}


@dataclass(frozen=True)
class Wish:
    """What a user says, the function that fits and its arguments (in the schema's order)."""

    text: str
    topic: str  # what it is about, as the thoughts name it
    function: Function
    arguments: dict[str, Value]
    answer: str = "The result is"  # what comes before the function's result


def parameter(rng: Random, taken: Sequence[str]) -> Parameter:
    """A parameter of a random name and kind."""
    while True:
        name = rng.choice(PARAMETERS) if rng.random() < 0.7 else rng.choice(w.WORDS)
        if rng.random() < 0.15:
            name = f"{name}_{rng.choice(w.WORDS)}"
        if name not in taken:
            break
    kind = rng.choices(["string", "integer", "number", "boolean", "enum"], [55, 17, 8, 8, 12])[0]
    pool = rng.choice(
        [w.COLOURS, w.SEASONS, w.DRINKS, w.SPORTS, w.WORDS, ["celsius", "fahrenheit", "kelvin"]]
    )
    choices = tuple(rng.sample(pool, rng.randint(2, min(4, len(pool))))) if kind == "enum" else ()
    return Parameter(name, kind, choices, required=rng.random() < 0.75)


PARAMETERS = """\
city place name day month colour size count number price title text id code unit time person animal date user
country language room topic query amount level speed mode weight height street address symbol key file path
""".split()


def value(rng: Random, one: Parameter) -> Value:
    """An argument for a parameter."""
    if one.kind == "enum":
        chosen = rng.choice(one.choices)
        return Value(chosen, chosen)
    if one.kind == "boolean":
        flag = rng.random() < 0.5
        said = rng.choice(["true", "yes", "on"] if flag else ["false", "no", "off"])
        return Value(flag, said)
    if one.kind == "integer":
        number = rng.randint(0, 10 ** rng.randint(1, 5))
        return Value(number, str(number))
    if one.kind == "number":
        text = f"{rng.randint(0, 999)}.{rng.randint(1, 9)}"
        return Value(float(text), text)
    return text_value(rng, named=one.name in ("city", "place"))


def text_value(rng: Random, named: bool = False) -> Value:
    """A text: cities, names, words, words without meaning, codes."""
    kind = rng.random()
    if named or kind < 0.22:
        text = rng.choice(CITIES)
    elif kind < 0.34:
        text = rng.choice([*w.NAMES, *w.CAPITALS, *w.DAYS, *w.MONTHS])
    elif kind < 0.55:
        text = " ".join(rng.sample(w.WORDS, rng.choice((1, 1, 1, 2, 3))))
    elif kind < 0.68:
        text = pseudo_word(rng)
        text = text.capitalize() if rng.random() < 0.6 else text
    elif kind < 0.86:
        text = code_word(rng)
    elif kind < 0.91:
        text = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 5)))
    elif kind < 0.95:
        text = f"{pseudo_word(rng)}@{rng.choice(w.WORDS)}.com"
    else:
        text = f"{rng.choice(w.WORDS)}_{digits(rng, 3)}"
    if rng.random() < 0.12:
        return Value(text, f'"{text}"', quoted=True)
    return Value(text, text)


VERBS = """\
Finds:Find Tells:Tell-me Sends:Send Opens:Open Closes:Close Gets:Get Shows:Show-me Books:Book Makes:Make
Starts:Start Stops:Stop Checks:Check Reads:Read Writes:Write Buys:Buy Sets:Set Counts:Count Looks-up:Look-up
Gives:Give-me Orders:Order Paints:Paint Moves:Move Plays:Play Calls:Call Deletes:Delete Saves:Save Turns:Turn
""".split()
SKIES = "sunny cloudy rainy windy warm cold snow fog dry wet clear stormy mild".split()
PREPOSITIONS = "in of for at from to near by".split()


def random_function(rng: Random) -> tuple[Function, str, str]:
    """A function of random words, what it is about, and the verb of a wish for it."""
    verbs, verb = rng.choice(VERBS).split(":")
    verbs, verb = verbs.replace("-", " "), verb.replace("-", " ")
    noun = rng.choice(w.WORDS + w.THINGS + w.PLACES + w.ANIMALS)
    if rng.random() < 0.2:
        noun = f"{rng.choice(w.WORDS)} {noun}"
    stem, first = noun.replace(" ", "_"), verb.split()[0].lower()
    name = rng.choice(
        [stem, stem, f"get_{stem}", f"{first}_{stem}", f"{first}_{stem}", f"{stem}_{rng.choice(w.WORDS)}"]
    )
    if rng.random() < 0.12:
        name = pseudo_word(rng)
    elif rng.random() < 0.1:
        name = f"{first}{stem.title().replace('_', '')}"
    listed: list[Parameter] = []
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 2, 3, 4))):
        listed.append(parameter(rng, [one.name for one in listed]))
    of = f" {rng.choice(PREPOSITIONS)} a {listed[0].name}" if listed and rng.random() < 0.4 else ""
    about = f"{verbs} {rng.choice(['the', 'the', 'a', 'any'])} {noun}{of}."
    if rng.random() < 0.12:
        about += f" {story_sentence(rng)}"
    if noun.split()[-1] in name and rng.random() < 0.1:
        about = ""
    return Function(name, about, tuple(listed)), noun, verb


def chosen_values(rng: Random, function: Function) -> dict[str, Value]:
    """Arguments for all that is required, and some of the rest."""
    return {one.name: value(rng, one) for one in function.parameters if one.required or rng.random() < 0.5}


def function_requires(function: Function, name: str) -> bool:
    """Whether this parameter must be given."""
    return any(one.name == name and one.required for one in function.parameters)


def random_wish(rng: Random) -> Wish:
    """A wish for a function of random words."""
    function, noun, verb = random_function(rng)
    given = chosen_values(rng, function)
    said = list(given.items())
    if rng.random() < 0.3:
        rng.shuffle(said)
    where = rng.choice(PREPOSITIONS)
    plain = len(said) == 1 and (len(function.parameters) == 1 or function_requires(function, said[0][0]))
    if plain and rng.random() < 0.75:
        text = f"the {noun} {where} {said[0][1].said}"
        if rng.random() < 0.55:
            ask = rng.choice(["How is {}?", "What is {}?", "What is {}?", "Where is {}?", "What was {}?"])
            is_ = "was" if "was" in ask else "is"
            return Wish(ask.format(text), noun, function, given, f"T{text[1:]} {is_}")
        return Wish(polite(rng, f"{verb} {text}"), noun, function, given)
    form = rng.choice(["{} {}", "{} {}", "{} {}", "{} is {}", "{}: {}", "{} = {}"])
    parts = [form.format(key.replace("_", " ") if rng.random() < 0.3 else key, one.said) for key, one in said]
    listed = (
        ", ".join(parts[:-1]) + f"{rng.choice([' and ', ', '])}{parts[-1]}" if parts[1:] else "".join(parts)
    )
    if rng.random() < 0.2:
        start = rng.choice([f"Call {function.name}", f"Use {function.name}", f"Please call {function.name}"])
    else:
        start = f"{verb} the {noun}"
    with_ = rng.choice([" with ", " with ", ", ", ": "]) if listed else ""
    return Wish(polite(rng, f"{start}{with_}{listed}"), noun, function, given)


def polite(rng: Random, text: str) -> str:
    """A wish in one of several tones."""
    lower = text[0].lower() + text[1:]
    return rng.choice(
        [
            f"{text}.",
            f"{text}.",
            f"{text}.",
            f"Please {lower}.",
            f"Can you {lower}?",
            f"{text}, please.",
            text,
        ]
    )
