"""The JSON Schema specification's own tests, token by token: what is kept, what is refused, what would be
wrong.

    python benchmarks/json_schema_suite.py [--list] [--out FILE]

Draft 2020-12 of JSON-Schema-Test-Suite (MIT license; `_json_schema/draft2020-12.json.gz` names the
commit), the optional parts included.  For each schema that is accepted every valid value must pass, byte
by byte, and every invalid one must not.  A value passes if one of its writings does: names of an object
in any order (the order of a schema's properties is the order of an answer's), a number without a fraction
as an integer.

Counted are tests: `passed`; `refused`, as their schema is, with the keyword; `narrower`: a valid value
that no answer will be, for a reason that docs/structured-outputs.md tells; `wrong`: anything else.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from baton.grammar.checking import Checker
from baton.grammar.description import GrammarError, Json, Structure
from baton.grammar.limits import parser_limits
from baton.grammar.vocabulary import matching_tokenizer

SUITE = Path(__file__).parent / "_json_schema" / "draft2020-12.json.gz"
_MOST_WRITINGS = 200
_NARROWER = {
    "format.json": "formats are asserted",
    "vocabulary.json": "keywords hold, whatever vocabulary $schema names",
    "optional/bignum.json": "integers above 10^17 are not written where there are bounds",
    "optional/format/ecmascript-regex.json": "expressions that every dialect has",
    "optional/format/idn-email.json": "addresses in ASCII",
    "optional/format/idn-hostname.json": "names of hosts in ASCII",
    "optional/format/iri.json": "URIs",
    "optional/format/iri-reference.json": "references to URIs",
    "optional/format/uri-template.json": "literals in ASCII",
    "optional/format/regex.json": "expressions that every dialect has",
    "optional/format/hostname.json": "no names of hosts in Punycode",
    "optional/format/date-time.json": "leap seconds in UTC only",
    "optional/format/time.json": "leap seconds in UTC only",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="name what is refused and narrower, too")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    total, details, reasons = run()
    for kind, text in details:
        if kind == "wrong" or arguments.list:
            print(f"{kind}: {text}")
    print(f"{total['schemas']} schemas, {total['refused schemas']} of them refused; of the tests:")
    for kind in ("passed", "refused", "narrower", "wrong"):
        print(f"  {kind:9}{total[kind]:5}")
    for reason, count in reasons.most_common():
        print(f"  refused {count:4} schemas: {reason}")
    if arguments.out:
        arguments.out.write_text(json.dumps({"total": total, "reasons": reasons}, indent=2) + "\n")


def run() -> tuple[Counter[str], list[tuple[str, str]], Counter[str]]:
    """(tests by what became of them, each that did not pass, schemas by why they are refused)."""
    suite = json.loads(gzip.decompress(SUITE.read_bytes()))
    checker, tokenizer = Checker({}), matching_tokenizer([bytes([byte]) for byte in range(256)], {}, 256)
    total: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    details: list[tuple[str, str]] = []
    for file, groups in suite["files"].items():
        for group in groups:
            total["schemas"] += 1
            try:
                grammar = checker.check(Structure(Json(group["schema"])))
            except GrammarError as error:
                total["refused schemas"] += 1
                total["refused"] += len(group["tests"])
                reasons[_reason(str(error))] += 1
                details.append(("refused", f"{file}: {group['description']}: {error}"))
                continue
            for description, value, valid in group["tests"]:
                found = any(takes(tokenizer, grammar, text) for text in writings(value))
                kind = "passed" if found == valid else "narrower" if valid and file in _NARROWER else "wrong"
                total[kind] += 1
                if kind != "passed":
                    details.append((kind, f"{file}: {group['description']}: {description}"))
    return total, details, reasons


def takes(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits(grammar))
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def writings(value: Any) -> Iterator[str]:
    both = itertools.chain(_orders(value), _orders(_whole(value)))
    return (json.dumps(one, ensure_ascii=False) for one in itertools.islice(both, 2 * _MOST_WRITINGS))


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        each = [list(itertools.islice(_orders(one), 24)) for one in value.values()]
        orders = itertools.permutations(range(len(value))) if len(value) <= 4 else iter([range(len(value))])
        names = list(value)
        for order in orders:
            for chosen in itertools.islice(itertools.product(*(each[index] for index in order)), 24):
                yield dict(zip((names[index] for index in order), chosen, strict=True))
    elif isinstance(value, list):
        each = [list(itertools.islice(_orders(one), 24)) for one in value]
        yield from map(list, itertools.islice(itertools.product(*each), 24))
    else:
        yield value


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return {name: _whole(one) for name, one in value.items()} if isinstance(value, dict) else value


def _reason(message: str) -> str:
    """The keyword, if the message names one."""
    for begin in ("the keyword ", "the format "):
        if begin in message:
            return message.partition(begin)[2].split()[0].strip("'")
    return message[:50]


if __name__ == "__main__":
    main()
