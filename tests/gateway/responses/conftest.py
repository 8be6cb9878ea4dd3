from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.gateway.access import Access
from baton.gateway.responses.store import ResponseStore
from baton.gateway.text.tokenizer import Tokenizer
from tests.gateway.api.test_tools import QWEN, directory_with
from tests.gateway.harness import GatewayServer

KEYS = ("one", "two")


@pytest.fixture(scope="package")
def keeping(byte_level: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayServer]:
    """A model whose template shows Hermes' calls and thinks; the server keeps eight answers."""
    special = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    directory = directory_with(byte_level, tmp_path_factory.mktemp("keeping"), QWEN, special)
    with GatewayServer(
        directory,
        eos=2,
        vocab=512,
        max_model_len=1024,
        access=Access(api_keys=KEYS),
        responses=ResponseStore(8, 1 << 20),
    ) as server:
        yield server


@pytest.fixture
def server(keeping: GatewayServer) -> GatewayServer:
    keeping.reset()
    return keeping


@pytest.fixture
def tokenizer(server: GatewayServer) -> Tokenizer:
    return Tokenizer.from_directory(server.served.tokenizer)
