"""Many small tasks on several threads, each task computed by one thread.

Theory.  PyTorch cuts an operation into parts for all threads and waits for the last one.  Of operations that
take microseconds, as those on the scales of one expert, that wait is most of the time: on a machine whose
cores have other work too, thousands of them take ten times as long as one thread alone.  Tasks that do not
depend on each other go to threads whole instead, and neither PyTorch nor the library cuts anything there.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

from baton.model.cpu.openmp import openmp


def can_compute_alone() -> bool:
    """Whether a thread can be told to compute by itself."""
    return openmp() is not None


def computed_alone(tasks: Sequence[Callable[[], None]], threads: int) -> Iterator[int]:
    """Runs all tasks, `threads` of them at once; gives the number of each that has ended, as they end.

    Raises what a task raised, once those that have begun have ended; no other one begins then.
    """
    inference = torch.is_inference_mode_enabled()  # (of this thread)
    failed = threading.Event()

    def run(task: Callable[[], None]) -> None:
        if failed.is_set():
            return
        try:
            with torch.inference_mode(inference):
                task()
        except BaseException:
            failed.set()
            raise

    pool = ThreadPoolExecutor(threads, "alone", initializer=_compute_alone)
    try:
        numbers = {pool.submit(run, task): number for number, task in enumerate(tasks)}
        for ended in as_completed(numbers):
            ended.result()
            yield numbers[ended]
    finally:
        pool.shutdown(cancel_futures=True)


def _compute_alone() -> None:
    """From now on what this thread computes is not shared out, by PyTorch or by the library."""
    runtime = openmp()
    assert runtime is not None
    torch.get_num_threads()  # PyTorch gives a thread its number when the thread first asks
    ctypes.CFUNCTYPE(None, ctypes.c_int)(runtime.set_threads)(1)
