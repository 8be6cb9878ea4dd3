"""`baton chat`: talk to a model in the terminal; the answer streams, the history is kept.

Whatever goes wrong with one answer (the instance died, the conversation became too long) is one line, and
the conversation goes on: the supervisor starts the instance again, and the next question waits for it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli import flags
from baton.launch.options import EngineOptions
from baton.launch.options.sources import Chosen

if TYPE_CHECKING:
    from baton.gateway.parsing.deltas import Delta
    from baton.llm import LLM, SamplingParams

_HELP = "/new starts over, /undo forgets the last exchange, /quit (or Ctrl-D) leaves; Ctrl-C stops an answer."
_LEAVE = "Ctrl-D or /quit leaves; so does a second Ctrl-C."


@flags.of(
    EngineOptions, "dtype", "quantization", "max_model_len", "tensor_parallel_size", "log_level", quiet=True
)
def chat(
    chosen: Chosen[EngineOptions],
    system: Annotated[str | None, typer.Option("--system", "-s", help="A system message.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", "-n", help="Tokens of an answer at most.", rich_help_panel=flags.SAMPLING
        ),
    ] = None,
    temperature: flags.Temperature = None,
    top_p: flags.TopP = None,
    seed: flags.Seed = None,
) -> None:
    """Chat with MODEL in the terminal."""
    from baton.launch.planning.plan import make_plan
    from baton.llm import LLM
    from baton.observe.logs import configure_logging

    with suppress(ImportError):  # editing and recall of lines; the prompt goes to stdout with it
        import readline  # noqa: F401
    configure_logging(chosen.options.log_level, "chat")
    plan = make_plan(chosen.options)
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    flags.check_before_loading(plan, given)
    with LLM.planned(plan) as llm:
        params = llm.default_sampling_params(**given)
        if max_tokens is None:
            params = params.replace(max_tokens=None)
        typer.secho(f"{llm.model_name}. {_HELP}", dim=True)
        _Talk(llm, params, system).run()


class _Talk:
    """A conversation: what was said, and what is done with each line."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._start = [{"role": "system", "content": system}] if system else []
        self._history = list(self._start)

    def run(self) -> None:
        """Until the user leaves, or the instance has failed for good (`ApiError`)."""
        while (line := _ask()) is not None:
            if line in ("/quit", "/exit"):
                return
            if line == "/new":
                self._history = list(self._start)
            elif line == "/undo":
                if len(self._history) > len(self._start):
                    self._history = self._history[:-2]
            elif line.startswith("/"):
                typer.secho(_HELP, dim=True)
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        from baton.gateway.errors import ApiError

        question = {"role": "user", "content": line}
        try:
            answer = _stream(self._llm.chat_deltas([*self._history, question], self._params))
        except (ApiError, ValueError) as error:
            if isinstance(error, ApiError) and error.code == "instance_failed":
                raise
            hint = "/new starts over" if isinstance(error, ValueError) else "ask again; nothing is forgotten"
            typer.secho(f"error: {error} ({hint})", err=True, fg=typer.colors.RED)
            return
        self._history += [question, {"role": "assistant", "content": answer}]


def _ask() -> str | None:
    """One line of the user; None at the end of input, or after two Ctrl-C in a row."""
    interrupted = False
    while True:
        try:
            return input("> ").strip()
        except EOFError:
            typer.echo()
            return None
        except KeyboardInterrupt:
            typer.echo()
            if interrupted:
                return None
            interrupted = True
            typer.secho(_LEAVE, dim=True)


def _stream(pieces: Generator[Delta, None, None]) -> str:
    """Prints the pieces as they come, what the model thinks dimmed and on lines of its own; Ctrl-C ends the
    answer, what came so far counts.  Returns the answer itself, which is what the history keeps."""
    from baton.gateway.parsing.deltas import Call, Content

    answer: list[str] = []
    last: Delta | None = None
    try:
        for piece in pieces:
            if last is not None and type(piece) is not type(last):
                typer.echo()
            last = piece
            if isinstance(piece, Content):
                text = piece.text if answer else piece.text.lstrip("\n")
                answer.append(text)
                typer.echo(text, nl=False)
            elif isinstance(piece, Call):
                typer.secho(f"{piece.name or ''}{piece.arguments}", dim=True, nl=False)
            else:
                typer.secho(piece.text, dim=True, nl=False)
    except KeyboardInterrupt:
        typer.secho(" [stopped]", dim=True, nl=False)
    except Exception:
        if last is not None:
            typer.echo()
        raise
    finally:
        pieces.close()
    typer.echo()
    return "".join(answer)
