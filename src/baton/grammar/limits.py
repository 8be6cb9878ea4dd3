"""How large a grammar and its work may be: for the check before a request is submitted and for the
workers alike."""

from __future__ import annotations

import re

from llguidance import LLParserLimits

MAX_DESCRIPTION_BYTES = 256 << 10
"""Of a schema, a regular expression, …, as it is written."""
MAX_CHECK_S = 0.4
"""CPU time of a check: about what compiling it takes in a worker, which others must not notice."""
MAX_DEPTH = 60
"""Of a schema, in lists and objects."""
MAX_COUNT = 65_536
"""Of characters that a string of a schema is counted to, or of repetitions in a pattern."""
MAX_COUNTED = 80_000
"""Of all different ones of these in a schema together."""
MAX_ITEMS = 4_000
"""Of an array whose items are counted."""
UNREACHABLE = 1 << 27
"""No answer has so many characters, items or names: a maximum of that many is none."""
_LEXER_STATES = 20_000
_STATES_OF_CHARACTER = 10
"""What a counted character may cost, in states: the bytes of one, and what else its first may begin."""
_COUNTED = re.compile(r'^\{"grammars":\[\{"name":"answer","lark_grammar":"// counted: ([0-9]{1,6})\\n')


def counted(characters: int) -> str:
    """What stands at the beginning of a grammar that counts so many characters of strings."""
    return f"// counted: {characters}\n" if characters else ""


def counted_by(grammar: str) -> int:
    """How many characters of strings a grammar says that it counts."""
    found = _COUNTED.match(grammar)
    return min(int(found[1]), MAX_COUNTED) if found else 0


def parser_limits(grammar: str = "") -> LLParserLimits:
    """For each grammar.  A step's are about 15 ms of work; 20,000 states are about 10 MB.

    A grammar that counts characters may have so many states more that it never runs out of them: they are
    made where an answer goes, a few KiB for each character of it."""
    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=_LEXER_STATES + _STATES_OF_CHARACTER * counted_by(grammar),
        max_grammar_size=200_000,
        verbose_errors=False,
    )
