"""The worker's part of a hand-over, with real worker groups: close, fetch, go on elsewhere."""

import time
from array import array

import msgspec
import pytest

from baton.protocol.codec import pack_int32
from baton.protocol.config import CostModel
from baton.protocol.messages.commands import DropFetch, Fetch, Grant, Grow
from baton.protocol.messages.handover import InstanceSource
from baton.protocol.messages.reports import Fetched, LayersDone, StepReport, WorkerReady

from .group import Group, make_config, oracle
from .model import admit

PROMPT = list(range(3, 93))
BLOCKS = list(range(100, 112))
TOKEN = b"of this request."


def handover_config(ranks=1, **changes):
    values = {
        "tensor_parallel_size": ranks,
        "simulated_layers": 4,
        "simulated_kv_heads": 4,
        "peer_endpoint": "ipc://unused",
    }
    return make_config(**(values | changes))


def source_of(group):
    ready = [group.of_kind(WorkerReady, rank)[0] for rank in range(len(group.workers))]
    return InstanceSource(ready[0].tile, ready[0].block_size, [one.source for one in ready])


def fetch(id_, group, pages, blocks, first_layer=0, num_layers=-1):
    packed = pack_int32(pages), pack_int32(blocks)
    return Fetch(id_, source_of(group), *packed, first_layer, num_layers, grant=TOKEN)


def fetched(group, id_):
    """The `Fetched` of every rank, once all are there."""

    def found():
        ranks = range(len(group.workers))
        return [one for rank in ranks for one in group.of_kind(Fetched, rank) if one.id == id_]

    group.wait(lambda: len(found()) == len(group.workers), f"end of fetch {id_}")
    return found()


def handed(command):
    return msgspec.structs.replace(command, handover=True)


def go_on(group, tokens, blocks, count):
    """Admits what was fetched, as an engine does; returns all tokens."""
    computed = len(tokens) - 1
    command = admit(2, 0, tokens, blocks, num_prompt=len(PROMPT), num_computed=computed, max_tokens=count)
    group.send(command)
    group.wait_closed((2, 0))
    return tokens[len(PROMPT) :] + group.tokens()[2, 0]


