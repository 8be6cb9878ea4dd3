"""A class of transformers, made without memory for its weights, and what it asks of attention.

Buffers that follow from the configuration (frequencies) are computed by the class itself, last; each is
filled with a mark before, so that one which the class leaves out is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from baton.model.adapted.interface import PROBING, RUNNING, register
from baton.model.adapted.names import TensorNames
from baton.model.adapted.probe import Probe, run_probe
from baton.model.checkpoint.config import ModelConfig
from baton.model.description.fields import UnsupportedModel
from baton.model.description.model import AttentionConfig, LayerConfig, MlpConfig

_MARK = -7_777_777
_LONGROPE = "longrope"


@dataclass
class Built:
    """A class on PyTorch's device "meta", and what is to be known of it."""

    model: Any
    """The PreTrainedModel."""
    decoder: nn.Module
    """The part of it that gives hidden states; what follows makes logits of them."""
    config: ModelConfig
    """With each layer's attention as it was seen."""
    probe: Probe
    products: dict[str, nn.Module]
    """Those that Baton will multiply, by name."""
    names: TensorNames


@torch.inference_mode(False)  # (which would hide what operations are made of)
def build(config: ModelConfig, name: str, longest: int) -> Built:
    """`longest`: context that is served, in tokens.  Raises `UnsupportedModel`."""
    model = _instance(config, name)
    _check_class(model, config, name)
    products = {path: part for path, part in model.named_modules() if _is_product(part)}
    kinds = _without_updates(model)
    _use(model, PROBING)
    probe = run_probe(model, name, set(products.values()))
    _use(model, RUNNING)
    if len(probe.attention) != config.num_layers:
        raise probe.refused(
            f"{len(probe.attention)} modules use the attention interface in {config.num_layers} layers"
        )
    for module, kind in kinds:
        module.rope_type = kind
    _compute_buffers(model, probe)
    for module, kind in kinds:
        _keep_frequencies(module, kind, longest, probe)
    names = TensorNames(model)
    return Built(model, _decoder_of(model, probe), _as_seen(config, probe, products), probe, products, names)


def _instance(config: ModelConfig, name: str) -> Any:
    import transformers

    register()
    transformers.logging.set_verbosity_error()  # (what a class remarks on a config.json is no news here)
    try:
        made: Any = getattr(transformers, config.architecture, None)
        if made is None:
            raise UnsupportedModel(
                f"{name!r}: transformers {transformers.__version__} has no {config.architecture}"
            )
        # (Infinity is an object in JSON files of the library.)
        read = getattr(made.config_class, "_decode_special_floats", dict)
        told = made.config_class.from_dict(read(dict(config.whole)))
        told._attn_implementation = PROBING
        told.use_cache = False
        with torch.device("meta"):
            model = made(told)
    except UnsupportedModel:
        raise
    except Exception as error:  # of a configuration that the class does not take, whatever it says
        reason = str(error).strip().partition("\n")[0][:160]
        raise UnsupportedModel(
            f"{name!r}: {config.architecture} of transformers refuses it: {reason}"
        ) from error
    return model.eval()


def _use(model: Any, attention: str) -> None:
    for module in model.modules():
        told = getattr(module, "config", None)
        if told is not None and hasattr(told, "_attn_implementation_internal"):
            told._attn_implementation_internal = attention


def _check_class(model: Any, config: ModelConfig, name: str) -> None:
    """What a class says of itself.  Raises `UnsupportedModel`."""
    told = model.config
    for mine, field in (
        (config.vocab_size, "vocab_size"),
        (config.hidden_size, "hidden_size"),
        (config.num_layers, "num_hidden_layers"),
    ):
        theirs = getattr(told, field, mine)
        if theirs != mine:
            raise UnsupportedModel(f"{name!r}: its class reads {field} {theirs}, config.json says {mine}")
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{name!r}: {config.architecture} has no output head")
    if getattr(model, "_keep_in_fp32_modules_strict", None):
        kept = sorted(model._keep_in_fp32_modules_strict)[0]
        raise UnsupportedModel(
            f"{name!r}: {config.architecture} keeps {kept} in float32; Baton has one dtype"
        )


