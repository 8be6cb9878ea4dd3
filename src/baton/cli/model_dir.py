"""`baton model-dir`: where the files of a model are."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli import flags


def model_dir(
    model: flags.Model = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
) -> None:
    """Print the directory of MODEL, with its tokenizer; a model of the hub is downloaded first.

    For tools that load the tokenizer themselves: `vllm bench serve --tokenizer $(baton model-dir) …`
    """
    with flags.user_errors():
        from baton.model.hub import resolve_model

        typer.echo(resolve_model(model, revision=revision))
