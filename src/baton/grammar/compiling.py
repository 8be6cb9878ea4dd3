"""From a description to the grammar that llguidance takes.

One Lark grammar; schemas stand in it as `%json`.  Grammars of users are grammars of their own beside it,
so that their names do not meet ours.  `no_forcing`: where only one text may follow, all tokens that begin
it are allowed, and not just those that a tokenizer would choose, so the model keeps its own way to write.
"""

from __future__ import annotations

import itertools
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
    Lark,
    Regex,
    Repeat,
    Sequence,
    Structure,
    Tag,
    Tagged,
    Text,
    Token,
    Tokens,
    Until,
)
from baton.grammar.json_schema import prepared
from baton.grammar.lark import between_tags, in_json
from baton.grammar.limits import counted
from baton.protocol.params.sampling import MAX_GRAMMAR_BYTES

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
        body = compiler.content(content, last=True)
        if structure.thinking_ends is not None:
            body = f"{compiler.until(structure.thinking_ends)} /[ \\n]{{0,4}}/ ({body})"
        rules = [f"start: {body}", *compiler.rules]
        source = counted(compiler.counted) + _OPTIONS + "\n".join(rules)
        found = _grammars([("answer", source), *compiler.grammars])
    if len(found) > MAX_GRAMMAR_BYTES:
        raise GrammarError(
            f"becomes a grammar of {len(found) >> 10} KiB; at most {MAX_GRAMMAR_BYTES >> 10} are possible"
        )
    return found


