"""Which bytes of which rank: against a straight reading, byte by byte."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.model.checkpoint.config import ModelConfig
from baton.protocol.rules.ranks import heads_of_rank
from baton.transfer.base import TransferError
from baton.transfer.layout import Part, neighbours, part_here, part_there, plan, rows, runs

from .pools import Geometry, Pool

SIZES = st.sampled_from([1, 2, 4, 8])


@given(SIZES, SIZES, SIZES, st.integers(0, 2), st.integers(1, 3), st.data())
def test_plans_read_every_wanted_byte_once(heads, there, here, first_layer, layers, data):
    layers = min(layers, 3 - first_layer)
    ids = st.lists(st.integers(0, 7), max_size=6, unique=True)
    pages = np.array(data.draw(ids), np.int32)
    blocks = np.array(data.draw(st.permutations(range(8)))[: len(pages)], np.int32)
    whole = np.random.default_rng(0).integers(0, 256, (8, 3, 2, heads, 4), np.uint8)
    memories, sources = [], []
    for rank in range(there):
        first, stop = heads_of_rank(heads, rank, there)
        memories.append(np.ascontiguousarray(whole[:, :, :, first:stop]).reshape(-1))
        geometry = Geometry(num_blocks=8, total_heads=heads, tile_bytes=4, ranks=there)
        pool = Pool(geometry, rank)
        sources.append(pool.view.source(rank))
        pool.close()
    for rank in range(here):
        pool = Pool(Geometry(num_blocks=8, total_heads=heads, tile_bytes=4, ranks=here), rank)
        target = np.zeros(pool.array.nbytes, np.uint8)
        written = np.zeros_like(target)
        streamed = np.zeros_like(target)
        for copy in plan(pool.view, sources, pages, blocks, first_layer, layers, reader=rank):
            ours, theirs = part_here(copy, pool.view), part_there(copy, pool.view)
            memory = memories[copy.source.rank]
            as_runs = ours.is_run and theirs.is_run
            into, from_ = rows(target, ours, as_runs=as_runs), rows(memory, theirs, as_runs=as_runs)
            into[blocks] = from_[pages]
            rows(written, ours, as_runs=as_runs)[blocks] += 1
            # The order of the wire is the same for both sides.
            stream = b"".join(memory[at : at + size].tobytes() for at, size in runs(theirs, pages))
            for at, size in runs(ours, blocks):
                streamed[at : at + size] = np.frombuffer(stream[:size], np.uint8)
                stream = stream[size:]
            assert not stream
        first, stop = heads_of_rank(heads, rank, here)
        expected = np.zeros((8, 3, 2, stop - first, 4), np.uint8)
        upto = first_layer + layers
        expected[blocks, first_layer:upto] = whole[pages, first_layer:upto, :, first:stop]
        assert np.array_equal(target, expected.reshape(-1))
        assert np.array_equal(streamed, target)
        assert written.max(initial=0) <= 1
        pool.close()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_neighbours_are_the_same_pairs(pairs):
    pages = np.array([page for page, _ in pairs], np.int32)
    blocks = np.array([block for _, block in pairs], np.int32)
    found = neighbours(pages, blocks)
    spread = [(page + i, block + i) for page, block, count in found for i in range(count)]
    assert spread == pairs
    for (page, block, count), (next_page, next_block, _) in itertools.pairwise(found):
        assert (page + count, block + count) != (next_page, next_block)


def test_readers_of_replicated_heads_use_different_ranks():
    sources = []
    for rank in range(4):
        pool = Pool(Geometry(total_heads=2, ranks=4), rank)
        sources.append(pool.view.source(rank))
        pool.close()
    used = []
    for rank in range(4):
        pool = Pool(Geometry(total_heads=2, ranks=4), rank)
        none = np.empty(0, np.int32)
        used += [copy.source.rank for copy in plan(pool.view, sources, none, none, 0, -1, reader=rank)]
        pool.close()
    assert sorted(used) == [0, 1, 2, 3]


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_hold_the_heads_that_the_model_gives_them(heads, size):
    sizes = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": heads, "max_position_embeddings": 8}
    config = ModelConfig.from_dict({"architectures": ["LlamaForCausalLM"], **sizes})
    for rank in range(size):
        assert heads_of_rank(heads, rank, size) == config.kv_heads_of_rank(rank, size)


@pytest.mark.parametrize(
    ("pages", "blocks", "layers", "problem"),
    [
        ([64], [1], (0, -1), "page of rank 0 64"),
        ([-1], [1], (0, -1), "page of rank 0 -1"),
        ([1], [64], (0, -1), "block 64"),
        ([1, 2], [1], (0, -1), "2 pages"),
        ([1], [1], (0, 4), "layers 0 to 4"),
        ([1], [1], (3, -1), "layers 3 to 3"),
        ([1], [1], (-1, 1), "layers -1"),
    ],
)
def test_what_does_not_fit_is_refused(pages, blocks, layers, problem):
    pool = Pool(Geometry())
    with pytest.raises(TransferError, match=problem):
        plan(pool.view, [pool.view.source(0)], np.array(pages), np.array(blocks), *layers)
    with pytest.raises(TransferError, match="no rank of the source has head 0"):
        plan(pool.view, [], np.array([1]), np.array([1]), 0, -1)
    pool.close()


def test_neighbouring_whole_pages_are_one_run():
    ids = np.array([4, 5, 6, 9], np.int32)
    assert list(runs(Part(2, 3, 10, 0, 2, 0, 3), ids)) == [(480, 360), (1080, 120)]
    assert list(runs(Part(2, 3, 10, 1, 1, 0, 3), ids[:2])) == [(540, 60), (660, 60)]
    assert list(runs(Part(2, 3, 10, 1, 1, 1, 2), ids[:1])) == [(550, 20), (580, 20)]
