"""Mistral: Llama without any bias, with a sliding window in every layer (none in later models).

Both differences stand in `ModelConfig`, so the modules are Llama's own.
"""

from __future__ import annotations

from baton.model.architectures.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    pass
