"""What the gateway has to know of the model that it serves."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from baton.gateway.names import Alias
from baton.protocol.params.limits import MAX_LOGPROBS
from baton.protocol.params.pooling import Pooling
from baton.protocol.routes import id_width

_PLACES = re.compile(r"(\{(?:instruction|query|document)\})")
Task = Literal["generate", "embed", "score", "classify"]
Activation = Literal["identity", "sigmoid", "softmax"]


@dataclass(frozen=True)
class Judge:
    """A model that says itself how well two texts fit: it is asked a question about them and answers with one
    of two tokens, or has a head of scores."""

    template: str
    """The prompt; `{instruction}`, `{query}` and `{document}` stand for what is asked."""
    instruction: str
    """Where the request gives none."""
    no: str = "no"
    yes: str = "yes"
    """The two tokens, as texts."""
    head: bool = False
    """It has a head of scores instead."""

    def prompt(self, query: str, document: str, instruction: str | None = None) -> str:
        """What the model is asked.  (Placeholders inside of what is given are text.)"""
        given = {
            "{instruction}": self.instruction if instruction is None else instruction,
            "{query}": query,
            "{document}": document,
        }
        return "".join(given.get(part, part) for part in _PLACES.split(self.template))

    @property
    def ending(self) -> str:
        """What follows the document."""
        return self.template.rpartition("{document}")[2]


QWEN3_RERANKER = Judge(
    template="<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
"""As its authors use it (Qwen/Qwen3-Reranker-0.6B)."""


PAIR = Judge(template="{query}{document}", instruction="", head=True)
"""One text after the other, as vLLM has it of decoders with a head of scores."""


@dataclass(frozen=True)
class Routing:
    """The mixtures of experts of a model."""

    mixtures: int
    """Layers that have experts."""
    chosen: int
    """Experts that a token goes to, in each of them."""
    experts: int

    @property
    def row_bytes(self) -> int:
        """Of the ids of one token."""
        return self.mixtures * self.chosen * id_width(self.experts)


@dataclass(frozen=True)
class ServedModel:
    """One model under its names.  Lengths are in tokens."""

    names: tuple[str, ...]
    """What clients may call it; the first one is what answers say that were asked for no name."""
    tokenizer: Path
    """Directory with tokenizer.json and tokenizer_config.json."""
    max_model_len: int
    """Prompt and answer together."""
    eos_token_ids: tuple[int, ...]
    """What ends an answer by the model's own files; the tokenizer's end is added to them."""
    vocab_size: int = 0
    """Size of the model's output layer; 0: unknown, ids are not checked."""
    root: str = ""
    """Where a client on this machine finds the model and its tokenizer: a directory, or a name on the hub."""
    checkpoint: str = ""
    """Tells it apart from other checkpoints; "": unknown, instances that join are not compared."""
    dtype: str = ""
    """In which the instances compute, or `simulated`; "": it does not matter."""
    angles: Literal["", "short", "long"] = ""
    """Which of LongRoPE's two sets the instances' keys are turned by; "": the model has one set."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of the model's generation_config, under `SamplingParams`' names."""
    chat_template: str | None = None
    """Instead of the tokenizer's."""
    template_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of the chat template's own switches, where a request says nothing."""
    content_format: Literal["auto", "string", "openai"] = "auto"
    """How a message's text parts come to the chat template; auto: as the template reads them."""
    unsupported_content: Literal["note", "refuse"] = "note"
    """What becomes of images, sound and files in a conversation: a short text stands in their place, or the
    request is refused."""
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    """How the model writes calls and reasoning (`parsing.formats`); auto: as its chat template shows."""
    tasks: frozenset[Task] = frozenset({"generate"})
    """What requests may ask for: texts, vectors of texts, scores of pairs of texts."""
    pooling: Pooling = field(default_factory=lambda: Pooling("last"))
    """How a vector is made of a text, where the request says nothing else."""
    dimensions: int = 0
    """Of the model's vectors; 0: unknown."""
    judge: Judge | None = None
    """The model itself says how well two texts fit; None: their vectors do."""
    labels: tuple[str, ...] = ()
    """Of a model with a head of scores: what each is of."""
    activation: Activation = "softmax"
    """What makes results of those scores."""
    routing: Routing | None = None
    """Answers may say which experts tokens went to (`--enable-return-routed-experts`); None: not here."""
    max_logprobs: int = MAX_LOGPROBS
    """Of each token, that a request may ask for at most; -1: all of the vocabulary."""
    seed: int | None = None
    """Makes requests without a seed reproducible, in order of arrival."""
    aliases: tuple[Alias, ...] = ()
    """Further names, which no list of models has."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix seconds, for the models list."""

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("names: a served model needs at least one name")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len: {self.max_model_len} must be at least 2")

    @property
    def name(self) -> str:
        return self.names[0]

    def alias_of(self, asked: str) -> Alias | None:
        """The first pattern that matches a name that is no name of the model; None: none does."""
        return next((alias for alias in self.aliases if alias.matches(asked)), None)
