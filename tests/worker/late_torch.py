"""The scripts of `lateness`, with the Torch executor on a device that runs behind the host.

What is right is told by the executor that waits, which computes each request alone.
"""

from functools import lru_cache

import numpy as np
import torch
from hypothesis import strategies as st

from baton.executor.streams import queue as queues
from baton.executor.torch_executor import TorchExecutor
from baton.launch.planning.instance_config import instance_config
from baton.protocol.messages.commands import Abort, Preempt
from baton.protocol.params.pooling import Pooling
from baton.protocol.params.sampling import Sampling, Stopping
from tests.executor.delayed import DelayedQueue, on_a_delayed_device
from tests.executor.driver import Driver
from tests.model.checkpoints import VOCAB, make_checkpoint

from .lateness import BLOCK, LENGTH, POOL, SIZE, Engine, Script

SIZES = dict(max_model_len=LENGTH, block_size=BLOCK, num_blocks=POOL, max_num_seqs=SIZE)
PROMPTS = [
    np.random.default_rng(n).integers(3, VOCAB, length).tolist() for n, length in enumerate((1, 4, 7, 12, 14))
]
PLAIN, DRAWN, PENALIZED, SCORED = (
    Sampling(seed=1, temperature=0.0),
    Sampling(seed=2, temperature=0.9, top_k=40, top_p=0.95),
    Sampling(seed=3, temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.3),
    Sampling(seed=4, temperature=0.0, logprobs=2, prompt_logprobs=0),
)


class Waiting:
    """The executor that waits, with one request at a time."""

    def __init__(self, directory):
        # (Attention and pages are those of the patched executor, computed at once.)
        config = instance_config(
            model=str(directory), dtype="float32", num_threads=1, speculation=None, **SIZES
        )
        self.executor = TorchExecutor.from_config(config, 0, "")
        assert not self.executor.one_step_late
        self.executor._graphs = None
        self.driver = Driver(self.executor)
        self.answer = lru_cache(None)(self._answer)
        self.pages = lru_cache(None)(self._pages)

    def _answer(self, prompt, sampling, min_tokens, stops, count):
        stopping = Stopping(max_tokens=count, min_tokens=min_tokens, stop_token_ids=stops)
        request = self.driver.add(list(prompt), sampling=sampling, stopping=stopping)
        self.driver.run()
        self.driver.remove(request)
        return request.tokens

    def _pages(self, tokens):
        """[layers, 2, kv_heads, tokens, head_dim]"""
        request = self.driver.add(list(tokens), 1, PLAIN)
        self.driver.run()
        found = positions_of(self.executor._pool.tensor, request.blocks, len(tokens)).clone()
        self.driver.remove(request)
        return found


def positions_of(pool, blocks, count):
    """[layers, 2, kv_heads, count, head_dim], as attention reads it."""
    return torch.cat(tuple(pool[blocks]), dim=-2)[..., :count, :]


class TorchEngine(Engine):
    layers_told = 0

    def __init__(self, executor, queue, waiting, budget):
        self.queue, self.waiting = queue, waiting
        super().__init__(executor, budget)

    def oracle(self, prompt, sampling, options, count):
        if count == 0 or sampling.pooling is not None:
            return []
        # (Tokens do not depend on where a request ends; but a stop token is impossible before `min_tokens`.)
        least = options.get("min_tokens", 0)
        stops = tuple(options.get("stop_token_ids", ())) if least else ()
        answer = self.waiting.answer(tuple(prompt), sampling, least, stops, 16)
        assert count <= len(answer)
        return answer[:count]

    def scribble(self, blocks):
        self.executor._pool.tensor[blocks] = self.executor._pool.mirror._here[blocks] = float("nan")

    def check_pages(self, slot, epoch, computed, layers=None):
        prompt, generated, sampling, options = self.requests[slot, epoch]
        tokens = [*prompt, *self.oracle(prompt, sampling, options, generated)]
        expected = self.waiting.pages(tuple(tokens[:computed]))
        whole = computed == len(tokens) and sampling.pooling is None
        # (Of the mirror others may be told full pages, and the last one of a prompt.)
        pools = (
            (self.executor._pool.tensor, computed),
            (self.executor._pool.mirror._here, computed if whole else computed // BLOCK * BLOCK),
        )
        for pool, count in pools:
            found = positions_of(pool, self.blocks[slot], count)[:layers]
            torch.testing.assert_close(found, expected[:layers, :, :, :count], rtol=1e-3, atol=1e-3)

    def check_layers(self, slot, epoch, layers):
        self.layers_told += 1
        prompt, generated, _, _ = self.requests[slot, epoch]
        self.check_pages(slot, epoch, len(prompt) + generated, layers)


class TorchScript(Script):
    least = 25

    def admit(self):
        prompt = self.draw(st.sampled_from(PROMPTS))
        kind = self.draw(st.sampled_from(["", "", "drawn", "penalized", "handover", "pooled", "scored"]))
        generated = self.draw(st.sampled_from([0, 0, 3])) if kind in ("", "penalized") else 0
        sampling = {"drawn": DRAWN, "penalized": PENALIZED, "scored": SCORED}.get(kind, PLAIN)
        options = {"max_tokens": generated + self.draw(st.integers(1, 12))}
        if kind == "pooled":
            options, sampling = {"max_tokens": 1}, Sampling(0, 0.0, pooling=Pooling("mean"))
        elif kind == "handover":
            options["handover"] = True
        elif stop := self.draw(st.sampled_from([0, 0, 2, 5])):
            # (One that comes, most of the time.)
            whole = self.engine.oracle(prompt, sampling, {}, 12)
            options["stop_token_ids"] = (whole[min(generated + stop, 11)],)
            options["min_tokens"] = self.draw(st.sampled_from([0, 0, 2]))
        self.engine.admit(self.slot(), prompt, generated, sampling, self.draw(st.integers(0, 3)), **options)

    def end(self):
        self.engine.end(self.slot(), self.draw(st.sampled_from([Preempt, Abort])))


class Bench:
    """One executor for many scripts: a script leaves nothing in it."""

    layers_told = 0

    def __init__(self, directory, patch, graphs):
        make_checkpoint(directory, "llama3")
        self.queue = DelayedQueue(eager=1.0)  # (while it is made)
        self.executor = on_a_delayed_device(
            patch, directory, self.queue, graphs=graphs, mirrored=True, **SIZES
        )
        patch.setattr(queues, "mirror_queue", lambda config, device: None)
        self.waiting = Waiting(directory)
        assert self.executor.one_step_late

    def run(self, data, budget, eager):
        self.queue.forget()
        self.queue.eager = eager
        self.queue.chance.seed(budget)
        self.executor._flights.clear()
        for other in self.queue.others:
            other.forget()
            other.eager = eager
        for slab in self.executor._staging._slabs:
            slab.read = None
        for slot in range(SIZE):
            self.executor.release(slot)
        if self.executor._graphs is not None:
            self.executor._graphs.forget(self.executor._model)
        engine = TorchEngine(self.executor, self.queue, self.waiting, budget)
        TorchScript(data, engine).run()
        assert not self.executor._flights
        self.layers_told += engine.layers_told
