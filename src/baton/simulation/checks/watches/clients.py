"""What is checked where a gateway sends and a client is answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.executor.simulated.results import simulated_routes
from baton.gateway.cluster.table import MAX_FRUITLESS, MAX_LOSSES
from baton.gateway.errors import ApiError
from baton.protocol.codec import unpack_int32
from baton.protocol.messages.requests import Finished, FromEngine, Load, Submit, ToEngine
from baton.simulation import describe
from baton.simulation.checks.books import Violation

if TYPE_CHECKING:
    from baton.simulation.parties.client import Client
    from baton.simulation.parties.gateway import GatewayProcess
    from baton.simulation.parties.instance import EngineProcess, Instance
    from baton.simulation.world import World


class ClientWatch:
    """The rules `answer`, `tokens`, `stream` and those of gateways."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._used: dict[str, set[int]] = {}
        """By gateway: ids that were submitted."""
        self._streams: dict[tuple[str, int], str] = {}
        """(gateway, id) → the incarnation that sent its first token."""

    def gateway_sends(self, gateway: GatewayProcess, to: str, message: ToEngine) -> None:
        if isinstance(message, Submit):
            used = self._used.setdefault(gateway.cluster.name, set())
            if message.id in used:
                raise Violation(
                    "answer", f"{gateway.name} submits {message.name} under the used id {message.id}"
                )
            used.add(message.id)
            self._check_generated(gateway, message)
        if self._world.recording:
            text = f"tells {to}: {describe.to_engine(message)}"
            self._world.note(gateway, text, describe.number_of(message))

    def _check_generated(self, gateway: GatewayProcess, submit: Submit) -> None:
        """A request goes on from exactly those tokens that came, whether its client has looked or not."""
        number = describe.number_in(submit.name)
        if number is None or not submit.generated:
            return
        self._world.continued += 1
        generated = list(unpack_int32(submit.generated))
        client = self._world.client(number)
        client.align(generated)
        if generated != client.expected[: len(generated)] or len(generated) < len(client.tokens):
            raise Violation(
                "tokens", f"request {number} goes on from {generated}, its client has {client.tokens}"
            )

    def gateway_reads(self, gateway: GatewayProcess, instance: Instance, message: FromEngine) -> None:
        if self._world.recording and not isinstance(message, Load):
            self._world.note(gateway, f"reads {describe.from_engine(message)} from {instance.name}")

    def streamed(self, gateway: GatewayProcess, engine: EngineProcess, number: int) -> None:
        """An engine sends a token under an id of a gateway."""
        if len(self._world.plan.instances) == 1:
            return
        name = engine.instance.name
        first = self._streams.setdefault((gateway.cluster.name, number), name)
        if first != name:
            raise Violation(
                "stream", f"{name} sends a token of id {number} of {gateway.cluster.name}, as {first} did"
            )

    def after_gateway(self, gateway: GatewayProcess) -> None:
        """After each call of the gateway's cluster."""
        cluster = gateway.cluster
        if len(cluster) > len(gateway.clients):
            raise Violation(
                "answer", f"{gateway.name} has {len(cluster)} requests for {len(gateway.clients)} clients"
            )
        if cluster.parked and cluster.next_deadline() is None:
            raise Violation("timer", f"{len(cluster.parked)} requests are parked without a limit")

    def query_answered(self, gateway: GatewayProcess, answer: dict[str, Any] | ApiError) -> None:
        self._world.note(gateway, f"gets {answer}")

    def got(self, client: Client) -> None:
        """After each chunk."""
        got = client.tokens
        client.align(got)
        if got != client.expected[: len(got)]:
            wrong = next(
                (i for i, (a, b) in enumerate(zip(got, client.expected, strict=False)) if a != b),
                len(client.expected),
            )
            raise Violation(
                "tokens",
                f"request {client.spec.number}: token {wrong} is {got[wrong]}, the oracle's answer is "
                f"{client.expected[max(0, wrong - 2) : wrong + 3]} from token {max(0, wrong - 2)}",
            )

        self._check_routes(client)

    def _check_routes(self, client: Client) -> None:
        """They come with the tokens that follow, or before."""
        request, first = client.request, client.spec.sampling.routes_from
        if first is None or request is None or not client.tokens:
            return
        tokens = [*client.spec.prompt, *client.tokens]
        got = b"".join(run.ids for run in request.routes or ())
        wanted = simulated_routes(first, tokens[first:-1])
        if got[: len(wanted.ids)] != wanted.ids:
            runs = [(run.first, run.stop) for run in request.routes or ()]
            raise Violation(
                "tokens",
                f"request {client.spec.number}: experts of {len(tokens)} tokens from {first} on miss or are "
                f"wrong; there are those of {runs}",
            )

    def finished(self, client: Client, finished: Finished) -> None:
        spec, name = client.spec, f"request {client.spec.number}"
        pooling = spec.sampling.pooling
        if finished.reason == "pooled":
            if not client.may_be_answered(finished.pooled):
                raise Violation("tokens", f"{name} got a wrong vector, or one that it did not ask for")
        elif finished.reason in ("stop", "length"):
            if pooling is not None:
                raise Violation("tokens", f"{name} wants a vector and ended with {finished.reason}")
            if client.tokens != client.expected or finished.reason != client.expected_end:
                raise Violation(
                    "tokens",
                    f"{name} ended with {finished.reason} after {len(client.tokens)} tokens, the oracle's "
                    f"answer has {len(client.expected)} and ends with {client.expected_end}",
                )
            if spec.sampling.logprobs is not None and client.num_logprobs != len(client.tokens):
                raise Violation("tokens", f"{name}: {client.num_logprobs} log-probabilities")
            if spec.sampling.prompt_logprobs is not None and client.prompt_positions != list(
                range(1, len(spec.prompt))
            ):
                raise Violation("tokens", f"{name}: prompt log-probabilities of {client.prompt_positions}")
        elif finished.code == "queue_full":
            if self._world.plan.config.max_waiting > len(self._world.plan.requests):
                raise Violation("queue", f"{name} was rejected though the queue cannot be full")
        elif finished.code == "never_fits":
            self._check_never_fits(client, finished)
        elif finished.code == "internal":
            if not spec.poisoned:
                raise Violation("answer", f"{name} got an internal error: {finished.message}")
        elif finished.code != "shutting_down":
            raise Violation(
                "answer", f"{name} ended with {finished.reason} {finished.code}: {finished.message}"
            )

    def _check_never_fits(self, client: Client, finished: Finished) -> None:
        spec = client.spec
        total = len(spec.prompt) + spec.stopping.max_tokens
        for config in self._world.plan.instances:
            blocks = -(-(total - 1) // config.block_size)
            if total > config.max_model_len or blocks > (config.num_blocks or 0):
                return
        raise Violation("answer", f"request {spec.number} fits and was refused: {finished.message}")

    def failed(self, client: Client, error: ApiError) -> None:
        name = f"request {client.spec.number}"
        if error.code != "instance_lost" or not self._world.losses:
            raise Violation(
                "answer", f"{name} failed with {error.code}, though nothing was lost: {error.message}"
            )
        request = client.request
        tried = request is not None and (request.fruitless >= MAX_FRUITLESS or request.losses >= MAX_LOSSES)
        if not tried and "was not back" not in error.message:
            raise Violation("answer", f"{name} failed without all the attempts that it could have had")

    def ended(self, client: Client, answer: str) -> None:
        if client.answer is not None:
            raise Violation("answer", f"request {client.spec.number} got {answer!r} after {client.answer!r}")
        if answer == "unavailable":
            raise Violation("liveness", f"request {client.spec.number} never found an instance to be sent to")
