"""A request's body, read: its fields, and apart from them the prompts, which may be nearly all of it.

Pure, and the same wherever it runs: short bodies are read on the event loop, long ones and every conversation
(chat templates are foreign code) in a helper (`helpers/`).  Helpers encode long texts and decode
many ids, too.  A helper's answer is small: fields, texts, packed token ids that are known to be the model's;
what cannot fit is refused there.

An error of the prompts (`Found.failure`) waits until they are asked for, so that other fields are checked
first, wherever the body was read.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton.gateway.api.content import Notes
from baton.gateway.api.messages import read_messages
from baton.gateway.api.pooling import ClassifyRequest, EmbeddingRequest, RankingFields
from baton.gateway.api.schemas import ChatFields, ChatRequest, decode_body, decode_prompt
from baton.gateway.api.tools import Tools, allowed_here, read_tools, served
from baton.gateway.errors import BadRequest, ContextTooLong
from baton.gateway.reading.checks import check_ids, check_not_empty, check_prompt, text_too_long
from baton.gateway.reading.constraints.binding import Binding, chat_bindings, text_bindings
from baton.gateway.reading.constraints.structured import Asked
from baton.gateway.reading.conversations import echo_of, render_conversation
from baton.gateway.reading.failure import Failure
from baton.gateway.reading.fitting import fitting
from baton.gateway.reading.jobs import (
    APART,
    CONVERSATIONS,
    KINDS,
    MORE,
    TRANSLATIONS,
    Beside,
    Job,
    Translated,
)
from baton.gateway.reading.pooled import inputs_of, pairs_of, prompts_of
from baton.gateway.reading.settings import Settings
from baton.gateway.responses.translation import ReadResponses
from baton.gateway.text.chat_template import ChatTemplate, ChatTemplateError, no_template
from baton.gateway.text.encoding import LONG_TEXT, MANY_TOKENS, Encoding, TextTooLong
from baton.grammar.checking import Checker
from baton.grammar.description import GrammarError
from baton.protocol.codec import pack_int32, unpack_int32

CHARACTERS_PER_TOKEN = 256
"""A text of more characters than this times the context cannot fit; it is refused unread."""
_ALWAYS_MESSAGES = 1024
"""So many are allowed even if the context has fewer tokens."""


class Found(msgspec.Struct, array_like=True):
    """The prompts of a body: texts, or token ids; or why there are none."""

    texts: list[str] = []
    ids: list[bytes] = []
    """Packed int32, each from 0 to the vocabulary's end, and short enough for the context; where there are
    texts too, those of them, of any length.  (Of ids to decode that were many, the text alone.)"""
    field: str = "prompt"
    """Where they stood."""
    failure: Failure | None = None
    documents: list[str] = []
    """Of a ranking: the texts that are ranked."""
    num_queries: int = 0
    """Of a ranking: texts that documents are compared with; one for all, or one for each."""
    tools: Tools = Tools()
    """Of a conversation."""
    thinking: bool = False
    """Of a conversation: the answer begins inside of reasoning."""
    echo: str = ""
    """Of a conversation: the last message's text, with which the answer is to begin."""
    bindings: list[Binding] = []
    """What binds the answers: the first that can be kept does (`constraints/binding.py`); none: nothing."""
    skipped: list[str] = []
    """Kinds of tools that were offered and left out."""
    notes: dict[str, int] = {}
    """Of a conversation: parts that the model does not read, kind → how many (`api/content.py`)."""

    @property
    def is_long(self) -> bool:
        """It takes long to encode the texts, or to decode the ids."""
        if self.field == "tokens":
            return any(len(ids) > 4 * MANY_TOKENS for ids in self.ids)
        return not self.ids and sum(map(len, self.texts)) >= LONG_TEXT

    @property
    def is_refused(self) -> bool:
        """There will be no answer."""
        return self.failure is not None or any(one.failure is not None for one in self.bindings[-1:])

    def check(self) -> None:
        """Raises `BadRequest`."""
        if self.failure is not None:
            raise self.failure.error()


