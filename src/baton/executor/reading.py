"""What a checkpoint's model is, and with transformers its class, before any weight is read."""

from __future__ import annotations

from pathlib import Path

from baton.model.adapted.build import Built, build
from baton.model.checkpoint.config import ModelConfig
from baton.protocol.config import InstanceConfig


def read_model(config: InstanceConfig, directory: str | Path) -> tuple[ModelConfig, Built | None]:
    """The class is there if transformers computes the model.

    Raises `UnsupportedModel` and `ModelNotFound`.
    """
    found = ModelConfig.from_directory(directory, config.model_impl)
    if found.implementation == "baton":
        return found, None
    built = build(found, str(directory), config.max_model_len)
    return built.config, built
