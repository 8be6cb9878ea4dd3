"""What a terminal shows of a server that starts."""

from __future__ import annotations

import pytest

from baton.launch import announce
from baton.launch.status import starting
from baton.observe.logs import ERASE, SHOWN


@pytest.mark.parametrize(
    ("far", "instances", "line"),
    [
        ({"instance-0": ""}, 1, "12 s · starting"),
        ({"instance-0": "25 % (layer 7)"}, 1, "12 s · loading █████░░░░░░░░░░░░░░░ 25 % (layer 7)"),
        ({"instance-0": "warming up"}, 1, "12 s · warming up"),
        ({}, 1, "12 s"),
        ({}, 0, "12 s · 0 of 0 instances ready"),
        (
            {"p": "62 % (layer 17)", "d-0": "waiting for the weights", "d-1": "waiting for the weights"},
            4,
            "12 s · 1 of 4 instances ready · p ██████░░░░ 62 % · 2 waiting for the weights",
        ),
    ],
)
def test_how_far_instances_are(far: dict[str, str], instances: int, line: str) -> None:
    assert starting(far, instances, 12.3) == line


def test_a_terminal_gets_no_line_that_is_wider(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        "  running   torch 2.13 on cpu, bfloat16, 8 threads at http://127.0.0.1:8000/a/long/path/in-one-piece"
    )
    announce.say(line)
    assert capsys.readouterr().out == line + "\n"
    monkeypatch.setenv(SHOWN, "1")
    monkeypatch.setenv("COLUMNS", "50")
    announce.say(line, "short")
    assert capsys.readouterr().out == (
        f"{ERASE}  running   torch 2.13 on cpu, bfloat16, 8\n"
        "            threads at\n"
        "            http://127.0.0.1:8000/a/long/path/in-one-piece\n"
        "short\n"
    )
