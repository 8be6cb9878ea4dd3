"""What the Python API returns (`LLM`), in vLLM's shapes."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.gateway.generation.generation import Completion, Generation
from baton.gateway.generation.routes import Ids, routed_experts
from baton.protocol.pooling import unpack_vector
from baton.protocol.sampling import TokenLogprobs


@dataclass
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    """Aligned with `token_ids`; None unless asked for."""
    finish_reason: str | None
    """`stop` or `length`."""
    stop_reason: int | str | None
    """The stop string or the asked-for stop token that ended the text; None for end-of-text or length."""
    routed_experts: Ids | None = None
    """[tokens, mixtures, chosen] uint8 or uint16: the experts, in each layer that has some, of the prompt's
    tokens and of all generated ones but the last; None unless asked for."""

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass
class RequestOutput:
    """The answer to one prompt."""

    request_id: str
    prompt: str | None
    """None where the prompt was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each prompt token, the first None; None unless asked for."""
    num_cached_tokens: int = 0
    finished: bool = field(default=True)


@dataclass
class EmbeddingOutput:
    embedding: list[float]


@dataclass
class EmbeddingRequestOutput:
    """The vector of one prompt."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0
    finished: bool = field(default=True)


@dataclass
class ScoringOutput:
    score: float


@dataclass
class ScoringRequestOutput:
    """How well a pair of texts fits."""

    request_id: str
    outputs: ScoringOutput
    finished: bool = field(default=True)


@dataclass
class ClassificationOutput:
    probs: list[float]
    """Of each label."""


@dataclass
class ClassificationRequestOutput:
    """What a model with a head of scores makes of a text."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ClassificationOutput
    finished: bool = field(default=True)


def classes_of(generation: Generation, probs: list[float]) -> ClassificationRequestOutput:
    (sequence,) = generation.sequences
    return ClassificationRequestOutput(
        generation.request_id, list(sequence.prompt), ClassificationOutput(probs)
    )


def embedding_of(generation: Generation) -> EmbeddingRequestOutput:
    (sequence,) = generation.sequences
    return EmbeddingRequestOutput(
        generation.request_id,
        list(sequence.prompt),
        EmbeddingOutput(unpack_vector(sequence.pooled)),
        generation.num_cached or 0,
    )


def output_of(generation: Generation, completions: list[Completion], text: str | None) -> RequestOutput:
    first = generation.sequences[0]
    return RequestOutput(
        request_id=generation.request_id,
        prompt=text,
        prompt_token_ids=list(first.prompt),
        prompt_logprobs=first.prompt_logprobs or None,
        num_cached_tokens=generation.num_cached or 0,
        outputs=[
            CompletionOutput(
                index=completion.index,
                text=completion.text,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs or None,
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
                routed_experts=routed_experts(generation, completion.index),
            )
            for completion in completions
        ],
    )
