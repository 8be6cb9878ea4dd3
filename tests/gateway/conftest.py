from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from baton.gateway.text.tokenizer import Tokenizer
from tests.gateway.harness import GatewayServer
from tests.gateway.site import Site

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "the cat sat on the mat and the hat was on the cat",
    "hello hello world, this is a small text about nothing at all",
    "STOP here and stop there; END of the story",
    "naïve café über straße 😀 😀 日本語",
]
TEMPLATE = (
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}\n"
    "    {{- '<|start|>' + message.role + '\\n' + (message.content or '') + '<|end|>' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|start|>assistant\\n' }}\n"
    "    {%- if shout %}{{ 'LOUD ' }}{% endif %}\n"
    "{%- endif %}"
)
SPECIAL = ["<|bos|>", "<|start|>", "<|end|>"]
BOS, START, END = 0, 1, 2


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE like GPT-2's, with BOS, special tokens and a chat template."""
    directory = tmp_path_factory.mktemp("byte-level")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)]
    )
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|end|>"}, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def tokenizer(byte_level: Path) -> Tokenizer:
    return Tokenizer.from_directory(byte_level)


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like Llama 2's: ▁ for spaces, byte fallback, a first space that the decoder drops."""
    directory = tmp_path_factory.mktemp("sentencepiece")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "c", "▁a", "▁b", "ab", "▁ab", "é", "▁é"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b"), ("▁", "é")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder that is not known byte by byte, so text goes through windows."""
    directory = tmp_path_factory.mktemp("metaspace")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<s>", "</s>"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def vocab(tokenizer: Tokenizer, byte_level: Path) -> int:
    return Backend.from_file(str(byte_level / "tokenizer.json")).get_vocab_size()


@pytest.fixture(scope="session")
def shared_server(byte_level: Path, vocab: int) -> Iterator[GatewayServer]:
    with GatewayServer(byte_level, eos=END, vocab=vocab) as server:
        yield server


@pytest.fixture
def server(shared_server: GatewayServer) -> GatewayServer:
    """A running gateway; its engine echoes.  Tests that lose the engine start their own."""
    shared_server.reset()
    return shared_server


@pytest.fixture
def site(byte_level: Path, vocab: int) -> Iterator[Site]:
    with GatewayServer(byte_level, eos=END, vocab=vocab) as server:
        site = Site(server)
        yield site
        site.close()
