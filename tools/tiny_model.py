"""The Qwen3 architecture in plain PyTorch, as `train_tiny.py` trains it.

Theory. A decoder block is `x + Attention(Norm(x))`, then `x + SwiGLU(Norm(x))`. Qwen3 normalises each query
and key head (RMSNorm over `head_dim`) before it rotates them by their position (RoPE, halves rotated),
groups query heads over fewer key/value heads, and has no biases. Finding a code word again needs an
*induction* circuit: one layer writes "what came before me" into each position, a later layer looks up the
position whose predecessor resembles the present token and copies what stands there. Two layers can do it;
we give it more, so that it can tell look-alike candidates (digits, names) apart.

Training joins what a checkpoint keeps apart (q, k and v; gate and up), because on a CPU two large matrix
products are faster than five small ones. `hf_views` shows them apart again, under the names that
`transformers` uses.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class TinyConfig:
    """The numbers that define the architecture (the names are those of `config.json`)."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 100_000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    def hf_config(self, eos_ids: list[int], bos_id: int, pad_id: int) -> dict[str, Any]:
        """The contents of `config.json`."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **asdict(self),
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": bos_id,
            "eos_token_id": eos_ids[0],
            "pad_token_id": pad_id,
            "hidden_act": "silu",
            "max_window_layers": self.num_hidden_layers,
            "rope_scaling": None,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
        }


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


def rope_tables(config: TinyConfig, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every (position, dimension); both halves of a head turn by the same angles."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), config.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x of shape [batch, heads, length, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.input_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.qkv = nn.Linear(c.hidden_size, (self.heads + 2 * self.kv_heads) * c.head_dim, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.o = nn.Linear(self.heads * c.head_dim, c.hidden_size, bias=False)
        self.post_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.gate_up = nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.input_norm(x)).view(batch, length, -1, self.head_dim)
        q, k, v = qkv.transpose(1, 2).split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, dim=-1)
        made: Tensor = x + self.down(F.silu(gate) * up)
        return made


class TinyModel(nn.Module):
    """Embedding, blocks, final norm; the head is the embedding again."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Block(config) for _ in range(config.num_hidden_layers)]
        self.blocks = nn.ModuleList(self.layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        cos, sin = rope_tables(config, config.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        deep = config.initializer_range / (2 * config.num_hidden_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(parameter, std=deep if residual else config.initializer_range)

    def forward(self, ids: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The normalised hidden states of `ids` [batch, length], computed in `dtype`."""
        length = ids.shape[1]
        x: Tensor = self.embed(ids).to(dtype)
        cos, sin = self.cos[:length].to(dtype), self.sin[:length].to(dtype)
        for block in self.layers:
            x = block(x, cos, sin)
        normed: Tensor = self.norm(x)
        return normed

    @torch.no_grad()
    def hf_views(self) -> dict[str, Tensor]:
        """The weights under the names of `transformers`, as views of ours; the tied head is left out."""
        c = self.config
        q_rows, kv_rows = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        out = {"model.embed_tokens.weight": self.embed.weight, "model.norm.weight": self.norm.weight}
        for index, block in enumerate(self.layers):
            at = f"model.layers.{index}"
            q, k, v = torch.split(block.qkv.weight, [q_rows, kv_rows, kv_rows])
            gate, up = torch.chunk(block.gate_up.weight, 2)
            out |= {
                f"{at}.self_attn.q_proj.weight": q,
                f"{at}.self_attn.k_proj.weight": k,
                f"{at}.self_attn.v_proj.weight": v,
                f"{at}.self_attn.o_proj.weight": block.o.weight,
                f"{at}.self_attn.q_norm.weight": block.q_norm.weight,
                f"{at}.self_attn.k_norm.weight": block.k_norm.weight,
                f"{at}.mlp.gate_proj.weight": gate,
                f"{at}.mlp.up_proj.weight": up,
                f"{at}.mlp.down_proj.weight": block.down.weight,
                f"{at}.input_layernorm.weight": block.input_norm.weight,
                f"{at}.post_attention_layernorm.weight": block.post_norm.weight,
            }
        return out

    def hf_state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint holds: the weights under the names of `transformers`, in bfloat16."""
        return {name: view.detach().bfloat16().contiguous().clone() for name, view in self.hf_views().items()}

    @torch.no_grad()
    def load_hf(self, state: dict[str, Tensor]) -> None:
        """Take the weights of a checkpoint."""
        for name, view in self.hf_views().items():
            view.copy_(state[name])
