"""What the files of a checkpoint call the tensors of a class, which the library has renamed at times."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from baton.model.checkpoint.files import LoadError


class TensorNames:
    """Of a class that has been made, with its parameters as they were."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        self._names = set(model.state_dict())
        self._owners = {name.rpartition(".")[0] for name in self._names}
        self._prefix = f"{model.base_model_prefix}."
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._ignored = [re.compile(pattern) for pattern in ignored]
        self._computed = {name for name, _ in model.named_buffers()}
        transforms = get_model_conversion_mapping(model)
        self._renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self._conversions = [one for one in transforms if not isinstance(one, WeightRenaming)]

    def ours(self, names: Iterable[str]) -> dict[str, str]:
        """By names of the class: names in the files.  Without those that the class has no use for.

        Raises `LoadError` if tensors would have to be made of others.
        """
        found: dict[str, str] = {}
        for name in names:
            mine = self._renamed(name)
            if mine in self._names or not any(pattern.search(mine) for pattern in self._ignored):
                found[mine] = name
        return found

    def is_computed(self, name: str) -> bool:
        """Whether it follows from the configuration, though a file may have it."""
        return name in self._computed

    def _renamed(self, name: str) -> str:
        renamed = name
        for one in self._renamings:
            renamed, _ = one.rename_source_key(renamed)
        for one in self._conversions:
            _, pattern = one.rename_source_key(renamed)
            if pattern is not None:
                raise LoadError(
                    f"tensor {name!r} would have to be converted for its class of transformers, which Baton "
                    "does not do"
                )
        owner = renamed.rpartition(".")[0]
        if owner not in self._owners:
            if f"{self._prefix}{owner}" in self._owners:
                return self._prefix + renamed
            if renamed.startswith(self._prefix) and owner.removeprefix(self._prefix) in self._owners:
                return renamed.removeprefix(self._prefix)
        return renamed
