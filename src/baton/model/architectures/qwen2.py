"""Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values, and a window in some layers if asked.

Both differences stand in `ModelConfig`, so the modules are Llama's own.
"""

from __future__ import annotations

from baton.model.architectures.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    pass
