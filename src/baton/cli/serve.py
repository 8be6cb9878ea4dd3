"""`baton serve`: the OpenAI-compatible server."""

from __future__ import annotations

import os

from baton.cli import flags
from baton.launch.limits import OptionError
from baton.launch.options import ServeOptions, flags_of
from baton.launch.options.sources import Chosen


@flags.of(ServeOptions)
def serve(chosen: Chosen[ServeOptions]) -> None:
    """Serve MODEL over HTTP, with OpenAI's API.

    Try it without a model, GPU or network: `baton serve`, then

    `curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json'
    -d '{"messages": [{"role": "user", "content": "Hello!"}]}'`

    Prefill here and decode there: `baton serve --prefill 1 --decode 2`; one more instance, from another
    terminal: `baton serve --instance --join 127.0.0.1:8000 --label decode`. Sizes are those of each instance.

    Every flag may also stand in the environment (`BATON_MAX_NUM_SEQS=64`) or in a YAML or TOML file
    (`--config serve.yaml` with a line `max-num-seqs: 64`).
    """
    from baton.launch import status
    from baton.launch.instances.processes import starting

    options = chosen.options
    for one in flags_of(ServeOptions):
        if one.declared.secret:  # not for the environment of engines, workers and helpers
            os.environ.pop(one.variable, None)
    if options.node:
        starting.begin(options.executor, options.log_format)
        from baton.launch.instances.node import run_node

        run_node(options)
        return
    if options.instance or options.join:
        if chosen.given("port", "command line"):
            raise OptionError(
                f"--port {options.port}: an instance that joins a server has no HTTP of its own; leave it out"
            )
        starting.begin(options.executor, options.log_format)
        from baton.launch.instances.joining.joined import run_joined

        run_joined(options)
        return
    for name in ("label", "name", "probe_port"):
        if chosen.given(name, "command line"):
            flag = name.replace("_", "-")
            raise OptionError(
                f"--{flag} {getattr(options, name)}: of an instance that joins a server (--instance --join "
                "HOST:PORT); the instances of this one are given with --prefill, --decode, --mixed"
            )
    status.begin(options.log_format)
    if not options.runs_none:
        starting.begin(options.executor, options.log_format)
    from baton.launch.server import run_server

    run_server(chosen)
