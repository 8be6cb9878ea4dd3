"""Chat templates: from messages to the prompt's text, by the conventions of Hugging Face's hub.

Templates come with a model, so they are foreign code: they run in Jinja's immutable sandbox, and a
server compiles and runs them in a helper (`helpers/`), with limits of time and memory.  Here they are only
parsed.
The conventions that published templates rely on are reproduced here without importing transformers
(seconds of start-up): trimmed blocks, loop controls, `{% generation %}`, `raise_exception`, `strftime_now`,
a `tojson` that does not escape HTML, and the special tokens (`bos_token`, `eos_token`, …) as variables.

Whether a template reads a message's text parts itself is found in its syntax tree, as vLLM does
(`content_format`).  A template of that kind that never asks whether content is a string gets a list of parts
for a plain text, too.

A message without text (tool calls only) has None for content where the template asks whether content is none
(some know a tool call by that), else "", as many templates join it to other strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.gateway.api.messages import MAX_TEMPLATE, RESERVED_VARIABLES, ContentFormat

_ASKS_FOR_NONE = re.compile(r"""content(['"]\s*\])?\s+is\s+(not\s+)?none\b""", re.IGNORECASE)
_ASKS_FOR_STRING = re.compile(r"""\bis\s+(not\s+)?string\b""")
_CONTINUE_MARK = "\ue0ff\uf8d1continue here\uf8d1\ue0ff"


class ChatTemplateError(ValueError):
    """The template could not be compiled, or refused these messages.  `param`: the field to change."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


def no_template() -> ChatTemplateError:
    return ChatTemplateError(
        "messages: the model has no chat template; use /v1/completions, or a model that was trained for chat"
    )


class ChatTemplate:
    """A compiled template and the variables that it always sees."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises `ChatTemplateError` if `source` is no template, `MemoryError` where that is limited."""
        self._special_tokens = dict(special_tokens or {})
        self._knows_developer = "developer" in source
        self._asks_for_none = _ASKS_FOR_NONE.search(source) is not None
        self._wraps = content_format(source) == "openai" and not _ASKS_FOR_STRING.search(source)
        try:
            self._template = _environment().from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # (constants are computed while it is compiled)
            raise _no_template(error) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text.

        Each message's `content` is a string, a list of text parts, or None.  `variables` are the template's
        own switches (`enable_thinking`, …).  With `continue_final_message` the text ends where the last
        message's content ends, so that the model goes on with it.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message: cannot go with add_generation_prompt; set that to false",
                "continue_final_message",
            )
        for name in variables or ():
            if name in RESERVED_VARIABLES:
                raise ChatTemplateError(
                    f"chat_template_kwargs: {name!r} is set by the server; leave it out",
                    "chat_template_kwargs",
                )
        conversation = [self._prepare(message) for message in messages]
        if continue_final_message:
            if not messages or not messages[-1].get("content"):
                raise ChatTemplateError(
                    "continue_final_message: the last message has no text to continue",
                    "continue_final_message",
                )
            content = conversation[-1]["content"]
            if isinstance(content, str):
                conversation[-1]["content"] = content + _CONTINUE_MARK
            else:
                content[-1] = {**content[-1], "text": content[-1]["text"] + _CONTINUE_MARK}
        try:
            text = self._template.render(
                {  # (not as arguments: a name may be one of the function's)
                    **self._special_tokens,
                    **{k: v for k, v in (variables or {}).items() if k not in self._special_tokens},
                    "messages": conversation,
                    "add_generation_prompt": add_generation_prompt,
                    "tools": tools,
                    "documents": documents,
                }
            )
        except MemoryError:
            raise
        except Exception as error:  # the template is a foreign program: whatever it raises
            given = "these messages" + (" and chat_template_kwargs" if variables else "")
            raise ChatTemplateError(f"the chat template rejects {given}: {error}") from None
        if not continue_final_message:
            return text
        end = text.rfind(_CONTINUE_MARK)
        if end < 0:
            raise ChatTemplateError(
                "continue_final_message: the chat template does not keep the last message's text"
            )
        return text[:end]

    def _prepare(self, message: Mapping[str, Any]) -> dict[str, Any]:
        prepared = dict(message)
        if prepared.get("role") == "developer" and not self._knows_developer:
            prepared["role"] = "system"
        content = prepared.get("content")
        if content is None and not self._asks_for_none:
            prepared["content"] = ""
        elif isinstance(content, list):
            prepared["content"] = list(content)
        elif content is not None and self._wraps:
            prepared["content"] = [{"type": "text", "text": content}]
        return prepared


def content_format(source: str) -> ContentFormat:
    """`openai` if the template goes through a message's content part by part, else `string`.

    Only parses.  Raises `ChatTemplateError` if `source` is no template, or longer than any.
    """
    if len(source) > MAX_TEMPLATE:
        raise ChatTemplateError(
            f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE} are read"
        )
    try:
        tree = _environment().parse(source)
        return "openai" if _loops_over_content(tree) else "string"
    except Exception as error:  # (nesting without end, too)
        raise _no_template(error) from None


