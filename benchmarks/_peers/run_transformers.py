"""transformers: `generate` on one batch with a static shape; needs torch and transformers.

All requests of a workload have the same lengths and are there at once, which is the best case for it: it has
no continuous batching to lose by.
"""

from __future__ import annotations

from answering import Loaded, NotOffered, Settings, answer


def load(settings: Settings) -> Loaded:
    if settings.quantization is not None:
        raise NotOffered("is compared unquantized only")
    import torch
    import transformers

    torch.set_num_threads(settings.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings.model, dtype=getattr(torch, settings.dtype)
    ).eval()

    @torch.inference_mode()
    def complete(prompts: list[list[int]], output_len: int) -> int:
        made = 0
        for first in range(0, len(prompts), settings.max_num_seqs):
            ids = torch.tensor(prompts[first : first + settings.max_num_seqs])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=output_len,
                min_new_tokens=output_len,
                pad_token_id=0,
            )
            made += out[:, ids.shape[1] :].numel()
        return made

    return Loaded(transformers.__version__, complete)


if __name__ == "__main__":
    answer(load)
