"""generation_config.json: what the authors of a checkpoint recommend for generation.

Its values become the defaults of requests, so each is checked here with the limits of a request's own
(`protocol/params/sampling_params.py`): a server must not start and then refuse every request for a field that
no client sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from baton.model.checkpoint.gguf import is_gguf
from baton.model.checkpoint.gguf_config import SOURCE, read_generation
from baton.model.description.fields import Fields, read_json_object
from baton.protocol.params.sampling_params import InvalidParameter, make_params

FILE = "generation_config.json"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class GenerationConfig:
    """What the file says."""

    eos_token_ids: tuple[int, ...] = ()
    """Ids that end an answer, beside those of config.json and of the tokenizer."""
    sampling: dict[str, float | int] = field(default_factory=dict)
    """Only what the file says: temperature, top_p, top_k, min_p, repetition_penalty."""


def read_generation_config(
    directory: str | Path, vocab_size: int, *, sampling: bool = True
) -> GenerationConfig:
    """Reads `generation_config.json`, or a GGUF file's metadata; everything is empty without one.

    `sampling`: not only the end ids.
    `do_sample: false` is `temperature: 0`: that is what the file asks of the program that wrote it.
    Raises `ModelNotFound` or `UnsupportedModel`.
    """
    directory = Path(directory)
    if is_gguf(directory):
        fields = Fields(read_generation(directory), str(directory), SOURCE)
    elif not (directory / FILE).exists():
        return GenerationConfig()
    else:
        fields = Fields(read_json_object(directory / FILE), str(directory), FILE)
    return GenerationConfig(
        fields.token_ids("eos_token_id", vocab_size), _sampling(fields) if sampling else {}
    )


def _sampling(fields: Fields) -> dict[str, float | int]:
    found: dict[str, float | int] = {}
    for key in _SAMPLING:
        if key in fields:
            value = fields.number(key)
            found[key] = int(value) if key == "top_k" and value.is_integer() else value
    if not fields.flag("do_sample", True):
        found["temperature"] = 0.0
    try:
        make_params(found, {})
    except InvalidParameter as error:
        raise fields.refused(f"{FILE}: {error}; mend the file, or give --generation-config baton") from None
    return found