class Answer(msgspec.Struct, array_like=True):
    """What a helper found in a body."""

    fields: bytes = b"{}"
    """Those that were given, as JSON (which knows integers of any size)."""
    found: Found = msgspec.field(default_factory=Found)
    unknown: list[str] = []
    """Names of fields that nobody knows."""
    failure: Failure | None = None
    """The body is refused."""
    chat: bytes = b""
    """Of a body of another API: the chat's fields, as JSON."""


class Reader:
    """Reads bodies by these settings.  The template is compiled when it is first needed.

    `encoding` None: this reader leaves long texts to a helper.
    """

    def __init__(self, settings: Settings, encoding: Encoding | None = None) -> None:
        self.settings = settings
        self._encoding = encoding
        self._template: ChatTemplate | None = None
        self._checker: Checker | None = None

    def read(self, job: Job, body: bytes) -> tuple[Any, Found, list[str]]:
        """(the body as a struct of `KINDS[job]`, or `Translated`; its prompts; unknown names).  Raises
        `BadRequest`."""
        more = b""
        if job in MORE:
            size = 4 + int.from_bytes(body[:4], "little")
            more, body = body[4:size], body[size:]
        request, unknown = decode_body(body, KINDS[job])
        read: Any = request
        translation, skipped = TRANSLATIONS.get(job), list[str]()
        if translation is not None:
            formats = self.settings.formats
            beside = Beside(
                keeps=self.settings.keeps,
                more=more,
                thinks=formats.thinks,
                refuse_tools=self.settings.refuse_tools,
                max_model_len=self.settings.max_model_len,
            )
            known, chat, skipped = translation.chat(request, beside)
            if chat is None:
                return Translated(known, ChatRequest()), Found(), unknown
            request, read = chat, Translated(known, chat)
        elif job in CONVERSATIONS:
            skipped = self._skip_tools(request)
        try:
            if getattr(request, "drops_oldest", False) and self._encoding is not None:
                self._drop_oldest(request, self._encoding)
            found = self._find(job, request)
            found.skipped = skipped
            self._bind(job, request, found)
            if self._encoding is not None and found.is_long:
                self._convert(job, request, found, self._encoding)
            return read, found, unknown
        except (BadRequest, ChatTemplateError) as error:
            return read, Found(failure=Failure.of(error)), unknown

    def answer(self, job: Job, body: bytes) -> bytes:
        """What `read` finds, as an encoded `Answer`.  Never raises for what a client sent."""
        if job == "structure":
            return self._check_structure(body)
        try:
            request, found, unknown = self.read(job, body)
        except BadRequest as error:
            return msgspec.msgpack.encode(Answer(failure=Failure.of(error)))
        if isinstance(request, Translated):
            if found.is_refused and isinstance(request.body, ReadResponses):
                request.body.said, request.body.items = "", []  # (of an answer that there will not be)
            fields = _given(request.body, TRANSLATIONS[job].apart)
            answer = Answer(fields, found, unknown, chat=_given(request.chat, APART))
        else:
            answer = Answer(_given(request, APART), found, unknown)
        return msgspec.msgpack.encode(answer)

    def _check_structure(self, body: bytes) -> bytes:
        """`body`: an encoded `Asked`.  The answer's only text is the grammar."""
        asked = _ASKED.decode(body)
        if self._checker is None:
            self._checker = Checker(self.settings.special_names)
        try:
            found = Found(texts=[self._checker.check(asked.structure)])
        except GrammarError as error:
            failure = Failure(f"{asked.field}: {error}", asked.field, None)
            return msgspec.msgpack.encode(Answer(failure=failure))
        return msgspec.msgpack.encode(Answer(found=found))

    def _skip_tools(self, request: Any) -> list[str]:
        """Leaves out the tools that cannot be called here.  Returns their kinds."""
        refuse = self.settings.refuse_tools
        request.tools, skipped = served(request.tools, request.tool_choice, refuse=refuse)
        request.tool_choice = allowed_here(request.tool_choice, refuse=refuse)
        if getattr(request, "web_search_options", None) is not None:
            if refuse:
                raise BadRequest(
                    "web_search_options: the server has no search engine; leave it out",
                    param="web_search_options",
                    code="unsupported_parameter",
                )
            skipped = list(dict.fromkeys(["web_search", *skipped]))
        return skipped

    def _find(self, job: Job, request: Any) -> Found:
        match job:
            case "completion":
                return self._prompts(decode_prompt(request.prompt), cut=_cuts(request))
            case "embedding" | "classify":
                return self._inputs(request)
            case "rerank" | "score":
                return self._pairs(request)
            case "detokenize":
                return self._tokens(request.tokens)
            case "tokenize":
                if (request.prompt is None) == (request.messages is None):
                    raise BadRequest("prompt: give either prompt or messages", param="prompt")
                if request.prompt is not None:
                    read_tools(request.tools)  # (of no effect, but not whatever they are)
                    return self._prompts(request.prompt)
        return self._conversation(request)

    def _bind(self, job: Job, request: Any, found: Found) -> None:
        """Describes what binds the answers."""
        if job == "completion":
            found.bindings = text_bindings(request)
        elif isinstance(request, ChatRequest) and job != "count_tokens":
            formats = self.settings.formats
            found.bindings = chat_bindings(request, formats, found.tools, thinking=found.thinking)
            found.tools = found.tools.without_schemas()

    def _convert(self, job: Job, request: Any, found: Found, encoding: Encoding) -> None:
        """Encodes what was found, or decodes it."""
        if found.field == "tokens":
            found.texts = [encoding.decode(unpack_int32(found.ids[0]), skip_special_tokens=False)]
            found.ids = []
            return
        special = request.add_special_tokens
        if special is None:
            judge = self.settings.judge
            asked = judge is not None and not judge.head and job in ("rerank", "score")
            special = found.field != "messages" and not asked  # (a template writes them itself)
        limit = self.settings.max_model_len
        if _cuts(request):
            limit = max(map(len, found.texts))  # (so many tokens it has at most: none is refused)
        try:
            rows = encoding.encode_all(found.texts, add_special_tokens=special, limit=limit)
        except TextTooLong as error:
            raise text_too_long(found.field, error.length, limit) from None
        if job != "tokenize":
            for row in rows:
                check_not_empty(row, found.field)
                check_ids(found.field, row, self.settings.vocab_size)
        found.ids = [pack_int32(row) for row in rows]

    def _prompts(
        self, prompt: str | list[str] | list[int] | list[list[int]] | None, *, cut: bool = False
    ) -> Found:
        """`cut`: those that are too long are not refused."""
        if isinstance(prompt, str):
            prompt = [prompt]
        if not prompt:
            raise BadRequest(
                "prompt: give a text, a list of texts, a list of token ids, or a list of such lists",
                param="prompt",
            )
        many: list[Any] = prompt  # (what its first item is, all are)
        if isinstance(many[0], str):
            for text in many if not cut else ():
                self._check_text("prompt", text)
            return Found(texts=many)
        rows = many if isinstance(many[0], list) else [many]
        for row in rows:
            longest = len(row) + 1 if cut else self.settings.max_model_len
            check_prompt(row, longest, self.settings.vocab_size)
        return Found(ids=[pack_int32(row) for row in rows])

    def _inputs(self, request: EmbeddingRequest | ClassifyRequest) -> Found:
        """Those that are too long are refused, unless they are to be cut."""
        inputs, cut = inputs_of(request), _cuts(request)
        ids, texts = [], []
        for one in inputs:
            if isinstance(one, str):
                texts.append(one)
                if not cut:
                    self._check_text("input", one)
                continue
            longest = len(one) if cut else self.settings.max_model_len
            check_prompt(one, longest, self.settings.vocab_size, field="input", answers=False)
            ids.append(pack_int32(one))
        return Found(texts, ids, field="input")

    def _pairs(self, request: RankingFields) -> Found:
        queries, documents = pairs_of(request)
        texts = prompts_of(queries, documents, self.settings.judge, request.instruction)
        if not _cuts(request):
            for text in texts:
                self._check_text("documents", text)
        return Found(texts, field="documents", documents=documents, num_queries=len(queries))

    def _tokens(self, tokens: list[int] | None) -> Found:
        if tokens is None:
            raise BadRequest("tokens: it is missing; give a list of token ids", param="tokens")
        check_ids("tokens", tokens, self.settings.vocab_size)
        return Found(ids=[pack_int32(tokens)], field="tokens")

    def _conversation(self, request: ChatFields) -> Found:
        count, most = len(request.messages or ()), max(self.settings.max_model_len, _ALWAYS_MESSAGES)
        if count > most:
            advice = f"Please reduce the length of the messages, to at most {most}"
            what = f"your {count} messages cannot fit"
            raise ContextTooLong(self.settings.max_model_len, what, advice, param="messages")
        notes = Notes(self.settings.refuses)
        settings, template = self.settings, self._template or self._compile()
        messages = read_messages(request.messages, settings.content_format, notes)
        defaults = settings.template_defaults
        text, found = render_conversation(request, messages, template, settings.formats, defaults)
        if not _cuts(request):
            self._check_text("messages", text)
        return Found(
            texts=[text],
            field="messages",
            tools=found.tools,
            thinking=found.thinking,
            echo=echo_of(request, messages, template) if getattr(request, "echo", None) else "",
            notes=notes.counts,
        )

    def _drop_oldest(self, request: Any, encoding: Encoding) -> None:
        """Of its messages, until the context has room for them and for the answer."""
        room = self.settings.max_model_len - (request.max_completion_tokens or 1)

        def fits(messages: list[dict[str, Any]]) -> bool:
            request.messages = messages
            text = self._conversation(request).texts[0]
            if encoding.is_longer(text, room):
                return False
            return len(encoding.encode(text, add_special_tokens=False)) <= room

        messages = list(request.messages or ())
        fitting(messages, fits)
        request.messages = messages

    def _compile(self) -> ChatTemplate:
        own = self.settings
        if own.template is None:
            raise no_template()
        self._template = ChatTemplate(own.template, own.special_tokens, own.template_defaults)
        return self._template

    def _check_text(self, field: str, text: str) -> None:
        if len(text) > self.settings.max_model_len * CHARACTERS_PER_TOKEN:
            raise text_too_long(field, len(text), self.settings.max_model_len)


