"""What drafts by the flags: the draft model, where it is, and whether it speaks as the model does; or a layer
of the model itself, and whether it has one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from baton.launch.limits import OptionError
from baton.model.checkpoint.config import ModelConfig
from baton.model.checkpoint.files import check_files, has_tokenizer
from baton.model.checkpoint.gguf import is_gguf
from baton.model.checkpoint.gguf_config import has_gguf_tokenizer
from baton.model.checkpoint.hub import resolve_model
from baton.protocol.config import Dtype, InstanceConfig

_FLAG = "--speculative-config"


def check_mtp(instance: InstanceConfig, model: ModelConfig, name: str) -> None:
    """Raises `OptionError` if its own layer is to draft for a model that has none."""
    if instance.speculation is None or instance.speculation.method != "mtp":
        return
    if instance.executor != "torch":
        raise OptionError(f"{_FLAG}: the simulated executor computes no MTP layer; leave method mtp away")
    if model.mtp is None:
        raise OptionError(f"{_FLAG}: {model.why_no_mtp(name)}")


def with_draft_model(
    instance: InstanceConfig, vocab_size: int, tokenizer: Path, dtype_of: Callable[[str], Dtype]
) -> InstanceConfig:
    """The instance with the draft model's directory in place of its name, if it has one.

    `dtype_of`: what a checkpoint in a dtype is computed in.  Raises `OptionError`, or `ModelNotFound` /
    `UnsupportedModel` / `LoadError` for the draft model's files.
    """
    wanted = instance.speculation
    if wanted is None or wanted.method != "draft":
        return instance
    if instance.executor != "torch":
        raise OptionError(f"{_FLAG}: the simulated executor computes no draft model; leave it away")
    directory = resolve_model(wanted.model)
    model = ModelConfig.from_directory(directory, instance.model_impl)
    if not is_gguf(directory):
        check_files(directory)
    if model.vocab_size != vocab_size:
        raise OptionError(
            f"{_FLAG}: the draft model {wanted.model!r} has {model.vocab_size} tokens, the model "
            f"{vocab_size}: their vocabularies must be the same; give a smaller model of the same family"
        )
    if has_gguf_tokenizer(directory) if is_gguf(directory) else has_tokenizer(directory):
        difference = _difference(tokenizer, directory)
        if difference:
            raise OptionError(
                f"{_FLAG}: the draft model {wanted.model!r} has another tokenizer: {difference}; give a "
                "smaller model of the same family"
            )
    found = msgspec.structs.replace(wanted, model=str(directory), dtype=dtype_of(model.dtype))
    return msgspec.structs.replace(instance, speculation=found)


def _difference(one: Path, other: Path) -> str:
    """The first token that two tokenizers spell otherwise, or "".  (One may name more tokens at the end.)"""
    if _same_file(one / "tokenizer.json", other / "tokenizer.json"):
        return ""
    from baton.gateway.text.tokenizer import Tokenizer

    try:
        ours, theirs = Tokenizer.from_directory(one), Tokenizer.from_directory(other)
    except ValueError as error:
        raise OptionError(f"{_FLAG}: {error}") from None
    for number in range(min(ours.vocab_size, theirs.vocab_size)):
        expected, found = ours.token_bytes(number), theirs.token_bytes(number)
        if expected != found:
            return f"token {number} is {found!r}, not {expected!r}"
    return ""


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.read_bytes() == other.read_bytes()
    except OSError:
        return False
