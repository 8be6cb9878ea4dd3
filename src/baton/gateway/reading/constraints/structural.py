"""Structural tags in the form with `format` (`api/structural.py`), as descriptions of answers.

Theory.  A lexer reads the answer, which never goes back.  So where free text ends must be seen from what
follows it: it ends at the first place where that begins.  Each format is therefore translated together with
what follows it, and free text looks at the marks with which that may begin (`_marks`): the end of the tag
around it, a fixed text, a special token, the end of the answer.  Where there is no such mark, the format is
refused.  What is accepted is always what the format allows; of texts in which a mark stands several times
only one reading is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from baton.gateway.api import structural as s
from baton.gateway.errors import BadRequest
from baton.gateway.reading.constraints.functions import Function
from baton.gateway.reading.constraints.writing import STYLES, parameters
from baton.grammar.description import (
    Choice,
    Content,
    Either,
    Ending,
    Grammar,
    GrammarError,
    Json,
    Regex,
    Repeat,
    Sequence,
    Text,
    Token,
    Tokens,
    Until,
)
from baton.grammar.limits import MAX_DESCRIPTION_BYTES

_NOTHING = Text("")
_MOST_CHARACTERS = 5_000
"""Of a `max_chars`: a lexer has a state for each."""
_SAID_OF_OBJECTS = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
    | {"title", "description", "default", "examples", "$comment"}
)

Rest = Content | None
"""What follows; None: the end of the answer."""


def structural_tag(value: Any) -> Content:
    """Raises `GrammarError`, with the place in the format."""
    try:
        tag = msgspec.convert(value, s.StructuralTag)
    except msgspec.ValidationError as error:
        raise GrammarError(str(error).replace("`$.", "`")) from None
    found = _then(tag.format, None, "format")
    if _size(found, {}) > MAX_DESCRIPTION_BYTES:
        raise GrammarError("is too long: what follows free text is written once for each way to go on")
    return found


def _size(value: Any, sizes: dict[int, int]) -> int:
    """About its bytes, as it would be written.  Parts that stand in several places are looked at once:
    written, they may be more than any memory holds."""
    size = sizes.get(id(value))
    if size is None:
        match value:
            case str():
                size = len(value)
            case msgspec.Struct():
                size = 8 + sum(_size(getattr(value, name), sizes) for name in value.__struct_fields__)
            case list():
                size = sum(_size(one, sizes) for one in value)
            case Mapping():
                size = sum(_size(key, sizes) + _size(one, sizes) for key, one in value.items())
            case _:
                size = 1
        sizes[id(value)] = size
    return size


def _then(format: s.Format, rest: Rest, path: str) -> Content:
    """The format, and what follows it."""
    match format:
        case s.AnyText(excludes, max_tokens, max_chars):
            if (max_chars or 0) > _MOST_CHARACTERS:
                raise GrammarError(f"{path}.max_chars: at most {_MOST_CHARACTERS} are possible")
            endings, may_end = _endings(rest, path)
            return Until(endings, may_end, excludes, max_chars, max_tokens)
        case s.AnyTokens(excluded, max_tokens):
            return _joined(Tokens([*excluded, *_tokens(rest, path)], 0, max_tokens), rest)
        case s.Sequence(elements):
            for number, one in reversed(list(enumerate(elements))):
                rest = _then(one, rest, f"{path}.elements[{number}]")
            return _NOTHING if rest is None else rest
        case s.Or(elements) if any(map(_is_open, elements)):
            return Either([_then(one, rest, f"{path}.elements[{i}]") for i, one in enumerate(elements)])
        case s.Optional(content) if _is_open(content):
            return Either([_then(content, rest, f"{path}.content"), _NOTHING if rest is None else rest])
        case s.Tag():
            return _tag(format, rest, path)
        case s.TriggeredTags() | s.Dispatch():
            return _triggered(format, rest, path)
        case s.TokenTriggeredTags() | s.TokenDispatch():
            return _token_triggered(format, rest, path)
    return _joined(_closed(format, path), rest)


def _closed(format: s.Format, path: str) -> Content:
    """A format that ends by itself."""
    match format:
        case s.ConstString(value):
            return Text(value)
        case s.JsonSchema(schema, style, _, most_spaces):
            if style == "json":
                return Json({"not": {}} if schema is False else schema, most_spaces)
            return _parameters(schema, style, path)
        case s.QwenXmlParameter(schema):
            return _parameters(schema, "qwen_xml", path)
        case s.Grammar(grammar):
            return Grammar(grammar)
        case s.Regex(pattern):
            return Regex(pattern)
        case s.Token(token):
            return Token(token)
        case s.ExcludeToken(excluded):
            return Tokens(excluded, 1, 1)
        case s.Or(elements):
            return Either([_closed(one, f"{path}.elements[{i}]") for i, one in enumerate(elements)])
        case s.Optional(content):
            return Repeat(_repeated(content, path), 0, 1)
        case s.Plus(content):
            return Repeat(_repeated(content, path), 1)
        case s.Star(content):
            return Repeat(_repeated(content, path), 0)
        case s.Repeat(least, most, content):
            return Repeat(_repeated(content, path), least, None if most < 0 else most)
        case s.TagsWithSeparator(tags, separator, at_least_one, stop_after_first):
            one = Either([_tag(tag, _NOTHING, f"{path}.tags[{i}]") for i, tag in enumerate(tags)])
            return Repeat(one, int(at_least_one), 1 if stop_after_first else None, separator)
    return _then(format, _NOTHING, path)


def _repeated(content: s.Format, path: str) -> Content:
    if _is_open(content):
        raise GrammarError(f"{path}.content: free text cannot be repeated: nothing tells where it ends")
    return _closed(content, f"{path}.content")


def _is_open(format: s.Format) -> bool:
    """Whether it has free text that what follows must end."""
    match format:
        case s.AnyText() | s.AnyTokens() | s.Dispatch() | s.TokenDispatch():
            return True
        case s.TriggeredTags() | s.TokenTriggeredTags():
            return not (format.at_least_one and format.stop_after_first)
        case s.Sequence(elements) | s.Or(elements):
            return any(map(_is_open, elements))
        case s.Optional(content) | s.Plus(content) | s.Star(content):
            return _is_open(content)
        case s.Repeat():
            return _is_open(format.content)
        case s.Tag():
            return not _always_ends(format) and _is_open(format.content)
    return False


def _always_ends(tag: s.Tag) -> bool:
    return isinstance(tag.end, s.Token) or all([tag.end] if isinstance(tag.end, str) else tag.end)


def _tag(tag: s.Tag, rest: Rest, path: str, *, begin: Content | None = None) -> Content:
    """`begin`: what is still to come of it."""
    if begin is None:
        begin = _mark(tag.begin)
    if isinstance(tag.end, list):
        end: Content = Either([Text(one) for one in tag.end])
    else:
        end = _mark(tag.end)
    return Sequence([begin, _then(tag.content, _joined(end, rest), f"{path}.content")])


def _mark(mark: str | s.Token) -> Text | Token:
    return Text(mark) if isinstance(mark, str) else Token(mark.token)


def _joined(content: Content, rest: Rest) -> Content:
    return content if rest is None else Sequence([content, rest])


# -- free text


def _endings(rest: Rest, path: str) -> tuple[list[Ending], bool]:
    """The marks with which what follows begins, and whether nothing may follow."""
    endings = []
    marks, may_end = _marks(rest, path)
    for mark, then in marks:
        endings.append(Ending(mark, then))
    return endings, may_end


def _tokens(rest: Rest, path: str) -> list[str | int]:
    """The same for tokens, of which free ones are not these."""
    found: list[str | int] = []
    for mark, _ in _marks(rest, path)[0]:
        found.append(mark.token if isinstance(mark, Token) else mark.text)
    return found


def _marks(rest: Rest, path: str) -> tuple[list[tuple[Text | Token, Content]], bool]:
    """(mark, what follows it) of all with which this may begin; whether it may be nothing."""
    match rest:
        case None | Text(""):
            return [], True
        case Text() | Token():
            return [(rest, _NOTHING)], False
        case Choice(texts):
            return [(Text(one), _NOTHING) for one in texts if one], "" in texts
        case Either(options):
            each = [_marks(one, path) for one in options]
            return [one for marks, _ in each for one in marks], any(ends for _, ends in each)
        case Sequence(parts):
            found: list[tuple[Text | Token, Content]] = []
            for number, part in enumerate(parts):
                marks, ends = _marks(part, path)
                after = parts[number + 1 :]
                found += [(mark, Sequence([then, *after])) for mark, then in marks]
                if not ends:
                    return found, False
            return found, True
        case Repeat(content, least, most, separator) if most != 0:
            marks, ends = _marks(content, path)
            following = Text(separator) if separator else _NOTHING
            left = None if most is None else most - 1
            again = Repeat(Sequence([following, content]), max(least - 1, 0), left)
            return [(mark, Sequence([then, again])) for mark, then in marks], ends or not least
    raise GrammarError(
        f"{path}: nothing tells where this free text ends: a fixed text, a special token or the end of a tag "
        "must follow it"
    )


def _triggered(format: s.TriggeredTags | s.Dispatch, rest: Rest, path: str) -> Content:
    excludes = format.excludes
    whole: list[Content] = []
    cases: list[tuple[str, Callable[[Rest], Content]]] = []
    """A trigger, and what follows it before what is given."""
    if isinstance(format, s.Dispatch):
        for number, (pattern, content) in enumerate(format.rules):
            cases.append((pattern, _rule(content, f"{path}.rules[{number}]")))
        again, must = format.loop, False
    else:
        for number, tag in enumerate(format.tags):
            place = f"{path}.tags[{number}]"
            cases.append(_trigger(tag, format.triggers, place))
            if format.at_least_one:
                whole.append(_tag(tag, _NOTHING, place))
        idle = next((one for one in format.triggers if all(one != trigger for trigger, _ in cases)), None)
        if idle is not None:
            raise GrammarError(f"{path}.triggers: no tag begins with {idle!r}")
        again, must = not format.stop_after_first, format.at_least_one
    if not again:
        if must:
            return _joined(Either(whole), rest)
        endings, may_end = _endings(rest, path)
        return Until([*(Ending(Text(mark), case(rest)) for mark, case in cases), *endings], may_end, excludes)
    begun = [Ending(Text(mark), case(_NOTHING)) for mark, case in cases]
    endings, may_end = _endings(rest, path)
    # (Of a byte: both texts end there, whichever it is.)
    bytes_ = [
        one.mark.text for one in (*begun, *endings) if isinstance(one.mark, Text) and len(one.mark.text) == 1
    ]
    without = list(dict.fromkeys([*excludes, *bytes_]))
    one = Until(begun, without=without)
    last = Until(endings, may_end, without)
    return Sequence([*([Either(whole)] if must else []), Repeat(one, 0), last])


def _rule(content: s.Format, path: str) -> Callable[[Rest], Content]:
    return lambda rest: _then(content, rest, path)


def _trigger(tag: s.Tag, triggers: list[str], path: str) -> tuple[str, Callable[[Rest], Content]]:
    if not isinstance(tag.begin, str):
        raise GrammarError(f"{path}.begin: must be a text, as triggers are")
    begin = tag.begin
    fitting = [one for one in triggers if begin.startswith(one)]
    if len(fitting) != 1:
        raise GrammarError(f"{path}.begin: must begin with exactly one trigger, not with {len(fitting)}")
    if not _always_ends(tag) and _is_open(tag.content):
        raise GrammarError(f"{path}.end: nothing tells where the free text before it ends")
    left = Text(begin[len(fitting[0]) :])
    return fitting[0], lambda rest: _tag(tag, rest, path, begin=left)


def _begins(tag: s.Tag) -> str | int | None:
    return tag.begin.token if isinstance(tag.begin, s.Token) else None


def _token_triggered(format: s.TokenTriggeredTags | s.TokenDispatch, rest: Rest, path: str) -> Content:
    cases: list[Content] = []
    triggers: list[str | int] = []
    if isinstance(format, s.TokenDispatch):
        again, must = format.loop, False
        for number, (token, content) in enumerate(format.rules):
            triggers.append(token)
            after = _NOTHING if again else rest
            cases.append(Sequence([Token(token), _then(content, after, f"{path}.rules[{number}]")]))
    else:
        again, must = not format.stop_after_first, format.at_least_one
        triggers = format.trigger_tokens
        for number, tag in enumerate(format.tags):
            place = f"{path}.tags[{number}]"
            if _begins(tag) not in triggers:
                raise GrammarError(f"{place}.begin: must be one of the trigger_tokens")
            cases.append(_tag(tag, _NOTHING if again or must else rest, place))
        idle = next((one for one in triggers if all(_begins(tag) != one for tag in format.tags)), None)
        if idle is not None:
            raise GrammarError(f"{path}.trigger_tokens: no tag begins with {idle!r}")
    chosen = Either(cases)
    if must and not again:
        return _joined(chosen, rest)
    free = Tokens([*format.exclude_tokens, *triggers])
    last = Tokens([*format.exclude_tokens, *triggers, *_tokens(rest, path)])
    if not again:
        return Either([Sequence([free, chosen]), _joined(last, rest)])
    loop = Repeat(Sequence([free, chosen]), 0)
    return _joined(Sequence([*([chosen] if must else []), loop, last]), rest)


# -- parameters in tags


def _parameters(schema: bool | Mapping[str, Any], style: str, path: str) -> Content:
    place = f"{path}.json_schema"
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise GrammarError(f"{place}: must be the schema of an object")
    unkept = next((key for key in schema if key not in _SAID_OF_OBJECTS), None)
    if unkept is not None:
        raise GrammarError(f"{place}: the keyword {unkept} cannot be enforced in this style; leave it out")
    properties = schema.get("properties") or {}
    missing = next((key for key in schema.get("required") or () if key not in properties), None)
    if missing is not None:
        raise GrammarError(f"{place}.required: {missing!r} must stand in properties")
    try:
        return parameters(STYLES[style], Function("", schema), bare=True)
    except BadRequest as error:
        raise GrammarError(f"{place}: {error}") from None
