"""Flags that several commands share, with vLLM's names where the meaning is the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NoReturn

import typer

MODEL = "Model"
MEMORY = "Memory and batching"
SAMPLING = "Sampling"

Model = Annotated[
    str | None,
    typer.Argument(
        help="Directory of a checkpoint, or a name on the model hub. Default: the embedded model.",
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Directory or hub name. Default: the embedded model.", rich_help_panel=MODEL
    ),
]
Dtype = Annotated[
    Literal["auto", "bfloat16", "float16", "float32"],
    typer.Option(help="auto: the checkpoint's, or float32 on a CPU without bf16.", rich_help_panel=MODEL),
]
Quantization = Annotated[
    Literal["int8"] | None,
    typer.Option(
        help="int8: weights and activations of all products in 8 bits, on a CPU.", rich_help_panel=MODEL
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size", "-tp", help="Worker processes that share each layer.", rich_help_panel=MODEL
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Longest prompt + output, in tokens. Default: the model's.", rich_help_panel=MEMORY),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], typer.Option(help="How much to log, to stderr.")
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=SAMPLING)
]
TopP = Annotated[float | None, typer.Option(help="Nucleus sampling.", rich_help_panel=SAMPLING)]
Seed = Annotated[
    int | None, typer.Option(help="The same seed gives the same text.", rich_help_panel=SAMPLING)
]


_INTERRUPTED = 130


@contextmanager
def user_errors() -> Iterator[None]:
    """Every expected end is one line on stderr at most, and an exit code.

    2: a mistake of the user; 1: the instance did not start, or failed; 130: Ctrl-C.
    """
    try:
        from baton.gateway.errors import ApiError
        from baton.launch.supervisor import InstanceFailed

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


def check_before_loading(model: str | None, options: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
    """Raises `ValueError` for what would only be found after a model is loaded."""
    from baton.launch.arguments import plan_of_arguments
    from baton.protocol.sampling_params import make_params

    make_params({}, sampling)
    limit = plan_of_arguments({**options, "model": model}).served.max_model_len
    max_tokens = sampling["max_tokens"]
    if max_tokens is not None and max_tokens >= limit:
        raise ValueError(
            f"--max-tokens {max_tokens}: the context is {limit} tokens, for the prompt and the answer "
            f"together; give at most {limit - 1}"
        )
