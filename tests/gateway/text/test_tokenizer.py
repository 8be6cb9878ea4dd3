"""Loading, encoding, and chat templates by the hub's conventions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from baton.gateway.api.messages import read_messages
from baton.gateway.errors import BadRequest
from baton.gateway.text.chat_template import ChatTemplate, ChatTemplateError
from baton.gateway.text.encoding import Encoding, Source, TextTooLong
from baton.gateway.text.tokenizer import Tokenizer, TokenizerError
from tests.gateway.conftest import BOS, END

USER = [{"role": "user", "content": "hi"}]


def test_special_tokens_are_added_on_request(tokenizer: Tokenizer):
    assert tokenizer.encode("the cat")[0] == BOS
    assert tokenizer.encode("the cat", add_special_tokens=False) == tokenizer.encode("the cat")[1:]
    assert tokenizer.encode("x<|end|>")[-1] == END
    assert tokenizer.decode([BOS, *tokenizer.encode("the cat"), END]) == "the cat"
    assert tokenizer.decode([END], skip_special_tokens=False) == "<|end|>"


def test_bytes_of_a_token(tokenizer: Tokenizer, sentencepiece: Path):
    text = "naïve 日本語 😀"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)[1:])) == text.encode()
    assert tokenizer.token_bytes(END) == b"<|end|>"
    assert tokenizer.token_bytes(10**6) == b""
    llama = Tokenizer.from_directory(sentencepiece)
    assert llama.token_bytes(3 + 0xE6) == b"\xe6"
    assert [llama.token_text(token) for token in llama.encode("ab a")] == [" ab", " a"]


def test_a_bos_that_only_the_configuration_knows(byte_level: Path, tmp_path: Path, tokenizer: Tokenizer):
    data = json.loads((byte_level / "tokenizer.json").read_text())
    data["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<|bos|>", "add_bos_token": true}')
    assert Tokenizer.from_directory(tmp_path).encode("the cat") == tokenizer.encode("the cat")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_models_are_served(kind: str, tmp_path: Path):
    """A directory with tokenizer.model alone, as many older checkpoints are."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "naïve 日本語", "def f(x):"] * 50),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=330,
        model_type=kind,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true, "bos_token": "<s>"}'
    )
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = Tokenizer.from_directory(tmp_path)
    for text in ("the cat sat", "naïve 日本語 😀", "x\ny", "def f(x):", ""):
        tokens = ours.encode(text)
        assert tokens == [reference.bos_id(), *reference.encode(text)]
        assert ours.decode(tokens) == text
        detokenizer = ours.detokenizer()
        pieces = "".join(detokenizer.push([token]) for token in tokens) + detokenizer.finish()
        assert pieces == text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no tokenizer: neither tokenizer.json nor tokenizer.model"),
        ({"tokenizer.model": "garbage"}, "has no tokenizer.json, and its tokenizer cannot be converted"),
        ({"tokenizer.json": "{}"}, "cannot be read"),
        (
            {"tokenizer.json": '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}'},
            "empty",
        ),
        ({"tiktoken.model": "AA== 0"}, "cannot be converted"),
    ],
)
def test_directories_without_a_tokenizer_are_one_line(
    files: dict[str, str], message: str, tmp_path: Path, caplog
):
    for name, content in {**files, "config.json": '{"model_type": "llama"}'}.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_directory(tmp_path)
    assert "\n" not in str(caught.value)
    assert not caplog.records


