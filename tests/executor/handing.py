"""One executor computes a prompt, another one of the same checkpoint goes on: pages by the real transport."""

from __future__ import annotations

import queue
from typing import Any

from baton.executor.torch_executor import TorchExecutor
from baton.protocol.codec import pack_int32
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.commands import Fetch
from baton.protocol.messages.handover import InstanceSource
from baton.protocol.messages.reports import Fetched
from baton.protocol.params.sampling import Sampling
from baton.transfer.service import TransferService
from tests.executor.driver import Driver, Request

DEADLINE_S = 60.0


def handed_over(
    executor: TorchExecutor, config: InstanceConfig, prompt: list[int], count: int, sampling: Sampling
) -> Request:
    """What a request of `count` tokens gets whose prompt `executor` computes.  `config` is the other one's,
    with `peer_endpoint` and `transfer` "shared_memory"."""
    decoder = TorchExecutor.from_config(config, 0, "")
    reports: queue.Queue[Any] = queue.Queue()
    ours, theirs = (TransferService(0, one.pool, config, reports.put) for one in (executor, decoder))
    try:
        ours.start()
        theirs.start()
        prefill, decode = Driver(executor), Driver(decoder, seed=5)
        at_p = prefill.add(prompt, 1, sampling)
        prefill.run()
        request = decode.add(prompt, count, sampling, generated=at_p.tokens)
        request.blocks = [int(decode.free.pop()) for _ in at_p.blocks]
        assert ours.source is not None
        source = InstanceSource(executor.info.tile, config.block_size, [ours.source])
        theirs.fetch(Fetch(1, source, pack_int32(at_p.blocks), pack_int32(request.blocks), 0, -1))
        report = reports.get(timeout=DEADLINE_S)
        assert isinstance(report, Fetched)
        assert not report.error, report.error
        request.computed = len(prompt)
        decode.run()
        prefill.remove(at_p)
        request.prompt_logprobs, request.logprobs[:0] = at_p.prompt_logprobs, at_p.logprobs
        request.routes[:0] = at_p.routes
    finally:
        theirs.close()
        ours.close()
        decoder.close()
    return request
