"""What `LLM` and `AsyncLLM` have in common: the instance in the background, and how calls become requests.

Nothing here waits: `prepare` and its sisters read what a program gave, in the thread that gives it, and
`start`, on the background's loop, submits it.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

from msgspec.structs import replace

from baton.gateway.api.content import Noted, Notes
from baton.gateway.api.fields import INT32
from baton.gateway.api.messages import ContentFormat
from baton.gateway.api.schemas import ChatRequest
from baton.gateway.api.tools import Tools
from baton.gateway.errors import BadRequest
from baton.gateway.generation.generation import Generation
from baton.gateway.generation.outputs import ClassificationRequestOutput, ScoringOutput, ScoringRequestOutput
from baton.gateway.generation.outputs import classes_of as _classes_of
from baton.gateway.parsing.choice import Formats, choose
from baton.gateway.parsing.plan import Parsing
from baton.gateway.reading.arguments import Prompt, as_list, one_params, token_ids
from baton.gateway.reading.constraints.calling import structure_of
from baton.gateway.reading.constraints.functions import Function, functions_of, loosened
from baton.gateway.reading.constraints.structured import asked_for, described
from baton.gateway.reading.conversations import Conversation, render_conversation
from baton.gateway.reading.judging import activated, checked, judging, scorer_of, scores_of
from baton.gateway.reading.pooled import prompts_of
from baton.gateway.text.chat_template import no_template
from baton.gateway.text.encoding import NotText
from baton.gateway.text.tokenizer import Tokenizer
from baton.launch.arguments import choose_arguments, takes_arguments_of
from baton.launch.background import Background
from baton.launch.options import EngineOptions
from baton.launch.planning.plan import ServerPlan, make_plan
from baton.llm.grammars import CheckedGrammars
from baton.observe.logs import log_somewhere
from baton.protocol.params.pooling import SCORES, Pooling, unpack_vector
from baton.protocol.params.sampling_params import NO_TOKENS, SamplingParams, make_params

log = logging.getLogger(__name__)

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
_Read = TypeVar("_Read")

_TAIL = 64
"""Tokens at a prompt's end that show whether its answer begins inside of reasoning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A request that can be submitted."""

    ids: list[int]
    text: str | None = None
    """None where the prompt was given as token ids."""
    params: SamplingParams = NO_TOKENS
    grammar: str = ""
    parsing: Parsing | None = None
    pooling: Pooling | None = None
    priority: int = 0
    chat: bool = False
    short_ids: bool = False
    """Of calls: see `api.calls.call_id`."""

    def __post_init__(self) -> None:
        """Raises `ValueError`."""
        if not isinstance(self.priority, int) or abs(self.priority) > INT32:
            raise ValueError(f"priority: {self.priority!r} must be an integer from {-INT32} to {INT32}")


