"""The flags of commands, made from their declarations (`launch/options/`), and how a command ends.

A command that serves a model is a function of what was chosen (`Chosen`), from the command line, the
environment and a config file, and of options of its own:

    @flags.of(EngineOptions, "dtype", "max_model_len", quiet=True)
    def generate(chosen: Chosen[EngineOptions], prompts: ..., max_tokens: ...) -> None:

Texts come from typer as they were typed; the declaration reads them, so a wrong value is the same one line
wherever it comes from.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from baton.launch.limits import OptionError
from baton.launch.options import Options, ServeOptions, flags_of
from baton.launch.options.flag import Flag
from baton.launch.options.sources import choose

if TYPE_CHECKING:
    from rich.progress import Progress

    from baton.launch.planning.plan import ServerPlan

O = TypeVar("O", bound=Options)  # noqa: E741

SAMPLING = "Sampling"

Temperature = Annotated[
    float | None, typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=SAMPLING)
]
TopP = Annotated[float | None, typer.Option(help="Nucleus sampling.", rich_help_panel=SAMPLING)]
Seed = Annotated[
    int | None, typer.Option(help="The same seed gives the same text.", rich_help_panel=SAMPLING)
]

_INTERRUPTED = 130


def of(
    kind: type[O], *names: str, quiet: bool = False, model_option: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the flags of `kind`; with `names` only these, besides `model` and `config`.

    The others can still be given by the environment and a config file.  `quiet`: with the defaults of `LLM`.
    `model_option`: the model is given with `--model`, as the command's arguments are something else.
    """
    chosen_ones = [
        one for one in flags_of(kind) if not names or one.name in names or one.name in ("model", "config")
    ]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            given = {one.name: values.pop(one.name) for one in chosen_ones}
            try:
                chosen = choose(kind, given, quiet=quiet, known=ServeOptions)
            except OptionError as error:
                _fail(error, 2)
            for remark in chosen.remarks:
                typer.secho(f"warning: {remark}", err=True, fg=typer.colors.YELLOW)
            with user_errors(), chosen.spelled():
                function(chosen, **values)

        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        derived = [_parameter(one, quiet, model_option) for one in chosen_ones]
        if not model_option:
            own.insert(0, derived.pop(next(i for i, one in enumerate(chosen_ones) if one.name == "model")))
        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own, *derived)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        return command

    return decorate


def _parameter(one: Flag, quiet: bool, model_option: bool) -> inspect.Parameter:
    """As typer reads it.  None: not given on the command line."""
    declared = one.declared
    text = f"{declared.help} Default: {one.default_in_words(quiet=quiet)}."
    kind: Any = bool if one.is_switch else list[str] if one.many else str
    if one.name == "model" and not model_option:
        info: Any = typer.Argument(help=text, metavar="MODEL", show_default=False)
    else:
        names = [f"{one.option}/--no-{one.option[2:]}" if one.is_switch else one.option]
        short = "-m" if one.name == "model" else declared.short
        info = typer.Option(
            *names,
            *([short] if short else []),
            help=text,
            metavar=None if one.is_switch else metavar(one),
            show_default=False,
            rich_help_panel=one.section,
        )
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def metavar(one: Flag) -> str:
    """What stands for the value."""
    if one.declared.metavar:
        return one.declared.metavar
    words = list(one.choices)
    if int in one.kinds:
        words.append("INTEGER")
    elif float in one.kinds:
        words.append("NUMBER")
    elif str in one.kinds:
        words.append("TEXT")
    return f"[{'|'.join(words)}]" if one.choices else words[0]


@contextmanager
def user_errors() -> Iterator[None]:
    """Every expected end is one line on stderr at most, and an exit code.

    2: a mistake of the user; 1: the instance did not start, or failed; 130: Ctrl-C.
    """
    try:
        from baton.gateway.errors import ApiError
        from baton.launch.instances.supervisor import InstanceFailed

        try:
            yield
        except ValueError as error:
            _fail(error, 2)
        except (ApiError, InstanceFailed) as error:
            _fail(error, 1)
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None


def _fail(error: Exception, code: int) -> NoReturn:
    typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
    raise typer.Exit(code) from None


def progress() -> Progress:
    """A bar on stderr, which goes when it is done; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    return Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def write_json(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    typer.echo(f"written: {path}")


def check_before_loading(plan: ServerPlan, sampling: Mapping[str, Any]) -> None:
    """Raises `ValueError` for what would only be found after a model is loaded."""
    from baton.protocol.params.sampling_params import make_params

    make_params({}, sampling)
    limit = plan.served.max_model_len
    max_tokens = sampling["max_tokens"]
    if max_tokens is not None and max_tokens >= limit:
        raise ValueError(
            f"--max-tokens {max_tokens}: the context is {limit} tokens, for the prompt and the answer "
            f"together; give at most {limit - 1}"
        )
