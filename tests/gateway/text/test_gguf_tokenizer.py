"""Tokenizers from the metadata of GGUF files: those of transformers, and of the file that was converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.gateway.text import gguf_pieces
from baton.gateway.text.tokenizer import Tokenizer, TokenizerError
from baton.model.checkpoint.hub import resolve_model
from tests.model.gguf_files import GGUFWriter, add_tokenizer

TEXTS = (
    "The capital of France is Paris.",
    "  two  spaces\n\n\tand 12345 numbers, it's I'LL",
    "naïve café — 日本語 😀 e\u0301",
    "<|im_start|>user\nhi<|im_end|>",
    "",
)


def written(path: Path, describe: Any) -> Path:
    writer = GGUFWriter(path, "llama")
    describe(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_converted_tokenizer_is_the_same(tmp_path: Path) -> None:
    directory = resolve_model(None)
    path = written(tmp_path / "model.gguf", lambda writer: add_tokenizer(writer, directory))
    found, expected = (Tokenizer.from_directory(item) for item in (path, directory))
    for text in TEXTS[:2] + TEXTS[3:]:
        assert found.encode(text) == expected.encode(text), text
        assert found.decode(expected.encode(text)) == expected.decode(expected.encode(text))
    assert found.special_ids == expected.special_ids
    assert found.end_ids == expected.end_ids
    assert found.template_source == expected.template_source
    messages = [{"role": "user", "content": "hi"}]
    assert found.render_chat(messages, add_generation_prompt=True) == expected.render_chat(
        messages, add_generation_prompt=True
    )
    streamed = found.detokenizer()
    ids = expected.encode(TEXTS[2])
    assert streamed.push(ids) + streamed.finish() == expected.decode(ids)


PIECES = ["▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "▁ab", "▁abc", "1", "▁1"]


def sentencepiece(writer: GGUFWriter, add_prefix: bool | None = None) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<tool>"]
    scores = [0.0] * 259 + [-float(len(PIECES) - len(piece) * 3) for piece in PIECES] + [0.0]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if add_prefix is not None:
        writer.add_add_space_prefix(add_prefix)


def test_sentencepiece(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(written(tmp_path / "model.gguf", sentencepiece))
    ids = tokenizer.encode("abc ab<tool>é1")
    assert [tokenizer.token(number) for number in ids] == [
        "<s>", "▁abc", "▁ab", "<tool>", "▁", "<0xC3>", "<0xA9>", "1",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == "abc ab<tool> é1"
    streamed = tokenizer.detokenizer()
    assert streamed.push(ids) + streamed.finish() == "abc ab<tool> é1"
    assert tokenizer.special_ids == {1, 2}


def test_sentencepiece_without_a_first_space(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(
        written(tmp_path / "model.gguf", lambda writer: sentencepiece(writer, False))
    )
    ids = tokenizer.encode("abc a")
    assert [tokenizer.token(number) for number in ids] == ["<s>", "abc", "▁a"]
    assert tokenizer.decode(ids) == "abc a"


def test_sentencepiece_is_merged_as_transformers_merges_it(tmp_path: Path) -> None:
    """Its converter of GGUF vocabularies is the reference of the merges."""
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    path = written(tmp_path / "model.gguf", sentencepiece)
    architecture, described, _ = get_gguf_tokenizer(str(path))
    reference, _ = convert_gguf_tokenizer(architecture, described)
    tokenizer = Tokenizer.from_directory(path)
    for text in ("abc", "abcabc cab bca", "aabbcc 11 a1b", "ünï abc"):
        expected = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text


@pytest.mark.parametrize("kind", [1, 4])
def test_an_end_by_its_name_is_one_token_of_any_text(kind: int, tmp_path: Path) -> None:
    """As llama.cpp takes it: a template writes it, and its pieces would be other tokens."""

    def describe(writer: GGUFWriter) -> None:
        sentencepiece(writer)
        writer.add_token_list(
            ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|im_end|>"]
        )
        writer.add_token_scores([0.0] * 260)
        writer.add_token_types([2, 3, 3, *[6] * 256, kind])

    tokenizer = Tokenizer.from_directory(written(tmp_path / "model.gguf", describe))
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False)[-1] == 259
    assert 259 in tokenizer.special_ids


def test_templates_with_names(tmp_path: Path) -> None:
    def describe(writer: GGUFWriter) -> None:
        sentencepiece(writer)
        writer.add_chat_template(
            [
                {"name": "default", "template": "plain"},
                {"name": "tool_use", "template": "{{ tools | length }} tools"},
            ]
        )

    tokenizer = Tokenizer.from_directory(written(tmp_path / "model.gguf", describe))
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert tokenizer.render_chat([{"role": "user", "content": "a"}]) == "plain"
    assert tokenizer.render_chat([{"role": "user", "content": "a"}], tools=[tool]) == "1 tools"


def byte_level(writer: GGUFWriter, pre: str) -> None:
    tokens = [*"abcĠ1", "ab", "Ġab", "abc", "<|begin_of_text|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 8 + [3])
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_bos_token_id(8)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        # A word that is a token is taken whole though no merges lead there, and a text begins with the BOS.
        ("llama-bpe", [8, 7, 6, 2]),
        ("qwen2", [5, 2, 6, 2]),
        ("gpt-2", [5, 2, 6, 2]),
    ],
)
def test_ways_to_cut_a_text(tmp_path: Path, pre: str, expected: list[int]) -> None:
    path = written(tmp_path / "model.gguf", lambda writer: byte_level(writer, pre))
    assert Tokenizer.from_directory(path).encode("abc abc") == expected


def pieces_of(name: str, text: str) -> list[str]:
    """As texts, not in the signs that stand for bytes."""
    cut = gguf_pieces.cutter(name)
    assert cut is not None
    return [text[first:end] for _, (first, end) in cut.pre_tokenize_str(text)]


ODD = "HelloWorld's DON'T 1234567 x9  a/b?!\r\n\r\n  é́té 中文かな한글 Ωμέγα ﬁ 12,345.6 \u2028 ok\t\t "


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("glm4", "I'LL 12345 ab!\n\n", ["I", "'LL", " ", "123", "45", " ab", "!\n\n"]),
        ("chatglm-bpe", "I'LL 12345", ["I", "'LL", " ", "123", "45"]),
        ("seed-coder", "I'LL 12\n a!\n\n", ["I", "'LL", " ", "1", "2", "\n", " a", "!", "\n\n"]),
        ("superbpe", "so, 1234567 and on", ["so, ", "1", "234", "567", " and on"]),
        ("deepseek-v3", "x 12345中文abc !if", ["x", " ", "123", "45", "中文", "abc", " !", "if"]),
        ("deepseek-v3", "a.b\n (x)", ["a", ".b", "\n", " (", "x", ")"]),
        (
            "deepseek-llm",
            "x 123中文\n a, b  ",
            ["x", " ", "1", "2", "3", "中文", "\n", " a", ",", " b", "  "],
        ),
        ("deepseek-coder", "x=12 中文\n\tif", ["x", "=", "1", "2", " ", "中文", "\n", "\tif"]),
        ("minerva-7b", "ab 12", ["ab", " ", "1", "2"]),
    ],
)
def test_pieces_by_name(name: str, text: str, pieces: list[str]) -> None:
    assert pieces_of(name, text) == pieces


@pytest.mark.parametrize("name", sorted({*gguf_pieces._CUTS, *gguf_pieces._WITH_DIGITS, *gguf_pieces._GPT2}))
def test_nothing_of_a_text_is_lost_between_its_pieces(name: str) -> None:
    assert "".join(pieces_of(name, ODD)) == ODD


def test_pieces_of_gpt_oss() -> None:
    """Words begin at capitals and keep their contractions; three digits; slashes with what follows."""
    assert pieces_of("gpt-4o", "HelloWorld's DON'T 12345  a/b?!/\r\nété ") == [
        "Hello", "World's", " DON'T", " ", "123", "45", " ", " a", "/b", "?!/\r\n", "été", " ",
    ]  # fmt: skip


def test_digits(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", lambda writer: byte_level(writer, "smollm"))
    assert Tokenizer.from_directory(path).encode("11") == [4, 4]


@pytest.mark.parametrize(
    ("describe", "says"),
    [
        (lambda writer: byte_level(writer, "chameleon"), "'chameleon' (tokenizer.ggml.pre)"),
        (lambda writer: writer.add_tokenizer_model("gpt2"), "it has no tokenizer"),
        (lambda writer: (writer.add_tokenizer_model("bert"), writer.add_token_list(["a"])), "is a 'bert'"),
        (lambda writer: (writer.add_tokenizer_model("llama"), writer.add_token_list(["a"])), "a score"),
    ],
)
def test_what_is_not_read_is_an_error_of_one_line(tmp_path: Path, describe: Any, says: str) -> None:
    path = written(tmp_path / "model.gguf", describe)
    with pytest.raises(TokenizerError) as error:
        Tokenizer.from_directory(path)
    assert says in str(error.value)
    assert "--tokenizer" in str(error.value) or says == "a score"
    assert "\n" not in str(error.value)
