"""sentence-transformers: `pip install sentence-transformers`.  Last token, normalized, 32 texts a batch."""

from __future__ import annotations

from typing import Any

from answering import Loaded, NotOffered, Settings, answer
from vectors import keep

BATCH = 32
"""As `SentenceTransformer.encode` takes them by default."""


def load(settings: Settings) -> Loaded:
    if settings.quantization is not None:
        raise NotOffered("this adapter knows no quantization")
    import sentence_transformers as library
    import torch
    from sentence_transformers.models import Normalize, Pooling, Transformer

    torch.set_num_threads(settings.threads)
    dtype = {"torch_dtype": getattr(torch, settings.dtype)}
    transformer = Transformer(settings.model, model_args=dtype)
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode="lasttoken")
    model = library.SentenceTransformer(modules=[transformer, pooling, Normalize()], device="cpu")

    def complete(prompts: list[list[int]], _: int) -> int:
        found: list[Any] = []
        with torch.inference_mode():
            for first in range(0, len(prompts), BATCH):
                ids = torch.tensor(prompts[first : first + BATCH])
                features = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                found += model(features)["sentence_embedding"].float().tolist()
        keep(settings, "sentence-transformers", found[:4])
        return len(found)

    return Loaded(library.__version__, complete)


if __name__ == "__main__":
    answer(load)
