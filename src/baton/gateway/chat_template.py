"""Chat templates: from messages to the prompt's text, by the conventions of Hugging Face's hub.

Templates come with a model, so they are somebody else's program: they run in Jinja's immutable sandbox.
The conventions that published templates rely on are reproduced here without importing transformers
(seconds of start-up): trimmed blocks, loop controls, `{% generation %}`, `raise_exception`, `strftime_now`,
a `tojson` that does not escape HTML, and the special tokens (`bos_token`, `eos_token`, …) as variables.

A message without text (tool calls only) has None for content where the template asks whether content is none
(some know a tool call by that), else "", as many templates join it to other strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_RESERVED = ("messages", "add_generation_prompt", "tools", "documents")
_ASKS_FOR_NONE = re.compile(r"""content(['"]\s*\])?\s+is\s+(not\s+)?none\b""", re.IGNORECASE)
_CONTINUE_MARK = "\ue0ff\uf8d1continue here\uf8d1\ue0ff"


class ChatTemplateError(ValueError):
    """The template could not be compiled, or refused these messages."""


class ChatTemplate:
    """A compiled template and the variables that it always sees."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises `ChatTemplateError` if `source` is no template."""
        self._special_tokens = dict(special_tokens or {})
        self._knows_developer = "developer" in source
        self._asks_for_none = _ASKS_FOR_NONE.search(source) is not None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text.

        Each message's `content` is a string or None.  `variables` are the template's own switches
        (`enable_thinking`, …).  With `continue_final_message` the text ends where the last message's
        content ends, so that the model goes on with it.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message: cannot go with add_generation_prompt; set that to false"
            )
        for name in variables or ():
            if name in _RESERVED:
                raise ChatTemplateError(f"chat_template_kwargs: {name!r} is set by the server; leave it out")
        conversation = [self._prepare(message) for message in messages]
        if continue_final_message:
            if not messages or not isinstance(messages[-1].get("content"), str):
                raise ChatTemplateError("continue_final_message: the last message has no text to continue")
            conversation[-1]["content"] += _CONTINUE_MARK
        try:
            text = self._template.render(
                **self._special_tokens,
                **{k: v for k, v in (variables or {}).items() if k not in self._special_tokens},
                messages=conversation,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
            )
        except Exception as error:  # the template is a foreign program: whatever it raises
            raise ChatTemplateError(f"the chat template rejects these messages: {error}") from None
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
        if prepared.get("content") is None and not self._asks_for_none:
            prepared["content"] = ""
        return prepared


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
