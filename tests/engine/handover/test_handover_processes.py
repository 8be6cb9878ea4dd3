"""Hand-overs with everything real but the model: two engine loops, their sockets, worker processes."""

import time
from typing import Any

import msgspec
import pytest

from baton.executor.simulated.executor import simulated_tokens
from baton.launch.planning.instance_config import instance_config
from baton.protocol.codec import pack_int32, unpack_int32, unpack_int64
from baton.protocol.config import CostModel
from baton.protocol.messages.requests import Outputs, Query, QueryReply, Submit, Target, Welcome
from baton.protocol.params.sampling import Sampling, Stopping
from tests.engine.instance import Gateway, Instance
from tests.engine.introductions import introduce

DEADLINE_S = 60.0
CONFIG = instance_config(
    model="",
    executor="simulated",
    vocab_size=1000,
    max_model_len=512,
    block_size=8,
    num_blocks=64,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    simulated_cost=CostModel(base=0.002),
    lease_s=600.0,  # so that nothing here is free because a lease is over
)


class Side:
    """An instance, and a gateway of the same name at each."""

    def __init__(self, name: str, peer_endpoint: str) -> None:
        config = msgspec.structs.replace(CONFIG, peer_endpoint=peer_endpoint)
        self.instance = Instance(config, incarnation=name)
        self.gateway = Gateway(self.instance.loop.endpoint)
        welcome = self.gateway.receive()
        assert isinstance(welcome, Welcome)
        self.welcome = welcome
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}

    def target(self, prefiller: "Side", number: int) -> Target:
        """As the gateway names this instance to the one that prefills the request."""
        me, key = self.welcome, self.welcome.key
        return introduce(me.incarnation, me.peer_endpoint, prefiller.welcome.incarnation, number, "gate", key)

    def submit(self, number: int, prompt: list[int], count: int, *decoders: "Side") -> None:
        targets = tuple(side.target(self, number) for side in decoders)
        sampling, stopping = Sampling(seed=0, temperature=0.0), Stopping(count)
        submit = Submit(number, f"r{number}", pack_int32(prompt), sampling, stopping, decoders=targets)
        self.gateway.send(submit)

    def read(self, timeout_s: float) -> bool:
        """Takes what comes next; false if nothing does."""
        if not self.gateway.socket.poll(int(timeout_s * 1000)):
            return False
        try:
            message = self.gateway.receive(0)
        except TimeoutError:  # it was a Load
            return True
        assert isinstance(message, Outputs), message
        for number, token in zip(unpack_int64(message.ids), unpack_int32(message.tokens), strict=True):
            assert number not in self.ends
            self.tokens.setdefault(number, []).append(token)
        self.ends |= {end.id: end.reason for end in message.finished}
        return True

    def read_until_ended(self, *numbers: int) -> None:
        end = time.monotonic() + DEADLINE_S
        while not set(numbers) <= set(self.ends):
            assert time.monotonic() < end, (self.tokens, self.ends)
            self.read(0.1)

    def stats(self) -> dict[str, Any]:
        self.gateway.send(Query(1, "stats"))
        while not isinstance(reply := self.gateway.receive(), QueryReply):
            pass
        return reply.body

    def blocks(self) -> dict[str, int]:
        return self.stats()["blocks"]

    def is_clean(self) -> bool:
        blocks = self.blocks()
        return blocks["held"] == blocks["reserved"] == blocks["exported"] == 0

    def until_clean(self) -> None:
        end = time.monotonic() + DEADLINE_S
        while not self.is_clean():
            assert time.monotonic() < end, self.blocks()
            time.sleep(0.01)

    def close(self) -> None:
        self.gateway.close()
        self.instance.close()


@pytest.fixture(params=["ipc", "tcp"])
def sides(request, tmp_path):
    endpoint = f"ipc://{tmp_path}/%s.peer" if request.param == "ipc" else "tcp://127.0.0.1:0"
    made = [Side(name, endpoint.replace("%s", name)) for name in "pd"]
    yield made
    for side in made:
        side.close()


def test_requests_are_handed_over_and_decode_there(sides):
    p, d = sides
    prompts = {number: [number * 7 + place for place in range(5 + 9 * number)] for number in range(1, 16)}
    for number, prompt in prompts.items():
        p.submit(number, prompt, 30, d)
    d.read_until_ended(*prompts)
    assert d.tokens == {
        number: simulated_tokens(prompt, 30, CONFIG.vocab_size) for number, prompt in prompts.items()
    }
    assert set(d.ends.values()) == {"length"}
    assert not p.tokens
    assert not p.ends
    p.until_clean()
    d.until_clean()


@pytest.mark.parametrize("endpoint", ["ipc://{}/nobody", "tcp://127.0.0.1:1", "carrier-pigeon"])
def test_a_decoder_that_is_not_there_costs_nothing_but_the_attempt(sides, tmp_path, endpoint):
    p, d = sides
    gone = Target("gone", endpoint.format(tmp_path))
    sampling, stopping = Sampling(seed=0, temperature=0.0), Stopping(20)
    p.gateway.send(Submit(1, "r", pack_int32([1, 2, 3]), sampling, stopping, decoders=(gone, d.target(p, 1))))
    d.read_until_ended(1)
    assert d.tokens[1] == simulated_tokens([1, 2, 3], 20, CONFIG.vocab_size)
    p.gateway.send(Submit(2, "r", pack_int32([1, 2, 3]), sampling, stopping, decoders=(gone,)))
    p.read_until_ended(2)
    assert p.tokens[2] == d.tokens[1], "without any decoder it stays where it is"
    refused = p.stats()["handovers"]["refused"]
    assert "no_answer" not in refused, "that nobody is there is known before reserve_timeout_s"


@pytest.mark.parametrize("sides", ["ipc"], indirect=True)
def test_when_d_dies_p_has_its_blocks_back_before_its_leases_are_over(sides):
    p, d = sides
    for number in range(1, 9):
        p.submit(number, [number] * 200, 200, d)
    while not d.tokens:
        assert d.read(5.0)
    d.close()
    end = time.monotonic() + DEADLINE_S
    while (stats := p.blocks())["held"]:  # those that were not handed over decode there
        assert time.monotonic() < end, stats
        time.sleep(0.01)
    p.until_clean()