class Body:
    """An instance of a model in processes of its own.

    `model` is a directory or a hub name, None the embedded model.  Keyword arguments have the names of `baton
    serve`'s flags; `docs/flags.md` lists them.  What is not given comes from the environment (`BATON_…`),
    from the file `config`, or is the default.  `log_level` is that of the instance's processes, and of
    this process if it has not configured logging itself.  Raises `ValueError` with one line for a model or an
    argument that cannot be served, `InstanceFailed` if the instance does not start.
    """

    @takes_arguments_of(EngineOptions)
    def __init__(self, model: str | None = None, **given: Any) -> None:
        chosen = choose_arguments({"model": model, **given})
        with chosen.spelled():
            plan = make_plan(chosen.options)
        log_somewhere(chosen.options.log_level)
        for remark in chosen.remarks:
            log.warning("%s", remark)
        self._begin(plan)

    @classmethod
    def planned(cls, plan: ServerPlan) -> Self:
        """With what was resolved already: for the command line."""
        body = cls.__new__(cls)
        body._begin(plan)
        return body

    def _begin(self, plan: ServerPlan) -> None:
        self._plan = plan
        self._ids = itertools.count()
        self._background = Background(self._plan)
        self._grammars = CheckedGrammars(self._background.tokenizer.special_names)
        self._known: tuple[str | None, Formats] | None = None
        self._noted = Noted()
        self._close = weakref.finalize(self, _stop, self._background, self._grammars)
        try:
            self._background.start()
        except BaseException:
            self._close()
            raise

    @property
    def model_name(self) -> str:
        return self._plan.served.name

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and its answer together."""
        return self._plan.served.max_model_len

    def get_tokenizer(self) -> Tokenizer:
        return self._background.tokenizer

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """The model's recommended parameters (generation_config.json), changed by what is given."""
        return make_params(self._plan.served.defaults, given)

    # -- from calls to requests

    def _prepare(self, prompt: Prompt, where: str, params: SamplingParams | None, priority: int) -> Prepared:
        """`where`: the argument that the prompt stands in.  Raises `ValueError`."""
        params = self.default_sampling_params() if params is None else one_params(params)
        text, ids = self._encode(prompt, where)
        grammar = self._bound(params, Tools(), lambda: self._thinks(text, ids))
        return Prepared(ids=ids, text=text, params=params, grammar=grammar, priority=priority)

    def _converse(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams | None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> Prepared:
        """Messages as `arguments.messages_of` gives them.  Raises `ValueError`."""
        served, tokenizer, formats = self._plan.served, self._background.tokenizer, self._formats
        params = make_params(served.defaults, {}, max_tokens=None) if params is None else one_params(params)
        request = ChatRequest(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=dict(chat_template_kwargs or {}),
            tools=None if tools is None else [dict(tool) for tool in tools],
            tool_choice=dict(tool_choice) if isinstance(tool_choice, Mapping) else tool_choice,
        )
        if tokenizer.chat_template is None:
            raise no_template()
        text, found = render_conversation(
            request, messages, tokenizer.chat_template, formats, served.template_defaults, strict=False
        )
        parsing = self._parsing(formats, found)
        calling = formats.calling
        return Prepared(
            ids=self._tokens(text, "messages", add_special_tokens=False),
            text=text,
            params=params,
            grammar=self._bound(params, found.tools, lambda: found.thinking, chat=True),
            parsing=parsing if parsing.changes_anything else None,
            priority=priority,
            chat=True,
            short_ids=calling is not None and calling.short_ids,
        )

    def _embed(
        self, prompts: Sequence[Prompt], dimensions: int | None, normalize: bool | None, priority: int
    ) -> list[Prepared]:
        self._check_task("embed")
        pooling, most = self._plan.served.pooling, self._plan.served.dimensions
        if dimensions is not None:
            if dimensions < 1 or (most and dimensions > most):
                raise ValueError(f"dimensions: {dimensions} must be from 1 to {most}")
            pooling = replace(pooling, dimensions=dimensions)
        if normalize is not None:
            pooling = replace(pooling, normalize=normalize)
        return self._pooled(prompts, pooling, priority)

    def _pooled(self, prompts: Sequence[Prompt], pooling: Pooling, priority: int) -> list[Prepared]:
        return [
            Prepared(ids=self._encode(one, f"prompts[{i}]")[1], pooling=pooling, priority=priority)
            for i, one in enumerate(prompts)
        ]

    def _score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], instruction: str | None, priority: int
    ) -> tuple[list[Prepared], int, int]:
        """(requests, queries, documents)."""
        served, tokenizer = self._plan.served, self._background.tokenizer
        self._check_task("score")
        queries, documents = [[one] if isinstance(one, str) else list(one) for one in (data_1, data_2)]
        if not queries or len(queries) not in (1, len(documents)):
            raise ValueError(f"data_1: {len(queries)} for {len(documents)} of data_2; give one, or as many")
        judge = served.judge
        texts = prompts_of(queries, documents, judge, instruction)
        pooling = replace(served.pooling, normalize=True) if judge is None else judging(judge, tokenizer)
        special = judge is None or judge.head
        requests = [
            Prepared(
                ids=tokenizer.encode(text, add_special_tokens=special), pooling=pooling, priority=priority
            )
            for text in texts
        ]
        return requests, len(queries), len(documents)

    def _scored(self, found: list[Generation], queries: int, documents: int) -> list[ScoringRequestOutput]:
        results = [generation.sequences[0].pooled for generation in found]
        scores = scores_of(results, queries, scorer_of(self._plan.served))
        own = found[len(found) - documents :]
        return [
            ScoringRequestOutput(generation.request_id, ScoringOutput(score))
            for generation, score in zip(own, scores, strict=True)
        ]

    def _classify(self, prompts: Prompt | Sequence[Prompt], priority: int) -> list[Prepared]:
        self._check_task("classify")
        return self._pooled(as_list(prompts), SCORES, priority)

    def _classes(self, generation: Generation) -> ClassificationRequestOutput:
        data = generation.sequences[0].pooled
        return _classes_of(generation, activated(checked(unpack_vector(data)), self._plan.served.activation))

    # -- inside

    def _start(self, request: Prepared, request_id: str, *, patient: bool = False) -> Generation:
        """On the background's loop.  Raises as `Generator.start`."""
        params = request.params
        if self._plan.served.routing is not None:
            params = params.replace(return_routed_experts=True)
        return self._background.generations.start(
            [request.ids],
            params,
            request_id=request_id,
            priority=request.priority,
            patient=patient,
            pooling=request.pooling,
            parsing=request.parsing,
            grammar=request.grammar,
            timed=request.pooling is None,
        )

    def _check_task(self, task: Literal["embed", "score", "classify"]) -> None:
        served = self._plan.served
        if task in served.tasks:
            return
        if task == "classify":
            raise ValueError("classify: the model has no head of scores (…ForSequenceClassification)")
        if not served.labels:
            raise ValueError(
                f'{task}: the model is loaded for texts alone; give runner="pooling", or convert="embed" to '
                "have vectors and texts"
            )
        if task == "score":
            raise ValueError(f"score: the model has {len(served.labels)} labels, not one; use classify")
        raise ValueError("embed: the model has a head of scores; use classify")

    def _encode(self, prompt: Prompt, where: str) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if prompt.get("prompt_token_ids") is not None:
                return prompt.get("prompt"), token_ids(
                    prompt["prompt_token_ids"], f"{where}.prompt_token_ids"
                )
            if not isinstance(prompt.get("prompt"), str):
                raise ValueError(f'{where}: a mapping needs "prompt", a text, or "prompt_token_ids"')
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self._tokens(prompt, where)
        return None, token_ids(prompt, where)

    def _tokens(self, text: str, where: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            return self._background.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except NotText as error:
            raise ValueError(f"{where}: {error}") from None

    def _read(self, read: Callable[[Any, ContentFormat, Notes], _Read], messages: Any) -> _Read:
        """Messages by a function of `arguments`.  Raises `ValueError`."""
        served = self._plan.served
        notes = Notes(served.unsupported_content == "refuse")
        found = read(messages, "string" if served.content_format == "string" else "openai", notes)
        self._noted.warn(notes.counts)
        return found

    @property
    def _formats(self) -> Formats:
        """How the model writes calls and reasoning."""
        served, tokenizer = self._plan.served, self._background.tokenizer
        source = tokenizer.template_source
        if self._known is None or self._known[0] != source:
            formats = choose(
                source,
                served.tool_call_parser,
                served.reasoning_parser,
                response=tokenizer.response_template,
            )
            self._known = source, formats
        return self._known[1]

    @staticmethod
    def _parsing(formats: Formats, found: Conversation) -> Parsing:
        tools = found.tools
        return Parsing(
            formats=formats,
            thinking=found.thinking,
            calling=tools.wanted and bool(formats.calls),
            tools=frozenset(tools.names),
            types=tools.types,
            demanded=tools.demanded and bool(formats.calls),
        )

    def _thinks(self, text: str | None, ids: list[int]) -> bool:
        """Whether the answer to a prompt begins inside of reasoning."""
        if text is None:
            text = self._background.tokenizer.decode(ids[-_TAIL:], skip_special_tokens=False)
        return self._formats.begins_thinking(text)

    def _bound(
        self, params: SamplingParams, tools: Tools, thinking: Callable[[], bool], *, chat: bool = False
    ) -> str:
        """The grammar that binds the answers; "": nothing does.  Of a conversation what is asked for binds
        the answer, else all of the text.  Raises `ValueError` for what cannot be enforced."""
        wanted, formats = params.structured_outputs, self._formats
        asked = None if wanted is None else asked_for(wanted)
        budget = params.thinking_token_budget
        budget = None if budget is None or budget < 0 else budget
        if budget is not None and formats.thinking is None and not formats.is_harmony:
            raise BadRequest(
                "thinking_token_budget: how this model writes reasoning is not known; give reasoning_parser",
                param="thinking_token_budget",
            )
        if not chat and budget is None:
            return "" if asked is None else self._grammars.of(asked)
        if not formats.calls:
            tools = Tools()

        def compiled(these: Sequence[Function]) -> str:
            structure = structure_of(
                formats,
                tools,
                these,
                parallel=True,
                thinking=thinking(),
                content=None if asked is None else asked.structure.content,
                budget=budget,
            )
            if structure is None:
                return ""
            return self._grammars.of(described(structure, "tools" if asked is None else asked.field))

        functions = functions_of(tools)
        try:
            return compiled(functions)
        except BadRequest:
            loose = loosened(functions, tools)
            if loose == functions:
                raise
        return compiled(loose)


def _stop(background: Background, grammars: CheckedGrammars) -> None:
    background.stop()
    grammars.close()
