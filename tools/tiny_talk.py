"""Sentences and short answers: the small talk of `baton-tiny`, its facts, sums, lists and stories, and its
filler.

Theory. A question and its answer are drawn from templates over the word lists of `tiny_words`; a model of
this size can learn all of them. Filler is what stands between a fact and the question for it. It comes in
many kinds (prose, facts, random words, words that mean nothing, log lines, code, the same sentence again
and again), so that what the model learns is to look for the fact, not to know the filler. "Look-alikes" are
sentences whose values have the form of a code word but belong to something else.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import tiny_words as w

Count = Callable[[str], int]  # how many tokens a text has

# --- values ---------------------------------------------------------------------------------------


def digits(rng: Random, count: int) -> str:
    """`count` random digits."""
    return "".join(rng.choice("0123456789") for _ in range(count))


def pseudo_word(rng: Random) -> str:
    """A pronounceable word that means nothing: two or three syllables."""
    syllables = (rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.choice((2, 2, 3))))
    return "".join(syllables) + rng.choice(["", "", "n", "r", "s", "x", "l", "m"])


def code_word(rng: Random) -> str:
    """A code word as users and tests give them: word or pseudo-word, dash, digits (or a second word)."""
    first = rng.choice(w.WORDS) if rng.random() < 0.5 else pseudo_word(rng)
    kind = rng.random()
    if kind < 0.7:
        return f"{first}-{digits(rng, 4)}"
    if kind < 0.9:
        return f"{first}-{rng.choice(w.WORDS)}-{digits(rng, 2)}"
    return f"{first}-{pseudo_word(rng)}-{digits(rng, 3)}"


def value(rng: Random) -> str:
    """Any value that a key may have: mostly code words, else plain words, capitals or numbers."""
    kind = rng.random()
    if kind < 0.7:
        return code_word(rng)
    if kind < 0.78:
        return rng.choice(w.WORDS)
    if kind < 0.84:
        return pseudo_word(rng).capitalize()
    if kind < 0.92:
        return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(3)) + "-" + digits(rng, 3)
    return digits(rng, rng.choice((3, 4, 5, 6)))


# --- filler ------------------------------------------------------------------------------------------------


def story_sentence(rng: Random) -> str:
    """One plain sentence of a story, not bound to the others."""
    name, other = rng.sample(w.NAMES, 2)
    animal, place, thing = rng.choice(w.ANIMALS), rng.choice(w.PLACES), rng.choice(w.THINGS)
    adjective, verb, adverb = rng.choice(w.ADJECTIVES), rng.choice(w.VERBS), rng.choice(w.ADVERBS)
    return rng.choice(
        [
            f"{name} {verb} {adverb} in the {place}.",
            f"The {adjective} {animal} {verb} near the {place}.",
            f"{name} gave the {adjective} {thing} to {other}.",
            f"On {rng.choice(w.DAYS)} {name} and {other} went to the {place}.",
            f"There was a {adjective} {thing} in the {place}, and the {animal} {verb} {adverb}.",
            f"{name} had {rng.choice(w.NUMBERS[2:])} {rng.choice(w.FRUITS)} and a {adjective} {thing}.",
            f'"Where is the {thing}?" asked {name}.',
            f"In {rng.choice(w.MONTHS)} the {place} was {adjective} and {rng.choice(w.ADJECTIVES)}.",
            f"{other} liked the {adjective} {animal} because it {verb} {adverb}.",
            f"Then the {animal} {verb} to the {place} and {rng.choice(w.VERBS)} there.",
        ]
    )


def noise_sentence(rng: Random, kind: str) -> str:
    """One sentence (or line) of a kind of filler."""
    if kind == "words":
        return " ".join(rng.choice(w.WORDS) for _ in range(rng.randint(4, 14))).capitalize() + "."
    if kind == "gibberish":
        return " ".join(pseudo_word(rng) for _ in range(rng.randint(4, 10))).capitalize() + "."
    if kind == "log":
        clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}:{rng.randint(0, 59):02}"
        part, number = rng.choice(w.WORDS), rng.randint(0, 99)
        return f"[{clock}] {part} {number}: {rng.choice(w.WORDS)} {rng.choice(w.VERBS)}"
    if kind == "code":
        return f"{rng.choice(w.WORDS)}_{rng.choice(w.WORDS)} = {pseudo_word(rng)}({rng.randint(0, 999)})"
    if kind == "look-alikes":
        return f"The {rng.choice(w.THINGS)} of {rng.choice(w.NAMES)} has the number {code_word(rng)}."
    if kind == "symbols":
        points = [
            rng.choice(
                [
                    rng.randint(33, 126),
                    rng.randint(0xA1, 0x17F),
                    rng.randint(0x391, 0x3C9),
                    rng.randint(0x4E00, 0x4EFF),
                    rng.randint(0x1F600, 0x1F64F),
                ]
            )
            for _ in range(8)
        ]
        return "".join(map(chr, points))
    if kind == "facts":
        return short_answer(rng)[1].split("\n")[0]
    return story_sentence(rng)


KINDS = ["story"] * 5 + ["facts"] * 2 + ["words"] * 3 + ["gibberish", "log", "code", "look-alikes", "repeat"]


def filler(rng: Random, tokens: int, count: Count) -> list[str]:
    """Sentences that have together about `tokens` tokens (never more)."""
    mixed = rng.random() < 0.35
    kind = rng.choice(KINDS)
    repeated = [
        noise_sentence(rng, rng.choice(["story", "facts", "words"])) for _ in range(rng.randint(1, 4))
    ]
    out: list[str] = []
    while True:
        if mixed and rng.random() < 0.2:
            kind = "symbols" if rng.random() < 0.02 else rng.choice(KINDS)
        line = repeated[len(out) % len(repeated)] if kind == "repeat" else noise_sentence(rng, kind)
        tokens -= count(line) + 1
        if tokens < 0:
            return out
        out.append(line)


# --- short questions and answers ---------------------------------------------------------------------------


def arithmetic(rng: Random) -> tuple[str, str]:
    """A small addition or subtraction (never below zero)."""
    top = rng.choice((10, 20, 20, 99))
    a, b = rng.randint(0, top), rng.randint(0, top)
    if rng.random() < 0.5:
        words, sum_ = ("+", "plus"), f"{a} + {b} = {a + b}."
    else:
        a, b = max(a, b), min(a, b)
        words, sum_ = ("-", "minus"), f"{a} - {b} = {a - b}."
    sign = words[rng.random() < 0.3]
    ask = rng.choice(
        ["What is {}?", "What is {}?", "What is {}?", "How much is {}?", "Calculate {}.", "{} = ?", "{}"]
    )
    return ask.format(f"{a} {sign} {b}"), sum_


def copying(rng: Random) -> tuple[str, str]:
    """Repeat a text exactly."""
    kind = rng.random()
    if kind < 0.3:
        text = story_sentence(rng)
    elif kind < 0.55:
        text = " ".join(rng.choice(w.WORDS) for _ in range(rng.randint(1, 10)))
    elif kind < 0.75:
        text = " ".join(value(rng) for _ in range(rng.randint(1, 3)))
    else:
        text = noise_sentence(rng, rng.choice(["gibberish", "code", "log", "symbols"]))
    ask = rng.choice(
        [
            "Repeat after me: ",
            "Repeat after me: ",
            "Repeat after me:\n",
            "Repeat: ",
            "Say: ",
            "Copy: ",
            "Please repeat: ",
            "Repeat this: ",
        ]
    )
    return ask + text, text


def listing(rng: Random) -> tuple[str, str]:
    """Name some members of a class, or count."""
    if rng.random() < 0.5:
        first = rng.choice((1, 1, rng.randint(0, 40)))
        last = first + rng.choice((rng.randint(2, 15), rng.randint(2, 15), rng.randint(2, 59)))
        numbers = [str(number) for number in range(first, last + 1)]
        if rng.random() < 0.2:
            return f"Count down from {last} to {first}.", ", ".join(reversed(numbers)) + "."
        return f"Count from {first} to {last}.", ", ".join(numbers) + "."
    name, members = rng.choice(list(w.CATEGORIES.items()))
    number = rng.randint(2, min(5, len(members)))
    ask = rng.choice(["Name {} {}.", "Tell me {} {}.", "List {} {}.", "Give me {} {}."])
    chosen = rng.sample(members, number)
    start = f"{w.NUMBERS[number].capitalize()} {name} are "
    return ask.format(w.NUMBERS[number], name), start + ", ".join(chosen[:-1]) + f" and {chosen[-1]}."


def an(noun: str) -> str:
    """`noun` with its article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def fact(rng: Random) -> tuple[str, str]:
    """A question about the small world of `tiny_words`."""
    kind = rng.randrange(10)
    if kind == 0:
        word, other = rng.choice(list(w.OPPOSITES.items()))
        word, other = (word, other) if rng.random() < 0.6 else (other, word)
        return (
            rng.choice(
                [
                    f"What is the opposite of {word}?",
                    f"Opposite of {word}?",
                    f"Tell me the opposite of {word}.",
                ]
            ),
            f"The opposite of {word} is {other}.",
        )
    if kind == 1:
        thing, colour = rng.choice(list(w.COLOUR_OF.items()))
        return (
            rng.choice([f"What colour is {thing}?", f"What color is {thing}?"]),
            f"{thing[0].upper()}{thing[1:]} is {colour}.",
        )
    if kind == 2:
        animal, sound = rng.choice(list(w.SOUNDS.items()))
        one = an(animal)
        return (
            rng.choice([f"What does {one} do?", f"What sound does {one} make?"]),
            f"{one[0].upper()}{one[1:]} {sound}.",
        )
    if kind == 3:
        animal, child = rng.choice(list(w.YOUNG.items()))
        return f"What is a young {animal} called?", f"A young {animal} is called {child}."
    if kind == 4:
        animal, legs = rng.choice(list(w.LEGS.items()))
        return f"How many legs does a {animal} have?", f"A {animal} has {legs} legs."
    if kind == 5:
        country, capital = rng.choice(list(w.CAPITALS.items()))
        return (
            rng.choice([f"What is the capital of {country}?", f"Capital of {country}?"]),
            f"The capital of {country} is {capital}.",
        )
    if kind == 6:
        cycle = rng.choice([w.DAYS, w.MONTHS])
        at = rng.randrange(len(cycle))
        what = "day" if cycle is w.DAYS else "month"
        if rng.random() < 0.6:
            return f"Which {what} comes after {cycle[at - 1]}?", f"{cycle[at]} comes after {cycle[at - 1]}."
        return f"Which {what} comes before {cycle[at]}?", f"{cycle[at - 1]} comes before {cycle[at]}."
    if kind == 7:
        word = rng.choice(w.ANIMALS + w.COLOURS)
        return rng.choice([f"Spell {word}.", f"Spell the word {word}."]), f"{'-'.join(word)}."
    if kind == 8:
        a, b = rng.sample(range(100), 2)
        return f"Which is bigger, {a} or {b}?", f"{max(a, b)} is bigger."
    at = rng.randrange(25)
    return f"Which letter comes after {chr(97 + at)}?", f"{chr(98 + at)} comes after {chr(97 + at)}."


