"""The arguments of a Python program: the flags of one instance, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec

from baton.launch.options import EngineOptions, ServeOptions, flags_of
from baton.launch.options.sources import Chosen, choose

P = ParamSpec("P")


def choose_arguments(given: Mapping[str, Any]) -> Chosen[EngineOptions]:
    """What a program gave, then the environment, the config file and the defaults of `LLM`.

    Raises `OptionError` that names the argument.
    """
    return choose(EngineOptions, given, style="argument", quiet=True, known=ServeOptions)


def takes_arguments_of(
    options: Callable[P, EngineOptions],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """An `__init__` has the parameters of these options: for type checkers, for editors and for `help()`."""

    def takes(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        first, *_ = inspect.signature(init).parameters.values()
        parameters = [first]
        signature = inspect.signature(options)
        for one in flags_of(EngineOptions):
            parameter = signature.parameters[one.name]
            parameters.append(parameter.replace(default=one.default_in(quiet=True)))
        parameters.sort(key=lambda parameter: parameter.kind)
        init.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return init

    return takes
