"""`baton generate`: complete one prompt, or several, and print the text."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from baton.cli import flags
from baton.launch.options import EngineOptions
from baton.launch.options.sources import Chosen


@flags.of(
    EngineOptions,
    "model_impl",
    "dtype",
    "quantization",
    "quantization_group_size",
    "quantize_head",
    "kv_cache_dtype",
    "max_model_len",
    "tensor_parallel_size",
    "log_level",
    quiet=True,
    model_option=True,
)
def generate(
    chosen: Chosen[EngineOptions],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Texts to complete. Without any, standard input is one prompt.", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Tokens to generate.", rich_help_panel=flags.SAMPLING)
    ] = 64,
    temperature: flags.Temperature = None,
    top_p: flags.TopP = None,
    seed: flags.Seed = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send each prompt as a chat message instead of raw text.")
    ] = False,
) -> None:
    """Complete PROMPTS in one batch and print the results.

    Example: `baton generate --chat "What colour is the sky?"`
    """
    from baton.launch.planning.plan import make_plan
    from baton.llm import LLM
    from baton.observe.logs import configure_logging

    configure_logging(chosen.options.log_level, "generate")
    plan = make_plan(chosen.options)
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    flags.check_before_loading(plan, given)
    texts = prompts or [_read_standard_input()]
    with LLM.planned(plan) as llm:
        params = llm.default_sampling_params(**given)
        if chat:
            conversations = [[{"role": "user", "content": text}] for text in texts]
            results = llm.chat(conversations, params, use_tqdm=False)
        else:
            results = llm.generate(texts, params, use_tqdm=False)
        for text, result in zip(texts, results, strict=True):
            typer.echo(result.outputs[0].text if chat else text + result.outputs[0].text)


def _read_standard_input() -> str:
    """All of it is one prompt, without the line break at its end."""
    if sys.stdin.isatty():
        typer.secho("Reading the prompt from standard input; Ctrl-D ends it.", err=True, dim=True)
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise ValueError("the prompt is empty; give PROMPTS, or text on standard input")
    return text
