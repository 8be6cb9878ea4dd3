"""A server for the SDKs of others: the embedded model, which calls functions (tests/e2e/test_calls.py); most
calls here are demanded, and keep the schema of the tool.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server


@pytest.fixture(scope="session")
def calling() -> Iterator[Server]:
    flags = ("--served-model-name", "tiny", "--dtype", "float32", "--responses-store", "8")
    with Server(*flags) as server:
        yield server


@pytest.fixture
def base_url(calling: Server) -> str:
    return f"{calling.url}/v1"
