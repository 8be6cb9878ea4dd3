"""How large a grammar and its work may be: for the check before a request is submitted and for the
workers alike."""

from __future__ import annotations

from llguidance import LLParserLimits

MAX_DESCRIPTION_BYTES = 256 << 10
"""Of a schema, a regular expression, …, as it is written."""
MAX_CHECK_S = 0.4
"""CPU time of a check: about what compiling it takes in a worker, which others must not notice."""
MAX_DEPTH = 60
"""Of a schema, in lists and objects."""


def parser_limits() -> LLParserLimits:
    """For each grammar.  A step's are about 15 ms of work, the states about 30 MB."""
    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
