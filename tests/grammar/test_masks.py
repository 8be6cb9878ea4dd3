"""The matchers of running requests: what they allow, by random choices, with no model."""

from __future__ import annotations

import json
import random
import threading
from functools import cache

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLParserLimits, LLTokenizer

from baton.grammar import compiled, masks
from baton.grammar.checking import Checker
from baton.grammar.description import (
    Choice,
    Content,
    Json,
    Regex,
    Sequence,
    Structure,
    Tag,
    Tagged,
    Text,
    Token,
)
from baton.grammar.masks import Masks
from baton.grammar.vocabulary import Vocabulary, matching_tokenizer
from baton.protocol.params.sampling import Constraint, Stopping

WORDS = ['{"', '":', '", "', '"}', "true", "null", "12", "é", "😀", "a b", "\\n", "},{", "name", "e5", '"']
TOKENS = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS]
END, OTHER_END, SPECIAL = 280, 281, {"</s>": 280, "<|end|>": 281, "<|call|>": 282}
VOCAB = 300
SLOTS = 4
SCHEMAS = [
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", None]}},
        "required": ["b"],
    },
    {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "number", "minimum": 0.5, "maximum": 7}, {"const": {"k": [1, "é"]}}]},
    {
        "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}, "additionalProperties": False}},
        "$ref": "#/$defs/n",
    },
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
]


@cache
def tokenizer() -> LLTokenizer:
    return matching_tokenizer(TOKENS, SPECIAL, VOCAB)


