"""Drafts from other requests' answers in numba, where there was no C++ compiler: `native/suffix.cpp`, which
tells the theory, function by function."""

# Compiled functions have the types that numba infers.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors
from __future__ import annotations

import functools
import logging
import time
from typing import Any

import numba
import numpy as np
from numba import carray, types

from baton.model.cpu.numba.ngram import (
    TEXT,
    TEXT_LENGTH,
    TEXT_STANDS_ON,
    TEXT_TOKENS,
    _floats,
    _int32s,
    _int64s,
)
from baton.model.cpu.numba.task import compiled

logger = logging.getLogger(__name__)

_PROBES, _WIDTH, _GROUP, _DEEPEST, _MOST_LEVELS = 16, 16, 16, 64, 6
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_LOW_BITS = 0xFFFFFFFF
# Of the store; the first eight are addresses.
_TOKENS, _LINKS, _TABLES, _OWNERS, _DOCUMENTS, _ROWS, _OPENED, _SHARES = range(8)
_MASK, _END, _OLDEST, _MOST_DOCUMENTS, _NUM_DOCUMENTS, _PENDING, _OFFSET = range(8, 15)
_LEVELS, _DEPTH, _MOST, _LIMITED = range(15, 19)
_STORE = 19
# Of a document, and of a row.
_START, _LENGTH, _FIRST, _SALT_LOW, _SALT_HIGH = range(5)
_DOCUMENT = 5
_ROW_LOW, _ROW_HIGH, _JUDGED, _ROW_OPENED, _ROW_MATCH, _NEWEST = range(6)
_ROW = 6
# Of what is learnt: addresses, then numbers.
_CLASS_OF, _PRIOR, _ALL = range(3)
_PRIOR_WEIGHT, _ALL_WEIGHT, _KEEP, _KEEP_ALL, _PER_TOKEN, _LEAST = range(6)


@compiled
def _place_of(store, low):
    age = (store[_END] - np.int64(low)) & _LOW_BITS
    if low != 0 and 0 < age <= store[_END] - store[_OLDEST]:
        return store[_END] - age
    return np.int64(-1)


