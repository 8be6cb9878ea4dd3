"""`make newest`: what it installs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def newest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("newest", ROOT / "tools" / "newest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PYPROJECT = """
[project]
dependencies = ["a-b>=1,<2", "torch>=2,<3", "c[x,y]>=1.5,!=1.6,<2; python_version<'3.13'", "plain"]
[project.optional-dependencies]
dev = ["ruff>=1", "triton>=3,<4", "pytest>=8"]
"""
CONSTRAINTS = "# what is pinned\ntorch==2.13.0\ntriton==3.7.1\na_b==1.1\n"


def test_bounds_are_kept_or_left_out(newest: ModuleType) -> None:
    kept = newest.requirements(PYPROJECT, CONSTRAINTS, beyond=False)
    c = "c[x,y]>=1.5,!=1.6,<2; python_version<'3.13'"
    assert kept == ["a-b>=1,<2", "torch==2.13.0", c, "plain", "triton==3.7.1", "pytest>=8"]
    beyond = newest.requirements(PYPROJECT, CONSTRAINTS, beyond=True)
    c = "c[x,y]>=1.5,!=1.6; python_version<'3.13'"
    assert beyond == ["a-b>=1", "torch==2.13.0", c, "plain", "triton==3.7.1", "pytest>=8"]


def test_what_differs_is_said(newest: ModuleType) -> None:
    pinned = newest.versions(CONSTRAINTS.splitlines())
    found = newest.differences({"torch": "2.13.0+cpu", "a-b": "1.2", "other": "5"}, pinned)
    assert [re.sub(r" +", " ", line) for line in found] == ["a-b 1.1 → 1.2"]


def test_its_tests_are_there(newest: ModuleType) -> None:
    for path in (*newest.TESTS, *newest._ALONE):
        assert (ROOT / path).exists(), path


def test_constraints_fit_the_bounds() -> None:
    """What CI installs is within what users may get."""
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    lines = (
        line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    pinned = {name.lower().replace("_", "-"): version for name, _, version in lines}
    for requirement in map(Requirement, wanted):
        version = pinned.get(requirement.name.lower().replace("_", "-"))
        assert version is None or requirement.specifier.contains(version), str(requirement)
