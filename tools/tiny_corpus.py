"""The text that `baton-tiny` learns from: written by this generator, from a seed, and from nothing else.

Theory. The model is a test instrument: a wrong, stale or misplaced KV block must show as a wrong *word*. So
most of the data is recall: a key ("the code word") gets a random value ("maple-4821") somewhere in a long
text, and is asked for later. Values come from a space of more than a thousand million, so nothing but
attention to the right place can answer. Other keys, look-alike values and several kinds of filler stand
around it, so that neither "the only odd word" nor "the last number" is a way to guess. The rest (small
talk, facts, sums, copying, lists, stories) makes the model answer like a chat model and end its turns.

A document is a list of segments `(text, weight)`; the weight is that of its tokens in the training loss: 1
for what the assistant says, little for what it only reads. Every function takes its own `random.Random`.
"""

from __future__ import annotations

from random import Random

import tiny_words as w
from tiny_talk import Count, arithmetic, filler, short_answer, story, story_sentence, value

Segment = tuple[str, float]
Message = dict[str, str]

START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
READ, PROSE, SAY = 0.02, 0.3, 1.0  # loss weights: what is only read, prose, what the assistant says

# --- keys and values ------------------------------------------------------------


def keys(rng: Random, count: int) -> list[str]:
    """`count` different things that can have a value; the code word is usually the first."""
    plain = [
        "secret word",
        "password",
        "magic word",
        "secret number",
        "pass phrase",
        "order number",
        "room number",
    ]
    found = ["code word"] if rng.random() < 0.75 else []
    while len(found) < count:
        kind = rng.random()
        if kind < 0.4:
            key = rng.choice(plain)
        elif kind < 0.75:
            key = f"{rng.choice(w.ADJECTIVES + w.COLOURS)} {rng.choice(['code', 'word', 'key', 'number'])}"
        else:
            key = f"code for the {rng.choice(w.PLACES + w.THINGS)}"
        if key not in found:
            found.append(key)
    return found[:count]


def statement(rng: Random, key: str, val: str) -> str:
    """A sentence that gives `key` its value."""
    forms = [f"The {key} is {val}."] * 5 + [
        f"Remember: the {key} is {val}.",
        f"Please remember that the {key} is {val}.",
        f"Remember this: the {key} is {val}.",
        f"Note that the {key} is {val}.",
        f"Important: the {key} is {val}.",
        f"My {key} is {val}.",
        f'The {key} is "{val}".',
        f"By the way, the {key} is {val}.",
        f"{key.capitalize()}: {val}.",
    ]
    return rng.choice(forms)


def question(rng: Random, key: str) -> str:
    """A question for the value of `key`."""
    forms = [f"What is the {key}?"] * 6 + [
        f"Tell me the {key}.",
        f"What was the {key}?",
        f"Do you remember the {key}?",
        f"What is my {key}?",
        f"Which {key} did I give you?",
        f"what is the {key}",
        f"Please tell me the {key}.",
        f"Question: What is the {key}?",
    ]
    return rng.choice(forms)


def reply(key: str, val: str) -> str:
    """The answer to `question`."""
    return f"The {key} is {val}."


# --- documents ---------------------------------------------------------------------------------------------

SYSTEMS = [
    "You are a helpful assistant.",
    "You are Baton Tiny.",
    "Answer in short sentences.",
    "Be kind and brief.",
]


def chat(messages: list[Message]) -> list[Segment]:
    """Messages in the chat template; only what the assistant says weighs fully."""
    out: list[Segment] = []
    for message in messages:
        out.append((f"{START}{message['role']}\n", READ))
        out.append((message["content"] + END, SAY if message["role"] == "assistant" else READ))
        out.append(("\n", READ))
    return out


def exchange(ask: str, answer: str) -> list[Message]:
    """One turn of the user and one of the assistant."""
    return [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]