def story(rng: Random) -> str:
    """A short story about one animal that keeps its name and its find."""
    animal, place, thing = rng.choice(w.ANIMALS), rng.choice(w.PLACES), rng.choice(w.THINGS)
    name, friend = rng.sample(w.NAMES, 2)
    adjective, shape = rng.sample(w.ADJECTIVES, 2)
    lines = [
        f"Once upon a time there was a {adjective} {animal} named {name}.",
        f"{name} lived near the {place}.",
    ]
    lines += rng.sample(
        [
            f"One day {name} found a {shape} {thing}.",
            f"{name} was very {rng.choice(w.ADJECTIVES)}.",
            f"Every morning {name} {rng.choice(w.VERBS)} to the {place}.",
            f"A friend named {friend} came to see the {thing}.",
            f'"What a {shape} {thing}!" said {friend}.',
            f"Then {name} and {friend} {rng.choice(w.VERBS)} {rng.choice(w.ADVERBS)}.",
        ],
        rng.randint(2, 5),
    )
    return " ".join([*lines, f"In the end {name} and {friend} were happy."])


def short_answer(rng: Random) -> tuple[str, str]:
    """One question and answer of any kind but recall."""
    kind = rng.random()
    if kind < 0.25:
        return arithmetic(rng)
    if kind < 0.42:
        return copying(rng)
    if kind < 0.52:
        return listing(rng)
    if kind < 0.77:
        return fact(rng)
    if kind < 0.80:
        return rng.choice(["Tell me a story.", "Tell me a short story.", "Write a story."]), story(rng)
    asks, answers = rng.choice(w.SMALL_TALK)
    return rng.choice(asks), rng.choice(answers)
