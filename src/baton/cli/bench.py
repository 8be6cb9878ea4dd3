"""`baton bench`: how fast an engine is (`throughput`), a server under load (`serve`), and how well a model
predicts a text (`perplexity`)."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from baton.cli import flags
from baton.cli.perplexity import perplexity
from baton.launch.options import EngineOptions
from baton.launch.options.sources import Chosen

app = typer.Typer(
    help="Measure: `throughput` and `perplexity` without a server, `serve` over HTTP.", no_args_is_help=True
)

_WORK = "Work"
_SERVER = "Server"
_RESULT = "Result"
_METRICS = ("ttft", "tpot", "itl", "e2el")

NumWarmups = Annotated[
    int, typer.Option(help="Requests before the clock starts.", min=0, rich_help_panel=_WORK)
]
Seed = Annotated[int, typer.Option(help="Of prompts and arrivals.", rich_help_panel=_WORK)]


@flags.of(
    EngineOptions,
    "model_impl",
    "dtype",
    "quantization",
    "quantization_group_size",
    "quantize_head",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "num_threads",
    "log_level",
    quiet=True,
)
def throughput(
    chosen: Chosen[EngineOptions],
    num_prompts: Annotated[
        int, typer.Option(help="Requests, all there at once.", min=1, rich_help_panel=_WORK)
    ] = 64,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1, rich_help_panel=_WORK)] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens of an answer.", min=1, rich_help_panel=_WORK)] = 128,
    num_warmups: NumWarmups = 1,
    seed: Seed = 0,
    output_json: Annotated[
        Path | None, typer.Option(help="Write the result here.", rich_help_panel=_RESULT)
    ] = None,
) -> None:
    """Complete random prompts of exact lengths as one batch; the last line has the tokens per second.

    Example: `baton bench throughput --num-prompts 64 --input-len 128 --output-len 128`
    """
    from baton.bench.machine import machine
    from baton.bench.throughput import measure_throughput
    from baton.bench.workload import random_requests
    from baton.launch.planning.plan import make_plan

    plan = make_plan(chosen.options)
    limit = plan.served.max_model_len
    if input_len + output_len > limit:
        raise ValueError(f"--input-len {input_len}, --output-len {output_len}: the context is {limit} tokens")
    vocab_size = plan.served.vocab_size
    result = measure_throughput(
        plan,
        random_requests(num_prompts, input_len, output_len, vocab_size, seed),
        vocab_size=vocab_size,
        num_warmups=num_warmups,
        seed=seed,
    )
    if output_json is not None:
        given = {name: getattr(chosen.options, name) for name in chosen.origins if name != "model"}
        about = {"model": chosen.options.model, "options": given, "machine": machine()}
        flags.write_json(output_json, result.as_dict() | about)
    typer.echo(result.as_text())


app.command()(throughput)
app.command()(perplexity)


@app.command()
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Without --base-url: what to serve, as for `baton serve`. With it: the name in the "
            "requests, by default the first that the server lists.",
            show_default=False,
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            help="Address of a server with OpenAI's API, such as http://127.0.0.1:8000. Default: a "
            "`baton serve` is started for this run.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    server_args: Annotated[
        str,
        typer.Option(
            help='Flags of the server that is started, in one text: "--prefill 1 --decode 1".',
            rich_help_panel=_SERVER,
        ),
    ] = "",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=["BATON_API_KEY", "OPENAI_API_KEY"],
            help="Sent as a bearer token.",
            show_default=False,
            rich_help_panel=_SERVER,
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests.", min=1, rich_help_panel=_WORK)] = 64,
    request_rate: Annotated[
        float, typer.Option(help="Requests that arrive per second; inf: all at once.", rich_help_panel=_WORK)
    ] = float("inf"),
    burstiness: Annotated[
        float,
        typer.Option(
            help="Of the arrivals: 1 is a Poisson process, less is burstier, more is steadier.",
            rich_help_panel=_WORK,
        ),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Requests under way at most.", min=1, rich_help_panel=_WORK)
    ] = None,
    random_input_len: Annotated[
        int, typer.Option(help="Tokens of a prompt.", min=1, rich_help_panel=_WORK)
    ] = 128,
    random_output_len: Annotated[
        int, typer.Option(help="Tokens of an answer.", min=1, rich_help_panel=_WORK)
    ] = 128,
    random_range_ratio: Annotated[
        float,
        typer.Option(
            help="Lengths are uniform from (1 - r) to (1 + r) of these.", min=0, max=1, rich_help_panel=_WORK
        ),
    ] = 0.0,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Prompts are ids below this. Default: that of the model served here; 1000 with --base-url.",
            min=2,
            rich_help_panel=_WORK,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for answers of the full length.", rich_help_panel=_WORK)
    ] = True,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_WORK)] = 0.0,
    num_warmups: NumWarmups = 1,
    seed: Seed = 0,
    percentile_metrics: Annotated[
        str, typer.Option(help="Which latencies to print, of ttft,tpot,itl,e2el.", rich_help_panel=_RESULT)
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[
        str, typer.Option(help="Their percentiles, such as 50,90,99.", rich_help_panel=_RESULT)
    ] = "99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help="Limits of a good request in milliseconds: ttft:200, tpot:50, e2el:5000. Repeatable; "
            "several may stand in one text.",
            rich_help_panel=_RESULT,
        ),
    ] = None,
    save_result: Annotated[
        bool, typer.Option("--save-result", help="Write JSON.", rich_help_panel=_RESULT)
    ] = False,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="With each request's values.", rich_help_panel=_RESULT)
    ] = False,
    result_dir: Annotated[
        Path | None, typer.Option(help="Where. Default: here.", rich_help_panel=_RESULT)
    ] = None,
    result_filename: Annotated[
        str | None,
        typer.Option(help="Default: by rate, concurrency, model and time.", rich_help_panel=_RESULT),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw TTFT and ITL into this file (png, pdf, svg); needs matplotlib, the extra `bench`.",
            rich_help_panel=_RESULT,
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Write a page into this file (HTML): figures, percentiles, TTFT and ITL over time and as "
            "distributions. It needs nothing else, and has no script.",
            rich_help_panel=_RESULT,
        ),
    ] = None,
) -> None:
    """Send random prompts of exact lengths to a server, stream the answers, and time them.

    `baton bench serve --num-prompts 64 --max-concurrency 16` starts a server with the embedded model;
    `baton bench serve --base-url http://127.0.0.1:8000 --request-rate 4 --goodput "ttft:200 tpot:50"` asks
    one that runs.
    """
    with flags.user_errors(), ExitStack() as stack:
        from baton.bench.client import Endpoint, split_url
        from baton.bench.drawing.plot import check_matplotlib
        from baton.bench.drawing.plot import plot as draw
        from baton.bench.drawing.report import check_report, write_report
        from baton.bench.metrics import calculate, parse_goodput
        from baton.bench.metrics import report as printed
        from baton.bench.results import Setting, as_json, default_name, remarks
        from baton.bench.serve import BenchFailed, measure_serving
        from baton.bench.server import ServerFailed, first_model, own_server
        from baton.bench.workload import UNKNOWN_VOCABULARY, arrival_times, random_requests, vocabulary_of
        from baton.model.checkpoint.hub import resolve_model

        selected = _names(percentile_metrics)
        percentiles = _percentiles(metric_percentiles)
        limits = parse_goodput([word for text in goodput or () for word in text.split()])
        if not request_rate > 0 or not burstiness > 0:
            raise ValueError(
                f"--request-rate {request_rate:g}, --burstiness {burstiness:g}: both must be above 0"
            )
        if plot is not None:
            check_matplotlib()
        if report is not None:
            check_report(report)
        if base_url is not None:
            split_url(base_url)
            if server_args:
                raise ValueError("--server-args: of the server that is started, which --base-url prevents")
        size = vocab_size or (
            UNKNOWN_VOCABULARY if base_url is not None else vocabulary_of(resolve_model(model))
        )
        requests = random_requests(
            num_prompts, random_input_len, random_output_len, size, seed, random_range_ratio
        )
        warmups = random_requests(num_warmups, random_input_len, random_output_len, size, seed + 1)
        arrivals = arrival_times(num_prompts, request_rate, burstiness, seed)
        ready_s = None
        try:
            if base_url is None:
                base_url, ready_s = stack.enter_context(own_server(model, shlex.split(server_args)))
                model = None
            name = model or first_model(base_url, api_key)
            endpoint = Endpoint(
                base_url, name, api_key, extra={"temperature": temperature, "ignore_eos": ignore_eos}
            )
            with flags.progress() as progress:
                task = progress.add_task("Requests", total=num_prompts)
                outcomes, duration = measure_serving(
                    endpoint,
                    requests,
                    arrivals,
                    max_concurrency=max_concurrency,
                    warmups=warmups,
                    on_done=lambda: progress.advance(task),
                )
        except (BenchFailed, ServerFailed) as error:
            typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
            raise typer.Exit(1) from None
        metrics = calculate(outcomes, duration, percentiles, limits)
        setting = Setting(
            model_id=name,
            num_prompts=num_prompts,
            random_input_len=random_input_len,
            random_output_len=random_output_len,
            random_range_ratio=random_range_ratio,
            request_rate=request_rate,
            burstiness=burstiness,
            max_concurrency=max_concurrency,
            seed=seed,
            goodput=limits,
            ready_s=ready_s,
        )
        now, noted = datetime.now(), remarks(outcomes, full_length=ignore_eos)
        for remark in noted:
            typer.secho(f"note: {remark}", err=True, fg=typer.colors.YELLOW)
        typer.echo(printed(metrics, selected, max_concurrency, request_rate))
        if save_result or save_detailed:
            path = (result_dir or Path()) / (result_filename or default_name(setting, now))
            flags.write_json(path, as_json(setting, metrics, outcomes, now, save_detailed))
        if report is not None:
            write_report(report, setting, metrics, outcomes, noted, now)
            typer.echo(f"written: {report}")
        if metrics.completed == 0:
            raise typer.Exit(1)
        if plot is not None:
            draw(outcomes, plot, setting.title())
            typer.echo(f"written: {plot}")


def _names(text: str) -> list[str]:
    names = [word.strip() for word in text.split(",") if word.strip()]
    for name in names:
        if name not in _METRICS:
            raise ValueError(f"--percentile-metrics {text}: {name!r} is none of {', '.join(_METRICS)}")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
        if not all(0 <= value <= 100 for value in found):
            raise ValueError
    except ValueError:
        raise ValueError(f"--metric-percentiles {text}: give numbers from 0 to 100, such as 50,99") from None
    return found