def recall_messages(
    rng: Random, tokens: int, count: Count, pairs: list[tuple[str, str]], asked: str
) -> list[Message]:
    """Messages of about `tokens` tokens that state all pairs; the last one asks for `asked`."""
    said = [statement(rng, key, val) for key, val in pairs]
    ask = question(rng, asked)
    layout = rng.choice(["one", "one", "one", "system", "turns"])
    room = tokens - count(" ".join(said)) - count(ask) - 24
    pieces = filler(rng, room if layout != "turns" else room * 9 // 10, count)
    acknowledged = rng.choice(["OK.", "I will remember that.", "I see."])
    messages: list[Message] = []
    if layout == "system":
        messages.append({"role": "system", "content": " ".join([rng.choice(SYSTEMS), *said])})
    else:
        if rng.random() < 0.2:
            messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
        for line in said:
            pieces.insert(rng.randint(0, len(pieces)), line)
    join = rng.choice([" ", " ", " ", "\n", "\n\n"])
    if layout == "turns":
        turns = rng.randint(2, 4)
        cuts = sorted(rng.randint(0, len(pieces)) for _ in range(turns - 1))
        for start, stop in zip([0, *cuts], [*cuts, len(pieces)], strict=True):
            if start < stop:
                messages += exchange(join.join(pieces[start:stop]), acknowledged)
            if rng.random() < 0.4:
                messages += exchange(*short_answer(rng))
        return [*messages, {"role": "user", "content": ask}]
    before = rng.choice(["", "", "", "Read this text.", "Read this text and answer the question at its end."])
    parts = [part for part in (before, join.join(pieces), ask) if part]
    return [*messages, {"role": "user", "content": rng.choice([" ", "\n", "\n\n"]).join(parts)}]


def recall_document(rng: Random, tokens: int, count: Count) -> list[Segment]:
    """A chat, or plain text, of about `tokens` tokens that states values and asks for them."""
    number = rng.choice((1, 2, 3, 4, 6, 8, 12)) if tokens > 500 else rng.choice((1, 1, 2, 3))
    pairs = [(key, value(rng)) for key in keys(rng, number)]
    asked = rng.sample(pairs, number)
    if rng.random() < 0.15:
        room = tokens - 2 * count(" ".join(reply(key, val) for key, val in pairs)) - 8 * number
        pieces = filler(rng, room, count)
        for key, val in pairs:
            pieces.insert(rng.randint(0, len(pieces)), reply(key, val))
        text, out = " ".join(pieces) + "\n", list[Segment]()
        for key, val in asked:
            if rng.random() < 0.5:
                lead, end = f"Question: What is the {key}?\nAnswer:", f" {reply(key, val)}\n"
            else:
                lead, end = f"So the {key} is", f" {val}.\n"
            out += [(text + lead, READ), (end, SAY)]
            text = ""
        return out
    more: list[Message] = []
    for key, val in asked[1:]:
        if rng.random() < 0.2:
            more += exchange(*short_answer(rng))
        more += exchange(question(rng, key), reply(key, val))
    used = count("\n".join(message["content"] for message in more)) + 5 * len(more)
    first_key, first_val = asked[0]
    messages = recall_messages(rng, tokens - used - 24, count, pairs, first_key)
    return chat([*messages, {"role": "assistant", "content": reply(first_key, first_val)}, *more])


def short_document(rng: Random) -> list[Segment]:
    """A chat of a few turns, a piece of plain text, or a drill in sums."""
    kind = rng.random()
    if kind < 0.12:
        loose = " ".join(story_sentence(rng) for _ in range(rng.randint(2, 6)))
        return [(story(rng) if rng.random() < 0.5 else loose, PROSE)]
    if kind < 0.30:
        out: list[Segment] = []
        for _ in range(rng.randint(4, 16)):
            left, right = arithmetic(rng)[1].split(" = ")
            out += [(f"{left} =", READ), (f" {right}\n", SAY)]
        return out
    if kind < 0.34:
        line = "\n".join(short_answer(rng)[1] for _ in range(3))
        return [(line + "\n", PROSE), (line, SAY)]
    messages: list[Message] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        messages += exchange(*short_answer(rng))
    return chat(messages)


def document(rng: Random, tokens: int, count: Count, recall: float) -> list[Segment]:
    """A document of at most about `tokens` tokens; `recall` is the share of recall documents."""
    if tokens > 80 and rng.random() < recall:
        return recall_document(rng, tokens, count)
    return short_document(rng)
