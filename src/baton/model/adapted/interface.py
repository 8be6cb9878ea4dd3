"""Attention of Baton behind the library's interface: a class calls it with each layer's queries."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor, nn

from baton.model.adapted.probe import attention_told, mask_told

RUNNING: Final = "baton"
PROBING: Final = "baton_probe"
"""Names in the library."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Whose step that is, and which layer, stands with the module (`decoder.AdaptedDecoder`).  What else a
    class says was seen by the probe."""
    whose: Any = module._baton
    decoder, layer, window = whose
    return decoder().attend(layer, query, key, value, window, s_aux), None


def register() -> None:
    """With the library; a second time changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(RUNNING, attend)
    AttentionInterface.register(PROBING, attention_told)
    # RUNNING is no name for masks: then the library makes none.
    AttentionMaskInterface.register(PROBING, mask_told)