def test_tokens_that_only_the_configuration_knows(byte_level: Path, tmp_path: Path, tokenizer: Tokenizer):
    """As transformers does: what tokenizer.json lacks is added, what it has as plain text becomes special."""
    data = json.loads((byte_level / "tokenizer.json").read_text())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] == "<|bos|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    size = len(data["model"]["vocab"])
    entries = {
        str(size + 1): {"content": "<tool>", "special": False},
        str(size): {"content": "<|new|>", "special": True},
        "9999": {"content": "<|far|>", "special": True},
        "1": {"content": "<|start|>", "special": True},
    }
    config = {
        "added_tokens_decoder": entries,
        "eos_token": "<|end|>",
        "pad_token": "<|nowhere|>",
        "additional_special_tokens": ["<|start|>", "the"],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    made = Tokenizer.from_directory(tmp_path)
    ids = made.encode("a<|new|>b<tool>c<|end|>", add_special_tokens=False)
    assert {size, size + 1, END} < set(ids)
    assert made.decode(ids) == "ab<tool>c"
    assert made.special_ids == {BOS, 1, END, size, tokenizer.encode("the", add_special_tokens=False)[0]}
    assert made.end_ids == (END,)
    assert made.encode("<|far|>") == tokenizer.encode("<|far|>"), "an id that is not the next one is left out"
    assert made.encode("<|nowhere|>") == tokenizer.encode("<|nowhere|>"), "one that the model cannot know too"


def test_the_embedded_model_has_a_tokenizer():
    import baton.gateway

    directory = Path(baton.gateway.__file__).parents[1] / "assets" / "baton-tiny"
    tokenizer = Tokenizer.from_directory(directory)
    text = tokenizer.render_chat(USER)
    assert "hi" in text
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_what_cannot_be_loaded_says_which_file(tmp_path: Path, byte_level: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    shutil.copy(byte_level / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}')
    with pytest.raises(ChatTemplateError, match="does not compile"):
        Tokenizer.from_directory(tmp_path)


def test_the_gateway_imports_neither_torch_nor_transformers():
    """They would add seconds to the start."""
    code = (
        "import sys, baton.gateway.http.app; "
        "sys.exit(str([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules] or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr.strip() == ""


def test_a_chat_becomes_text(tokenizer: Tokenizer):
    assert tokenizer.render_chat(USER) == "<|start|>user\nhi<|end|><|start|>assistant\n"
    assert tokenizer.render_chat(USER, add_generation_prompt=False) == "<|start|>user\nhi<|end|>"
    assert tokenizer.render_chat(USER, variables={"shout": True}).endswith("LOUD ")
    assert tokenizer.render_chat([{"role": "developer", "content": "x"}]).startswith("<|start|>system\nx")


def test_the_last_message_is_continued(tokenizer: Tokenizer):
    messages = [*USER, {"role": "assistant", "content": "well, "}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    text = tokenizer.render_chat(messages, **options)
    assert text == "<|start|>user\nhi<|end|><|start|>assistant\nwell, "
    with pytest.raises(ChatTemplateError, match="add_generation_prompt") as refused:
        tokenizer.render_chat(messages, continue_final_message=True)
    assert refused.value.param == "continue_final_message"
    with pytest.raises(ChatTemplateError, match="no text"):
        tokenizer.render_chat([{"role": "assistant", "content": None}], **options)


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}", "assistant:;tool:1;"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "1"),
        (
            "{% for m in messages %}{% if m['content'] is none %}call{% else %}{{ m['content'] }}"
            "{% endif %}{% endfor %}",
            "call1",
        ),
        ("{% for m in messages %}{{ 'x' if m.content is not none }}{% endfor %}", "x"),
        ("{% for m in messages %}{{ m.content or '-' }}{% endfor %}", "-1"),
    ],
)
def test_a_tool_call_without_text(source, expected):
    messages = read_messages([CALL, {"role": "tool", "content": "1"}])
    assert ChatTemplate(source).render(messages) == expected


def test_no_template_is_a_clear_error(sentencepiece: Path):
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Tokenizer.from_directory(sentencepiece).render_chat(USER)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ messages | tojson(indent=1) }}", json.dumps(USER, indent=1)),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{{ bos_token }}|{{ nothing }}|{{ tools is none }}", "<s>||True"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_conventions_of_the_hub(source, expected):
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(USER) == expected


def test_templates_run_in_a_sandbox():
    for source in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ raise_exception('no!') }}"):
        with pytest.raises(ChatTemplateError, match="rejects these messages"):
            ChatTemplate(source).render(USER)


def test_clients_cannot_replace_the_messages():
    with pytest.raises(ChatTemplateError, match="chat_template_kwargs"):
        ChatTemplate("{{ messages }}").render(USER, variables={"messages": []})


