"""Runs a program in a home and a repository of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from tests.agents.programs import NOTE, Place, Program

DEADLINE_S = 300.0


def prepare(place: Place) -> None:
    """A fresh repository with the note."""
    place.home.mkdir(parents=True)
    place.work.mkdir(parents=True)
    (place.work / "note.txt").write_text(NOTE)
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "A note"]):
        subprocess.run(["git", *command], cwd=place.work, check=True, capture_output=True)


def environment_of(program: Program, place: Place) -> dict[str, str]:
    """Nothing of the user's but PATH: a home of its own, and no proxies on the way to 127.0.0.1."""
    home = place.home
    own = {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".local/share"),
        "XDG_STATE_HOME": str(home / ".local/state"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "TMPDIR": str(home / "tmp"),
        "TERM": "dumb",
        "NO_COLOR": "1",
        "DO_NOT_TRACK": "1",
        "GIT_AUTHOR_NAME": "A",
        "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_COMMITTER_NAME": "A",
        "GIT_COMMITTER_EMAIL": "a@example.org",
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
    }
    return own | program.environment(place)


def run(program: Program, place: Place, deadline_s: float = DEADLINE_S) -> tuple[int | None, str]:
    """Exit code (None: it was ended at the deadline) and output."""
    (place.home / "tmp").mkdir(exist_ok=True)
    for name, text in program.files(place).items():
        path = place.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    output = place.home / "output.txt"
    with Path(output).open("wb") as file:
        process = subprocess.Popen(
            program.command(place, program.prompt),
            cwd=place.work,
            env=environment_of(program, place),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    return code, output.read_text(errors="replace")
