"""The tokenizer of a model directory: text to ids, ids to text, messages to text.

The fast way needs only `tokenizer.json` (the `tokenizers` library) and the chat template; importing
transformers takes seconds and is the fallback for directories that have no `tokenizer.json`.

What a token's bytes are follows from the tokenizer's decoder: see `decoders.py`.  Where that is known,
streaming text is exact and cheap (`ByteDetokenizer`), and log-probabilities can name exact bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import tokenizers

from baton.gateway.parsing.formats import MARKERS
from baton.gateway.text.chat_template import ChatTemplate, check_template, no_template
from baton.gateway.text.decoders import byte_of, decoder_of
from baton.gateway.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    FallbackDetokenizer,
    WindowDetokenizer,
)
from baton.gateway.text.encoding import Backend, Encoding
from baton.gateway.text.gguf_tokenizer import read_gguf_tokenizer
from baton.gateway.text.template_files import read_chat_template
from baton.model.checkpoint.files import has_tokenizer
from baton.model.checkpoint.gguf import is_gguf

log = logging.getLogger(__name__)

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OTHER_END = "other_eos_token"
"""In what was read of a directory: what special_tokens_map.json calls the end."""
_ADDED_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class TokenizerError(ValueError):
    """The directory holds no tokenizer that can be used."""


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Description(msgspec.Struct):
    """What is of interest in a tokenizer.json."""

    decoder: dict[str, Any] | None = None
    added_tokens: list[_Added] = []


_Found = TypeVar("_Found")


class _OfTokens(dict[int, _Found]):
    """Something of each token; found when it is first asked for."""

    def __init__(self, find: Callable[[int], _Found]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, token: int) -> _Found:
        found = self[token] = self._find(token)
        return found


class _Hides(NamedTuple):
    """What detokenizers give where some tokens are hidden."""

    ids: frozenset[int]
    bytes_of: Callable[[int], bytes]
    piece_of: Callable[[int], str | int]


class Tokenizer:
    """Immutable after loading; encoding is safe from any thread."""

    def __init__(self, backend: Backend, description: _Description, config: Mapping[str, Any]) -> None:
        self._backend = backend
        self.config = config
        """What tokenizer_config.json says."""
        self.special_ids = frozenset(token.id for token in description.added_tokens if token.special)
        marks = frozenset(token.id for token in description.added_tokens if token.content in MARKERS)
        self._named_ids = self.special_ids | marks
        self.special_tokens = _special_tokens(config)
        """`bos_token` and the like → text."""
        ends = (self.special_tokens.get("eos_token"), config.get(_OTHER_END))
        self._ends = tuple(dict.fromkeys(end for end in ends if isinstance(end, str)))
        self._decoder = decoder_of(description.decoder)
        self._bytes = _OfTokens(self._find_bytes)
        self._bytes_of = self._bytes.__getitem__
        self._texts = _OfTokens(lambda token: self._bytes[token].decode("utf-8", "replace"))
        self._pieces = _OfTokens(self._find_piece)
        self._piece_of = self._pieces.__getitem__
        self._hiding: dict[frozenset[int], _Hides] = {}
        """Special tokens that are shown → how the others are hidden; a model has one or two such sets."""
        self.encoding = Encoding(backend)
        bos = self.special_tokens.get("bos_token")
        if config.get("add_bos_token") is True and bos is not None:
            bos_id = backend.token_to_id(bos)
            if bos_id is not None and bos_id not in self.encode(""):
                self.encoding = Encoding(backend, [bos_id])
        self.template_source: str | None = config.get("chat_template") or None
        response = config.get("response_template")
        self.response_template = "" if response is None else msgspec.json.encode(response).decode()
        """How transformers reads the model's answers, as JSON; "": not said."""
        self.use_template(self.template_source)

    def use_template(self, source: str | None) -> None:
        """Instead of the one that came with it; None: that one stays.  Raises `ChatTemplateError`."""
        if source is not None:
            check_template(source)
            self.template_source = source

    @classmethod
    def from_directory(cls, directory: Path | str) -> Tokenizer:
        """Of a directory, or of a GGUF file.

        Raises `TokenizerError` or `ChatTemplateError` with the file and the reason.
        """
        directory = Path(directory)
        if is_gguf(directory):
            return _from_gguf(directory)
        config = _read_config(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            return _from_transformers(directory, config)
        try:
            data = path.read_bytes()
            backend = tokenizers.Tokenizer.from_buffer(data)
            description = msgspec.json.decode(data, type=_Description)
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{path} cannot be read: {error}") from None
        if not backend.get_vocab_size():
            raise TokenizerError(f"{path}: its vocabulary is empty")
        backend.no_truncation()
        backend.no_padding()
        _add_missing(backend, description, config)
        return cls(backend, description, config)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids of what its files call `eos_token`: none, one, or two where they contradict each other."""
        ids = (self._backend.token_to_id(token) for token in self._ends)
        return tuple(token for token in ids if token is not None)

    @property
    def vocab_size(self) -> int:
        """Added tokens included; the model's may be larger."""
        size: int = self._backend.get_vocab_size()
        return max(size, max(self.special_ids, default=-1) + 1)

    @property
    def special_names(self) -> dict[str, int]:
        """Tokens that are never part of a text: text → id.  Special ones, and those that mark thoughts and
        calls though their tokenizer does not call them special, as Qwen's."""
        named = ((self._backend.id_to_token(token), token) for token in sorted(self._named_ids))
        return {text: token for text, token in named if text}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens (a BOS, say) as the model's tokenizer adds them."""
        return self.encoding.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.encoding.decode(ids, skip_special_tokens=skip_special_tokens)

    def token(self, token: int) -> str | None:
        """The vocabulary's own name of an id (with its marks for spaces), None if it has none."""
        return self._backend.id_to_token(token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, special ones too; empty for an unknown id."""
        return self._bytes[token]

    def token_text(self, token: int) -> str:
        """A token on its own; U+FFFD where it is a part of a character."""
        return self._texts[token]

    def detokenizer(
        self,
        context: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """Streaming text of what follows `context` (the prompt's ids; empty: the start of a text).  `shown`:
        special tokens that are not skipped."""
        hides = self._hides(shown) if skip_special_tokens else None
        if self._decoder is None:
            return WindowDetokenizer(
                lambda ids: self._backend.decode(ids, skip_special_tokens=False),
                context,
                hidden=hides.ids if hides else (),
            )
        if self._decoder.falls_back:
            return FallbackDetokenizer(
                hides.piece_of if hides else self._piece_of, context, strip_first_space=self._decoder.strips
            )
        return ByteDetokenizer(hides.bytes_of if hides else self._bytes_of, context)

    def special_of(self, texts: Collection[str]) -> frozenset[int]:
        """Those special tokens that have one of these texts."""
        return frozenset(token for token in self.special_ids if self.token(token) in texts)

    def _hides(self, shown: frozenset[int]) -> _Hides:
        hides = self._hiding.get(shown)
        if hides is None:
            hidden = self.special_ids - shown
            visible = _OfTokens(lambda token: b"" if token in hidden else self._bytes[token])
            pieces = _OfTokens[str | int](lambda token: "" if token in hidden else self._pieces[token])
            hides = self._hiding[shown] = _Hides(hidden, visible.__getitem__, pieces.__getitem__)
        return hides

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt's text; see `ChatTemplate.render`.  In this process: a server renders in a helper."""
        if self.chat_template is None:
            raise no_template()
        return self.chat_template.render(messages, **options)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """Compiled when it is first needed."""
        source = self.template_source
        return None if source is None else ChatTemplate(source, self.special_tokens)

    def _find_piece(self, token: int) -> str | int:
        """For `FallbackDetokenizer`."""
        byte = byte_of(self._backend.id_to_token(token) or "")
        return self._bytes[token].decode() if byte is None else byte

    def _find_bytes(self, token: int) -> bytes:
        content = self._backend.id_to_token(token)
        if content is None:
            return b""
        if self._decoder is not None:
            return self._decoder.to_bytes(content)
        return self._backend.decode([token], skip_special_tokens=False).encode()


def _read_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json with `chat_template` as one string."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = directory / name
        if path.is_file():
            try:
                read = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            except msgspec.MsgspecError as error:
                raise TokenizerError(f"{path} cannot be read: {error}") from None
            # (null says nothing: what the other file says stays)
            config.update({key: value for key, value in read.items() if value is not None})
            if name == "special_tokens_map.json":
                config[_OTHER_END] = _special_tokens(config).get("eos_token")
    try:
        config["chat_template"] = read_chat_template(directory, config.get("chat_template"))
    except (OSError, ValueError) as error:
        raise TokenizerError(str(error)) from None
    return config


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _add_missing(backend: tokenizers.Tokenizer, description: _Description, config: Mapping[str, Any]) -> None:
    """Adds what tokenizer_config.json says of tokens and tokenizer.json does not, as transformers does.

    That is tokens of `added_tokens_decoder`, and that `eos_token` and the like are special.  A name of the
    latter kind that has no id at all is left out: the model cannot know the id that it would be given.
    """
    known = {token.content for token in description.added_tokens}
    stated = config.get("added_tokens_decoder")
    entries: list[tuple[int, dict[str, Any]]] = []
    for key, entry in (stated if isinstance(stated, dict) else {}).items():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and key.isdecimal():
            entries.append((int(key), entry))
    for token_id, entry in sorted(entries, key=lambda pair: pair[0]):
        content = entry["content"]
        if content in known:
            continue
        free = backend.token_to_id(content) is None
        if free and token_id != backend.get_vocab_size():
            log.warning(
                "tokenizer_config.json: %r has the id %d, but the next one of tokenizer.json is %d; left out",
                content,
                token_id,
                backend.get_vocab_size(),
            )
            continue
        flags = {name: entry[name] for name in _ADDED_FLAGS if isinstance(entry.get(name), bool)}
        _add(backend, description, tokenizers.AddedToken(content, **flags))
        known.add(content)
    more = config.get("additional_special_tokens")
    named = [*_special_tokens(config).values(), *(more if isinstance(more, list) else ())]
    for content in named:
        if isinstance(content, str) and content not in known and backend.token_to_id(content) is not None:
            _add(backend, description, tokenizers.AddedToken(content, special=True, normalized=False))
            known.add(content)


def _add(backend: tokenizers.Tokenizer, description: _Description, token: tokenizers.AddedToken) -> None:
    (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    token_id = backend.token_to_id(token.content)
    if token_id is not None:
        description.added_tokens.append(_Added(token_id, token.content, token.special))


def _from_transformers(directory: Path, config: Mapping[str, Any]) -> Tokenizer:
    """For directories without tokenizer.json: a SentencePiece model, say, which transformers converts."""
    if not has_tokenizer(directory):
        raise TokenizerError(f"{directory} has no tokenizer: neither tokenizer.json nor tokenizer.model")
    # What it logs meanwhile are guesses at what is wrong; the error says it.
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    try:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise TokenizerError(
            f"{directory} has no tokenizer.json, and its tokenizer cannot be converted "
            f"({_first_line(error)}); save it with save_pretrained of transformers' fast tokenizer"
        ) from None
    finally:
        transformers_logging.set_verbosity(verbosity)
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise TokenizerError(
            f"{directory}: no tokenizer.json, and {type(loaded).__name__} has no fast form; convert it "
            "with save_pretrained of a fast tokenizer"
        )
    if not backend.get_vocab_size(with_added_tokens=False):
        raise TokenizerError(f"{directory}: the tokenizer's vocabulary is empty; its files are incomplete")
    backend.no_truncation()
    backend.no_padding()
    return _described(backend, config)


def _from_gguf(path: Path) -> Tokenizer:
    try:
        backend, config = read_gguf_tokenizer(path)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{str(path)!r}: {_first_line(error)}") from None
    return _described(backend, config)


def _described(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer(backend, msgspec.json.decode(backend.to_str(), type=_Description), config)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".:") if lines else type(error).__name__
