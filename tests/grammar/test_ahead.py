"""Masks behind drafts are those that come when the drafts have been read one by one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from baton.grammar import compiled
from baton.grammar.description import Content, Json, Regex
from tests.grammar.test_masks import END, MANY_STATES, OTHER_END, SCHEMAS, Site, few_states

CONTENTS: list[Content] = [*map(Json, SCHEMAS), Regex("(ab|cd|x[0-9]{3})+")]
ENDS = (END, OTHER_END)
WRONG = 299
"""A token without a text: in no mask."""


def drafts_and_masks(
    site: Site, content: Content, options: dict[str, Any], tokens: list[int], choices: random.Random
) -> tuple[list[int], list[list[int]]]:
    """Some drafts after these tokens, and what may come before each and behind the last one, up to the first
    that is wrong; by a site that reads one after the other."""
    site.admit(0, content, tokens, **options)
    drafts: list[int] = []
    masks = site.allowed([0])
    for _ in range(choices.randrange(6)):
        goes_on = [token for token in masks[-1] if token not in ENDS]
        if not goes_on or choices.random() < 0.1:
            return [*drafts, WRONG, 97], masks
        drafts.append(choices.choice(goes_on))
        site.choose([0], drafts[-1:])
        masks += site.allowed([0])
    return drafts, masks


def masks_ahead(site: Site, slots: list[int], drafts: list[list[int]]) -> dict[int, list[list[int]]]:
    """Of each slot with a grammar, as the site fills them in one step."""
    assert site.masks.begin(np.array(slots, np.int32), drafts)
    assert site.masks.ready() == ({}, [])
    found, place = {}, 0
    for slot, its in zip(slots, drafts, strict=True):
        filled = site.masks.filled_ahead(slot)
        if filled is not None:
            rows = site.masks.ahead[place : place + filled].view(np.uint8)
            found[slot] = [
                np.flatnonzero(row).tolist() for row in np.unpackbits(rows, axis=1, bitorder="little")
            ]
        place += 1 + len(its)
    return found


@pytest.mark.parametrize(("threads", "beside"), [(1, False), (2, True), (2, False)])
def test_masks_are_those_of_one_by_one(threads: int, beside: bool) -> None:
    choices = random.Random(threads + beside)
    ahead = 0
    for content in CONTENTS:
        slow, fast = Site(), Site(threads=threads, beside=beside)
        answers: dict[int, list[int]] = {}
        options: dict[int, dict[str, Any]] = {}
        for _ in range(40):
            for slot in {0, 2, 3} - set(answers):
                answers[slot] = []
                options[slot] = {"min_tokens": choices.choice((0, 3)), "goes_on": choices.random() < 0.3}
                fast.admit(slot, content, **options[slot])
                assert fast.ready([slot]) == {}
            order = choices.sample([0, 1, 2, 3], 4)  # (1 has no grammar)
            drafts, expected = {1: [5, 6]}, {}
            for slot, tokens in answers.items():
                found = drafts_and_masks(slow, content, options[slot], tokens, choices)
                drafts[slot], expected[slot] = found
            assert masks_ahead(fast, order, [drafts[slot] for slot in order]) == expected
            for slot, masks in expected.items():
                right = choices.randrange(len(masks))
                run = [*drafts[slot][:right], choices.choice(masks[right])]
                assert fast.masks.chosen_ahead(slot, run) == (len(run), "")
                answers[slot] += run
                ahead += right
            answers = {slot: tokens for slot, tokens in answers.items() if tokens[-1] not in ENDS}
        fast.masks.close()
        slow.masks.close()
    assert ahead > 300


def test_a_token_that_is_not_in_its_mask_ends_the_run() -> None:
    site = Site()
    site.admit(1, Regex("abc*"))
    assert site.ready([1]) == {}
    assert masks_ahead(site, [1], [[97, 98]])[1][:2] == [[97], [98]]
    right, why = site.masks.chosen_ahead(1, [97, 120, 98])
    assert right == 1
    assert "no token of the vocabulary may follow" in why
    assert site.allowed([1]) == [[98]], "what was right has been read"
    site.masks.close()


def test_who_has_a_lexer_of_its_own_is_not_asked_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are wrong would fill it."""
    monkeypatch.setattr(compiled, "parser_limits", lambda _: few_states(400))
    site, choices = Site(), random.Random(0)
    slots, asked = np.array([0], np.int32), []
    for _ in range(20):
        site.admit(0, MANY_STATES)
        assert site.ready([0]) == {}
        for _ in range(30):
            request = site.masks._requests[0]
            before = request.alone
            drafts = [choices.choice([97, 98]) for _ in range(5)]
            asked.append((before, site.masks.begin(slots, [drafts])))
            failed, late = site.masks.ready()
            assert not failed
            if late:
                assert site.ready([0]) == {}
            elif asked[-1][1]:
                assert site.masks.chosen_ahead(0, [drafts[0]]) == (1, "")
                continue
            site.choose([0], [drafts[0]])
    assert {(False, True), (True, False)} == set(asked)
    site.masks.close()