@pytest.mark.parametrize("transfer", ["shared_memory", "tcp"])
@pytest.mark.parametrize(("here", "there"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2)])
def test_a_request_goes_on_from_fetched_pages(here, there, transfer):
    p, d = handover_config(here, transfer=transfer), handover_config(there, transfer=transfer)
    with Group(p) as prefill, Group(d) as decode:
        prefill.ready()
        decode.ready()
        prefill.send(handed(admit(0, 0, PROMPT, BLOCKS, max_tokens=30)))
        prefill.wait_closed((0, 0))
        prefill.settle()
        assert prefill.closings()[0, 0] == "handed_over"
        first = prefill.tokens()[0, 0]
        assert first == oracle(PROMPT, 1)
        prefill.transfer(Grant(TOKEN, "d", [b""], pack_int32(BLOCKS), 60.0))
        blocks = list(range(40, 56))
        decode.send(
            fetch(1, prefill, BLOCKS[:5], blocks[:5]), fetch(2, prefill, BLOCKS[5:], blocks[5:12], 0, 3)
        )
        decode.send(fetch(3, prefill, BLOCKS[5:], blocks[5:12], 3))  # (the command log will do too)
        for id_ in (1, 2, 3):
            for one in fetched(decode, id_):
                assert (one.error, one.dropped) == ("", False)
        block_bytes = decode.of_kind(WorkerReady)[0].block_bytes
        assert fetched(decode, 1)[0].num_bytes == 5 * block_bytes
        assert block_bytes == 4 * 8 * (4 // there)
        assert go_on(decode, PROMPT + first, blocks, 30) == oracle(PROMPT, 30)
        assert decode.shutdown() == [0] * there
        assert prefill.shutdown() == [0] * here


def test_a_page_or_a_layer_that_was_not_fetched_changes_the_answer():
    with Group(handover_config()) as prefill, Group(handover_config()) as decode:
        prefill.ready()
        decode.ready()
        prefill.send(handed(admit(0, 0, PROMPT, BLOCKS, max_tokens=30)))
        prefill.wait_closed((0, 0))
        first = prefill.tokens()[0, 0]
        decode.send(fetch(1, prefill, BLOCKS, list(range(12)), 0, 3))
        fetched(decode, 1)
        assert go_on(decode, PROMPT + first, list(range(12)), 5) != oracle(PROMPT, 5)


def test_layers_are_reported_while_the_last_chunk_runs():
    config = handover_config(
        simulated_layers=16, block_size=32, simulated_cost=CostModel(per_prefill_token=2e-3)
    )
    with Group(config) as group:
        group.ready()
        # Two chunks: of the first one nothing is said layer by layer, nor of a request that stays here.
        group.send(handed(admit(0, 0, PROMPT, range(3), max_tokens=30)))
        group.wait_closed((0, 0))
        layers = group.of_kind(LayersDone)
        assert [one.layers for one in layers] == [2, 4, 6, 8, 10, 12, 14]
        assert {(one.slots, one.epochs) for one in layers} == {(array("i", [0]).tobytes(),) * 2}
        stream = group.reports[0]
        steps = [stream.index(report) for report in group.of_kind(StepReport)]
        assert steps[0] < stream.index(layers[0]) < stream.index(layers[-1]) < steps[1]
        group.send(admit(1, 0, PROMPT, range(8), max_tokens=3))
        group.wait_closed((1, 0))
        assert len(group.of_kind(LayersDone)) == 7


def test_a_fetch_is_done_and_reported_in_the_middle_of_a_step():
    slow = handover_config(simulated_cost=CostModel(base=600.0))
    with Group(handover_config()) as prefill, Group(slow) as decode:
        prefill.ready()
        decode.ready()
        decode.send(admit(0, 0, PROMPT[:9], [7, 8], max_tokens=1))
        time.sleep(0.05)  # (the step begins, as a rule)
        decode.transfer(fetch(1, prefill, [1], [1]))
        fetched(decode, 1)
        assert not decode.of_kind(StepReport)


def test_drops_and_refusals_are_answered_once():
    with Group(handover_config(2, transfer="tcp")) as group:
        group.ready()
        group.transfer(Grant(TOKEN, "d", [b""], pack_int32(range(5001)), 60.0))
        gone = [msgspec.structs.replace(one, tcp="127.0.0.1:1") for one in source_of(group).ranks]
        there = InstanceSource("token-ids", 8, gone)
        group.send(Fetch(1, there, pack_int32([1]), pack_int32([2]), 0, -1), DropFetch([77]))
        assert all("refused" in one.error for one in fetched(group, 1))
        group.send(fetch(2, group, [5000], [1]), fetch(3, group, [1], [5000]), fetch(4, group, [1], [1, 2]))
        for id_, what in ((2, "page of rank"), (3, "block 5000"), (4, "1 pages")):
            assert all(what in one.error and not one.dropped for one in fetched(group, id_))
        ids = list(range(5, 40))
        group.transfer(*(fetch(id_, group, range(200), range(200, 400)) for id_ in ids), DropFetch(ids))
        for id_ in ids:
            assert all(
                one.error == "dropped" if one.dropped else not one.error for one in fetched(group, id_)
            )
        time.sleep(0.1)
        group.poll()
        for rank in (0, 1):
            assert len(group.of_kind(Fetched, rank)) == 4 + len(ids)
        assert group.shutdown() == [0, 0]


@pytest.mark.parametrize("command", [Grow(0, 0, b""), None])
def test_what_does_not_belong_into_the_transfer_ring_ends_the_worker(command):
    with Group(handover_config()) as group:
        group.ready()
        if command is None:
            group.transfers += 1  # a gap
        group.transfer(command or DropFetch([1]))
        assert group.workers[0].wait(60) == 1
        group.poll()
        assert "transfer" in group.failures()[0]


def test_a_worker_without_hand_overs_says_so():
    with Group(make_config()) as group:
        group.ready()
        assert group.of_kind(WorkerReady)[0].source is None
        there = InstanceSource("token-ids", 8, [])
        group.send(Fetch(1, there, pack_int32([1]), pack_int32([2]), 0, -1), DropFetch([1]))
        assert "peer_endpoint" in fetched(group, 1)[0].error
        assert group.shutdown() == [0]
