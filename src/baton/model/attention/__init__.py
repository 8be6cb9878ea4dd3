"""Attention over paged KV: `base` is the whole interface, one file an implementation."""

from __future__ import annotations

from baton.model.attention.base import AttentionBackend, AttentionShape, AttentionStep
from baton.model.attention.torch_backend import TorchAttention

__all__ = ["AttentionBackend", "AttentionShape", "AttentionStep", "TorchAttention", "attention_backend"]


def attention_backend(shape: AttentionShape) -> AttentionBackend:
    """The backend to use for these shapes on this machine."""
    return TorchAttention(shape)
