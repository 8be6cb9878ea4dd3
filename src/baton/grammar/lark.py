"""Lark grammars of tools that take a text (`custom` ones), rewritten for the place where the text stands.

In a JSON string its characters are written otherwise (`json_text.py`).  Between tags it stands as it is, and
a tag ends it.  The dialect is llguidance's, which OpenAI documents for these tools, too.

Theory.  llguidance's lexer looks one byte ahead and does not go back.  A terminal that may go on with `\\`
and is followed by one that begins with it would need two; a terminal that may go on with `<` would take the
tag that ends the text.  So a grammar that does not refer to itself becomes *one* terminal, which needs no
lexer: that is exact.  One that does is rewritten terminal by terminal, and refused where the lexer would have
to look further.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from baton.grammar.description import GrammarError
from baton.grammar.json_text import WRITTEN, expression_written, text_written
from baton.grammar.limits import MAX_CHECK_S
from baton.grammar.terminals import begins_with_backslash, delimited, goes_on_with_backslash, members

_TOKENS = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
    |%import\s+common\s*\.\s*(?P<single>[A-Z_]+)(?:\s*->\s*(?P<alias>[A-Z_][A-Z0-9_]*))?
    |%import\s+common\s*\((?P<listed>[^)]*)\)
    |(?P<directive>%[a-z_]+)
    |"(?P<first>(?:\\.|[^"\\\n])+)"\s*\.\.\s*"(?P<last>(?:\\.|[^"\\\n])+)"
    |"(?P<text>(?:\\.|[^"\\\n])*)"(?P<case>i?)
    |/(?P<expression>(?:\\.|[^/\\\n])+)/(?P<flags>[a-z]*)
    |(?P<special><[^>\s]*>)
    |(?P<alternative>->\s*[A-Za-z_][A-Za-z_0-9]*)
    |(?P<defined>^[ \t]*[?!]?(?P<name>[A-Za-z_][A-Za-z_0-9]*)(?P<options>[^:\n"/]*):)
    |(?P<complement>~(?!\s*[0-9]))
    |(?P<word>[A-Za-z_][A-Za-z_0-9]*)
    |(?P<other>\s+|.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_LEXER_OPTION = re.compile(r"\s*\[\s*lazy\s*\]\s*")
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "SIGNED_FLOAT": r"[+-]?(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r"\"(?:[^\"\\\n]|\\[^\n])*\"",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*(?:[^*]|\*+[^*\/])*\*+\/",
    "SQL_COMMENT": r"--[^\n]*",
}
"""Lark's own terminals, by name."""
_SIMPLE = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "\\": "\\", '"': '"', "/": "/"}
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|[xu]\{([0-9A-Fa-f]{1,6})\}|(.))", re.DOTALL)
_START = "start"
_RUN = re.compile(r"\[(?:\\.|[^\]\\\[])+\]\+")


class Definition(NamedTuple):
    """A rule or a terminal, under the name that it has in the rewritten grammar."""

    name: str
    options: str
    body: str
    refers: frozenset[str]
    """Names, as the source has them."""
    leaves: tuple[str, ...]
    """Its terminals without names, rewritten."""
    ignored: bool = False
    """It is what may stand anywhere (`%ignore`), and has no name."""


def in_json(source: str) -> str:
    """The grammar of its texts as they stand in a JSON string, between the quotes.  Raises `GrammarError`."""
    rewriting = _Rewriting(source, escaped=True)
    if rewriting.is_regular:
        return rewriting.as_terminal()
    rewriting.ignore_singly()
    rewriting.check_ahead()
    return rewriting.as_rules()


def between_tags(source: str, end: str = "") -> str:
    """The grammar of its texts and of what ends them: `end`.  In none of them it stands, nor its tag before
    another one.  "": they end at a token that is no text.  Raises `GrammarError`."""
    rewriting = _Rewriting(source, escaped=False)
    if rewriting.is_regular:
        return rewriting.as_terminal(end)
    raise GrammarError(
        "refers to itself, and where this model calls with tags that cannot be kept; write it without "
        "recursion and %ignore"
    )


