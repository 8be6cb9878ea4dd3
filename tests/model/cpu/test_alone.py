"""Tasks that are shared out whole: each is computed by its thread, and what fails stops the others."""

from __future__ import annotations

import threading

import pytest
import torch

from baton.model.cpu.alone import can_compute_alone, computed_alone

pytestmark = pytest.mark.skipif(not can_compute_alone(), reason="PyTorch has no OpenMP runtime that we know")


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_each_task_is_computed_by_its_thread() -> None:
    together = threading.Barrier(2, timeout=60)
    found = {}

    def task(number: int) -> None:
        together.wait()  # both threads have one of the two tasks
        found[number] = (torch.get_num_threads(), torch.is_inference_mode_enabled(), threading.get_ident())

    with torch.inference_mode():
        ended = list(computed_alone([lambda: task(0), lambda: task(1)], 2))
    assert sorted(ended) == [0, 1]
    assert [found[number][:2] for number in (0, 1)] == [(1, True)] * 2
    assert len({threading.get_ident(), *(thread for *_, thread in found.values())}) == 3
    assert torch.get_num_threads() == 3

    seen = []
    another = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    another.start()
    another.join()
    assert seen == [3]


def test_what_a_task_raises_stops_the_others() -> None:
    begun = []

    def task(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise ValueError("no such expert")

    with pytest.raises(ValueError, match="no such expert"):
        for _ in computed_alone([lambda number=number: task(number) for number in range(1000)], 1):
            pass
    assert begun == [0, 1]
