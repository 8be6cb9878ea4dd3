"""`baton bench perplexity`: how well a model predicts a text, and how far it is from a reference."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from baton.cli import flags
from baton.launch.options import EngineOptions
from baton.launch.options.sources import Chosen

if TYPE_CHECKING:
    from baton.launch.planning.plan import ServerPlan

_TEXT = "Text"
_REFERENCE = "Reference"
_DEFAULT_CONTEXT = 2048


@flags.of(
    EngineOptions,
    "model_impl",
    "dtype",
    "quantization",
    "quantization_group_size",
    "quantize_head",
    "kv_cache_dtype",
    "num_threads",
    "log_level",
    quiet=True,
)
def perplexity(
    chosen: Chosen[EngineOptions],
    text: Annotated[Path, typer.Option(help="A file of UTF-8 text.", rich_help_panel=_TEXT)],
    context: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens of a window. Default: the model's context, {_DEFAULT_CONTEXT} at most.",
            min=2,
            show_default=False,
            rich_help_panel=_TEXT,
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            help="A window begins every so many tokens. Default: half of --context.",
            min=1,
            show_default=False,
            rich_help_panel=_TEXT,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Read only so many tokens of the text.", min=2, show_default=False, rich_help_panel=_TEXT
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Another model of the same vocabulary, or the same one unquantized: also print the KL "
            "divergence from it, and how often both have the same most likely token.",
            show_default=False,
            rich_help_panel=_REFERENCE,
        ),
    ] = None,
    reference_dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        typer.Option(
            help="What the reference is computed in, as --dtype. Default: that of its checkpoint.",
            show_default=False,
            rich_help_panel=_REFERENCE,
        ),
    ] = None,
    output_json: Annotated[
        Path | None, typer.Option(help="Write the result here.", show_default=False)
    ] = None,
) -> None:
    """Predict each token of a text from those before it; print the perplexity. No server is needed.

    Example: `baton bench perplexity --text README.md --quantization int8 --reference baton-tiny`
    """
    import numpy as np

    from baton.bench.machine import machine
    from baton.bench.perplexity import Scorer, measure_perplexity
    from baton.gateway.text.tokenizer import Tokenizer
    from baton.launch.planning.plan import make_plan
    from baton.observe.logs import configure_logging

    options = chosen.options
    configure_logging(options.log_level, "perplexity")
    plans = [_plan(options)]
    if reference is not None:
        plans.append(
            make_plan(
                replace(
                    options,
                    model=reference,
                    tokenizer=None,
                    quantization=None,
                    quantization_group_size=None,
                    quantize_head=None,
                    model_impl="auto",
                    kv_cache_dtype="auto",
                    dtype=reference_dtype or "auto",
                )
            )
        )
    elif reference_dtype is not None:
        raise ValueError("--reference-dtype: there is no --reference")
    limit = min(plan.served.max_model_len for plan in plans)
    context = min(limit, _DEFAULT_CONTEXT) if context is None else context
    if context > limit:
        raise ValueError(f"--context {context}: the context is {limit} tokens; give at most that")
    stride = context // 2 if stride is None else stride
    if stride >= context:
        raise ValueError(f"--stride {stride}: give less than the context, {context} tokens")
    words = _read(text)
    ids = [Tokenizer.from_directory(plan.served.tokenizer).encode(words) for plan in plans]
    if ids[0] != ids[-1] or plans[0].served.vocab_size != plans[-1].served.vocab_size:
        raise ValueError(f"--reference {reference}: it has another tokenizer or vocabulary than the model")
    tokens = np.array(ids[0][:max_tokens], np.int32)
    if len(tokens) < 2:
        raise ValueError(f"--text {text}: it has {len(tokens)} tokens; at least two are needed")
    with ExitStack() as stack:
        scorers = [stack.enter_context(closing(Scorer(plan.instance, context))) for plan in plans]
        bar = stack.enter_context(flags.progress())
        task = bar.add_task("tokens", total=len(tokens) - 1)
        result = measure_perplexity(
            tokens,
            scorers[0],
            scorers[1] if reference is not None else None,
            context=context,
            stride=stride,
            progress=lambda done: bar.update(task, completed=done),
        )
    if output_json is not None:
        given = {name: getattr(options, name) for name in chosen.origins if name != "model"}
        about = {"model": options.model, "options": given, "text": str(text), "reference_model": reference}
        flags.write_json(output_json, result.as_dict() | about | {"machine": machine()})
    typer.echo(result.as_text())


def _plan(options: EngineOptions) -> ServerPlan:
    from baton.launch.planning.plan import make_plan

    if options.executor != "torch" or options.tensor_parallel_size != 1:
        raise ValueError("perplexity is measured with --executor torch and --tensor-parallel-size 1")
    return make_plan(options)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {path}: cannot be read: {error}") from None