class _Rewriting:
    """Of one grammar."""

    def __init__(self, source: str, *, escaped: bool) -> None:
        self._escaped = escaped
        self._leaves: list[str] = []
        """Of the definition that is read."""
        self._sources: dict[str, str] = {}
        """By leaf: what it was."""
        self.definitions = list(self._read(source))
        names = [one.name for one in self.definitions if not one.ignored]
        if _START not in names:
            raise GrammarError("has no rule 'start'")
        if len(set(names)) < len(names):
            twice = next(name for at, name in enumerate(names) if name in names[:at])
            raise GrammarError(f"{twice} is defined more than once")
        self._by_name = {one.name: one for one in self.definitions if not one.ignored}
        for one in self.definitions:
            for name in one.refers - self._by_name.keys():
                raise GrammarError(f"{one.name or '%ignore'}: there is no {name}; define it")

    @property
    def is_regular(self) -> bool:
        """Nothing refers to itself, and nothing asks for a lexer."""
        if any(one.ignored or one.options for one in self.definitions):
            return False
        return not self._refers_to_itself()

    def _refers_to_itself(self) -> bool:
        done: set[str] = set()
        for first in self._by_name:
            path: list[tuple[str, Iterator[str]]] = [(first, iter(self._by_name[first].refers))]
            begun = {first}
            while path:
                name, rest = path[-1]
                following = next((one for one in rest if one not in done), None)
                if following is None:
                    done.add(name)
                    begun.discard(name)
                    path.pop()
                elif following in begun:
                    return True
                else:
                    begun.add(following)
                    path.append((following, iter(self._by_name[following].refers)))
        return False

    def as_terminal(self, end: str = "") -> str:
        """One for all of it, and for `end` behind it."""
        lines = [f"{_terminal(one.name)}: {_named(one.body, _terminal)}" for one in self.definitions]
        whole = _terminal(_START)
        if not end:
            return "\n".join([f"start: {whole}", *lines, ""])
        tag = re.escape(end.strip())
        without = f"& ~/(.|\\n)*({delimited(re.escape(end))}|{delimited(tag)}[ \\n\\t]*<)(.|\\n)*/"
        return "\n".join([f"start[lazy]: TEXT {_string(end)}", f"TEXT: {whole} {without}", *lines, ""])

    def as_rules(self) -> str:
        lines = []
        for one in self.definitions:
            body = _named(one.body, str)
            lines.append(f"%ignore {body}" if one.ignored else f"{one.name}{one.options}: {body}")
        return "\n".join([*lines, ""])

    def check_ahead(self) -> None:
        """Raises `GrammarError` where what may go on with a backslash may be followed by one."""
        leaves, began = self._used(), time.thread_time()
        if not any(map(begins_with_backslash, leaves)):
            return
        for leaf in leaves:
            if time.thread_time() - began > MAX_CHECK_S:
                raise GrammarError(f"takes more than {MAX_CHECK_S:g} s to be read; give a simpler one")
            if goes_on_with_backslash(leaf):
                raise GrammarError(
                    f"{self._sources[leaf][:60]} may go on with a quote, a backslash or a control character, "
                    "and so may what follows it: in a grammar that refers to itself or has %ignore that "
                    "cannot be kept where this model calls with JSON; leave such characters out of it"
                )

    def _used(self) -> list[str]:
        """Leaves of all that an answer may have."""
        waiting = [self._by_name[_START], *(one for one in self.definitions if one.ignored)]
        seen, leaves = {_START}, dict[str, None]()
        while waiting:
            one = waiting.pop()
            leaves.update(dict.fromkeys(one.leaves))
            waiting += [self._by_name[name] for name in one.refers - seen]
            seen |= one.refers
        return list(leaves)

    def ignore_singly(self) -> None:
        """What is ignored may come again and again: one character of a run of them is enough, and the lexer
        need not look further."""
        for at, one in enumerate(self.definitions):
            if not one.ignored:
                continue
            if len(one.refers) == 1 and re.fullmatch("\0[^\0]*\0", one.body):
                one = self._by_name[next(iter(one.refers))]
            pattern = self._sources.get(one.body, "")[1:-1]
            if _RUN.fullmatch(pattern):
                self._leaves = []
                body = self._expression(pattern[:-1], "")
                self.definitions[at] = Definition("", "", body, frozenset(), tuple(self._leaves), True)

    # -- reading

    def _read(self, source: str) -> Iterator[Definition]:
        name, options, body, refers, ignored = "", "", list[str](), set[str](), False
        for token in _TOKENS.finditer(source):
            if token["defined"] or token["directive"] or token["single"] or token["listed"] is not None:
                if name or ignored:
                    leaves, self._leaves = tuple(self._leaves), []
                    yield Definition(name, options, _joined(body), frozenset(refers), leaves, ignored)
                name, options, body, refers, ignored = "", "", [], set(), False
            if token["defined"]:
                name, options = token["name"], _options(token["options"], token["name"])
            elif token["directive"]:
                if token["directive"] != "%ignore":
                    raise GrammarError(
                        f"{token['directive']} is not supported; of imports those of common are"
                    )
                ignored = True
            elif token["single"]:
                yield self._common(token["single"], token["alias"] or token["single"])
            elif token["listed"] is not None:
                for one in filter(None, map(str.strip, token["listed"].split(","))):
                    yield self._common(one, one)
            elif token["word"]:
                refers.add(token["word"])
                body.append(f"\0{token['word']}\0")
            elif (made := self._made(token)) is not None:
                if made.strip() and not (name or ignored):
                    raise GrammarError(f"{made.strip()[:50]!r} belongs to no rule")
                body.append(made)
        if name or ignored:
            yield Definition(name, options, _joined(body), frozenset(refers), tuple(self._leaves), ignored)

    def _common(self, name: str, alias: str) -> Definition:
        if name not in _COMMON:
            raise GrammarError(f"%import common.{name}: there is no such terminal; define it")
        body = self._expression(_COMMON[name], "")
        leaves, self._leaves = tuple(self._leaves), []
        return Definition(alias, "", body, frozenset(), leaves)

    def _made(self, token: re.Match[str]) -> str | None:
        if token["comment"] or token["alternative"]:
            return None
        if token["special"]:
            raise GrammarError(f"{token['special'][:50]}: the model's tokens cannot stand in a tool's input")
        if token["complement"]:
            raise GrammarError("~ before a terminal is not supported; write what it may be")
        if token["first"]:
            first, last = _unquoted(token["first"]), _unquoted(token["last"])
            if len(first) != 1 or len(last) != 1:
                raise GrammarError(f"{token[0][:50]}: a range is of single characters")
            return self._expression(f"[\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}]", "")
        if token["text"] is not None:
            return self._text(token["text"], token["case"])
        if token["expression"]:
            return self._expression(token["expression"], token["flags"])
        if token["other"] in ('"', "/"):
            raise GrammarError("a text or an expression has no end on its line")
        return token["other"]

    def _text(self, quoted: str, case: str) -> str:
        text = _unquoted(quoted)
        if not self._escaped:
            return _string(text) + case
        if case and any(one in WRITTEN for one in text):
            return self._expression(
                "".join(f"\\x{{{ord(one):x}}}" if one in WRITTEN else re.escape(one) for one in text), "i"
            )
        written = _string(text_written(text)) + case
        if text:
            self._leaves.append(written)
            self._sources[written] = f'"{quoted}"'
        return written

    def _expression(self, pattern: str, flags: str) -> str:
        unknown = set(flags) - set("is")
        if unknown:
            raise GrammarError(f"/{pattern[:50]}/{flags}: of flags only i and s are supported")
        if not self._escaped:
            return f"/{pattern}/{flags}"
        made = expression_written(pattern, members, ignores_case="i" in flags, dot_all="s" in flags)
        leaf = f"/{delimited(made)}/{'i' if 'i' in flags else ''}"
        self._leaves.append(leaf)
        self._sources[leaf] = f"/{pattern}/"
        return leaf


