"""Real schemas with values that they allow and forbid: what is served, what is refused, what is wrong, and
what it costs.

    python benchmarks/json_schema_bench.py FOLDER [--every 20] [--tokenizer FILE] [--list] [--out FILE]

`FOLDER`: files with a `schema` and `tests`, each with `data` and `valid`: `maskbench/data` of
https://github.com/guidance-ai/jsonschemabench (MIT license).  `--tokenizer`: a tokenizer.json, whose
vocabulary the masks are for; without one they are for single bytes.  `--every`: one file of so many.

A schema is *served* if it compiles within the limits of a server (`grammar/checking.py`).  Of the tests
of those that are, counted are: `passed`; `narrower`: a valid value that no answer will be; `wrong`: an
invalid value that an answer may be.  `failed`: the matcher ended within a value.  Values are written as
they stand in the file; then a writing is looked for, with names in any order.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from baton.grammar.checking import Checker
from baton.grammar.description import GrammarError, Json, Structure
from baton.grammar.limits import parser_limits
from baton.grammar.vocabulary import matching_tokenizer

_PERCENTILES = (50, 75, 90, 95, 99, 99.9, 100)
_MOST_STEPS = 4000
"""Of a search."""
_PLACE = re.compile(r"^(\S+): ")


class Bench:
    """Counts what becomes of the files that it is given."""

    def __init__(self, vocabulary: LLTokenizer, texts: dict[bytes, int]) -> None:
        self._tokenizer, self._texts = vocabulary, texts
        self._longest = max(map(len, texts))
        self._checker = Checker({})
        self.total: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.details: list[tuple[str, str]] = []
        self.check_ms: list[float] = []
        self.compile_ms: list[float] = []
        self.mask_us: list[float] = []

    def add(self, path: Path) -> None:
        """Tries the schema of a file, and its tests."""
        found = json.loads(path.read_text())
        self.total["schemas"] += 1
        self.total["tests"] += len(found["tests"])
        began = time.perf_counter()
        try:
            grammar = self._checker.check(Structure(Json(found["schema"])))
        except GrammarError as error:
            self.total["refused"] += 1
            self.reasons[reason(str(error))] += 1
            self.details.append(("refused", f"{path.name}: {error}"))
            return
        finally:
            self.check_ms.append((time.perf_counter() - began) * 1e3)
        self.total["served"] += 1
        began = time.perf_counter()
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits(grammar))
        self.compile_ms.append((time.perf_counter() - began) * 1e3)
        for number, test in enumerate(found["tests"]):
            kind = self._kind(matcher, test["data"], test["valid"])
            self.total[kind] += 1
            if kind != "passed":
                self.details.append((kind, f"{path.name}: test {number}"))

    def _kind(self, matcher: LLMatcher, value: Any, valid: bool) -> str:
        try:
            data = json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # half of a surrogate pair: no answer has it
            return "narrower" if valid else "passed"
        takes, failed = self._takes(matcher.deep_copy(), data)
        if not takes and not failed:
            takes = Search(self._tokens, whole=valid).takes(matcher, value)
        if valid:
            return "passed" if takes else "failed" if failed else "narrower"
        return "wrong" if takes else "passed"

    def _takes(self, matcher: LLMatcher, data: bytes) -> tuple[bool, bool]:
        """(whether it allows all of this, whether it failed); masks are timed."""
        for token in self._tokens(data):
            began = time.perf_counter()
            matcher.compute_bitmask()
            self.mask_us.append((time.perf_counter() - began) * 1e6)
            if matcher.is_error() and not matcher.get_error().startswith("NoExtension"):
                return False, True
            if matcher.is_error() or not matcher.try_consume_tokens([token]):
                return False, False
        return matcher.is_accepting(), False

    def _tokens(self, data: bytes) -> list[int]:
        found, place = [], 0
        while place < len(data):
            for size in range(min(self._longest, len(data) - place), 0, -1):
                token = self._texts.get(data[place : place + size])
                if token is not None:
                    break
            else:
                raise ValueError("the vocabulary lacks a byte")
            found.append(token)
            place += size
        return found

    def report(self) -> dict[str, Any]:
        """All that was counted."""
        return {
            "total": dict(self.total),
            "reasons": dict(self.reasons.most_common()),
            "check_ms": percentiles(self.check_ms),
            "compile_ms": percentiles(self.compile_ms),
            "mask_us": percentiles(self.mask_us),
            "masks": len(self.mask_us),
            "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }


class Search:
    """Looks for a writing of a value that a matcher takes: names in any order, whole numbers as integers."""

    def __init__(self, tokens: Callable[[bytes], list[int]], *, whole: bool = True) -> None:
        """`whole`: 1.0 may be written as 1.  (In draft 4 it is another value.)"""
        self._tokens, self._whole = tokens, whole
        self._left = _MOST_STEPS

    def takes(self, matcher: LLMatcher, value: Any) -> bool:
        return any(after.is_accepting() for after in self._after(matcher, value))

    def _after(self, matcher: LLMatcher, value: Any) -> Iterator[LLMatcher]:
        """The matcher behind each such writing."""
        if isinstance(value, dict):
            for begun in self._read(matcher, "{"):
                yield from self._members(begun, list(value.items()), first=True)
        elif isinstance(value, list):
            for begun in self._read(matcher, "["):
                yield from self._items(begun, value, first=True)
        else:
            yield from self._read(matcher, json.dumps(value, ensure_ascii=False))
            if self._whole and isinstance(value, float) and value.is_integer():
                yield from self._read(matcher, str(int(value)))

    def _members(self, matcher: LLMatcher, left: list[Any], *, first: bool) -> Iterator[LLMatcher]:
        if not left:
            yield from self._read(matcher, "}")
        for number, (name, value) in enumerate(left):
            text = f"{'' if first else ', '}{json.dumps(name, ensure_ascii=False)}: "
            for begun in self._read(matcher, text):
                for after in self._after(begun, value):
                    yield from self._members(after, left[:number] + left[number + 1 :], first=False)

    def _items(self, matcher: LLMatcher, left: list[Any], *, first: bool) -> Iterator[LLMatcher]:
        if not left:
            yield from self._read(matcher, "]")
            return
        for begun in self._read(matcher, "" if first else ", "):
            for after in self._after(begun, left[0]):
                yield from self._items(after, left[1:], first=False)

    def _read(self, matcher: LLMatcher, text: str) -> Iterator[LLMatcher]:
        self._left -= 1
        if self._left < 0:
            return
        tokens = list(self._tokens(text.encode()))
        copy = matcher.deep_copy()
        if copy.try_consume_tokens(tokens) == len(tokens):
            yield copy


def percentiles(values: list[float]) -> dict[str, float]:
    """By their number."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {f"p{one:g}": round(ordered[round(last * one / 100)], 2) for one in _PERCENTILES} if values else {}


