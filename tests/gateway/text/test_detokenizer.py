"""Streaming text equals the text of the whole, and stop strings do not care how text is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from baton.gateway.text.detokenizer import FallbackDetokenizer, StopStrings, StopTables, WindowDetokenizer
from baton.gateway.text.tokenizer import Tokenizer

quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def cut(items, points):
    """The items in consecutive pieces, cut at the points."""
    edges = sorted({0, len(items), *(p % (len(items) + 1) for p in points)})
    return [items[a:b] for a, b in pairwise(edges)]


def stream(detokenizer, pieces):
    return [detokenizer.push(piece) for piece in pieces] + [detokenizer.finish()]


@quick
@given(st.lists(st.integers(0, 399), max_size=40), st.lists(st.integers(0, 99)), st.booleans())
def test_byte_level_pieces_make_the_whole(tokenizer: Tokenizer, ids, points, skip):
    """Any ids, so that most byte sequences are not even UTF-8."""
    pieces = stream(tokenizer.detokenizer(skip_special_tokens=skip), cut(ids, points))
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@quick
@given(st.text(max_size=30), st.text(max_size=30), st.lists(st.integers(0, 99)))
@example("😀", "😀日本", [1, 2, 3, 4, 5])
def test_text_goes_on_after_a_prompt(tokenizer: Tokenizer, before, after, points):
    context = tokenizer.encode(before)
    ids = tokenizer.encode(after, add_special_tokens=False)
    assert "".join(stream(tokenizer.detokenizer(context), cut(ids, points))) == after


@pytest.fixture(scope="module")
def llama(sentencepiece: Path) -> Tokenizer:
    return Tokenizer.from_directory(sentencepiece)


_SPACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_FALLBACK, _FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@pytest.fixture(scope="module")
def with_decoder(sentencepiece: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokenizer]:
    """The tokenizer with other decoding steps."""

    def make(*steps: dict) -> Tokenizer:
        directory = tmp_path_factory.mktemp("decoder")
        data = json.loads((sentencepiece / "tokenizer.json").read_text())
        data["decoder"] = {"type": "Sequence", "decoders": steps}
        (directory / "tokenizer.json").write_text(json.dumps(data))
        return Tokenizer.from_directory(directory)

    return make


@pytest.mark.parametrize(
    "steps",
    [(_SPACE, _FALLBACK, _FUSE, _STRIP), (_FALLBACK, _FUSE), (_SPACE, _FALLBACK, _FUSE), (_FALLBACK,)],
)
def test_fallback_pieces_make_the_whole(with_decoder: Callable[..., Tokenizer], steps):
    """What the library decodes of any ids: most runs of bytes are not UTF-8, and no step replaces ▁."""
    tokenizer = with_decoder(*steps)

    @quick
    @given(st.lists(st.integers(1, 268), max_size=30), st.lists(st.integers(0, 99)), st.booleans())
    @example([259, 263, 3 + 0xF0, 3 + 0x9F, 3 + 0x98, 3 + 0x80, 263], [1, 3, 4], True)
    @example([3 + 0xE6, 3 + 0x97, 260], [1, 2], True)
    @example([3 + 0x41, 3 + 0xFF, 3 + 0x41, 263, 3 + 0xE6], [1, 2, 3, 4], True)
    @example([3 + 0xE6, 2, 3 + 0x97, 1, 3 + 0xA5], [1, 2, 3, 4], True)
    @example([3 + 0xE6, 2, 3 + 0x97, 1, 3 + 0xA5], [1, 2, 3, 4], False)
    def check(ids, points, skip):
        detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
        assert isinstance(detokenizer, FallbackDetokenizer)
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(stream(detokenizer, cut(ids, points))) == whole

    check()


@pytest.mark.parametrize(
    "steps", [(_FALLBACK, _FUSE, _SPACE), (_SPACE, _FALLBACK, _STRIP, _FUSE), (_SPACE, _FUSE)]
)
def test_steps_in_another_order_go_through_windows(with_decoder: Callable[..., Tokenizer], steps):
    assert isinstance(with_decoder(*steps).detokenizer(), WindowDetokenizer)


def test_a_long_row_of_bytes_is_not_held_back_for_ever(llama: Tokenizer):
    text = "日" * 1000
    detokenizer = llama.detokenizer()
    given_text = [detokenizer.push([3 + byte]) for byte in text.encode()]
    assert len("".join(given_text)) > 900
    assert "".join(given_text) + detokenizer.finish() == text


def test_sentencepiece_keeps_the_space_after_a_prompt(llama: Tokenizer):
    ids = llama.encode("ab ab", add_special_tokens=False)
    space_ab = ids[-1:]
    assert llama.token(space_ab[0]) == "▁ab"
    assert llama.detokenizer().push(space_ab) == "ab"
    assert llama.detokenizer(ids).push(space_ab) == " ab"


@quick
@given(st.lists(st.integers(0, 120), max_size=60), st.lists(st.integers(0, 99)), st.booleans())
def test_window_pieces_make_the_whole(metaspace_tokenizer: Tokenizer, ids, points, skip):
    detokenizer = metaspace_tokenizer.detokenizer(skip_special_tokens=skip)
    assert isinstance(detokenizer, WindowDetokenizer)
    whole = metaspace_tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(detokenizer, cut(ids, points))) == whole


@pytest.fixture(scope="module")
def metaspace_tokenizer(metaspace: Path) -> Tokenizer:
    return Tokenizer.from_directory(metaspace)


@quick
@given(st.text(alphabet="aé日😀 ", max_size=30), st.lists(st.integers(0, 99)))
def test_windows_and_bytes_agree(tokenizer: Tokenizer, text, points):
    ids = tokenizer.encode(text, add_special_tokens=False)
    window = WindowDetokenizer(lambda some: tokenizer.decode(some, skip_special_tokens=False))
    assert "".join(stream(window, cut(ids, points))) == text


def test_no_half_characters(tokenizer: Tokenizer):
    """A character comes with its last byte; a broken one comes as U+FFFD at the end."""
    byte_ids = [i for i in range(400) if len(tokenizer.token_bytes(i)) == 1]
    of_byte = {tokenizer.token_bytes(i)[0]: i for i in byte_ids}
    ids = [of_byte[byte] for byte in "😀".encode()]
    for detokenizer in (
        tokenizer.detokenizer(),
        WindowDetokenizer(lambda some: tokenizer.decode(some)),
    ):
        assert [detokenizer.push([i]) for i in ids] == ["", "", "", "😀"]
        assert detokenizer.push(ids[:2]) == ""
        assert detokenizer.finish() == "\ufffd"


def test_the_window_stays_short(tokenizer: Tokenizer):
    """A long text costs no more per token than a short one, also if no character is ever complete."""
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids)

    for ids in (tokenizer.encode("the cat sat on the mat " * 50), [200] * 500):
        window = WindowDetokenizer(decode)
        for token in ids:
            window.push([token])
        assert longest < 50


def by_character(text, stops, include):
    """The definition: characters one by one, the first complete stop string, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@quick
@given(
    st.text(alphabet="ab\n", max_size=40),
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.integers(0, 99)),
    st.booleans(),
)
def test_stop_strings_do_not_depend_on_the_pieces(text, stops, points, include):
    finder = StopStrings(StopTables(stops), include=include)
    given_text, found = "", None
    for piece in cut(text, points):
        some, found = finder.push(piece)
        given_text += some
        if found is not None:
            break
    else:
        given_text += finder.finish()
    assert (given_text, found) == by_character(text, stops, include)


def test_only_what_may_be_a_stop_string_is_held_back():
    finder = StopStrings(StopTables(["END", "\n\n"]))
    assert finder.push("hello E") == ("hello ", None)
    assert finder.push("N") == ("", None)
    assert finder.push("T") == ("ENT", None)
    assert finder.push("\n") == ("", None)
    assert finder.push("x") == ("\nx", None)
    assert finder.push("EN") == ("", None)
    assert finder.push("D and more") == ("", "END")


def test_skipped_text_does_not_count():
    finder = StopStrings(StopTables(["ab"]))
    assert finder.skip("ab") == "ab"
    assert finder.push("a") == ("", None)
    assert finder.skip("b") == "ab"
    assert finder.push("b") == ("b", None)
