"""A server for the SDKs of others: the embedded model with a chat template that knows tools.

It was not trained to call anything, so calls are demanded; their arguments keep the tool's schema, and are
otherwise random.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from baton.model.checkpoint.hub import resolve_model
from tests.e2e.server import Server

TEMPLATE = (
    "{%- if tools %}{{ 'Tools: ' + (tools | tojson) + ' <tool_call></tool_call>' }}{% endif %}"
    "{%- for message in messages %}"
    "{{- message.role + ': ' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{- '\\n' }}"
    "{%- endfor %}{{ 'assistant: ' }}"
)


@pytest.fixture(scope="session")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("calling") / "model"
    shutil.copytree(resolve_model(None), directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    flags = ("--served-model-name", "tiny", "--dtype", "float32", "--responses-store", "8")
    with Server(*flags, model=str(directory)) as server:
        yield server


@pytest.fixture
def base_url(calling: Server) -> str:
    return f"{calling.url}/v1"
