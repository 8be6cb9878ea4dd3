"""`baton serve --instance --node 1 --leader HOST:PORT`: one more host of an instance.

Theory.  The process asks the leader what is to be computed, starts a relay (`processes/relay.py`) with
the ranks of this host, forked from a fork server as engines are, and when it has ended asks again: whatever
ends one incarnation, this host takes part in the next.  While the leader is away it tries to connect, once a
second at most.  It has no HTTP but `--probe-port`, no model in its own memory, and decides nothing; weight
images live in it, so ranks that start again map what others have packed.

| what happens | what the process does |
| --- | --- |
| SIGTERM | waits up to `--shutdown-timeout` for the leader, which drains if it was told too; then as SIGINT |
| SIGINT, or a second signal | ends the relay, which tells the leader, exits with 0 |
| the leader refuses this host for good, or it has another model | says so, exits with 1 |
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import uvloop
import zmq

from baton.engine.shell.sockets import set_tcp_options
from baton.ipc.processes.children import Process
from baton.ipc.sockets.curve import Encryption, leader_keys
from baton.ipc.sockets.zeromq import has_messages, terminate
from baton.launch.announce import say
from baton.launch.instances.image_server import image_server
from baton.launch.instances.probes import Probes
from baton.launch.instances.processes.environment import engine_environment
from baton.launch.instances.processes.relay import RelayLaunch
from baton.launch.instances.processes.starting import Starter, exit_of
from baton.launch.instances.supervisor import InstanceFailed
from baton.launch.limits import OptionError
from baton.launch.options import ServeOptions
from baton.launch.planning.cluster_options import bracketed, check_reachable, is_loopback
from baton.launch.planning.cluster_secret import check_open, read_secrets, warn_if_open
from baton.launch.planning.node_options import leader_address, own_address
from baton.model.checkpoint.fingerprint import fingerprint
from baton.model.checkpoint.hub import resolve_model
from baton.observe.logs import configure_logging
from baton.protocol.codec import MalformedMessage
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.nodes import FROM_LEADER, FROM_NODE, Hello, Refused, Welcome
from baton.protocol.rules.cluster_secret import SECRETS_VARIABLE
from baton.version import __version__

log = logging.getLogger(__name__)

_MODULE = "baton.launch.instances.processes.relay"
_RECONNECT_MS, _RECONNECT_MAX_MS, _CONNECT_MS = 100, 1000, 2000
_ASK_AGAIN_S = 3.0
"""A question without an answer is asked on another connection, with the next secret."""
_LATER_S = 0.5
_STOP_S = 5.0
_SHORT_S = 5.0
"""A relay that ends sooner is started again more slowly each time."""
_MAX_PAUSE_S = 5.0


def run_node(options: ServeOptions) -> None:
    """Runs until a signal.  Raises `ValueError` for wrong options, `InstanceFailed` when it cannot go on."""
    if not options.instance or options.leader is None:
        raise OptionError(f"--node {options.node}: give --instance and --leader HOST:PORT as well")
    check_open(options)
    configure_logging(options.log_level, f"node-{options.node}", options.log_format)
    warn_if_open(options)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_NodeRunner(options).run())


class _NodeRunner:
    """The process, on its event loop."""

    def __init__(self, options: ServeOptions) -> None:
        """Raises `OptionError`."""
        self._options = options
        self._secrets = read_secrets(options.cluster_secret)
        host, port = leader_address(options)
        self._endpoint = f"tcp://{bracketed(host)}:{port}"
        self._host = options.node_host or own_address(host, port)
        check_reachable("--node-host", self._host)
        self._encrypts = bool(self._secrets) and options.transfer_encryption == "on"
        self._keys = leader_keys(self._secrets) if self._encrypts else [b""]
        self._launcher = secrets.token_hex(8)
        self._starter = Starter(options.executor, options.log_format)
        self._process: Process | None = None
        self._idle, self._told, self._leaving = asyncio.Event(), asyncio.Event(), asyncio.Event()
        """No relay runs; a signal has come; it is time to go."""
        self._idle.set()
        self._images = ""
        self._probes: Probes | None = None
        if options.probe_port is not None:
            self._probes = Probes(
                options.host, options.probe_port, unhealthy=lambda: "", unready=self._unready
            )

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._probes is not None:
            await self._probes.start()
        say(f"Baton {__version__}: node {self._options.node} of an instance led by {self._endpoint[6:]}")
        with ExitStack() as stack:
            if self._options.executor == "torch":
                self._images = stack.enter_context(image_server())
            serving = asyncio.create_task(self._serve(), name="node")
            leaving = asyncio.create_task(self._until_time_to_go(), name="leaving")
            try:
                await asyncio.wait((serving, leaving), return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    await serving  # raises why
            finally:
                serving.cancel()
                leaving.cancel()
                await asyncio.gather(serving, leaving, return_exceptions=True)
                await self._stop()
                self._starter.close()
                if self._probes is not None:
                    self._probes.close()

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGINT or self._told.is_set():
            self._leaving.set()
        self._told.set()

    async def _until_time_to_go(self) -> None:
        """Where both are told to end at once the leader drains, for which it needs this host."""
        await self._told.wait()
        waits = [asyncio.create_task(event.wait()) for event in (self._idle, self._leaving)]
        try:
            await asyncio.wait(
                waits, timeout=self._options.shutdown_timeout, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for one in waits:
                one.cancel()

    def _unready(self) -> str:
        if self._told.is_set():
            return "leaving"
        return "waits for the leader" if self._idle.is_set() else ""

    async def _serve(self) -> None:
        short = 0
        while True:
            welcome, key = await self._ask()
            config = self._local(welcome.config)
            launch = RelayLaunch(
                config, welcome.incarnation, self._options.node, self._launcher, key.hex(), os.getpid()
            )
            environment = {**engine_environment(), SECRETS_VARIABLE: self._secrets.dump()}
            began = time.monotonic()
            argument = msgspec.json.encode(launch).decode()
            self._process = await self._starter.start(_MODULE, argument, environment)
            self._idle.clear()
            log.info("takes part in incarnation %s of %s", welcome.incarnation, config.name)
            code = await exit_of(self._process)
            self._idle.set()
            short = short + 1 if time.monotonic() - began < _SHORT_S else 0
            pause = min(_MAX_PAUSE_S, 0.5 * (short - 1)) if short > 1 else 0.0
            if code:
                log.warning("the relay has ended (%d); asks the leader again in %.1f s", code, pause)
            await asyncio.sleep(pause)

    def _local(self, config: InstanceConfig) -> InstanceConfig:
        """The leader's configuration with what is this host's own.  Raises `InstanceFailed`."""
        options, nodes = self._options, config.nodes
        if config.executor != options.executor:
            raise InstanceFailed(f"--executor {options.executor}: the leader has {config.executor}")
        model = config.model
        if not config.weights.generation:  # (later ones are at the same place on each host)
            model = str(
                resolve_model(options.model or nodes.model, revision=options.revision or nodes.revision)
            )
            found = fingerprint(Path(model))
            if found != nodes.checkpoint:
                raise InstanceFailed(
                    f"the model in {model} is another one than the leader's: copy it from there"
                )
        remote = not is_loopback(self._host)
        host = options.transfer_host or options.peer_host or self._host
        return msgspec.structs.replace(
            config,
            model=model,
            nodes=msgspec.structs.replace(nodes, host=self._host, listen=self._endpoint),
            num_threads=options.num_threads or config.num_threads,
            transfer_host=host if remote else config.transfer_host,
            weight_images=self._images if config.weight_images else "",
            weight_cache=None if options.weight_cache is None else str(Path(options.weight_cache).absolute()),
            weight_cache_verify=options.weight_cache_verify,
            tokenizer_files="",
            vocabulary="",
            record=None,
            log_level=options.log_level,
            log_format=options.log_format,
        )

    # -- asking

    async def _ask(self) -> tuple[Welcome, bytes]:
        """Waits for a leader that lets this host take part.  Raises `InstanceFailed` if it never will."""
        told, attempt = False, 0
        while True:
            key = self._keys[attempt % len(self._keys)]
            attempt += 1
            answer = await self._ask_once(key)
            if isinstance(answer, Welcome):
                return answer, key
            if answer is not None and not answer.later:
                raise InstanceFailed(f"the leader refuses this host: {answer.reason}")
            if not told:
                told = True
                log.info(
                    "waits for the leader at %s%s", self._endpoint[6:], f": {answer.reason}" if answer else ""
                )
            if answer is not None:
                await asyncio.sleep(_LATER_S)

    async def _ask_once(self, key: bytes) -> Welcome | Refused | None:
        """None: there was no answer."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        set_tcp_options(dealer, self._endpoint)
        if self._encrypts:
            Encryption(self._secrets).connect(dealer, key)
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        descriptor = dealer.fileno()
        try:
            dealer.connect(self._endpoint)
            dealer.send(FROM_NODE.encode(Hello(self._options.node, self._launcher)))
            loop.add_reader(descriptor, ready.set)
            with suppress(TimeoutError):
                async with asyncio.timeout(_ASK_AGAIN_S):
                    while not has_messages(dealer):
                        ready.clear()
                        await ready.wait()
                    answer = FROM_LEADER.decode(dealer.recv(zmq.NOBLOCK))
                    if isinstance(answer, Welcome | Refused):
                        return answer
        except MalformedMessage as error:
            raise InstanceFailed(f"{self._endpoint[6:]} is no leader of this version: {error}") from None
        finally:
            loop.remove_reader(descriptor)
            dealer.close(0)
            await loop.run_in_executor(None, terminate, context, 1.0)
        return None

    async def _stop(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await exit_of(process)
        except TimeoutError:
            print("the relay did not leave; killing it", file=sys.stderr)
            process.kill()
            await exit_of(process)
