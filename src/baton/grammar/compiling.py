"""From a description to the grammar that llguidance takes.

One Lark grammar; schemas stand in it as `%json`.  Grammars of users are grammars of their own beside it,
so that their names do not meet ours.  `no_forcing`: where only one text may follow, all tokens that begin
it are allowed, and not just those that a tokenizer would choose, so the model keeps its own way to write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import msgspec
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from baton.grammar.description import (
    AnyText,
    Choice,
    Content,
    Either,
    Grammar,
    GrammarError,
    Json,
    Regex,
    Repeat,
    Sequence,
    Structure,
    Tag,
    Tagged,
    Text,
)
from baton.grammar.json_schema import prepared
from baton.protocol.sampling import MAX_GRAMMAR_BYTES

_OPTIONS = '%llguidance {"no_forcing": true}\n'
_FREE = r"/(.|\n)*/"
_NOT_DONE = re.compile(r"\[[^\]\n]*\b(temperature|stop|max_tokens)\s*=")
"""Options of rules that need more of an engine than masks."""
_MAX_REPEATS = 1000


def compile_structure(structure: Structure, special_tokens: Mapping[str, int]) -> str:
    """What `LLMatcher` takes.  `special_tokens`: the vocabulary's, text → id.  Raises `GrammarError`."""
    compiler = _Compiler(special_tokens)
    content = structure.content
    if isinstance(content, Grammar) and structure.thinking_ends is None:
        found = _grammars([("grammar", _of_user(content.source))])
    else:
        body = compiler.content(content)
        if structure.thinking_ends is not None:
            body = f"{compiler.until(structure.thinking_ends)} /[ \\n]{{0,4}}/ ({body})"
        rules = [f"start: {body}", *compiler.rules]
        found = _grammars([("answer", _OPTIONS + "\n".join(rules)), *compiler.grammars])
    if len(found) > MAX_GRAMMAR_BYTES:
        raise GrammarError(
            f"becomes a grammar of {len(found) >> 10} KiB; at most {MAX_GRAMMAR_BYTES >> 10} are possible"
        )
    return found


def _grammars(named: list[tuple[str, str]]) -> str:
    return msgspec.json.encode(
        {"grammars": [{"name": name, "lark_grammar": source} for name, source in named]}
    ).decode()


def _of_user(source: str) -> str:
    try:
        lark: str = any_to_lark(source)
    except Exception as error:  # (its own kinds, and what it stumbles over)
        raise GrammarError(f"cannot be read as GBNF: {error}") from None
    found = _NOT_DONE.search(lark)
    if found:
        raise GrammarError(f"the option {found[1]} of a rule is not supported; leave it out")
    return f"{lark}\n{_OPTIONS}"


