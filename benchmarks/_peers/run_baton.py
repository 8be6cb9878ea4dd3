"""Baton, through its Python API."""

from __future__ import annotations

import json
from pathlib import Path

from answering import LONGEST_DRAFT, Loaded, Settings, Told, answer, weight_numbers
from packed_files import weight_bytes

import baton
from baton import LLM, SamplingParams


def load(settings: Settings) -> Loaded:
    options = {
        name: value
        for name in ("quantization", "quantization_group_size", "quantize_head")
        if (value := getattr(settings, name)) is not None
    }
    if settings.speculation in ("off", None):
        options["speculation"] = settings.speculation
    else:
        method = {"method": settings.speculation, "num_speculative_tokens": LONGEST_DRAFT}
        options["speculative_config"] = method
    llm = LLM(
        settings.model,
        dtype=settings.dtype,
        num_threads=settings.threads,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        enable_prefix_caching=False,
        **options,
    )

    made: list[list[int]] = []
    counted = [0, 0]

    def complete(prompts: list[list[int]], output_len: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        results = llm.generate(prompts, params, use_tqdm=False)
        made[:] = [list(result.outputs[0].token_ids) for result in results]
        return sum(map(len, made))

    def told() -> Told:
        stats = llm._background.call(llm._background._client.query("stats"))
        before = tuple(counted)
        counted[:] = stats["draft_tokens"], stats["accepted_tokens"]
        return Told(made, counted[0] - before[0], counted[1] - before[1])

    return Loaded(baton.__version__, complete, _weight_bytes(settings), told)


def _weight_bytes(settings: Settings) -> dict[str, int] | None:
    """The checkpoint's numbers, each at the bits that a product of this kind takes.

    None for a version of Baton that has no weights in groups.
    """
    layers = head = 32.0 if settings.dtype == "float32" else 16.0
    if settings.quantization == "int8":
        layers = head = 8.0
    elif settings.quantization == "int4":
        try:
            group = settings.quantization_group_size or 64
            layers = _bits(4, group)
            head = head if settings.quantize_head == 16 else _bits(settings.quantize_head or 8, group)
        except (ImportError, TypeError):
            return None
    numbers = weight_numbers(Path(settings.model))
    if "quantization_config" in json.loads((Path(settings.model) / "config.json").read_text()):
        head = _bits(settings.quantize_head, 128) if settings.quantize_head in (4, 8) else 16.0
        return weight_bytes(Path(settings.model)) | {"head": int(numbers["head"] * head / 8)}
    return {"layers": int(numbers["layers"] * layers / 8), "head": int(numbers["head"] * head / 8)}


def _bits(bits: int, group: int) -> float:
    """Of a weight with its share of scales and zero points, as a small product holds them."""
    import torch

    from baton.model.layers.grouped import grouped_product
    from baton.model.layers.rounding import Grouping, in_groups
    from baton.model.weights.store import PrivateStore, Shelf

    weight, _ = in_groups(torch.randn(256, 1024), Grouping(bits, group))
    product = grouped_product(weight, None, torch.bfloat16, Shelf(PrivateStore(), "sample"))
    return 8 * product.nbytes / (256 * 1024)


if __name__ == "__main__":
    answer(load)
