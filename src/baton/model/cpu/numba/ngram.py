"""Drafts by n-grams in numba, where there was no C++ compiler: `native/ngram.cpp`, which tells the theory,
function by function."""

# Compiled functions have the types that numba infers.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors
from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from baton.model.cpu.numba.task import compiled

logger = logging.getLogger(__name__)

_PROBES = 16
_LEAST = 4
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHORTEST, _KEY, _LONGEST, _DEPTH, _MOST, _LEARN, _LEVELS = range(7)
TEXT = 13
"""Words of a text, `native/text.h`."""
_TOKENS, _LINKS, _TABLE, _JUDGED, _LENGTH, _MASK, _SOURCE, _MATCH = range(8)
_ALONG, _SINCE, _DIFFERED, _BEFORE, _STANDS_ON = range(8, TEXT)
TEXT_TOKENS, TEXT_LENGTH, TEXT_STANDS_ON = _TOKENS, _LENGTH, _STANDS_ON
_LEVEL_OF, _PRIOR, _ALL = range(3)


def _pointer_to(element: Any, bits: Any) -> Callable[..., Any]:
    def pointer(context, address):
        def emit(context, builder, signature, values):
            return builder.inttoptr(values[0], bits.as_pointer())

        return types.CPointer(element)(types.int64), emit

    return intrinsic(pointer)


_int32s = _pointer_to(types.int32, ir.IntType(32))
_int64s = _pointer_to(types.int64, ir.IntType(64))
_floats = _pointer_to(types.float32, ir.FloatType())


@compiled
def _equal_before(tokens, a, b, most):
    most = min(most, a)
    count = 0
    while count < most and tokens[a - 1 - count] == tokens[b - 1 - count]:
        count += 1
    return count


@compiled
def _swap_place(text, tokens, n):
    length = text[_LENGTH]
    key = np.uint64(n)
    for back in range(1, n + 1):
        key = (key ^ np.uint64(np.uint32(tokens[length - back]))) * _FACTOR
        key ^= key >> np.uint64(32)
    table = carray(_int32s(text[_TABLE]), text[_MASK] + 1)
    mask = np.uint64(text[_MASK])
    mine = np.int32(length << 2 | n)
    for probe in range(_PROBES):
        index = np.int64((key + np.uint64(probe)) & mask)
        entry = np.int64(table[index])
        place = entry >> 2
        if entry == 0 or (entry & 3 == n and _equal_before(tokens, place, length, n) == n):
            table[index] = mine
            return place
    table[np.int64(key & mask)] = mine
    return np.int64(0)


@compiled
def _index_end(text, options, tokens, search):
    text[_MATCH] = 0
    end = text[_LENGTH]
    if end < options[_SHORTEST]:
        return
    links = carray(_int32s(text[_LINKS]), end + 1)
    longest = options[_LONGEST]
    links[end] = 0
    if end >= options[_KEY]:
        place = _swap_place(text, tokens, options[_KEY])
        links[end] = np.int32(place)
        link = 0
        while search and place and link < options[_DEPTH] and text[_MATCH] < longest:
            match = _equal_before(tokens, place, end, longest)
            if match > text[_MATCH]:
                text[_MATCH] = match
                text[_SOURCE] = place
            place = np.int64(links[place])
            link += 1
    n = options[_KEY] - 1
    while n >= options[_SHORTEST]:
        if end >= n:
            place = _swap_place(text, tokens, n)
            if search and place and text[_MATCH] < n:
                text[_MATCH] = _equal_before(tokens, place, end, longest)
                text[_SOURCE] = place
        n -= 1
    if text[_MATCH] < options[_SHORTEST]:
        text[_MATCH] = 0


@compiled
def _judge(judged, everywhere, keep, keep_all, level, right):
    judged[level, 0] = judged[level, 0] * keep + np.float32(right)
    judged[level, 1] = judged[level, 1] * keep + np.float32(1)
    everywhere[level, 0] = everywhere[level, 0] * keep_all + np.float32(right)
    everywhere[level, 1] = everywhere[level, 1] * keep_all + np.float32(1)


@compiled
def _chance(judged, everywhere, prior, prior_weight, all_weight, level):
    of_all = (everywhere[level, 0] + prior_weight * prior[level]) / (everywhere[level, 1] + prior_weight)
    return (judged[level, 0] + all_weight * of_all) / (judged[level, 1] + all_weight)


@compiled
def _level_behind(level_of, longest, since):
    return level_of[longest + 1 + since if since < longest else longest]


@compiled
def _differ(text, tokens, place, before, token):
    left_out = place + 1 < text[_LENGTH] and tokens[place + 1] == token
    text[_DIFFERED] = place
    text[_BEFORE] = before
    text[_SINCE] = 1 if left_out else 0
    text[_ALONG] = place + 1 + text[_SINCE]