def reason(message: str) -> str:
    """The keyword of a refusal, without where in the schema it stands."""
    for begin in ("the keyword ", "the format "):
        if begin in message:
            return begin + message.partition(begin)[2].split()[0].strip("':;,")
    message = _PLACE.sub("", message)
    return re.sub(r"[0-9]+|'[^']*'|\"[^\"]*\"", "…", message)[:60]


def vocabulary(path: Path | None) -> tuple[LLTokenizer, dict[bytes, int]]:
    """What matchers need, and the tokens by their bytes."""
    if path is None:
        tokens = [bytes([byte]) for byte in range(256)]
    else:
        signs = {sign: byte for byte, sign in _byte_signs().items()}
        listed = json.loads(path.read_text())["model"]["vocab"]
        tokens = [b""] * (max(listed.values()) + 1)
        for text, number in listed.items():
            tokens[number] = bytes(signs[sign] for sign in text)
    texts = {data: number for number, data in enumerate(tokens) if data}
    return matching_tokenizer(tokens, {}, len(tokens)), texts


def _byte_signs() -> dict[int, str]:
    """How byte-level BPE writes bytes as characters."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="begin with this file")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--list", action="store_true", help="name what is refused and narrower, too")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    bench = Bench(*vocabulary(arguments.tokenizer))
    for path in sorted(arguments.folder.glob("*.json"))[arguments.first :: arguments.every]:
        bench.add(path)
    for kind, text in bench.details:
        if kind in ("wrong", "failed") or arguments.list:
            print(f"{kind}: {text}")
    report, total = bench.report(), bench.total
    print(f"{total['schemas']} schemas: {total['served']} served, {total['refused']} refused")
    print(f"{total['tests']} tests, of the served ones:")
    for kind in ("passed", "narrower", "failed", "wrong"):
        print(f"  {kind:9}{total[kind]:6}")
    for reason_, count in bench.reasons.most_common():
        print(f"  refused {count:4}: {reason_}")
    for name in ("check_ms", "compile_ms", "mask_us"):
        print(f"{name:11}" + ", ".join(f"{key} {value:g}" for key, value in report[name].items()))
    print(f"masks      {report['masks']}; memory {report['memory_mib']} MiB")
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
