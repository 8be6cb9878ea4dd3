"""A class of transformers as the executor runs it: `decoder.decoder.Decoder`'s twin.

The tokens of a step, of whatever rows, are one sequence [1, T] to the class; rows are known to our attention
alone, which it calls through the library's interface.  What is made of hidden states besides the product of
the head (factors, a cap) is the class's own code: it is run with hidden states that are given to it.

Other than in our decoder, hidden states are those after the last norm.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from baton.model.adapted.build import Built, build, is_turned
from baton.model.adapted.layers import Kept, PackedHead, PackedLinear, PackedTable, WholeMatrix, in_our_memory
from baton.model.adapted.steady import make_steady, steadied
from baton.model.attention import AttentionBackend, AttentionStep
from baton.model.checkpoint.config import ModelConfig
from baton.model.layers.layers import Layer, Module, VocabParallelEmbedding
from baton.model.layers.placement import Placement


class AdaptedDecoder(Module):
    """One rank.  Parameters are allocated uninitialised; see `loader`."""

    is_program = False

    def __init__(
        self, built: Built, placement: Placement, backend: AttentionBackend, max_model_len: int
    ) -> None:
        self.config = config = built.config
        self.weights = placement.weights
        self.placement = placement
        self.backend = backend
        self.names = built.names
        self.unread: set[str] = set()
        """Tensors that a checkpoint may have of what is tied to another one."""
        self.parts: list[Layer] = []
        model, decoder = built.model, built.decoder
        self._put_in(built)
        for number, (module, _) in enumerate(built.probe.attention):
            window = config.window_of(number, max_model_len)
            object.__setattr__(module, "_baton", (weakref.ref(self), number, window))
        for module in built.probe.unsteady:
            if module is not model:
                make_steady(module)
        self._given = _Given()
        self._head = _head_of(model, decoder, self._given, model in built.probe.unsteady)
        self._decoder = decoder
        self._plan: Any = None
        self._on_layers: Callable[[int], None] | None = None

    def _put_in(self, built: Built) -> None:
        """Layers of ours into the places of the class, in the order of its modules."""
        model, placement = built.model, self.placement
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        table_path = next(path for path, part in model.named_modules() if part is table)
        tied = head.weight is table.weight or bool(
            model.config.tie_word_embeddings and getattr(model, "_tied_weights_keys", None)
        )
        shared: VocabParallelEmbedding | None = None
        taken: dict[int, Tensor] = {}
        for path, module in list(model.named_modules()):
            if module is table and type(module) is nn.Embedding:
                shared = self._table(path, module, True, tied)
                _replace(model, path, PackedTable(shared))
            elif module is head:
                self.unread |= {f"{path}.weight"} if tied else set()
                layer = shared if tied else None
                if layer is None:
                    layer = self._table(table_path if tied else path, module, False, True)
                bias = None
                if getattr(module, "bias", None) is not None:
                    bias = Kept(f"{path}.bias", tuple(module.bias.shape), placement)
                    self.parts.append(bias)
                _replace(model, path, PackedHead(layer, bias, placement))
            elif path in built.products:
                turned = is_turned(module)
                shape = module.weight.shape
                sizes = (shape[1], shape[0]) if turned else (shape[0], shape[1])
                made = WholeMatrix(path, sizes, module.bias is not None, turned, placement)
                self.parts.append(made)
                _replace(model, path, PackedLinear(made, placement))
            else:
                # (Of a table that the class changes when it looks up, beside the head's form of it.)
                self._keep(path, module, taken, ".lookup" if module is table and tied else "")

    def _table(self, path: str, module: Any, lookup: bool, head: bool) -> VocabParallelEmbedding:
        vocab, hidden = module.weight.shape
        layer = VocabParallelEmbedding(path, vocab, hidden, self.placement, lookup=lookup, head=head)
        self.parts.append(layer)
        return layer

    def _keep(self, path: str, module: nn.Module, taken: dict[int, Tensor], beside: str) -> None:
        """The parameters of the module itself, and buffers that a checkpoint has."""
        own = {**module._parameters, **module._buffers}
        for name, tensor in own.items():
            if tensor is None or tensor.device.type != "meta":
                continue
            if id(tensor) not in taken:
                whole = f"{path}.{name}" if path else name
                kept = Kept(whole, tuple(tensor.shape), self.placement, beside)
                self.parts.append(kept)
                taken[id(tensor)] = kept.as_it_is()
            in_our_memory(module, name, taken[id(tensor)])

    def __call__(
        self,
        tokens: npt.NDArray[np.int32],
        step: AttentionStep,
        wanted: npt.NDArray[np.int64] | None = None,
        on_layers: Callable[[int], None] | None = None,
        whole: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """See `Decoder`.  Hidden states are complete in any case."""
        self.backend.clear_opened(step)
        self._plan, self._on_layers = self.backend.prepare(step), on_layers
        found: Any = self._decoder(
            input_ids=self._int64(tokens)[None],
            position_ids=self._int64(step.positions())[None],
            use_cache=False,
        )
        self._plan = self._on_layers = None
        hidden: Tensor = found.last_hidden_state[0]
        chosen = hidden if wanted is None else hidden[self._int64(wanted)]
        return hidden, self.logits(chosen) if len(chosen) else None

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[1, heads, T, head_dim] each, sinks [heads] → [1, T, heads, head_dim]"""
        _, heads, count, dim = queries.shape
        dtype = self.placement.dtype
        turned = (part[0].transpose(0, 1).to(dtype) for part in (queries, keys, values))
        query, key, value = turned
        self.backend.write_kv(layer, key, value, self._plan)
        found = self.backend.attend(
            layer, query, window, self._plan, None if sinks is None else sinks.float()
        )
        if self._on_layers is not None:
            self._on_layers(layer + 1)
        return found.view(1, count, heads, dim)

    def _int64(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.placement.device)

    def rows(
        self,
        tokens: npt.NDArray[np.int32],
        step: AttentionStep,
        wanted: npt.NDArray[np.int64],
        on_layers: Callable[[int], None] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See `Decoder`."""
        hidden, logits = self(tokens, step, wanted, on_layers)
        return hidden[self._int64(wanted)], logits

    def final(self, hidden: Tensor) -> Tensor:
        """[n, hidden], which have passed the last norm."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[n, hidden] → [n, vocab] in float32."""
        self._given.hidden = hidden[None]
        found: Any = self._head(inputs_embeds=hidden[None], use_cache=False)
        logits: Tensor = found.logits[0]
        return logits.float()

    def weights_change(self) -> None:
        """Weights are about to be loaded."""

    def weight_bytes(self) -> int:
        return sum(layer.weight_bytes() for layer in self.parts)


def make_adapted(
    config: ModelConfig, name: str, placement: Placement, backend: AttentionBackend, max_model_len: int
) -> AdaptedDecoder:
    """Raises `UnsupportedModel`."""
    return AdaptedDecoder(build(config, name, max_model_len), placement, backend, max_model_len)


class _Given(nn.Module):
    """In the place of the part that gives hidden states: those that were put here."""

    hidden: Tensor

    @property
    def decoder(self) -> _Given:
        """As some classes call it."""
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        return _GivenOutput(last_hidden_state=self.hidden)


class _GivenOutput(SimpleNamespace):
    """What else a class may ask the part for (keys that are kept, attentions; the library's names change from
    version to version) was not asked of it: None, as the library has it then."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)

    def __getitem__(self, place: int) -> Any:
        return (self.last_hidden_state, None)[place]


def _head_of(model: Any, decoder: nn.Module, given: _Given, unsteady: bool) -> Callable[..., Any]:
    """The class with `given` in place of what gives hidden states."""
    head = copy.copy(model)
    head._modules = dict(model._modules)
    for name, part in model._modules.items():
        if part is decoder or part is model.base_model:
            head._modules[name] = given
    forward = type(model).forward.__get__(head)
    return steadied(forward) if unsteady else forward


def _replace(model: nn.Module, path: str, new: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = new
