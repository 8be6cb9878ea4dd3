"""Chat templates: from messages to the prompt's text, by the conventions of Hugging Face's hub.

Templates come with a model, so they are foreign code: they run in Jinja's immutable sandbox, and a
server compiles and runs them in a helper (`helpers/`), with limits of time and memory.  Here they are only
parsed.
The conventions that published templates rely on are reproduced here without importing transformers
(seconds of start-up): trimmed blocks, loop controls, `{% generation %}`, `raise_exception`, `strftime_now`,
a `tojson` that does not escape HTML, and the special tokens (`bos_token`, `eos_token`, …) as variables.

How a template wants messages to look (a list of parts or a text, None or "" where there is no text, …) is
asked by rendering (`shapes.py`).  One that rejects a conversation is given it once more in the ways that
strict templates take (`shapes.tamer`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.gateway.api.call_arguments import Arguments
from baton.gateway.api.messages import MAX_TEMPLATE, RESERVED_VARIABLES
from baton.gateway.text.shapes import Shapes, tamer

_OURS = 3
"""Variables that are set here in `render`."""
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

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """`defaults`: of the template's own switches, where it is asked what it wants.  Raises
        `ChatTemplateError` if `source` is no template, `MemoryError` where that is limited."""
        self._special_tokens = dict(special_tokens or {})
        self._defaults = dict(defaults or {})
        try:
            self._template = _environment().from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # (constants are computed while it is compiled)
            raise _no_template(error) from None
        self.shapes = Shapes(self._render, Arguments)
        """How it wants messages to look."""

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
        if continue_final_message and (not messages or not messages[-1].get("content")):
            raise ChatTemplateError(
                "continue_final_message: the last message has no text to continue", "continue_final_message"
            )
        given = {
            **(variables or {}),
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "documents": documents,
        }
        conversation = self.shapes.prepare(messages)
        try:
            text = self._text_of(conversation, given, marked=continue_final_message)
        except ChatTemplateError as error:
            text = self._tamed(conversation, given, error, marked=continue_final_message)
        if not continue_final_message:
            return text
        end = text.rfind(_CONTINUE_MARK)
        if end < 0:
            raise ChatTemplateError(
                "continue_final_message: the chat template does not keep the last message's text"
            )
        return text[:end]

    def _text_of(
        self, conversation: list[dict[str, Any]], variables: Mapping[str, Any], *, marked: bool
    ) -> str:
        """`marked`: where the last message ends, a mark follows."""
        try:
            return self._run(_marked(conversation) if marked else conversation, variables)
        except MemoryError:
            raise
        except Exception as error:  # the template is a foreign program: whatever it raises
            given = "these messages" + (" and chat_template_kwargs" if len(variables) > _OURS else "")
            raise ChatTemplateError(f"the chat template rejects {given}: {error}") from None

    def _tamed(
        self,
        conversation: list[dict[str, Any]],
        variables: Mapping[str, Any],
        error: ChatTemplateError,
        *,
        marked: bool,
    ) -> str:
        """What a strict template makes of it in another shape.  Raises the first error if it takes none."""
        if variables["tools"] is None:  # (some go through them without asking)
            with contextlib.suppress(ChatTemplateError):
                return self._text_of(conversation, {**variables, "tools": []}, marked=marked)
        tried = [conversation]
        for other in tamer(conversation):
            if other not in tried:
                tried.append(other)
                with contextlib.suppress(ChatTemplateError):
                    return self._text_of(other, variables, marked=marked)
        raise error

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> str | None:
        """For `Shapes`."""
        try:
            return self._run(messages, {**self._defaults, "add_generation_prompt": True, "tools": tools})
        except MemoryError:
            raise
        except Exception:  # (an answer, too)
            return None

    def _run(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        return self._template.render(  # (not as arguments: a name may be one of the function's)
            {
                **self._special_tokens,
                **{k: v for k, v in variables.items() if k not in self._special_tokens},
                "messages": list(messages),
                "documents": variables.get("documents"),
            }
        )


def _marked(conversation: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """With `_CONTINUE_MARK` at the end of the last text."""
    marked = list(conversation)
    place = next((i for i in reversed(range(len(marked))) if marked[i].get("content")), 0)
    content = marked[place]["content"]
    if isinstance(content, str):
        content += _CONTINUE_MARK
    else:
        content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUE_MARK}]
    marked[place] = {**marked[place], "content": content}
    return marked


def check_template(source: str) -> None:
    """Only parses.  Raises `ChatTemplateError` if `source` is no template, or longer than any."""
    if len(source) > MAX_TEMPLATE:
        raise ChatTemplateError(
            f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE} are read"
        )
    try:
        _environment().parse(source)
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
