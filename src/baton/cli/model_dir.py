"""`baton model-dir`: where the files of a model are."""

from __future__ import annotations

import typer

from baton.cli import flags
from baton.launch.options import EngineOptions
from baton.launch.options.sources import Chosen


@flags.of(EngineOptions, "revision", quiet=True)
def model_dir(chosen: Chosen[EngineOptions]) -> None:
    """Print the directory of MODEL, with its tokenizer; a model of the hub is downloaded first.

    For tools that load the tokenizer themselves: `vllm bench serve --tokenizer $(baton model-dir) …`
    """
    from baton.model.checkpoint.hub import resolve_model

    typer.echo(resolve_model(chosen.options.model, revision=chosen.options.revision))
