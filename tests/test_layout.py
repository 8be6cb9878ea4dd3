"""The house: files do not import each other in circles, and stay short enough to be read."""

from __future__ import annotations

from pathlib import Path

import grimp

SOURCES = Path(__file__).parents[1] / "src" / "baton"
MAX_LINES = 400
LONGER = {
    "engine/core.py": 720,  # every message of the engine passes here: dispatch, readiness, orders
    "engine/handover/arrivals.py": 520,  # one state machine with its table of states
    "engine/handover/departures.py": 540,  # one state machine with its table of states
    "engine/scheduling/scheduler.py": 640,  # admission, growth and preemption share one book
    "gateway/cluster/cluster.py": 430,
    "gateway/cluster/table.py": 480,  # one state machine with its table of states
    "engine/shell/loop.py": 420,
    "gateway/generation/generation.py": 590,
    "gateway/helpers/pool.py": 440,
    "gateway/instances/client.py": 500,
    "gateway/text/tokenizer.py": 460,
    "model/cpu/numba/attention.py": 410,
    "observe/metrics.py": 450,
    "simulation/world.py": 440,
    "worker/slots.py": 520,  # the slots' one owner
}
"""Files over the limit, and how long they may be: these numbers only go down."""


def test_no_file_imports_itself_by_way_of_others():
    """Imports under TYPE_CHECKING do not count: they name a type and run nothing."""
    graph = grimp.build_graph("baton", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    while imports:  # what imports nothing that is left is in no circle
        free = {module for module, others in imports.items() if not others & imports.keys()}
        if not free:
            break
        imports = {module: others for module, others in imports.items() if module not in free}
    circle = {module: sorted(others & imports.keys()) for module, others in imports.items()}
    assert not circle


def test_files_are_short():
    lengths = {str(p.relative_to(SOURCES)): p.read_text().count("\n") for p in SOURCES.rglob("*.py")}
    assert {name: lines for name, lines in lengths.items() if lines > LONGER.get(name, MAX_LINES)} == {}