class Site:
    """Masks of some slots, and who chooses."""

    def __init__(self, *, threads: int = 1, beside: bool = False) -> None:
        self.bits = np.zeros((SLOTS, VOCAB // 32 + 1), np.uint32)
        self.masked = np.zeros(SLOTS, np.uint8)
        self.masks = Masks(tokenizer, self.bits, self.masked, VOCAB, threads=threads, beside=beside)

    def admit(self, slot: int, content: Content, generated: list[int] = [], **more) -> None:  # noqa: B006
        constraint = Constraint(Checker(SPECIAL).check(Structure(content)), **more)
        stopping = Stopping(100, stop_token_ids=(END, OTHER_END))
        self.masks.admit(slot, np.array(generated, np.int32), constraint, stopping)

    def ready(self, slots: list[int]) -> dict[int, str]:
        """Who failed, once none is late any more."""
        while True:
            self.masks.begin(np.array(slots, np.int32))
            failed, late = self.masks.ready()
            if not late:
                return failed

    def allowed(self, slots: list[int]) -> list[list[int]]:
        """What may come next, for each."""
        assert self.ready(slots) == {}
        bits = np.unpackbits(self.bits.view(np.uint8), axis=1, bitorder="little")
        return [np.flatnonzero(bits[slot]).tolist() for slot in slots]

    def choose(self, slots: list[int], tokens: list[int]) -> dict[int, str]:
        return self.masks.chosen(np.array(slots, np.int32), np.array(tokens, np.int32))


def text_of(tokens: list[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens if token < len(TOKENS)).decode()


def walk(site: Site, slot: int, choices: random.Random, tokens: list[int], most: int) -> bool:
    """Goes on with `tokens` until the end, or until there are `most`.  Returns whether it ended."""
    while len(tokens) < most:
        (allowed,) = site.allowed([slot])
        token = choices.choice(allowed) if END not in allowed or choices.random() < 0.7 else END
        site.choose([slot], [token])
        tokens.append(token)
        if token in (END, OTHER_END):
            return True
    return False


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
@pytest.mark.parametrize(("threads", "beside"), [(1, False), (2, True)])
def test_what_ends_is_valid_also_after_it_was_interrupted(schema, threads, beside):
    """An answer that is cut anywhere and goes on elsewhere, from its tokens, is the same."""
    valid = jsonschema_rs.validator_for(schema)
    ended = 0
    for seed in range(12):
        whole: list[int] = []
        site = Site(threads=threads, beside=beside)
        site.admit(1, Json(schema))
        if not walk(site, 1, random.Random(seed), whole, 120):
            continue
        ended += 1
        assert valid.is_valid(json.loads(text_of(whole))), text_of(whole)
        site.masks.close()
        choices, parts = random.Random(seed), []
        for cut in sorted({len(whole) // 3, len(whole) // 2, len(whole)}):
            site = Site(threads=threads, beside=beside)
            site.admit(2, Json(schema), parts)
            walk(site, 2, choices, parts, cut)
            site.masks.close()
        assert parts == whole
    assert ended >= 3


def test_rows_do_not_see_each_other():
    together, alone = Site(threads=2), Site()
    contents = [Json({"type": "null"}), Regex("[ab]+"), Json({"type": "boolean"})]
    for slot, content in enumerate(contents):
        together.admit(slot, content)
    found = together.allowed([2, 0, 1])
    for slot, allowed in zip([2, 0, 1], found, strict=True):
        alone.admit(3, contents[slot])
        assert alone.allowed([3]) == [allowed]
    assert together.masked.tolist() == [1, 1, 1, 0]
    together.masks.release(0)
    assert together.masked.tolist() == [0, 1, 1, 0]
    assert together.masks.any


def test_the_end_comes_where_the_grammar_accepts():
    """Each of the request's end tokens, and no other special one."""
    site = Site()
    site.admit(0, Regex("a?b"))
    a, b = ord("a"), ord("b")
    assert site.allowed([0]) == [[a, b]]
    site.choose([0], [a])
    assert site.allowed([0]) == [[b]]
    site.choose([0], [b])
    assert site.allowed([0]) == [[END, OTHER_END]]


def test_ignore_eos_and_min_tokens_end_it_only_where_nothing_else_may_follow():
    site = Site()
    a = ord("a")
    site.admit(0, Regex("a{1,3}"), goes_on=True)
    site.admit(1, Regex("a{1,3}"), min_tokens=2)
    site.admit(2, Regex("a"), min_tokens=5)
    for free in ([[a], [a], [a]], [[a], [a], [END, OTHER_END]]):
        assert site.allowed([0, 1, 2]) == free
        site.choose([0, 1, 2], [a, a, a])
        site.masks.release(2) if free[2] != [a] else None
    assert site.allowed([0, 1]) == [[a], [a, END, OTHER_END]]
    site.choose([0, 1], [a, a])
    assert site.allowed([0, 1]) == [[END, OTHER_END], [END, OTHER_END]]


def test_a_matcher_that_fails_fails_alone():
    site = Site()
    site.masks.admit(0, np.array([], np.int32), Constraint("no grammar at all {"), Stopping(9))
    site.admit(1, Regex("ab"))
    site.admit(2, Regex("ab"), [ord("b")])  # its tokens are not the grammar's
    site.masks.admit(
        3, np.array([], np.int32), Constraint(Checker({}).check(Structure(Regex("")))), Stopping(9)
    )
    failures = site.ready([0, 1, 2, 3])
    assert sorted(failures) == [0, 2]
    failures |= site.choose([1, 3], [ord("a"), 0])  # (slot 3: nothing may follow, and nothing ends it)
    assert sorted(failures) == [0, 2, 3]
    assert all(why.startswith("structured_outputs: ") and "\n" not in why for why in failures.values())
    assert np.unpackbits(site.bits[1].view(np.uint8)).sum() == 1


def test_a_vocabulary_that_cannot_be_had_fails_the_requests_that_need_it():
    def none() -> LLTokenizer:
        raise OSError("it was not written")

    site = Site()
    site.masks = Masks(none, site.bits, site.masked, VOCAB, threads=1, beside=False)
    site.admit(0, Regex("ab"))
    assert "it was not written" in site.ready([0])[0]


def test_equal_grammars_are_compiled_once():
    calls = 0

    def counted() -> LLTokenizer:
        nonlocal calls
        calls += 1
        return tokenizer()

    site = Site()
    site.masks = Masks(counted, site.bits, site.masked, VOCAB, threads=1, beside=False)
    for slot in range(SLOTS):
        site.admit(slot, Regex("ab"))
    assert len(site.allowed([0, 1, 2, 3])) == SLOTS
    assert calls == 1


def test_a_vocabulary_travels():
    vocabulary = Vocabulary(TOKENS, SPECIAL)
    assert Vocabulary.decode(vocabulary.encode()) == vocabulary


@pytest.mark.parametrize("beside", [False, True])
def test_no_row_waits_for_the_grammar_of_another(beside):
    """While a grammar is compiled its request is late, step after step, and the others have their masks."""
    compile_it = threading.Event()
    made = []

    def slow() -> LLTokenizer:
        if made:
            assert compile_it.wait(60)
        made.append(1)
        return tokenizer()

    site = Site()
    now = [0.0]
    site.masks = Masks(slow, site.bits, site.masked, VOCAB, threads=2, beside=beside, clock=lambda: now[0])
    a, b = ord("a"), ord("b")
    site.admit(0, Regex("ab"))
    assert site.allowed([0]) == [[a]]
    site.choose([0], [a])
    site.admit(1, Regex("ba"))  # (its compiler stands)
    site.admit(2, Regex("ab"), [a])  # known already: it does not queue behind the other
    while True:
        site.masks.begin(np.arange(3, dtype=np.int32))
        found = site.masks.ready()
        assert found.failed == {}
        assert 1 in found.late
        if found.late == [1]:
            break
    bits = np.unpackbits(site.bits.view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(bits[slot]).tolist() for slot in (0, 2)] == [[b], [b]]
    assert site.choose([0, 2], [b, b]) == {}
    site.masks.begin(np.array([1], np.int32))  # nobody else gets a token: waits for a moment, and is late
    assert site.masks.ready().late == [1]
    now[0] = 61.0
    site.masks.begin(np.array([1], np.int32))
    found = site.masks.ready()
    assert "not compiled within 60 s" in found.failed[1]
    now[0] = 0.0
    compile_it.set()
    assert site.allowed([1]) == [[b]]
    site.masks.close()


def test_what_nobody_waits_for_any_more_is_not_compiled():
    compile_it, made = threading.Event(), []

    def slow() -> LLTokenizer:
        assert compile_it.wait(60)
        made.append(1)
        return tokenizer()

    site = Site()
    site.masks = Masks(slow, site.bits, site.masked, VOCAB, threads=1, beside=False)
    for number, pattern in enumerate(("a", "b", "c", "b")):
        site.admit(number, Regex(pattern))
    site.masks.release(2)
    site.masks.release(1)  # (slot 3 still wants it)
    site.masks.release(3)
    site.admit(1, Regex("d"))
    compile_it.set()
    assert site.allowed([0, 1]) == [[ord("a")], [ord("d")]]
    assert len(made) == 2
    site.masks.close()


def test_a_token_that_is_not_in_its_mask_fails_its_request():
    """Whatever chose it: such an answer would not be valid."""
    site = Site()
    site.admit(0, Regex("ab"))
    site.admit(1, Regex("ab"))
    assert site.allowed([0, 1, 3]) == [[ord("a")], [ord("a")], []]
    failed = site.choose([0, 1, 3], [ord("a"), 0, 7])
    assert list(failed) == [1]
    assert failed[1].endswith("no token of the vocabulary may follow")


MANY_STATES = Regex("[ab]*a[ab]{14}")
"""An answer meets a hundred states of a lexer, and there are 30,000."""


def few_states(most: int) -> LLParserLimits:
    return LLParserLimits(max_lexer_states=most)


@pytest.mark.parametrize(("threads", "beside"), [(1, False), (2, True)])
def test_no_request_fails_because_others_have_filled_its_lexer(threads, beside, monkeypatch):
    """Copies of a matcher share a lexer, whose states only become more."""
    answers: list[list[list[int]]] = []
    for most in (100_000, 400):
        monkeypatch.setattr(compiled, "parser_limits", lambda _, most=most: few_states(most))
        site = Site(threads=threads, beside=beside)
        for number in range(8):
            slots = [number % SLOTS, (number + 1) % SLOTS]
            choices = random.Random(number)
            for slot in slots:
                site.admit(slot, MANY_STATES, [97, 98] * number)
            rows: list[list[int]] = [[], []]
            for _ in range(60):
                for row, allowed in zip(rows, site.allowed(slots), strict=True):
                    row.append(choices.choice([token for token in allowed if token < END]))
                assert site.choose(slots, [row[-1] for row in rows]) == {}
            if most == 400:
                assert rows == answers[number]
                continue
            answers.append(rows)
        own = sum(request.alone for request in site.masks._requests.values())
        assert own == 0 if most > 400 else own
        site.masks.close()


class Failed:
    """A matcher that says so."""

    def __init__(self, error: str) -> None:
        self.error = error

    def is_error(self) -> bool:
        return True

    def get_error(self) -> str:
        return self.error


@pytest.mark.parametrize("state", ["", "\n<state>\nrows: 5\n</state>", "\n<non-verbose/>"])
def test_an_error_says_what_is_wrong_and_no_more(state):
    with pytest.raises(compiled.MatchingError) as raised:
        compiled.check_matcher(Failed(f"lexer error: too many states{state}"))
    assert str(raised.value) == "lexer error: too many states"


def test_who_fails_with_a_lexer_of_its_own_fails(monkeypatch):
    monkeypatch.setattr(compiled, "parser_limits", lambda _: few_states(60))
    site = Site()
    site.admit(0, MANY_STATES)
    site.admit(1, Regex("a*"))
    failed: dict[int, str] = {}
    choices = random.Random(0)
    while not failed:
        failed = site.ready([0, 1])
        if not failed:
            assert site.choose([0, 1], [choices.choice([97, 98]), 97]) == {}
    assert list(failed) == [0]
    assert "too many states" in failed[0]
    site.masks.close()


def test_a_grammar_that_many_have_gets_a_lexer_for_each_thread():
    for threads in (1, 3):
        grammars = compiled.Grammars(tokenizer, lexers=threads)
        grammar = Checker(SPECIAL).check(Structure(Regex("a*")))
        made = []
        for _ in range(40):
            made.append(grammars.matcher(grammar, []))
            made[-1].result()
            for one in grammars._kept[grammar].compiled:
                one.future.result()
        assert sorted({promise.lexer for promise in made}) == list(range(threads))
        assert [promise.lexer for promise in made[:8]] == [0] * 8, "few share one"
        last = [promise.lexer for promise in made[-12:]]
        assert [last.count(lexer) for lexer in range(threads)] == [12 // threads] * threads
        grammars.close()


def test_strings_that_all_count_are_bounded_and_short_ones_have_room(monkeypatch):
    """Whoever shares a grammar shares what is counted; what is released makes room."""
    monkeypatch.setattr(masks, "_MOST_CHARACTERS", 15_000)
    monkeypatch.setattr(masks, "_TOKEN", 1_000)
    site = Site()
    long, other = ({"type": "string", "maxLength": 8_000, "title": name} for name in "ab")
    site.admit(0, Json(long))
    site.admit(1, Json({**long, "minLength": 1}))
    site.admit(2, Json(long))
    site.admit(3, Json({"type": "string", "maxLength": 300}))
    failed = site.ready([0, 1, 2, 3])
    assert list(failed) == [1]
    assert "too many characters" in failed[1]
    for slot in (0, 1, 2):
        site.masks.release(slot)
    site.admit(1, Json({**other, "minLength": 1}))
    assert site.ready([1, 3]) == {}
    site.masks.close()


def test_few_grammars_of_long_strings_are_kept(monkeypatch):
    monkeypatch.setattr(compiled, "_KEPT_CHARACTERS", 1_000)
    grammars = compiled.Grammars(tokenizer)
    made = [
        Checker(SPECIAL).check(Structure(Json({"type": "string", "maxLength": most})))
        for most in (400, 450, 500)
    ]
    short = Checker(SPECIAL).check(Structure(Json({"type": "string"})))
    for grammar in (short, *made):
        grammars.matcher(grammar, []).result()
    assert list(grammars._kept) == made[1:]
    grammars.matcher(short, []).result()
    assert list(grammars._kept) == [*made[1:], short]
    grammars.close()


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "street_number": {"type": "integer"}},
    "required": ["name", "street_number"],
    "additionalProperties": False,
}


def test_what_a_grammar_forces_is_spelt():
    site = Site()
    site.admit(0, Json(PERSON))
    site.admit(1, Regex("[a-z]+"))
    assert site.ready([0, 1]) == {}
    assert site.masks.forced([0, 1, 2]) == {0: [TOKENS.index(b"{")]}
    for token in b"{":
        site.ready([0])
        site.choose([0], [token])
    site.ready([0])
    site.choose([0], [ord('"')])
    (tokens,) = site.masks.forced([0, 2]).values()
    assert tokens == [TOKENS.index(b"name"), TOKENS.index(b'"')]


def test_what_is_spelt_otherwise_is_spelt_so_the_next_time():
    """By the answers that were given, of this request or another one."""
    site = Site()
    for slot in (0, 1):
        site.admit(slot, Json(PERSON))
        site.ready([slot])
        site.choose([slot], [TOKENS.index(b'{"')])
        forced = site.masks.forced([slot])[slot]
        assert text_of(forced) == 'name"'
        for token in b"name":
            site.ready([slot])
            site.choose([slot], [token])
            assert text_of(site.masks.forced([slot])[slot]) == 'name"'["name".index(chr(token)) + 1 :]
        site.ready([slot])
        site.choose([slot], [ord('"')])
        assert slot not in site.masks.forced([slot])
        assert forced == ([TOKENS.index(b"name"), ord('"')] if slot == 0 else list(b'name"'))


CALL = Tag(
    "<|call|>", Json({"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]}), "<|end|>"
)
CONTENTS = [
    *map(Json, SCHEMAS),
    Sequence(
        [
            Token("<|call|>"),
            Text('{"name'),
            Token("<|call|>"),
            Text(' "'),
            Choice(["ab", "ac"]),
            Token("<|call|>"),
        ]
    ),
    Tagged([CALL], ["<|call|>"], at_least_one=True),
]


@pytest.mark.parametrize("content", CONTENTS, ids=str)
def test_to_ask_what_is_forced_changes_nothing(content):
    """The same walk with and without; and what is forced may come."""
    for seed in range(6):
        walks = []
        for asking in (False, True):
            site, choices, tokens = Site(), random.Random(seed), []
            site.admit(1, content)
            while not tokens or (tokens[-1] not in (END, OTHER_END) and len(tokens) < 80):
                forced = site.masks.forced([1]) if asking else {}
                (allowed,) = site.allowed([1])
                if forced:
                    assert forced[1][0] in allowed
                    assert END not in allowed
                tokens.append(choices.choice(allowed) if END not in allowed else END)
                site.choose([1], tokens[-1:])
            assert site.masks.forced([1]) == {} or tokens[-1] not in (END, OTHER_END)
            site.masks.close()
            walks.append(tokens)
        assert walks[0] == walks[1]
