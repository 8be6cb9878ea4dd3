"""`baton generate`: complete one prompt, or several, and print the text."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from baton.cli import flags


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Texts to complete. Without any, standard input is one prompt.", show_default=False
        ),
    ] = None,
    model: flags.ModelOption = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Tokens to generate.", rich_help_panel=flags.SAMPLING)
    ] = 64,
    temperature: flags.Temperature = None,
    top_p: flags.TopP = None,
    seed: flags.Seed = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send each prompt as a chat message instead of raw text.")
    ] = False,
    dtype: flags.Dtype = "auto",
    quantization: flags.Quantization = None,
    max_model_len: flags.MaxModelLen = None,
    tensor_parallel_size: flags.TensorParallel = 1,
    log_level: flags.LogLevel = "warning",
) -> None:
    """Complete PROMPTS in one batch and print the results.

    Example: `baton generate --chat "What colour is the sky?"`
    """
    with flags.user_errors():
        from baton.llm import LLM
        from baton.observe.logs import configure_logging

        configure_logging(log_level, "generate")
        given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        options: dict[str, Any] = {
            "dtype": dtype,
            "quantization": quantization,
            "max_model_len": max_model_len,
            "tensor_parallel_size": tensor_parallel_size,
            "log_level": log_level,
        }
        flags.check_before_loading(model, options, given)
        texts = prompts or [_read_standard_input()]
        with LLM(model, **options) as llm:
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
