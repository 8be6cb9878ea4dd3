"""What a process holds, and what counts as growing."""

from __future__ import annotations

import os
import random
import subprocess
import sys

from baton.bench.memory import MIB, growth, usage


def test_a_process_says_what_it_holds():
    held = usage(os.getpid())
    assert held is not None
    assert 0 < held.anonymous < held.resident
    assert held.threads >= 1
    with open(os.devnull), open(os.devnull):
        now = usage(os.getpid())
    assert now is not None
    assert now.descriptors == held.descriptors + 2


def test_a_process_that_is_gone_holds_nothing():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert usage(child.pid) is None


def noise(rng, count):
    return [abs(rng.gauss(0, 20)) for _ in range(count)]


def test_a_leak_of_a_megabyte_a_minute_is_found_in_noise():
    rng = random.Random(1)
    values = [100 + minute + extra for minute, extra in enumerate(noise(rng, 45))]
    found = growth(values, 4.0)
    assert found is not None
    assert found.steady
    assert 20 < found.amount < 45


def test_noise_and_steps_do_not_grow():
    rng = random.Random(2)
    cases = {
        "noise": [100 + extra for extra in noise(rng, 400)],
        "a peak": [100.0] * 30 + [180.0] * 3 + [100.0] * 30,
        "a step": [100.0] * 40 + [127.0] * 40,
        "a sawtooth": [100 + at % 20 for at in range(200)],
        "falling": [300.0 - at for at in range(100)],
        "a little": [100 + 0.03 * at for at in range(100)],
    }
    for name, values in cases.items():
        found = growth(values, 4.0)
        assert found is not None, name
        assert not found.steady, (name, found)


def test_too_few_values_are_no_verdict():
    assert growth([1.0 * MIB] * 7, 1.0) is None