def _grammars(named: list[tuple[str, str]]) -> str:
    grammars = [{"name": name, "lark_grammar": source} for name, source in named]
    try:
        return msgspec.json.encode({"grammars": grammars}).decode()
    except UnicodeEncodeError:
        raise GrammarError("half of a surrogate pair is in it, which no answer has") from None


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
        self.counted = 0
        """Characters that strings of schemas are counted to."""
        self._special = special_tokens
        longest_first = sorted(map(re.escape, filter(None, special_tokens)), key=len, reverse=True)
        self._names = re.compile("(" + "|".join(longest_first) + ")") if longest_first else None

    def content(self, content: Content, *, last: bool = False) -> str:
        """An expression for it; `last`: the answer ends with it."""
        match content:
            case Json(schema, most_spaces):
                found, characters = prepared(schema, most_spaces)
                self.counted += characters
                return self._rule("%json " + json.dumps(found, ensure_ascii=False))
            case Regex(pattern):
                return f"/{regex_to_lark(pattern)}/" if pattern else '""'
            case Choice(texts):
                if not texts:
                    raise GrammarError("give at least one text to choose from")
                # (A terminal: thousands of texts are too many items for the parser, not for the lexer.)
                return self._rule(" | ".join(map(_quoted, texts)), prefix="T")
            case Text(text):
                return self.literal(text)
            case Token(token):
                return f"<[{self._number(token)}]>"
            case Tokens(without, least, most):
                return self._tokens(without, least, most)
            case Until():
                return self._until(content, last)
            case AnyText(without, most):
                return self._free(without, most)
            case Sequence():
                return self._sequence(content, last)
            case Either(options):
                if not options:
                    raise GrammarError("give at least one option")
                return self._rule(" | ".join(self.content(option, last=last) for option in options))
            case Repeat():
                return self._repeat(content)
            case Tagged():
                return self._tagged(content)
            case Grammar(source):
                name = f"user{len(self.grammars)}"
                self.grammars.append((name, _of_user(source)))
                return self._rule(f"@{name}")
            case Lark(source, end):
                return self._tool(source, end)

    def _tool(self, source: str, end: str) -> str:
        name = f"tool{len(self.grammars)}"
        if not end:
            made, behind = in_json(source), ""
        elif self._names is not None and self._names.match(end):
            made, behind = between_tags(source), self.literal(end)
        else:
            made, behind = between_tags(source, end), ""
        self.grammars.append((name, _OPTIONS + made))
        return self._rule(f"@{name} {behind}".rstrip())

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

    def _sequence(self, sequence: Sequence, last: bool) -> str:
        """A lexer does not go back: what an expression matches, and the texts beside it, is for it one."""
        parts = _flat(sequence)
        made: list[str] = []
        while parts:
            each = list(itertools.takewhile(bool, map(self._regular, parts)))
            run, rest = parts[: len(each)], parts[len(each) :]
            if len(run) > 1 and any(isinstance(part, Regex) for part in run):
                terminal = self._terminal(" ".join(map(str, each)))
                # (Where more follows it must end somewhere: at the first place where it may.)
                ends = (rest or not last) and isinstance(run[-1], Text)
                made.append(self._rule(terminal, "lazy") if ends else terminal)
            else:
                run, rest = parts[:1], parts[1:]
                made.append(f"({self.content(run[0], last=last and not rest)})")
            parts = rest
        return " ".join(made) or '""'

    def _regular(self, content: Content) -> str | None:
        """An expression of a terminal for it, if there is one."""
        match content:
            case Text(text) if self._names is None or not self._names.search(text):
                return _quoted(text)
            case Regex(pattern):
                return f"/{regex_to_lark(pattern)}/" if pattern else '""'
            case Choice(texts) if texts:
                return f"({' | '.join(map(_quoted, texts))})"
        return None

    def _until(self, until: Until, last: bool) -> str:
        text = _FREE
        if until.most_characters is not None:
            text = f"/(.|\\n){{0,{until.most_characters}}}/"
        marks = [ending.mark.text for ending in until.endings if isinstance(ending.mark, Text)]
        for one in dict.fromkeys([*until.without, *filter(_is_byte, marks)]):
            if one not in self._special:
                text += f" & ~/(.|\\n)*{regex_to_lark(re.escape(one))}(.|\\n)*/"
        limit = "" if until.most_tokens is None else f"max_tokens={until.most_tokens}"
        free = self._terminal(text)
        bounded = self._bounded(text, free, until) if limit else free
        options = [bounded] if until.may_end else []
        for ending in until.endings:
            if isinstance(ending.mark, Token):
                mark, rest = self.content(ending.mark), ""
            else:
                first, rest = self._first(ending.mark.text)
                mark = self._token(first) or ""
                rest = self.literal(rest)
            then = f"{rest} ({self.content(ending.then, last=last)})"
            if not mark and _is_byte(first) and not limit:
                mark = _quoted(first)
            if mark:
                options.append(f"{bounded} {mark} {then}")
            elif limit:
                # (Where the model ends it, and after the last of its tokens, where the mark must come.)
                options.append(f"{bounded} {_quoted(first)} {then}")
                if until.most_tokens:
                    ended = self._rule(f"{free} {_quoted(first)}", f"lazy, {limit}")
                    options.append(f"{ended} {then}")
            else:
                options.append(f"{self._rule(f'{free} {_quoted(first)}', 'lazy')} {then}")
        return self._rule(" | ".join(options))

    def _bounded(self, text: str, free: str, until: Until) -> str:
        """The text of a number of tokens, without what ends it; `free`: without a number.

        After the last token all that is begun is ended, and the first rule of the grammar is taken to be the
        one that was meant: this one, which is made before those that have the mark in them."""
        if until.most_tokens == 0:
            return '""'
        marks = [self._first(one.mark.text)[0] for one in until.endings if isinstance(one.mark, Text)]
        texts = [one for one in dict.fromkeys(marks) if one not in self._special and not _is_byte(one)]
        for one in texts:
            text += f" & ~/(.|\\n)*{regex_to_lark(re.escape(one))}(.|\\n)*/"
        own = self._terminal(text) if texts else free
        return f"{self._rule(own, f'max_tokens={until.most_tokens}')}?"

    def _first(self, text: str) -> tuple[str, str]:
        """(the special token that it begins with, or what stands before one, the rest)."""
        if not text:
            raise GrammarError("what ends or triggers something must not be empty")
        parts = [part for part in self._names.split(text) if part] if self._names is not None else [text]
        return parts[0], "".join(parts[1:])

    def _tokens(self, without: list[str | int], least: int, most: int | None) -> str:
        if (most or 0) > _MAX_REPEATS:
            raise GrammarError(f"max_tokens: at most {_MAX_REPEATS} are possible here")
        numbers = ",".join(map(str, sorted({self._number(one) for one in without})))
        one = self._rule(f"<[^{numbers}]>" if numbers else "<[*]>")
        if (least, most) == (1, 1):
            return one
        return f"{one}{{{least},{'' if most is None else most}}}" if most != 0 else '""'

    def _number(self, token: str | int) -> int:
        number = self._special.get(token) if isinstance(token, str) else token
        if number is None or number not in self._special.values():
            raise GrammarError(f"{token!r} is no special token of this model")
        return number

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


def _is_byte(mark: str) -> bool:
    """Such a mark is no part of the text before it: where it follows something else that ends with it, a
    lazy expression would not see it."""
    return len(mark.encode()) == 1


def _flat(sequence: Sequence) -> list[Content]:
    found: list[Content] = []
    for part in sequence.parts:
        found += _flat(part) if isinstance(part, Sequence) else [part]
    return [part for part in found if part != Text("")]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
