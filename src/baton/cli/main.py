"""The `baton` command.  One file a subcommand; heavy imports wait until a command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli import (
    bench,
    chat,
    cluster,
    generate,
    model_dir,
    plan,
    replay,
    run_batch,
    scale,
    serve,
    simulate,
    timeline,
    top,
)
from baton.version import __version__

app = typer.Typer(
    name="baton",
    help="Baton serves large language models: an OpenAI-compatible server, and a command line.\n\n"
    "Without MODEL, every command uses the small model that comes with the package.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"baton {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """See `baton COMMAND --help`."""


app.command("serve")(serve.serve)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("run-batch")(run_batch.run_batch)
app.add_typer(bench.app, name="bench")
app.add_typer(cluster.app, name="cluster")
app.command("simulate")(simulate.simulate)
app.command("plan")(plan.plan)
app.command("scale")(scale.scale)
app.command("model-dir")(model_dir.model_dir)
app.command("replay")(replay.replay)
app.command("top")(top.top)
app.command("timeline")(timeline.timeline)