def _no_template(error: Exception) -> ChatTemplateError:
    return ChatTemplateError(f"the chat template does not compile: {error or type(error).__name__}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _loops_over_content(tree: nodes.Template) -> bool:
    """`{% for part in message.content %}`, with `message` from a loop over `messages` or an item of it, and
    both maybe under other names."""
    loops, assigned = list(tree.find_all(nodes.For)), list(tree.find_all(nodes.Assign))
    lists = _names_of(assigned, {"messages"}, _is_part_of)
    items = {
        loop.target.name
        for loop in loops
        if isinstance(loop.target, nodes.Name) and any(_is_part_of(loop.iter, name) for name in lists)
    }
    items |= {
        node.target.name
        for node in assigned
        if isinstance(node.target, nodes.Name) and any(_is_item_of(node.node, name) for name in lists)
    }
    contents = {
        node.target.name
        for node in assigned
        if isinstance(node.target, nodes.Name) and _is_content(node.node, items, lists)
    }
    contents |= _content_parameters(tree, lambda node: _is_content(node, items, lists))
    return any(
        _is_content(loop.iter, items, lists) or any(_is_part_of(loop.iter, name) for name in contents)
        for loop in loops
    )


def _content_parameters(tree: nodes.Template, is_content: Callable[[nodes.Node], bool]) -> set[str]:
    """Names of macros' parameters that are called with a message's content."""
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is not None:
            pairs = zip(call.args, macro.args, strict=False)
            found |= {parameter.name for value, parameter in pairs if is_content(value)}
    return found


def _names_of(
    assigned: Sequence[nodes.Assign], known: set[str], matches: Callable[[nodes.Node, str], bool]
) -> set[str]:
    """`known` and the variables that are set to one of them, in turn."""
    names = set(known)
    while True:
        more = {
            node.target.name
            for node in assigned
            if isinstance(node.target, nodes.Name) and any(matches(node.node, name) for name in names)
        }
        if more <= names:
            return names
        names |= more


def _is_part_of(node: nodes.Node | None, name: str) -> bool:
    """The variable, maybe filtered or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test | nodes.Getitem):
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.name == name


def _is_item_of(node: nodes.Node, name: str) -> bool:
    """`messages[0]` and the like."""
    return isinstance(node, nodes.Getitem) and _is_part_of(node.node, name)


def _is_content(node: nodes.Node, items: set[str], lists: set[str]) -> bool:
    """`message.content`, `message["content"]`, `messages[0]["content"]`, maybe filtered."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getattr):
        named = node.attr == "content"
    elif isinstance(node, nodes.Getitem):
        named = isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    else:
        return False
    return named and (
        any(_is_part_of(node.node, name) for name in items)
        or any(_is_item_of(node.node, name) for name in lists)
    )


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: marks what a model wrote, for training; renders its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own convention)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
