"""A decoder-only model as data: what each layer computes, and how its tensors are called.

Every family is told in these words (`model/architectures`); one decoder is built from them
(`model/decoder`).  A block is

    x = x + residual * norm?(attention(norm?(x)))
    x = x + residual * norm?(mlp(norm?(x)))

with the norms that `Norms` names.  Sizes are in elements, lengths in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

Activation = Literal["silu", "gelu_tanh", "swiglu_oai"]
"""Of an MLP's gate; gelu_tanh: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x³))); swiglu_oai: gate and up
together, min(gate, 7) * sigmoid(1.702 min(gate, 7)) * (1 + up within 7 of zero)"""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.  `parameters` holds what the type needs (factor, beta_fast, …)."""

    theta: float = 10_000.0
    type: str = "default"
    """default, linear, dynamic, llama3, yarn, longrope or factors."""
    parameters: dict[str, Any] = field(default_factory=dict)
    share: float = 1.0
    """The first elements of a head that are rotated, of all."""
    neighbours: bool = False
    """Pairs are (2i, 2i+1) of what is rotated, not (i, i + half)."""

    def rotated(self, head_dim: int) -> int:
        """Elements of a head that are rotated."""
        return int(head_dim * self.share)

    def set_of(self, longest: int) -> Literal["short", "long"]:
        """longrope: which of its two sets of frequencies is for contexts of up to `longest` tokens."""
        return "long" if longest > self.parameters["original_max_position_embeddings"] else "short"


@dataclass(frozen=True)
class QueryGrowth:
    """A query at position p is multiplied by 1 + beta * ln(1 + floor(p / original))."""

    beta: float
    original: int


@dataclass(frozen=True)
class AttentionConfig:
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    """None: the layer sees no positions."""
    scale: float
    """Of the dot products."""
    window: int | None = None
    """A position sees so many positions, itself included; None: all before it."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["", "head", "wide"] = ""
    """Before the rotation: none, over each head, or over all heads of a token together."""
    soft_cap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    sinks: bool = False
    """Each head has a score that takes part in the softmax and sees nothing."""
    growth: QueryGrowth | None = None


@dataclass(frozen=True)
class MlpConfig:
    """down(activation(gate(x)) * up(x))"""

    size: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True)
class MoeConfig:
    """A router, in float32, that gives each token to some of many MLPs; their results are added.

    scores = `scores`(logits); of scores + bias the `chosen` largest are taken (of the best `chosen_groups` of
    `groups` groups, a group by the sum of its two best); weights = their scores, over their sum (or
    `least_sum`, if that is more) if `normalized`, times `factor`.
    """

    experts: int
    chosen: int
    expert: MlpConfig
    scores: Literal["softmax", "sigmoid", "chosen_softmax"] = "softmax"
    """chosen_softmax: over the logits of the chosen alone."""
    bias: Literal["", "choice", "logits"] = ""
    """Of the router: none, added for the choice alone, or to its logits."""
    groups: int = 1
    chosen_groups: int = 1
    normalized: bool = True
    least_sum: float = 0.0
    factor: float = 1.0
    shared: MlpConfig | None = None
    """An MLP that each token passes as well."""
    shared_gate: bool = False
    """Its result is multiplied by the sigmoid of a product of its own."""


@dataclass(frozen=True)
class Norms:
    """Which of a sublayer's two places have a norm: of what it takes, and of what it gives."""

    inputs: bool = True
    results: bool = False


@dataclass(frozen=True)
class LayerConfig:
    attention: AttentionConfig
    mlp: MlpConfig | MoeConfig
    norms: Norms = Norms()


