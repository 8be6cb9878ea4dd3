"""The house: neither files nor packages import each other in circles, and files stay short."""

from __future__ import annotations

from pathlib import Path

import grimp
import pytest

SOURCES = Path(__file__).parents[1] / "src" / "baton"
MAX_LINES = 400
LONGER = {
    "engine/core.py": 520,  # every message of the engine passes here: gateways, engines, workers, the clock
    "engine/handover/arrivals.py": 520,  # one state machine with its table of states
    "engine/handover/departures.py": 545,  # one state machine with its table of states
    "gateway/cluster/table.py": 480,  # one state machine with its table of states
    "gateway/instances/client.py": 450,  # what the rest of the gateway asks of the instances: one call each
}
"""Files over the limit, and how long they may be: these numbers only go down.  Each says why it is whole."""


Imports = dict[str, set[str]]


@pytest.fixture(scope="module", params=["that run", "of types too"])
def imports(request: pytest.FixtureRequest) -> Imports:
    """Which files of Baton each file imports; "that run": without those under TYPE_CHECKING."""
    running = request.param == "that run"
    graph = grimp.build_graph("baton", exclude_type_checking_imports=running, cache_dir=None)
    found = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    if not running:
        # The simulator's world holds its parties, wires and watches, and each of them is of one world: they
        # name each other's types.  What runs there is in no circle.
        world = "baton.simulation."
        found = {module: others for module, others in found.items() if not module.startswith(world)}
    return found


def test_no_file_imports_itself_by_way_of_others(imports: Imports):
    assert _circle(imports) == {}


def test_no_package_imports_itself_by_way_of_others(imports: Imports):
    """The packages and files that lie side by side, each with all that is in it."""
    packages = {module.rpartition(".")[0] for module in imports} - {""}
    assert "baton.gateway" in packages
    circles = {package: _circle(_side_by_side(package, imports)) for package in packages}
    assert {package: circle for package, circle in circles.items() if circle} == {}


def test_a_circle_is_seen():
    made = {
        "baton": set(),
        "baton.a": set(),
        "baton.a.x": {"baton.b.y"},
        "baton.b": set(),
        "baton.b.y": set(),
    }
    made["baton.b.z"] = {"baton.a.x"}
    assert _circle(made) == {}
    assert _circle(_side_by_side("baton", made)) == {"baton.a": ["baton.b"], "baton.b": ["baton.a"]}


def _circle(imports: Imports) -> dict[str, list[str]]:
    """What is left when all is taken away that imports nothing of what is left."""
    while free := {module for module, others in imports.items() if not others & imports.keys()}:
        imports = {module: others for module, others in imports.items() if module not in free}
    return {module: sorted(others & imports.keys()) for module, others in imports.items()}


def _side_by_side(package: str, imports: Imports) -> Imports:
    """Between what lies in `package`, of all imports between files."""

    def whose(module: str) -> str:
        name = module.removeprefix(package + ".").partition(".")[0]
        return f"{package}.{name}"

    within = {module for module in imports if module.startswith(package + ".")}
    found: Imports = {whose(module): set() for module in within}
    for module in within:
        found[whose(module)] |= {whose(other) for other in imports[module] & within} - {whose(module)}
    return found


def test_files_are_short():
    lengths = {str(p.relative_to(SOURCES)): p.read_text().count("\n") for p in SOURCES.rglob("*.py")}
    assert {name: lines for name, lines in lengths.items() if lines > LONGER.get(name, MAX_LINES)} == {}


def test_the_architecture_document_has_every_package():
    """The tree under "Layout": a line for each folder, by its place."""
    text = (SOURCES.parents[1] / "docs" / "architecture.md").read_text()
    tree = text.partition("src/baton/\n")[2].partition("```")[0].splitlines()
    told, parents = set(), []
    for line in tree:
        name = line.split()[0]
        if name.endswith("/"):
            depth = (len(line) - len(line.lstrip())) // 2 - 1
            parents[depth:] = [name.rstrip("/")]
            told.add("/".join(parents))
    folders = {str(p.parent.relative_to(SOURCES)) for p in SOURCES.rglob("__init__.py")} - {"."}
    assert told == folders | {"assets", "model/cpu/native"}
