"""The short tests with the newest release of everything that Baton needs: `make newest`.

    python tools/newest.py --venv .venv-newest            # the newest that pyproject.toml allows
    python tools/newest.py --venv .venv-newest --beyond   # also beyond its upper bounds

CI installs what constraints.txt says; users get what is newest that day.  Some libraries are subclassed or
imitated by parts that are no promise of theirs (pyproject.toml says which, and bounds them): so this is run
on a schedule, and whatever breaks is mended, or bounded, before users meet it.  `--beyond` tells whether a
bound can be raised.

PyTorch, and Triton with it, stay those of constraints.txt: another build would bring gigabytes of CUDA.
Baton itself is run from `src/`, whose compiled library is used where there is one.  The versions that differ
from constraints.txt are printed, then the tests; the exit code is that of the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("torch", "triton")
"""Of constraints.txt whatever is newest."""
TESTS = (
    "tests/grammar",
    "tests/gateway/text",
    "tests/gateway/http",
    "tests/gateway/api",
    "tests/launch/test_http.py",
    "tests/launch/test_http_accept.py",
    "tests/launch/test_http_limits.py",
    "tests/launch/test_http_places.py",
    "tests/launch/test_options.py",
    "tests/ipc",
    "tests/transfer/test_nixl_package.py",
    "tests/model/adapted",
    "tests/model/checkpoint",
    "tests/model/reading/test_ggml.py",
    "tests/executor/test_adapted.py",
)
"""What touches libraries most, in some minutes."""
_EXTRAS = ("dev",)
_LEFT_OUT = ("import-linter", "mypy", "pre-commit", "ruff", "schemathesis", "matplotlib")
"""Of the tools of contributors: none of these tests needs them."""
_ALONE = ("tests/gateway/http/test_openapi.py",)
"""Needs one of them."""


def requirements(pyproject: str, constraints: str, *, beyond: bool) -> list[str]:
    """What to install, of the texts of both files; with `beyond` without upper bounds."""
    project = tomllib.loads(pyproject)["project"]
    wanted = list(project["dependencies"])
    for extra in _EXTRAS:
        wanted += project["optional-dependencies"][extra]
    pinned = versions(constraints.splitlines())
    found = []
    for requirement in wanted:
        name = name_of(requirement)
        if name in _LEFT_OUT:
            continue
        if name in KEPT and name in pinned:
            requirement = f"{name}=={pinned[name]}"
        elif beyond:
            requirement = without_upper_bound(requirement)
        found.append(requirement)
    return found


def name_of(requirement: str) -> str:
    """'huggingface_hub>=0.34' → 'huggingface-hub'"""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]).lower()


def without_upper_bound(requirement: str) -> str:
    """'triton>=3.6,<3.10' → 'triton>=3.6'"""
    bounds = re.match(r"(?P<name>[\w.-]+(?:\[[\w,-]+\])?)(?P<bounds>[^;]*)(?P<rest>.*)\Z", requirement)
    assert bounds is not None
    kept = [bound for bound in bounds["bounds"].split(",") if not bound.strip().startswith("<")]
    return bounds["name"] + ",".join(kept) + bounds["rest"]


def versions(lines: Iterable[str]) -> dict[str, str]:
    """By normal names: 'torch==2.13.0' → {'torch': '2.13.0'}"""
    pairs = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name_of(name): version.strip() for name, _, version in pairs}


def install(python: Path, wanted: list[str]) -> dict[str, str]:
    """Installs the newest; returns the versions of all that is there."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(wanted) + "\n")
        file.flush()
        command = [*pip, "install", "--quiet", "--upgrade", "--upgrade-strategy", "eager", "-r", file.name]
        subprocess.run(command, check=True)
    found = subprocess.run([*pip, "list", "--format", "json"], check=True, capture_output=True, text=True)
    return {name_of(one["name"]): one["version"] for one in json.loads(found.stdout)}


def differences(installed: dict[str, str], pinned: dict[str, str]) -> list[str]:
    """A line for each that is another one than the one that CI installs."""
    return [
        f"{name:24} {pinned[name]:>14} → {installed[name]}"
        for name in sorted(installed.keys() & pinned.keys())
        if installed[name].partition("+")[0] != pinned[name].partition("+")[0]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-newest")
    parser.add_argument("--beyond", action="store_true", help="leave out the upper bounds of pyproject.toml")
    parser.add_argument("tests", nargs="*", help="instead of the usual ones")
    options = parser.parse_args()
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    wanted = requirements(
        (ROOT / "pyproject.toml").read_text(encoding="utf-8"), constraints, beyond=options.beyond
    )
    python = options.venv.absolute() / "bin" / "python"
    if not python.exists():
        venv.create(options.venv, with_pip=True)
    installed = install(python, wanted)
    print("Other than in constraints.txt:")
    print("\n".join(differences(installed, versions(constraints.splitlines()))) or "nothing", flush=True)
    command = [str(python), "-m", "pytest", "-q", *(options.tests or TESTS)]
    command += [f"--ignore={path}" for path in _ALONE]
    sys.exit(
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}).returncode
    )


if __name__ == "__main__":
    main()
