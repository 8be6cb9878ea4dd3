"""A config file: the flags of a command by name, in YAML or TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from baton.launch.limits import OptionError

_MAX_BYTES = 1 << 20


def read_config(path: str) -> dict[str, Any]:
    """Keys as they are written → values.  A key without a value (null) counts as not given.

    Raises `OptionError` that begins with the path.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".yaml", ".yml", ".json", ".toml"):
        raise OptionError(f"{path}: a config file is YAML or TOML; its name ends with .yaml, .yml or .toml")
    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise OptionError(f"{path}: larger than {_MAX_BYTES >> 10} KiB; is it the right file?")
        text = data.decode()
        content = tomllib.loads(text) if suffix == ".toml" else _yaml(text)
    except OSError as error:
        raise OptionError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"{path}: is not UTF-8: {error.reason} at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"{path}: is not TOML: {error}") from None
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path}: is not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise OptionError(f"{path}: give flags and their values, a line each: max-num-seqs: 64")
    return {_key(path, key): value for key, value in content.items() if value is not None}


def _key(path: str, key: object) -> str:
    if not isinstance(key, str):
        raise OptionError(f"{path}: {key!r}: no such flag; keys are the names of flags")
    return key


def _yaml(text: str) -> Any:
    """Raises `ValueError` with one line."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Safe: it makes plain values only.  A key that stands twice is an error."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[Any] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        raise ValueError(f"line {key.start_mark.line + 1}: {key.value} stands there twice")
                    seen.add(key.value)
            made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            return made

    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise ValueError(f"{error.problem or error.context}{where}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error).splitlines()[0]) from None
