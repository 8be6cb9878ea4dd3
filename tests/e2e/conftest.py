from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The embedded model in float32, shared by the tests that only ask it things."""
    with Server("--dtype", "float32") as running:
        yield running
