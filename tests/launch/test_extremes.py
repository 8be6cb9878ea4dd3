"""Every numeric flag with 0, 1, huge and no number: an error that names it, or a server that serves."""

from __future__ import annotations

import math

import pytest
from typer.testing import CliRunner

from baton import LLM, SamplingParams
from baton.cli.main import app
from baton.launch.limits import MAX_SECONDS, OptionError, check_range
from baton.launch.options import ServeOptions, flags_of

_INTEGERS = ["-1", "0", "1", "8", "64", "100", "4096", str(2**31), str(2**63), str(10**30)]
_FLOATS = ["-1", "0", "1e-9", "1", "3000000", "1e300", "inf", "nan"]


def numeric_flags() -> list[tuple[str, list[str]]]:
    """From the declarations, so that a new flag is in it."""
    found = []
    for one in flags_of(ServeOptions):
        values = _INTEGERS if int in one.kinds else _FLOATS if float in one.kinds else None
        if values:
            found.append((one.option, values))
    return found


def test_the_table_is_not_empty():
    assert len(numeric_flags()) > 15


@pytest.mark.parametrize(("flag", "values"), numeric_flags())
def test_a_number_is_refused_by_name_or_taken(flag: str, values: list[str], monkeypatch: pytest.MonkeyPatch):
    def listen(*_: object) -> None:
        raise Reached

    monkeypatch.setattr("baton.launch.server.listen_all", listen)
    monkeypatch.setattr("baton.launch.instances.joining.joined.run_joined", listen)
    join = ["--instance", "--join", "127.0.0.1:1"] if flag == "--probe-port" else []
    taken = 0
    for value in values:
        result = CliRunner().invoke(app, ["serve", f"{flag}={value}", *join])
        if isinstance(result.exception, Reached):
            taken += 1
            continue
        assert result.exit_code == 2, (value, result.exception)
        message = result.output.strip()
        assert message.startswith("error: ")
        assert message.count("\n") == 0
        assert flag in message, value
        assert len(message) < 250
    assert 0 < taken < len(values), "some of these must be refused, some can be served"


class Reached(Exception):
    """The options were taken; the server would listen now."""


def test_the_longest_times_and_largest_counts_serve():
    """`--step-timeout 3000000` ended each instance at its first request: poll() takes 24.8 days at most."""
    with LLM(
        executor="simulated",
        step_timeout=MAX_SECONDS,
        max_num_seqs=1 << 12,
        max_num_batched_tokens=1 << 22,
        max_waiting=2**31 - 1,
        num_gpu_blocks_override=64,
        admission_headroom=2**31 - 1,
        seed=2**64 - 1,
        log_level="error",
    ) as llm:
        (result,) = llm.generate(["hello"], SamplingParams(max_tokens=4))
    assert len(result.outputs[0].token_ids) == 4


def test_bounds_are_in_the_message():
    check_range("--x", None, 1, 2)
    check_range("--x", 1, 1, 2)
    with pytest.raises(OptionError, match=r"^--x 3: give apples from 1 to 2$"):
        check_range("--x", 3, 1, 2, "apples")
    with pytest.raises(OptionError, match=r"^--x nan: give from 0.5 to 2$"):
        check_range("--x", math.nan, 0.5, 2)
    with pytest.raises(OptionError, match=r"^--x 100000000000… \(401 digits\): give from 1 to 2$"):
        check_range("--x", 10**400, 1, 2)
