"""Whether Baton's kernels in Triton (`model.cuda`) serve a device.  For a CPU nothing of Triton is imported.

They need a CUDA device of compute capability 8.0 or more, and Triton, 3.6 to 3.9, which PyTorch's builds for
CUDA bring.  What starts kernels Triton compiles itself, the first time: with a C compiler and Python's
headers, into a directory that it may write.  Elsewhere PyTorch's operators compute the same, slower.  The
kernels run where `serve` says so: who chooses one asks it, by the module's name, so that tests can have them
interpreted on a CPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging

import torch

logger = logging.getLogger(__name__)

_FIRST, _BEHIND = (3, 6), (3, 10)
_LEAST_CAPABILITY = (8, 0)
_MOST_TOLD = 200


def serve(device: torch.device) -> bool:
    """Whether the kernels compute on this device.  Of a CUDA device for which they do not, a line in the log
    says once why."""
    return device.type == "cuda" and not _told(device)


def why_not(version: str, capability: tuple[int, int]) -> str:
    """Why kernels do not run with this version of Triton ("": there is none) on a device of this compute
    capability, or ""."""
    if not version:
        return "Triton is not installed (pip install 'baton-llm[cuda]')"
    try:
        numbers = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return f"Triton {version} is of no known version; install 3.6 to 3.9"
    if not _FIRST <= numbers < _BEHIND:
        return f"Triton is {version}; the kernels are for 3.6 to 3.9"
    if capability < _LEAST_CAPABILITY:
        return f"the device has compute capability {capability[0]}.{capability[1]}; the kernels need 8.0"
    return ""


@functools.cache
def _told(device: torch.device) -> str:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    reason = why_not(version, torch.cuda.get_device_capability(device)) or _why_not_started()
    if reason:
        logger.warning("%s: PyTorch computes attention, norms and sampling, slower: %s", device, reason)
    else:
        logger.info("%s: attention, norms, gates and sampling by Triton %s", device, version)
    return reason


def _why_not_started() -> str:
    """Why Triton cannot start kernels in this process, or ""."""
    try:
        importlib.import_module("triton").runtime.driver.active  # noqa: B018 (it is compiled)
    except Exception as error:
        told = " ".join(str(error).split())[:_MOST_TOLD]
        return (
            "Triton cannot start kernels, for which it needs a C compiler (gcc), Python's headers "
            f"(python3-dev) and a directory (TRITON_CACHE_DIR): {type(error).__name__}: {told}"
        )
    return ""
