"""`baton run-batch`: a file of requests becomes a file of answers."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli import flags
from baton.launch.options import ClusterOptions, EngineOptions, ServeOptions, flags_of
from baton.launch.options.sources import Chosen

if TYPE_CHECKING:
    from rich.progress import Progress

    from baton.batch.client import Address
    from baton.batch.run import Batch, Counts

_BATCH = "Batch"
_LOADING_S = 3600.0


@flags.of(
    ServeOptions,
    *(one.name for one in (*flags_of(EngineOptions), *flags_of(ClusterOptions))),
    quiet=True,
    model_option=True,
)
def run_batch(
    chosen: Chosen[ServeOptions],
    input_file: Annotated[
        str,
        typer.Option("--input-file", "-i", help="Requests, one a line (JSONL).", rich_help_panel=_BATCH),
    ],
    output_file: Annotated[
        str,
        typer.Option(
            "--output-file",
            "-o",
            help="Where the answers go. If some are there already, the run goes on with the others.",
            rich_help_panel=_BATCH,
        ),
    ],
    url: Annotated[
        str | None,
        typer.Option(
            help="Ask the server at this address, such as http://127.0.0.1:8000. Default: the model is "
            "served for this run, with the flags of `baton serve`.",
            show_default=False,
            rich_help_panel=_BATCH,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--openai-api-key",
            envvar="OPENAI_API_KEY",
            help="Sent to --url.",
            show_default=False,
            show_envvar=False,
            rich_help_panel=_BATCH,
        ),
    ] = None,
    max_concurrency: Annotated[
        int, typer.Option(min=1, max=65536, help="Requests in flight at most.", rich_help_panel=_BATCH)
    ] = 512,
) -> None:
    """Answer a file of requests in OpenAI's batch format: one line for each, as it is ready.

    Example: `baton run-batch -i requests.jsonl -o answers.jsonl --prefill 1 --decode 1`

    The same command goes on with a run that was killed or stopped: no line is answered twice or left out.
    Ctrl-C lets what runs end, a second one does not.
    """
    from baton.batch.client import Address
    from baton.batch.output import Output
    from baton.batch.run import Batch, BatchFailed, count_lines

    if url is not None:
        given = [one for one in chosen.origins if chosen.given(one, "command line")]
        if given:
            raise ValueError(
                f"--{given[0].replace('_', '-')}: of the model that this run serves itself; not with --url"
            )
        address: Address | None = Address.of(url)
    else:
        address = None
    try:
        source = open(input_file, "rb")  # noqa: SIM115 (closed below, with the output)
    except OSError as error:
        raise ValueError(f"-i {input_file}: cannot be read: {error.strerror}") from None
    with source:
        output = Output(output_file)
        try:
            counts = count_lines(source, output)
            if output.cut:
                _say(f"{output_file}: the beginning of a line, of a run that was killed, is cut off")
            if counts.before:
                _say(f"{output_file} has {counts.before} of {counts.total} answers already")
            if counts.before == counts.total:
                _say(_summary(counts, 0.0))
                return
            batch = Batch(source, output, address or Address(), api_key, max_concurrency, counts=counts)
            began = time.monotonic()
            with flags.progress() as bar:
                visit = _Visit(batch, bar, output_file)
                try:
                    if address is None:
                        _serve(chosen, visit)
                    else:
                        _ask(visit)
                except BatchFailed as error:
                    _say(f"{_summary(counts, time.monotonic() - began)}; the same command goes on")
                    raise typer.Exit(_failed(error)) from None
                except BaseException:
                    if counts.done < counts.total:
                        _say(f"{_summary(counts, time.monotonic() - began)}; the same command goes on")
                    raise
        finally:
            output.close()
    _say(_summary(counts, time.monotonic() - began))
    if counts.twice:
        _say(f"warning: {counts.twice} custom_ids were there before; `id` tells their answers apart")
    if counts.done < counts.total:
        _say("stopped; the same command goes on")
        raise KeyboardInterrupt


class _Visit:
    """A batch beside the server that it asks (`launch.server.Guest`)."""

    def __init__(self, batch: Batch, bar: Progress, name: str) -> None:
        self.batch = batch
        self.loading = False
        """The server is being started."""
        self._bar = bar
        self._name = name

    async def run(self) -> None:
        from baton.batch.run import until_ready

        counts = self.batch.counts
        if self.loading:
            await until_ready(self.batch.address, _LOADING_S)
            self.loading = False
        task = self._bar.add_task(self._name, total=counts.total, completed=counts.before)
        self.batch.advance = lambda: self._bar.advance(task)
        await self.batch.run()

    def on_signal(self) -> bool:
        if self.batch.stopping or self.loading:
            return False
        self.batch.stopping = True
        _say("stopping: what runs may end; Ctrl-C again does not wait for it")
        return True


def _serve(chosen: Chosen[ServeOptions], visit: _Visit) -> None:
    """Serves the model on a socket of its own, for this run."""
    from baton.batch.client import Address
    from baton.launch.instances.processes import starting
    from baton.launch.instances.runtime_dir import RuntimeDirectory
    from baton.launch.server import run_server

    for one in flags_of(ServeOptions):
        if one.declared.secret:  # not for the environment of engines, workers and helpers
            os.environ.pop(one.variable, None)
    options = dataclasses.replace(chosen.options, api_key=(), ssl_certfile=None, ssl_keyfile=None)
    starting.begin(options.executor)
    directory = RuntimeDirectory()
    try:
        path = str(directory.path / "batch.sock")
        visit.batch.address, visit.loading = Address(path=path), True
        run_server(dataclasses.replace(chosen, options=dataclasses.replace(options, uds=path)), visit)
    finally:
        directory.remove()


def _ask(visit: _Visit) -> None:
    """The server at --url."""
    import asyncio

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None

        def on_signal() -> None:
            if not visit.on_signal():
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        try:
            await visit.run()
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    asyncio.run(run())


def _summary(counts: Counts, seconds: float) -> str:
    parts = [f"{counts.answered} answered", f"{counts.errors} errors"]
    if counts.before:
        parts.append(f"{counts.before} before")
    if counts.done < counts.total:
        parts.append(f"{counts.total - counts.done} left")
    took = f" in {seconds:.1f} s" if counts.answered + counts.errors else ""
    return f"{counts.total} lines: {', '.join(parts)}{took}"


def _failed(error: Exception) -> int:
    typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
    return 1


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