def test_a_variable_may_have_any_name():
    """Also that of an argument of Jinja's function."""
    variables = {"self": 1, "args": 2, "loop": 3}
    assert (
        ChatTemplate("{{ args }}{{ loop }}{{ messages | length }}").render(USER, variables=variables) == "231"
    )
    with pytest.raises(ChatTemplateError, match="rejects these messages and chat_template_kwargs"):
        ChatTemplate("{{ range(n) }}").render(USER, variables={"n": "a"})


def test_messages_are_read_as_templates_want_them():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
    ]
    read = read_messages(messages)
    assert read[0]["content"] == "a\nb"
    assert read[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert call["function"]["arguments"] == '{"x": 1}'
    assert read[2] == {**messages[2], "name": "f"}
    assert read_messages(tuple(messages)) == read


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ("hi", "at least one"),
        (b"hi", "at least one"),
        ({"role": "user", "content": "x"}, "at least one"),
        (["hi"], r"messages\[0\]"),
        ([{"role": "k" * 65, "content": ""}], r"messages\[0\]\.role: 'kkk"),
        ([{"role": ["king"], "content": ""}], r"messages\[0\]\.role: "),
        ([{"role": "user"}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"content\[0\]\.type: 'image_url' is an image",
        ),
        ([{"role": "user", "content": [{"image_url": "x"}]}], r"content\[0\]\.type: 'image_url' is an image"),
        (
            [{"role": "user", "content": ["a", {}]}],
            r"content\[1\]\.type: it is missing; give {'type': 'text'",
        ),
        (
            [{"role": "user", "content": [{"type": ["text"]}]}],
            r"content\[0\]\.type: \"\['text'\]\" is no text",
        ),
        ([{"role": "user", "content": [5]}], r"content\[0\]: must be a part"),
        ([{"role": "user", "content": [{"type": "refusal"}]}], r"content\[0\]\.refusal: must be a text"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text"),
        ([{"role": "assistant", "tool_calls": [1]}], "tool_calls"),
        ([{"role": "assistant", "tool_calls": 1}], "tool_calls"),
    ],
)
def test_bad_messages_are_refused_by_place(messages, message):
    with pytest.raises(BadRequest, match=message):
        read_messages(messages)


def test_kinds_of_texts_are_texts():
    parts = [{"type": "input_text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]
    (message,) = read_messages([{"role": "assistant", "content": parts}], "openai")
    assert message["content"] == [{"type": "text", "text": text} for text in "abc"]


def test_a_long_text_is_measured_before_it_is_encoded(tokenizer: Tokenizer):
    dense, sparse = "é?" * 200_000, "the quick brown fox jumps over the lazy dog " * 10_000
    encoding = tokenizer.encoding
    assert encoding.is_longer(dense, 50_000)
    assert not encoding.is_longer(dense, 400_000)
    assert len(encoding.encode(sparse)) < 150_000
    assert not encoding.is_longer(sparse, 100_000)
    with pytest.raises(TextTooLong, match="400000 characters"):
        encoding.encode_all(["the cat", dense], limit=50_000)
    assert len(encoding.encode_all(["the cat", sparse], limit=100_000)) == 2


def test_an_encoding_is_the_same_in_another_process(tokenizer: Tokenizer, sentencepiece: Path):
    texts = ["the cat sat on the mat", "naïve 日本語 😀 <|end|>", "", " x  y\n\n"]
    prefixed = Encoding(tokenizer.encoding._backend, [7])
    for one in (tokenizer.encoding, Tokenizer.from_directory(sentencepiece).encoding, prefixed):
        source = msgspec.msgpack.decode(msgspec.msgpack.encode(one.source()), type=Source)
        other = Encoding.of(source)
        for text in texts:
            for special in (True, False):
                ids = one.encode(text, add_special_tokens=special)
                assert other.encode(text, add_special_tokens=special) == ids
            assert other.decode(ids, skip_special_tokens=False) == one.decode(ids, skip_special_tokens=False)