@dataclass(frozen=True)
class MixtureNames:
    """How the tensors of a mixture of experts are called, below `model.layers.N.`."""

    router: str = "mlp.gate"
    router_bias: tuple[str, ...] = ("mlp.gate.e_score_correction_bias",)
    """Any of these."""
    bias_is_row: bool = False
    """It is [1, experts], not [experts]."""
    experts: str = "mlp.experts"
    """Before an expert's number and the names of its parts."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up_of_all: str = ""
    """One tensor [experts, 2 size, hidden], gates first; "": each expert has its own two."""
    down_of_all: str = ""
    """Likewise, [experts, hidden, size]."""
    stacked: Literal["", "gpt_oss", "halves"] = ""
    """How files may have experts in tensors of all, if otherwise than that: `reading.gpt_oss`, which gives
    each its own."""
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True)
class Names:
    """How a layer's tensors are called, below `model.layers.N.`; "" for what the family does not have."""

    queries: str = "self_attn.q_proj"
    keys: str = "self_attn.k_proj"
    values: str = "self_attn.v_proj"
    qkv: str = ""
    """All three in one tensor, one after the other."""
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = ""
    """Both in one tensor, gates first."""
    down: str = "mlp.down_proj"
    mixture: MixtureNames = MixtureNames()
    attention_input_norm: str = "input_layernorm"
    attention_result_norm: str = ""
    mlp_input_norm: str = "post_attention_layernorm"
    mlp_result_norm: str = ""
    layers: str = "model.layers"
    """Before a layer's number."""
    unused: tuple[str, ...] = ()
    """How whole names of tensors begin that nothing uses: of layers that predict more than one token."""


@dataclass(frozen=True)
class MtpConfig:
    """A layer beside the others that guesses the token after the next one (`decoder/mtp.py`), and whole names
    of its tensors."""

    layer: LayerConfig
    block: str
    """Before the layer's number, which is 0."""
    embedding_norm: str
    hidden_norm: str
    projection: str
    """[hidden, 2 hidden], of the embedding and the hidden state."""


@dataclass(frozen=True)
class Description:
    """A model as its family tells it."""

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    tie_word_embeddings: bool
    norm_plus_one: bool = False
    """Norms multiply by 1 + weight."""
    embedding_factor: float = 1.0
    residual_factor: float = 1.0
    """What a sublayer gives is multiplied by it before it is added."""
    logits_factor: float = 1.0
    logits_cap: float | None = None
    """Logits become cap * tanh(logit / cap)."""
    names: Names = Names()
    mtp: MtpConfig | None = field(default=None, compare=False)
    """None: there is no such layer, or none that Baton computes.  Answers do not depend on it."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_attention_heads(self) -> int:
        return self.layers[0].attention.heads

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0].attention.kv_heads

    @property
    def head_dim(self) -> int:
        return self.layers[0].attention.head_dim

    @property
    def intermediate_sizes(self) -> tuple[int, ...]:
        """The different ones of MLPs, in the order of layers."""
        mlps = (part for layer in self.layers for part in _mlps(layer.mlp))
        return tuple(dict.fromkeys(part.size for part in mlps))

    @property
    def intermediate_size(self) -> int:
        """The largest."""
        return max(self.intermediate_sizes)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def rotaries(self) -> tuple[RopeConfig | None, ...]:
        """The different ones, in the order of layers."""
        found: list[RopeConfig | None] = []
        for layer in self.layers:
            if layer.attention.rope not in found:
                found.append(layer.attention.rope)
        return tuple(found)


def _mlps(mlp: MlpConfig | MoeConfig) -> tuple[MlpConfig, ...]:
    if isinstance(mlp, MlpConfig):
        return (mlp,)
    return (mlp.expert,) if mlp.shared is None else (mlp.expert, mlp.shared)


def difference(mine: Any, theirs: Any, skipped: frozenset[str] = frozenset()) -> str:
    """The first place where two descriptions differ, such as "norm_eps is 0.5, not 1e-06", or ""."""
    for item in fields(mine):
        if not item.compare or item.name in skipped:
            continue
        found = _difference(item.name, getattr(mine, item.name), getattr(theirs, item.name))
        if found:
            return found
    return ""


def _difference(name: str, mine: Any, theirs: Any) -> str:
    if mine == theirs:
        return ""
    if name == "layers":
        if len(mine) != len(theirs):
            return f"num_layers is {len(mine)}, not {len(theirs)}"
        pairs = enumerate(zip(mine, theirs, strict=True))
        return next(f"{found} in layer {at}" for at, pair in pairs if (found := difference(*pair)))
    if is_dataclass(mine) and type(mine) is type(theirs):
        return f"{name}.{difference(mine, theirs)}"
    return f"{name} is {mine!r}, not {theirs!r}"
