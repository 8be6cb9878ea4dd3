"""What a checkpoint's model is, and with transformers its class, before any weight is read."""

from __future__ import annotations

from pathlib import Path

from baton.model.adapted.build import Built, build
from baton.model.checkpoint.config import ModelConfig
from baton.protocol.config import InstanceConfig


def read_config(config: InstanceConfig, directory: str | Path) -> ModelConfig:
    """Raises `UnsupportedModel` and `ModelNotFound`."""
    found = ModelConfig.from_directory(directory, config.model_impl)
    return found.without_head() if config.headless else found


def read_model(config: InstanceConfig, directory: str | Path) -> tuple[ModelConfig, Built | None]:
    """The class is there if transformers computes the model.

    Raises `UnsupportedModel` and `ModelNotFound`.
    """
    found = read_config(config, directory)
    if found.implementation == "baton":
        return found, None
    built = build(found, str(directory), config.max_model_len)
    return built.config, built