def _is_product(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_turned(module)


def is_turned(module: nn.Module) -> bool:
    """Whether it is GPT-2's `Conv1D`, a product whose weight is [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _decoder_of(model: Any, probe: Probe) -> nn.Module:
    """The part that the class calls for hidden states: some leave out the one around it."""
    base = model.base_model
    if base is model:
        raise probe.refused("its class has no part that gives hidden states")
    called: list[nn.Module] = []
    candidates = [part for part in (base, getattr(base, "decoder", None)) if isinstance(part, nn.Module)]
    handles = [part.register_forward_pre_hook(lambda part, _: called.append(part)) for part in candidates]
    try:
        with torch.no_grad(), torch.device("meta"):
            zeros = torch.zeros((1, 1), dtype=torch.int64)
            _DecoderCalled.run(model, zeros)
    finally:
        for handle in handles:
            handle.remove()
    if not called:
        raise probe.refused("its class has no part that gives hidden states")
    return called[0]


class _DecoderCalled(Exception):
    """Enough was seen."""

    @classmethod
    def run(cls, model: Any, tokens: Tensor) -> None:
        def stop(*_: Any) -> None:
            raise cls

        handle = model.get_input_embeddings().register_forward_pre_hook(stop)
        try:
            model(input_ids=tokens, position_ids=tokens, use_cache=False)
        except cls:
            pass
        finally:
            handle.remove()


def _as_seen(config: ModelConfig, probe: Probe, products: dict[str, nn.Module]) -> ModelConfig:
    layers = []
    inputs = {_inputs_of(part) for part in products.values()} or {config.hidden_size}
    # The widest for who makes room, one that does not fit into groups for who checks that.
    sizes = [max(inputs), *(count for count in sorted(inputs) if count % 32)]
    for number, (_, seen) in enumerate(probe.attention):
        attention = AttentionConfig(
            seen.heads, seen.kv_heads, seen.head_dim, None, seen.scale, seen.window, soft_cap=seen.soft_cap
        )
        layers.append(LayerConfig(attention, MlpConfig(sizes[min(number, len(sizes) - 1)])))
    return replace(config, layers=tuple(layers))


def _inputs_of(part: Any) -> int:
    shape = part.weight.shape
    return int(shape[0] if is_turned(part) else shape[1])


def _without_updates(model: nn.Module) -> list[tuple[Any, Any]]:
    """Rotary modules that would compute their frequencies from the positions of a step, with the kinds that
    make them do so, which are taken away."""
    found: list[tuple[Any, Any]] = []
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and (kind == _LONGROPE or "dynamic" in kind):
            found.append((module, kind))
            module.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kind, dict) and any(one == _LONGROPE or "dynamic" in one for one in kind.values()):
            found.append((module, kind))
            module.rope_type = dict.fromkeys(kind, "default")  # type: ignore[assignment]
    return found


def _keep_frequencies(module: Any, kind: Any, longest: int, probe: Probe) -> None:
    """Those for the longest context that is served, of all positions: keys that are kept cannot turn."""
    if isinstance(kind, dict):
        if _LONGROPE in kind.values():
            raise probe.refused("its layers have longrope of several kinds")
        module.rope_type = dict.fromkeys(kind, "default")
        return
    module.rope_type = "default"  # (dynamic: as long as a context fits what the model is made for)
    if kind == _LONGROPE:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        original = module.config.rope_parameters["original_max_position_embeddings"]
        seq_len = original + 1 if longest > original else original
        frequencies, factor = ROPE_INIT_FUNCTIONS[_LONGROPE](
            module.config, torch.device("cpu"), seq_len=seq_len
        )
        module.inv_freq.copy_(frequencies)
        module.attention_scaling = factor


def _compute_buffers(model: Any, probe: Probe) -> None:
    """Those that a checkpoint does not have."""
    saved = set(model.state_dict().keys())
    computed: list[tuple[str, nn.Module, str]] = []
    for path, module in model.named_modules():
        for name, buffer in list(module._buffers.items()):
            whole = f"{path}.{name}" if path else name
            if buffer is None or (whole in saved and buffer.is_floating_point()):
                continue
            mark = (
                torch.full(buffer.shape, _MARK, dtype=torch.int64) if not buffer.is_floating_point() else None
            )
            made = torch.full(buffer.shape, float("nan"), dtype=buffer.dtype) if mark is None else mark
            module._buffers[name] = made.to(buffer.dtype)
            computed.append((whole, module, name))
    with torch.no_grad():
        for module in {id(module): module for _, module, _ in computed}.values():
            model._init_weights(module)
    for whole, module, name in computed:
        buffer = module._buffers[name]
        assert buffer is not None
        marked = buffer.isnan() if buffer.is_floating_point() else buffer == _MARK
        if bool(marked.any()) and buffer.dtype != torch.bool:
            raise probe.refused(f"its class does not compute {whole}")
