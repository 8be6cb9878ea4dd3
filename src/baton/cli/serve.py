"""`baton serve`: the OpenAI-compatible server."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from baton.cli import flags, http_flags

_SERVER = "Server"
_CLUSTER = "Instances"
_JOIN = "An instance that joins another server"
_EXECUTION = "Execution"


def serve(
    model: flags.Model = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(help="Port to listen on; 0 takes a free one. Default: 8000.", rich_help_panel=_SERVER),
    ] = None,
    api_key: http_flags.ApiKeys = None,
    admin_key: http_flags.AdminKeys = None,
    allowed_host: http_flags.AllowedHosts = None,
    allowed_origins: http_flags.AllowedOrigins = None,
    min_priority: http_flags.MinPriority = None,
    profile_dir: http_flags.ProfileDir = None,
    weights_dir: http_flags.WeightsDir = None,
    h11_max_incomplete_event_size: http_flags.MaxHeadBytes = 64 << 10,
    h11_max_header_count: http_flags.MaxHeaders = 100,
    timeout_head: http_flags.TimeoutHead = 10.0,
    timeout_body: http_flags.TimeoutBody = 30.0,
    timeout_write: http_flags.TimeoutWrite = 60.0,
    timeout_keep_alive: http_flags.TimeoutKeepAlive = 5.0,
    limit_concurrency: http_flags.LimitConcurrency = None,
    max_body_memory: http_flags.MaxBodyMemory = "256MiB",
    shutdown_grace: http_flags.ShutdownGrace = 0.0,
    fair_queuing: http_flags.FairQueuing = True,
    fair_weights: http_flags.FairWeights = None,
    salt_by_key: http_flags.SaltByKey = False,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Names that clients use. Repeatable. Default: MODEL.", rich_help_panel=_SERVER),
    ] = None,
    max_waiting: Annotated[
        int,
        typer.Option(
            help="Requests that may queue for admission; of one more, the worst is answered 429.",
            rich_help_panel=_SERVER,
        ),
    ] = 1024,
    shutdown_timeout: Annotated[
        float,
        typer.Option(help="Seconds that running requests get to finish on Ctrl-C.", rich_help_panel=_SERVER),
    ] = 10.0,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Directory of the tokenizer. Default: the model's.", rich_help_panel=flags.MODEL),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit on the hub.", rich_help_panel=flags.MODEL)
    ] = None,
    dtype: flags.Dtype = "auto",
    quantization: flags.Quantization = None,
    generation_config: Annotated[
        Literal["auto", "baton"],
        typer.Option(
            help="auto: sampling defaults from the model's generation_config.json; baton: neutral ones.",
            rich_help_panel=flags.MODEL,
        ),
    ] = "auto",
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        typer.Option(
            help="How a message's text parts come to the chat template: joined to one string, or as OpenAI's "
            "list of parts. auto: as the template reads them.",
            rich_help_panel=flags.MODEL,
        ),
    ] = "auto",
    seed: Annotated[
        int | None,
        typer.Option(help="Makes requests without a seed reproducible.", rich_help_panel=flags.MODEL),
    ] = None,
    max_model_len: flags.MaxModelLen = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Sequences in one step at most.", rich_help_panel=flags.MEMORY)
    ] = 256,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(help="Tokens in one step at most (chunked prefill).", rich_help_panel=flags.MEMORY),
    ] = 2048,
    block_size: Annotated[
        int, typer.Option(help="Tokens in one KV block.", rich_help_panel=flags.MEMORY)
    ] = 32,
    kv_cache_memory_bytes: Annotated[
        str | None,
        typer.Option(
            help="Size of the KV cache, such as 4GiB. Default: by free memory.", rich_help_panel=flags.MEMORY
        ),
    ] = None,
    num_gpu_blocks_override: Annotated[
        int | None,
        typer.Option(help="KV blocks, on any device, instead of a size.", rich_help_panel=flags.MEMORY),
    ] = None,
    admission_headroom: Annotated[
        int | None,
        typer.Option(
            help="Tokens that everything running can still grow by when a request is admitted. "
            "Default: learnt from preemptions; 0 admits whatever fits now.",
            rich_help_panel=flags.MEMORY,
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(help="Share the KV of common prompt beginnings.", rich_help_panel=flags.MEMORY),
    ] = True,
    tensor_parallel_size: flags.TensorParallel = 1,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model runs.", rich_help_panel=_EXECUTION)
    ] = "auto",
    num_threads: Annotated[
        int | None,
        typer.Option(
            help="Compute threads of a worker. Default: the physical cores that this process may use, "
            "divided among all workers.",
            rich_help_panel=_EXECUTION,
        ),
    ] = None,
    executor: Annotated[
        Literal["torch", "simulated"],
        typer.Option(
            help="simulated: no model is computed, tokens are a hash of the KV cache's content.",
            rich_help_panel=_EXECUTION,
        ),
    ] = "torch",
    simulated_cost: Annotated[
        str | None,
        typer.Option(
            help="Seconds of a simulated step: base,prefill token,decode sequence,KV token.",
            rich_help_panel=_EXECUTION,
        ),
    ] = None,
    step_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds without a step report, while requests run, after which the instance is restarted.",
            rich_help_panel=_EXECUTION,
        ),
    ] = 120.0,
    startup_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that loading the model may take, at the start and in /update_weights.",
            rich_help_panel=_EXECUTION,
        ),
    ] = 600.0,
    max_restarts: Annotated[
        int,
        typer.Option(help="Restarts in a row of an instance that keeps dying.", rich_help_panel=_EXECUTION),
    ] = 5,
    record: Annotated[
        str | None,
        typer.Option(
            help="Record all that the engine reads into this directory, for `baton replay`. "
            "Contains prompts and answers as token ids.",
            rich_help_panel=_EXECUTION,
        ),
    ] = None,
    record_max_bytes: Annotated[
        str,
        typer.Option(
            help="Recording ends when the directory holds so much, such as 1GiB; serving goes on.",
            rich_help_panel=_EXECUTION,
        ),
    ] = "1GiB",
    prefill: Annotated[
        int,
        typer.Option(help="Instances that prefill and hand over to others.", rich_help_panel=_CLUSTER),
    ] = 0,
    decode: Annotated[
        int,
        typer.Option(help="Instances that decode what was prefilled elsewhere.", rich_help_panel=_CLUSTER),
    ] = 0,
    mixed: Annotated[
        int | None,
        typer.Option(
            help="Instances that do both. Default: one, if there are no others; "
            "0 alone: all join from elsewhere.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    disaggregation_threshold: Annotated[
        int | None,
        typer.Option(
            help="A request with fewer uncached prompt tokens is prefilled where it decodes; 0: never. "
            "Default: by measured cost.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    max_preparing: Annotated[
        int,
        typer.Option(
            help="Requests for which a prefilling instance asks others for room at the same time.",
            rich_help_panel=_CLUSTER,
        ),
    ] = 64,
    kv_lease: Annotated[
        float,
        typer.Option(
            help="Seconds that KV pages stay for an instance that fetches them and says nothing.",
            rich_help_panel=_CLUSTER,
        ),
    ] = 10.0,
    transfer: Annotated[
        Literal["auto", "shared_memory", "tcp", "nixl"],
        typer.Option(
            help="How KV pages travel. auto: shared memory on one host, else TCP; NIXL for device memory.",
            rich_help_panel=_CLUSTER,
        ),
    ] = "auto",
    transfer_checksums: Annotated[
        bool,
        typer.Option(
            "--transfer-checksums",
            help="Compare a checksum of each page after copying.",
            rich_help_panel=_CLUSTER,
        ),
    ] = False,
    peer_host: Annotated[
        str | None,
        typer.Option(
            help="Address of this machine at which instances on other hosts reach those here. No "
            "authentication: trusted networks only. Default: this machine only; with --instance, --host.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    transfer_host: Annotated[
        str | None,
        typer.Option(
            help="Address at which KV pages are fetched, if it is another one than --peer-host.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    instance: Annotated[
        bool,
        typer.Option(
            "--instance", help="Run one instance without HTTP; needs --join.", rich_help_panel=_JOIN
        ),
    ] = False,
    join: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The server to join. On this machine it reaches the instance by a socket that only this "
            "user can open, else at --host, without authentication: trusted networks only. The first "
            "--admin-key is sent to it.",
            rich_help_panel=_JOIN,
        ),
    ] = None,
    label: Annotated[
        Literal["mixed", "prefill", "decode"] | None,
        typer.Option(
            help="What the server sends to the instance at first. Default: mixed.", rich_help_panel=_JOIN
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the instance in its cluster. Default: LABEL-HOSTNAME-PID.", rich_help_panel=_JOIN
        ),
    ] = None,
    log_level: flags.LogLevel = "info",
) -> None:
    """Serve MODEL over HTTP, with OpenAI's API.

    Try it without a model, GPU or network: `baton serve`, then

    `curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json'
    -d '{"messages": [{"role": "user", "content": "Hello!"}]}'`

    Prefill here and decode there: `baton serve --prefill 1 --decode 2`; one more instance, from another
    terminal: `baton serve --instance --join 127.0.0.1:8000 --label decode`. Sizes are those of each instance.
    """
    with flags.user_errors():
        from baton.gateway.sharing import SharingOptions
        from baton.launch.cluster_options import ClusterOptions
        from baton.launch.http_limits import HttpLimits
        from baton.launch.joined import JoinOptions, run_joined
        from baton.launch.limits import OptionError
        from baton.launch.options import ServeOptions, parse_bytes, parse_cost
        from baton.launch.server import ServerOptions, make_access, run_server

        options = ServeOptions(
            model=model,
            tokenizer=tokenizer,
            revision=revision,
            served_model_name=tuple(served_model_name or ()),
            dtype=dtype,
            quantization=quantization,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_waiting=max_waiting,
            block_size=block_size,
            num_gpu_blocks_override=num_gpu_blocks_override,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            tensor_parallel_size=tensor_parallel_size,
            admission_headroom=admission_headroom,
            enable_prefix_caching=enable_prefix_caching,
            generation_config=generation_config,
            chat_template_content_format=chat_template_content_format,
            seed=seed,
            executor=executor,
            simulated_cost=parse_cost(simulated_cost),
            device=device,
            num_threads=num_threads,
            step_timeout=step_timeout,
            startup_timeout=startup_timeout,
            record=record,
            record_max_bytes=record_max_bytes,
            log_level=log_level,
        )
        cluster = ClusterOptions(
            prefill=prefill,
            decode=decode,
            mixed=mixed,
            disaggregation_threshold=disaggregation_threshold,
            max_preparing=max_preparing,
            kv_lease=kv_lease,
            transfer=transfer,
            transfer_checksums=transfer_checksums,
            transfer_host=transfer_host,
            peer_host=peer_host,
        )
        if instance or join is not None:
            if port is not None:
                raise OptionError(
                    f"--port {port}: an instance that joins a server has no HTTP of its own; leave it out"
                )
            joining = JoinOptions(
                instance=instance,
                join=join,
                host=host,
                label=label or "mixed",
                name=name,
                admin_key=admin_key[0] if admin_key else None,
                shutdown_timeout_s=shutdown_timeout,
                max_restarts=max_restarts,
            )
            run_joined(options, cluster, joining)
        else:
            for flag, given in (("--label", label), ("--name", name)):
                if given is not None:
                    raise OptionError(
                        f"{flag} {given}: of an instance that joins a server (--instance --join HOST:PORT); "
                        "the instances of this one are given with --prefill, --decode, --mixed"
                    )
            access = make_access(
                api_keys=tuple(api_key or ()),
                admin_keys=tuple(admin_key or ()),
                allowed_hosts=tuple(allowed_host or ()),
                allowed_origins=tuple(allowed_origins or ()),
                min_priority=min_priority,
                profile_dir=profile_dir,
                weights_dir=weights_dir,
            )
            limits = HttpLimits(
                max_head_bytes=h11_max_incomplete_event_size,
                max_headers=h11_max_header_count,
                timeout_head_s=timeout_head,
                timeout_body_s=timeout_body,
                timeout_write_s=timeout_write,
                timeout_keep_alive_s=timeout_keep_alive,
                limit_concurrency=limit_concurrency,
                max_body_memory_bytes=parse_bytes("--max-body-memory", max_body_memory),
            )
            server = ServerOptions(
                host=host,
                port=8000 if port is None else port,
                access=access,
                limits=limits,
                shutdown_grace_s=shutdown_grace,
                sharing=SharingOptions(
                    fair_queuing=fair_queuing, fair_weights=fair_weights, salt_by_key=salt_by_key
                ),
                shutdown_timeout_s=shutdown_timeout,
                max_restarts=max_restarts,
            )
            run_server(options, server, cluster)
