"""The Python API, without a server: `LLM`, whose calls block, and `AsyncLLM`, for programs of asyncio.

Both start one instance (an engine process and its workers, as `baton serve` does) and talk to it from a
background thread that runs an event loop (`launch/background.py`).  `body` is what they share, `blocking` and
`asynchronous` are the two, `hops` carries things between event loops of two threads.
"""

from __future__ import annotations

from baton.gateway.generation.outputs import (
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    ToolCall,
)
from baton.llm.asynchronous import AsyncLLM
from baton.llm.blocking import LLM
from baton.protocol.params.repetition import RepetitionDetection
from baton.protocol.params.sampling_params import RequestOutputKind, SamplingParams
from baton.protocol.params.structured_outputs import StructuredOutputs

__all__ = [
    "LLM",
    "AsyncLLM",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "RepetitionDetection",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputs",
    "ToolCall",
]