def _options(options: str, name: str) -> str:
    """Of a definition.  Raises `GrammarError` for what needs more of an engine than masks."""
    if not options.strip():
        return ""
    if not _LEXER_OPTION.fullmatch(options):
        raise GrammarError(f"{name}{options.strip()[:50]}: is not supported; leave it out")
    return options.strip()


def _joined(body: list[str]) -> str:
    return " ".join("".join(body).split("\n")).strip()


def _named(body: str, rename: Callable[[str], str]) -> str:
    return re.sub("\0([^\0]*)\0", lambda found: rename(found[1]), body)


def _terminal(name: str) -> str:
    """A name of its own for each name."""
    return f"T_{name.upper()}_{'U' if name.isupper() else 'L'}{name.encode().hex().upper()}"


def _unquoted(text: str) -> str:
    def character(escape: re.Match[str]) -> str:
        code = escape[1] or escape[2] or escape[3]
        if code is not None:
            return chr(int(code, 16))
        if escape[4] not in _SIMPLE:
            raise GrammarError(f"\\{escape[4]} is not supported in a text")
        return _SIMPLE[escape[4]]

    return _ESCAPE.sub(character, text)


def _string(text: str) -> str:
    """As Lark writes it."""
    special = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f", "\b": "\\b"}
    return '"' + "".join(special.get(one, one) for one in text) + '"'