class _Compiler:
    """Makes expressions of Lark; what needs a name is kept as a rule."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self.grammars: list[tuple[str, str]] = []
        self._special = special_tokens
        longest_first = sorted(map(re.escape, filter(None, special_tokens)), key=len, reverse=True)
        self._names = re.compile("(" + "|".join(longest_first) + ")") if longest_first else None

    def content(self, content: Content) -> str:
        match content:
            case Json(schema):
                return self._rule("%json " + json.dumps(prepared(schema), ensure_ascii=False))
            case Regex(pattern):
                return f"/{regex_to_lark(pattern)}/" if pattern else '""'
            case Choice(texts):
                if not texts:
                    raise GrammarError("give at least one text to choose from")
                # (A terminal: thousands of texts are too many items for the parser, not for the lexer.)
                return self._rule(" | ".join(map(_quoted, texts)), prefix="T")
            case Text(text):
                return self.literal(text)
            case AnyText(without, most):
                return self._free(without, most)
            case Sequence(parts):
                return " ".join(f"({self.content(part)})" for part in parts) or '""'
            case Either(options):
                if not options:
                    raise GrammarError("give at least one option")
                return self._rule(" | ".join(map(self.content, options)))
            case Repeat():
                return self._repeat(content)
            case Tagged():
                return self._tagged(content)
            case Grammar(source):
                name = f"user{len(self.grammars)}"
                self.grammars.append((name, _of_user(source)))
                return self._rule(f"@{name}")

    def literal(self, text: str) -> str:
        """A text in which names of special tokens mean these."""
        if self._names is None:
            return _quoted(text)
        parts = [part for part in self._names.split(text) if part]
        return " ".join(self._token(part) or _quoted(part) for part in parts) or '""'

    def until(self, end: str) -> str:
        """Any text, up to the first such text or token, and that."""
        token = self._token(end)
        if token:
            return f"{_FREE} {token}"
        if not end:
            raise GrammarError("what ends or triggers something must not be empty")
        return self._rule(f"FREE {_quoted(end)}", "lazy", {"FREE": _FREE})

    def _free(self, without: str, most: int | None) -> str:
        """Any text that does not have this in it, of so many tokens at most."""
        free = _FREE
        if without and self._token(without) is None:
            free = f"{_FREE} & ~/(.|\\n)*{regex_to_lark(re.escape(without))}(.|\\n)*/"
        if most is None:
            return free if free == _FREE else self._rule(self._terminal(free))
        return self._rule(self._terminal(free), f"max_tokens={most}") if most else '""'

    def _terminal(self, body: str) -> str:
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _token(self, text: str) -> str | None:
        number = self._special.get(text)
        return None if number is None else f"<[{number}]>"

    def _rule(
        self, body: str, option: str = "", terminals: Mapping[str, str] | None = None, prefix: str = "r"
    ) -> str:
        name = f"{prefix}{len(self.rules)}"
        for terminal, expression in (terminals or {}).items():
            line = f"{terminal}: {expression}"
            if line not in self.rules:
                self.rules.append(line)
        self.rules.append(f"{name}{f'[{option}]' if option else ''}: {body}")
        return name

    def _repeat(self, repeat: Repeat) -> str:
        least, most = repeat.least, repeat.most
        if not 0 <= least <= (_MAX_REPEATS if most is None else most) or (most or 1) > _MAX_REPEATS:
            raise GrammarError(f"repetitions must be from 0 to {_MAX_REPEATS}")
        content = self._rule(self.content(repeat.content))
        if most == 0 or (most == 1 and least == 1):
            return content if most else '""'
        if most == 1:
            return f"{content}?"
        if not repeat.separator:
            return f"{content}{{{least},{'' if most is None else most}}}"
        again = self._rule(f"{self.literal(repeat.separator)} {content}")
        more = f"{again}{{{max(least - 1, 0)},{'' if most is None else max(most - 1, 0)}}}"
        once = self._rule(f"{content} {more}")
        return once if least else f"{once}?"

    def _tagged(self, tagged: Tagged) -> str:
        if not tagged.tags:
            raise GrammarError("give at least one tag")
        heads: dict[str, str] = {}
        tags = " | ".join(self._tag(tag, tagged.triggers, heads) for tag in tagged.tags)
        if tagged.stop_after_first:
            one = self._rule(tags)
            return one if tagged.at_least_one else self._rule(f"{one} | {_FREE}")
        one = self._rule(tags)
        return f"{one}{'+' if tagged.at_least_one else '*'} {_FREE}"

    def _tag(self, tag: Tag, triggers: list[str], heads: dict[str, str]) -> str:
        trigger = max((one for one in triggers if one and tag.begin.startswith(one)), key=len, default=None)
        if trigger is None:
            raise GrammarError(f"no trigger is a beginning of the tag's begin, {tag.begin[:100]!r}")
        if trigger not in heads:
            heads[trigger] = self.until(trigger)
        rest = self.literal(tag.begin[len(trigger) :])
        return f"{heads[trigger]} {rest} ({self.content(tag.content)}) {self.literal(tag.end)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