@compiled
def _document_of(store, place):
    owners = carray(_int32s(store[_OWNERS]), (store[_MASK] + 1) // _GROUP)
    owner = np.int64(owners[(place & store[_MASK]) // _GROUP])
    return carray(_int64s(store[_DOCUMENTS] + 8 * _DOCUMENT * owner), _DOCUMENT)


@compiled
def _equal_before(store, place, newest, most, low, high):
    document = _document_of(store, place)
    if document[_SALT_LOW] != low or document[_SALT_HIGH] != high:
        return 0
    tokens = carray(_int32s(store[_TOKENS]), store[_MASK] + 1)
    most = min(most, place - document[_START])
    count = 0
    while count < most and tokens[(place - 1 - count) & store[_MASK]] == newest[count]:
        count += 1
    return count


@compiled
def _hashes_of(store, newest, count, low, high, hashes):
    key = np.uint64(low) ^ np.uint64(high) * _FACTOR
    level = 0
    back = 0
    while back < count and level < store[_LEVELS]:
        key = (key ^ np.uint64(np.uint32(newest[back]))) * _FACTOR
        key ^= key >> np.uint64(32)
        back += 1
        if back == 2 << level:
            hashes[level] = key
            level += 1
    return level


@compiled
def _find(store, level, key, newest, low, high):
    """The index of the entry in the tables, and the place, or -1."""
    n = 2 << level
    size = 2 * (store[_MASK] + 1)
    tables = carray(_int32s(store[_TABLES]), store[_LEVELS] * size)
    first = level * size
    room = np.int64(-1)
    for probe in range(_PROBES):
        index = first + np.int64((key + np.uint64(probe)) & np.uint64(size - 1))
        entry = np.int64(np.uint32(tables[index]))
        place = _place_of(store, entry)
        if place < 0:
            if room < 0:
                room = index
            if entry == 0:
                break
        elif _equal_before(store, place, newest, n, low, high) == n:
            return index, place
    if room < 0:
        room = first + np.int64(key & np.uint64(size - 1))
    return room, np.int64(-1)


@compiled
def _index_place(store, document, offset):
    size = store[_MASK] + 1
    tokens = carray(_int32s(store[_TOKENS]), size)
    links = carray(_int32s(store[_LINKS]), (store[_LEVELS], size))
    tables = carray(_int32s(store[_TABLES]), store[_LEVELS] * 2 * size)
    newest = np.empty(_DEEPEST, np.int32)
    hashes = np.empty(_MOST_LEVELS, np.uint64)
    place = document[_START] + offset
    count = min(1 << store[_LEVELS], offset)
    for back in range(count):
        newest[back] = tokens[(place - 1 - back) & store[_MASK]]
    low, high = document[_SALT_LOW], document[_SALT_HIGH]
    for level in range(_hashes_of(store, newest, count, low, high, hashes)):
        index, before = _find(store, level, hashes[level], newest, low, high)
        links[level, place & store[_MASK]] = np.int32(0) if before < 0 else np.int32(np.uint32(before))
        tables[index] = np.int32(np.uint32(place))


@compiled
def _index_some(store, places):
    while places > 0 and store[_PENDING] < store[_NUM_DOCUMENTS]:
        number = store[_PENDING] % store[_MOST_DOCUMENTS]
        document = carray(_int64s(store[_DOCUMENTS] + 8 * _DOCUMENT * number), _DOCUMENT)
        store[_OFFSET] = max(store[_OFFSET], document[_FIRST])
        while places > 0 and store[_OFFSET] < document[_LENGTH]:
            _index_place(store, document, store[_OFFSET])
            store[_OFFSET] += 1
            places -= 1
        if store[_OFFSET] >= document[_LENGTH]:
            store[_PENDING] += 1
            store[_OFFSET] = 0


@compiled
def _limit(store, learnt, match):
    wanted = learnt[_PER_TOKEN] * np.float32(match)
    if wanted >= np.float32(store[_MOST]):
        return store[_MOST]
    return np.int64(1) if wanted < 1 else np.int64(wanted)


@compiled
def _search(store, text, low, high, places):
    """How many places, and the length of their match."""
    size = store[_MASK] + 1
    newest = np.empty(_DEEPEST, np.int32)
    hashes = np.empty(_MOST_LEVELS, np.uint64)
    length = text[TEXT_LENGTH]
    tokens = carray(_int32s(text[TEXT_TOKENS]), length)
    have = min(length, store[_DEPTH])
    for back in range(have):
        newest[back] = tokens[length - 1 - back]
    level = _hashes_of(store, newest, have, low, high, hashes)
    place = np.int64(-1)
    while place < 0 and level > 0:
        level -= 1
        _, place = _find(store, level, hashes[level], newest, low, high)
    links = carray(_int32s(store[_LINKS]), (store[_LEVELS], size))
    count, match, seen = 0, 0, 0
    while place >= 0 and seen < _WIDTH:
        equal = _equal_before(store, place, newest, have, low, high)
        if equal > match:
            match = equal
            count = 0
        if equal == match:
            places[count] = place
            count += 1
        before = _place_of(store, np.int64(np.uint32(links[level, place & store[_MASK]])))
        place = before if before < place else np.int64(-1)
        seen += 1
    return count, match


@compiled
def _vote(store, places, count, ahead):
    """How many say so, and the token."""
    tokens = carray(_int32s(store[_TOKENS]), store[_MASK] + 1)
    said = np.full(_WIDTH, -1, np.int64)
    for index in range(count):
        document = _document_of(store, places[index])
        if places[index] + ahead < document[_START] + document[_LENGTH]:
            said[index] = np.int64(np.uint32(tokens[(places[index] + ahead) & store[_MASK]]))
    best = 0
    token = np.int64(0)
    for index in range(count):
        if said[index] < 0:
            continue
        votes = 0
        for other in range(index, count):
            votes += said[other] == said[index]
        if votes > best:
            best = votes
            token = said[index]
    return best, np.int32(np.uint32(token))


@compiled
def _suffix(
    store_of,
    learnt_of,
    texts,
    slots_of,
    runs_of,
    tokens_of,
    num_rows,
    places_more,
    drafts_of,
    chances_of,
    counts_of,
):
    store = carray(_int64s(store_of), _STORE)
    addresses = carray(_int64s(learnt_of), 3)
    learnt = carray(_floats(learnt_of + 24), 6)
    depth, most = store[_DEPTH], store[_MOST]
    kinds = carray(_int32s(addresses[_CLASS_OF]), depth + 1)
    num_kinds = np.int64(kinds[depth]) + 1
    prior = carray(_floats(addresses[_PRIOR]), num_kinds)
    everywhere = carray(_floats(addresses[_ALL]), (num_kinds, 2))
    slots = carray(_int32s(slots_of), num_rows)
    runs = carray(_int32s(runs_of), num_rows)
    drafts = carray(_int32s(drafts_of), (num_rows, most))
    chances = carray(_floats(chances_of), (num_rows, most))
    counts = carray(_int32s(counts_of), num_rows)
    _index_some(store, places_more)
    total = 0
    for number in range(num_rows):
        total += runs[number]
    came = carray(_int32s(tokens_of), total)
    at = 0
    for number in range(num_rows):
        slot = np.int64(slots[number])
        row = carray(_int64s(store[_ROWS] + 8 * _ROW * slot), _ROW)
        mine = carray(_int32s(store[_OPENED] + 4 * most * slot), most)
        shares = carray(_floats(store[_SHARES] + 4 * most * slot), most)
        judged = carray(_floats(row[_JUDGED]), (num_kinds, 2))
        for index in range(min(row[_ROW_OPENED], runs[number])):
            kind = kinds[min(row[_ROW_MATCH] + index, depth)]
            right = np.float32(1 if mine[index] == came[at + index] else 0)
            judged[kind, 0] = judged[kind, 0] * learnt[_KEEP] + right
            judged[kind, 1] = judged[kind, 1] * learnt[_KEEP] + shares[index]
            everywhere[kind, 0] = everywhere[kind, 0] * learnt[_KEEP_ALL] + right
            everywhere[kind, 1] = everywhere[kind, 1] * learnt[_KEEP_ALL] + shares[index]
            if right == 0:
                break
        row[_ROW_OPENED] = 0
        row[_NEWEST] = number
        at += runs[number]
    places = np.empty(_WIDTH, np.int64)
    found = np.empty(most, np.float32)
    ring = carray(_int32s(store[_TOKENS]), store[_MASK] + 1)
    for number in range(num_rows):
        slot = np.int64(slots[number])
        text = carray(_int64s(texts + 8 * TEXT * slot), TEXT)
        row = carray(_int64s(store[_ROWS] + 8 * _ROW * slot), _ROW)
        if row[_NEWEST] != number:
            continue
        if store[_LIMITED]:
            counts[number] = min(np.int64(counts[number]), _limit(store, learnt, text[TEXT_STANDS_ON]))
            while counts[number] > 0 and chances[number, counts[number] - 1] < learnt[_LEAST]:
                counts[number] -= 1
            chances[number, counts[number] :] = 0
        row[_ROW_OPENED] = 0
        said = 0
        low, high = row[_ROW_LOW], row[_ROW_HIGH]
        if low != 0 or high != 0:
            said, row[_ROW_MATCH] = _search(store, text, low, high, places)
        if not said:
            continue
        mine = carray(_int32s(store[_OPENED] + 4 * most * slot), most)
        shares = carray(_floats(store[_SHARES] + 4 * most * slot), most)
        judged = carray(_floats(row[_JUDGED]), (num_kinds, 2))
        limit = _limit(store, learnt, row[_ROW_MATCH])
        of_places, together, promised = np.float32(1), np.float32(1), np.float32(0)
        opened = 0
        while opened < limit and said > 0:
            votes, token = _vote(store, places, said, opened)
            share = np.float32(votes) / np.float32(said)
            of_places *= share
            if votes == 0 or of_places < learnt[_LEAST]:
                break
            kind = kinds[min(row[_ROW_MATCH] + opened, depth)]
            of_all = (everywhere[kind, 0] + learnt[_PRIOR_WEIGHT] * prior[kind]) / (
                everywhere[kind, 1] + learnt[_PRIOR_WEIGHT]
            )
            rate = (judged[kind, 0] + learnt[_ALL_WEIGHT] * of_all) / (judged[kind, 1] + learnt[_ALL_WEIGHT])
            together *= min(share * rate, np.float32(1))
            promised += together
            found[opened], mine[opened], shares[opened] = together, token, share
            left = 0
            for index in range(said):
                document = _document_of(store, places[index])
                place = places[index] + opened
                if place < document[_START] + document[_LENGTH] and ring[place & store[_MASK]] == token:
                    places[left] = places[index]
                    left += 1
            said = left
            opened += 1
        row[_ROW_OPENED] = opened
        own = np.float32(0)
        for index in range(counts[number]):
            own += chances[number, index]
        if promised <= own:
            continue
        counts[number] = opened
        for index in range(opened):
            drafts[number, index] = mine[index]
            chances[number, index] = found[index]
        chances[number, opened:] = 0


@compiled
def _index(store_of, places):
    _index_some(carray(_int64s(store_of), _STORE), places)


@functools.cache
def suffix() -> tuple[Any, Any]:
    """The compiled functions of `native/suffix.cpp`, `suffix` and `suffix_index`, with their `address`es."""
    begin = time.perf_counter()
    found = []
    for function, arguments in ((_suffix, 11), (_index, 2)):
        signature = types.void(*(types.int64,) * arguments)
        # (Functions of their own, as numba's cache looks only at the file of what it compiles.)
        try:
            found.append(numba.cfunc(signature, cache=True)(function.py_func))
        except (RuntimeError, OSError):  # no directory that a cache could be in
            found.append(numba.cfunc(signature)(function.py_func))
    logger.info("numba: suffix ready in %.1f s", time.perf_counter() - begin)
    return found[0], found[1]