def _given(request: msgspec.Struct, apart: frozenset[str]) -> bytes:
    """The fields that were given, but for some, as JSON."""
    fields = {
        name: value
        for name in request.__struct_fields__
        if name not in apart
        and (value := getattr(request, name)) is not None
        and not isinstance(value, msgspec.Raw)
    }
    return msgspec.json.encode(fields)


def _cuts(request: Any) -> bool:
    """Prompts that are too long are to be cut."""
    return getattr(request, "truncate_prompt_tokens", None) is not None


def decode_grammar(data: bytes) -> str:
    """What a helper made of a description.  Raises `BadRequest`."""
    answer = _ANSWERS.decode(data)
    if answer.failure is not None:
        raise answer.failure.error()
    return answer.found.texts[0]


def decode_answer(job: Job, data: bytes) -> tuple[Any, Found, list[str]]:
    """What a helper's `Reader.read` returned.  Raises `BadRequest`."""
    answer = _ANSWERS.decode(data)
    if answer.failure is not None:
        raise answer.failure.error()
    body = _FIELDS[job].decode(answer.fields)
    if job in TRANSLATIONS:
        body = Translated(body, _FIELDS["chat"].decode(answer.chat))
    return body, answer.found, answer.unknown


_ANSWERS = msgspec.msgpack.Decoder(Answer)
_ASKED = msgspec.msgpack.Decoder(Asked)
_FIELDS: dict[Job, msgspec.json.Decoder[Any]] = {
    job: msgspec.json.Decoder(TRANSLATIONS[job].kind if job in TRANSLATIONS else kind)
    for job, kind in KINDS.items()
}
