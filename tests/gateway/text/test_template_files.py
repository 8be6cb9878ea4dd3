"""Which file a chat template is read of; transformers is the reference wherever it reads the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.gateway.text.template_files import read_chat_template
from baton.gateway.text.tokenizer import Tokenizer, TokenizerError
from baton.model.checkpoint.hub import resolve_model

TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
USER = [{"role": "user", "content": "hi"}]


def directory_of(path: Path, files: dict[str, Any]) -> Path:
    """A tokenizer with these files, and without any other template."""
    source = resolve_model(None)
    (path / "tokenizer.json").symlink_to(source / "tokenizer.json")
    (path / "config.json").symlink_to(source / "config.json")
    config = json.loads((source / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    for name, content in {"tokenizer_config.json": {}, **files}.items():
        (path / name).parent.mkdir(exist_ok=True)
        if name == "tokenizer_config.json":
            content = config | content
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


NAMED = [
    {"name": "default", "template": "field\n"},
    {"name": "tool_use", "template": "tools {{ tools | length }}\n"},
]


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [
        ({"tokenizer_config.json": {"chat_template": "field"}}, "field", "field"),
        ({"chat_template.jinja": "file"}, "file", "file"),
        (
            {"tokenizer_config.json": {"chat_template": "field"}, "chat_template.jinja": "file"},
            "file",
            "file",
        ),
        ({"tokenizer_config.json": {"chat_template": NAMED}}, "field", "tools 1"),
        (
            {
                "chat_template.jinja": "file",
                "additional_chat_templates/tool_use.jinja": "{% if tools %}T\n{% endif %}\n",
            },
            "file",
            "T\n",
        ),
    ],
)
def test_the_template_is_the_one_of_transformers(
    tmp_path: Path, files: dict[str, Any], plain: str, with_tools: str
) -> None:
    from transformers import AutoTokenizer

    directory = directory_of(tmp_path, files)
    mine, theirs = Tokenizer.from_directory(directory), AutoTokenizer.from_pretrained(directory)
    for tools, expected in ((None, plain), ([TOOL], with_tools)):
        assert mine.render_chat(USER, tools=tools, add_generation_prompt=False) == expected
        assert theirs.apply_chat_template(USER, tools=tools, tokenize=False) == expected


def test_that_of_a_model_of_images_is_taken_where_there_is_no_other(tmp_path: Path) -> None:
    directory = directory_of(tmp_path, {"chat_template.json": {"chat_template": "of the processor"}})
    assert read_chat_template(directory, None) == "of the processor"
    assert read_chat_template(directory, "field") == "field"


def test_a_single_one_with_a_name_is_taken(tmp_path: Path) -> None:
    assert read_chat_template(tmp_path, [{"name": "chatml", "template": "text"}]) == "text"
    assert read_chat_template(tmp_path, None) is None
    assert read_chat_template(tmp_path, [{"name": 5}, "x"]) is None


@pytest.mark.parametrize(
    ("name", "content"), [("chat_template.json", b"{"), ("chat_template.jinja", b"\xff\xfe")]
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    directory = directory_of(tmp_path, {})
    (directory / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=name) as caught:
        Tokenizer.from_directory(directory)
    assert "\n" not in str(caught.value)