@compiled
def _compare(text, options, tokens, level_of, judged, everywhere, keep, keep_all, token):
    longest = options[_LONGEST]
    right = text[_MATCH] > 0 and tokens[text[_SOURCE]] == token
    if text[_MATCH]:
        _judge(judged, everywhere, keep, keep_all, level_of[min(text[_MATCH], longest)], right)
    if text[_ALONG]:
        along = tokens[text[_ALONG]] == token
        _judge(judged, everywhere, keep, keep_all, _level_behind(level_of, longest, text[_SINCE]), along)
        if along:
            text[_ALONG] += 1
            text[_SINCE] += 1
            if text[_SINCE] >= longest:
                text[_ALONG] = 0
            return
        if not right and text[_SINCE] > 1:
            _differ(text, tokens, text[_ALONG], text[_BEFORE] + text[_SINCE], token)
            return
        if not right and text[_SINCE] == 0 and tokens[text[_DIFFERED]] == token:
            text[_ALONG] = text[_DIFFERED] + 1
            text[_SINCE] = 1
            return
        text[_ALONG] = 0
    if not right and text[_MATCH] >= min(longest, _LEAST):
        _differ(text, tokens, text[_SOURCE], text[_MATCH], token)


@compiled
def _follow(
    options_of, learnt_of, texts, slots_of, runs_of, tokens_of, rows, drafts_of, chances_of, counts_of
):
    options = carray(_int64s(options_of), 7)
    most, longest, levels = options[_MOST], options[_LONGEST], options[_LEVELS]
    learnt = carray(_int64s(learnt_of), 5)
    weights = carray(_floats(learnt_of + 24), 4)
    prior_weight, all_weight, keep, keep_all = weights[0], weights[1], weights[2], weights[3]
    level_of = carray(_int32s(learnt[_LEVEL_OF]), 2 * longest + 1)
    prior = carray(_floats(learnt[_PRIOR]), levels)
    everywhere = carray(_floats(learnt[_ALL]), (levels, 2))
    slots = carray(_int32s(slots_of), rows)
    runs = carray(_int32s(runs_of), rows)
    drafts = carray(_int32s(drafts_of), (rows, most))
    chances = carray(_floats(chances_of), (rows, most))
    counts = carray(_int32s(counts_of), rows)
    total = 0
    for row in range(rows):
        total += runs[row]
    given = carray(_int32s(tokens_of), total)
    at = 0
    for row in range(rows):
        text = carray(_int64s(texts + 8 * TEXT * np.int64(slots[row])), TEXT)
        tokens = carray(_int32s(text[_TOKENS]), text[_LENGTH] + runs[row])
        judged = carray(_floats(text[_JUDGED]), (levels, 2))
        for left in range(runs[row], 0, -1):
            token = given[at]
            at += 1
            if options[_LEARN]:
                _compare(text, options, tokens, level_of, judged, everywhere, keep, keep_all, token)
            tokens[text[_LENGTH]] = token
            text[_LENGTH] += 1
            _index_end(text, options, tokens, options[_LEARN] or left == 1)
        match, since = text[_MATCH], text[_SINCE]
        along = text[_ALONG] > 0
        if along and match:
            behind = _chance(
                judged, everywhere, prior, prior_weight, all_weight, _level_behind(level_of, longest, since)
            )
            level = level_of[min(match, longest)]
            along = behind > _chance(judged, everywhere, prior, prior_weight, all_weight, level)
        first = text[_ALONG] if along else text[_SOURCE]
        text[_STANDS_ON] = text[_BEFORE] + since if along else match
        counts[row] = most if along or match else 0
        together = np.float32(1)
        for index in range(counts[row]):
            source = first + index
            if along:
                level = _level_behind(level_of, longest, since + index)
            else:
                level = level_of[min(match + index, longest)]
            together *= _chance(judged, everywhere, prior, prior_weight, all_weight, level)
            length = text[_LENGTH]
            drafts[row, index] = tokens[source] if source < length else drafts[row, source - length]
            chances[row, index] = together
        for index in range(counts[row], most):
            chances[row, index] = np.float32(0)


@functools.cache
def ngram() -> Any:
    """The compiled function: numba's, which keeps it alive, with its `address`."""
    begin = time.perf_counter()
    signature = types.void(*(types.int64,) * 10)
    # (A function of its own: numba's cache looks only at the file of what it compiles, which is this one.)
    try:
        found = numba.cfunc(signature, cache=True)(_follow.py_func)
    except (RuntimeError, OSError):  # no directory that a cache could be in
        found = numba.cfunc(signature)(_follow.py_func)
    logger.info("numba: ngram ready in %.1f s", time.perf_counter() - begin)
    return found
