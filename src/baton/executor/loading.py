"""Makes the executor that a configuration names; imports PyTorch only if that one needs it."""

from __future__ import annotations

import importlib

from baton.executor.base import Executor
from baton.protocol.config import InstanceConfig


def import_executor(config: InstanceConfig) -> None:
    """Imports what `create_executor` needs: with PyTorch more than a second."""
    name = "simulated.executor" if config.executor == "simulated" else "torch_executor"
    importlib.import_module(f"baton.executor.{name}")


def create_executor(config: InstanceConfig, rank: int, rendezvous: str) -> Executor:
    """Loads the executor that the configuration names.

    `rendezvous` is a path in a directory private to the instance, where tensor-parallel ranks meet
    (a `torch.distributed` file store), or `fd:N` with ranks on several hosts; unused with one rank.
    """
    if config.executor == "simulated":
        if config.overlap_steps:
            from baton.executor.simulated.late import LateSimulatedExecutor

            return LateSimulatedExecutor.from_config(config, rank, shared=True)
        from baton.executor.simulated.executor import SimulatedExecutor

        return SimulatedExecutor.from_config(config, rank, shared=True)
    if config.overlap_steps:
        from baton.executor.torch_late import LateTorchExecutor

        return LateTorchExecutor.from_config(config, rank, rendezvous)
    from baton.executor.torch_executor import TorchExecutor

    return TorchExecutor.from_config(config, rank, rendezvous)
