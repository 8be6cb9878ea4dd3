"""What a flag is: one field of a dataclass, with its meaning, its bounds and its unit beside it.

    max_num_seqs: int = flag(256, "Sequences in one step at most.", least=1, most=1 << 16, unit="sequences")

The field's name gives all spellings (`--max-num-seqs`, `max_num_seqs=`, `BATON_MAX_NUM_SEQS`, the key of a
config file), its type says what is read: `bool`, `int`, `float`, `str`, `Literal[...]`, `tuple[str, ...]`
(repeatable), and unions of these; `| None` is for "not given", and `unset` says what that means.  With
`| JsonObject` a text is that of a JSON object, and a program or a config file may give the object itself:
the flag's value is the text.

Nothing here imports what is slow: `baton --help` reads every declaration.
"""

from __future__ import annotations

import inspect
import json
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Final, Literal

from baton.launch.limits import OptionError, check_range, shown

_METADATA = "flag"
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})
HIDDEN: Final = "(hidden)"
"""Stands for a secret wherever values are shown."""
JsonObject = Mapping[str, Any]


@dataclass(frozen=True)
class Declared:
    """What `flag` was given besides the default."""

    help: str
    unit: str = ""
    """What a number counts, for messages and documents: "tokens"."""
    least: float | None = None
    most: float | None = None
    unset: str = ""
    """What None means, as it follows "Default: "."""
    quiet: Any = ...
    """The default of `LLM` and of the commands that use it, where that is another than `baton serve`'s."""
    secret: bool = False
    """Its value is never shown."""
    size: bool = False
    """Bytes, also as a text: 4GiB, 500M."""
    short: str = ""
    """A second name on the command line, such as `-tp`."""
    metavar: str = ""
    variable: str = ""
    """In the environment, where that is another name than the flag's."""
    check: Callable[[Any], object] | None = None
    """Raises `ValueError` with what to give instead, for texts with a form of their own."""


def flag(default: Any, help: str, **declared: Any) -> Any:
    """A field of an options dataclass.  See `Declared` for the keywords."""
    return field(
        default=default, metadata={_METADATA: Declared(help, **declared)}, repr=not declared.get("secret")
    )


@dataclass(frozen=True)
class Flag:
    """A declared flag, with what its field says."""

    name: str
    """Of the field and of the Python argument."""
    section: str
    default: Any
    declared: Declared
    kinds: tuple[type, ...]
    """Of bool, int, float, str."""
    choices: tuple[str, ...]
    many: bool
    is_object: bool
    """Of JSON."""

    @property
    def option(self) -> str:
        """On the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """In the environment."""
        return self.declared.variable or f"BATON_{self.name.upper()}"

    @property
    def is_switch(self) -> bool:
        return self.kinds == (bool,)

    def default_in(self, *, quiet: bool) -> Any:
        return self.default if not quiet or self.declared.quiet is ... else self.declared.quiet

    def default_in_words(self, *, quiet: bool) -> str:
        default = self.default_in(quiet=quiet)
        if default in (None, ()):
            return self.declared.unset
        if isinstance(default, bool):
            return "on" if default else "off"
        return f"{default:g}" if isinstance(default, float) else str(default)

    def public(self, value: object) -> object:
        """The value, unless it is a secret."""
        return HIDDEN if self.declared.secret and value not in (None, ()) else value

    def expected(self) -> str:
        """What to give, in words."""
        declared = self.declared
        if declared.size:
            return _SIZES
        if self.is_object:
            return "a JSON object"
        words = []
        if self.choices:
            words.append(f"one of {', '.join(self.choices)}" if len(self.choices) > 1 else self.choices[0])
        if int in self.kinds or float in self.kinds:
            words.append(self._range())
        elif bool in self.kinds:
            words.append("true or false")
        elif str in self.kinds:
            words.append("texts" if self.many else "a text")
        return ", or ".join(words)

    def from_text(self, text: str) -> Any:
        """The value of a text, on the command line or in the environment.  Raises `OptionError`."""
        if text in self.choices:
            return text
        if self.declared.size:
            return parse_bytes(self.option, text)
        lowered = text.strip().lower()
        if bool in self.kinds and lowered in _TRUE | _FALSE:
            return lowered in _TRUE
        for kind in (int, float):
            if kind in self.kinds:
                try:
                    return kind(text)
                except ValueError:
                    pass
        if str in self.kinds:
            return text
        raise self._wrong(text or "''")

    def read(self, value: object) -> Any:
        """The value of what a program or a file gave, checked; what it returned, it returns again.

        Raises `OptionError`, which names the flag as on the command line.
        """
        if value is None and self.default is None:
            return None
        value = self._read_many(value) if self.many else self._read_one(value)
        declared = self.declared
        if isinstance(value, int | float) and declared.least is not None and declared.most is not None:
            check_range(self.option, value, declared.least, declared.most, declared.unit)
        if declared.check is not None:
            try:
                declared.check(value)
            except ValueError as error:
                what = self.option if self.many else f"{self.option} {self.public(value)}"
                raise OptionError(f"{what}: {error}") from None
        return value

    def _read_many(self, value: object) -> tuple[str, ...]:
        items = () if value is None else (value,) if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            raise self._wrong(repr(value))
        return tuple(items)

    def _read_one(self, value: object) -> Any:
        if self.declared.size and isinstance(value, int | str) and not isinstance(value, bool):
            return parse_bytes(self.option, value)
        if self.is_object and isinstance(value, Mapping):
            return self._as_text(value)
        if hasattr(value, "__fspath__") and str in self.kinds:
            return str(value)
        if isinstance(value, str):
            if value in self.choices or str in self.kinds:
                return value
        elif isinstance(value, bool):
            if bool in self.kinds:
                return value
        elif int in self.kinds or float in self.kinds:
            if float in self.kinds and isinstance(value, float):
                return value
            try:
                number = operator.index(value)  # type: ignore[arg-type]
            except TypeError:
                raise self._wrong(repr(value)) from None
            return self._as_float(number) if int not in self.kinds else number
        plain = isinstance(value, str) and set(self.kinds) <= {str}
        raise self._wrong(value if plain else repr(value))  # type: ignore[arg-type]

    def _as_text(self, value: JsonObject) -> str:
        try:
            return json.dumps(dict(value), ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):  # what JSON has no form for
            raise self._wrong(repr(value)) from None

    def _as_float(self, number: int) -> float:
        try:
            return float(number)
        except OverflowError:
            return math.copysign(math.inf, number)

    def _wrong(self, text: str) -> OptionError:
        text = HIDDEN if self.declared.secret else shortened(text)
        expected = self.expected()
        if int in self.kinds and not self.declared.size and "an integer" not in expected:
            expected += ", an integer"
        return OptionError(f"{self.option} {text}: give {expected}")

    def _range(self) -> str:
        declared = self.declared
        what = declared.unit or ("an integer" if int in self.kinds else "a number")
        if declared.least is None or declared.most is None:
            return what
        return f"{what} from {shown(declared.least)} to {shown(declared.most)}"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of the groups of flags.  Making one reads and checks every value, whoever makes it.

    A group has a `title`, under which help and documents show it, and may have a `check` of what its flags
    mean together.  Raises `OptionError`, whose message names flags as on the command line.
    """

    title: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for one in flags_of(type(self)):
            object.__setattr__(self, one.name, one.read(getattr(self, one.name)))
        for group in type(self).__mro__:
            if issubclass(group, Options) and "check" in group.__dict__:
                group.check(self)

    def check(self) -> None:
        """Of flags that depend on each other.  Raises `OptionError`."""


_FLAGS: dict[type, tuple[Flag, ...]] = {}


def flags_of(options: type[Options]) -> tuple[Flag, ...]:
    """Every flag of a group, or of what is composed of groups, in the order of the declarations."""
    if options not in _FLAGS:
        _FLAGS[options] = _flags_of(options)
    return _FLAGS[options]


def _flags_of(options: type[Options]) -> tuple[Flag, ...]:
    declared = {one.name: one for one in fields(options)}
    found: dict[str, Flag] = {}
    for group in options.__mro__:
        own = inspect.get_annotations(group)
        hints = typing.get_type_hints(group) if own else {}
        for name in own:
            if name in declared and name not in found:
                found[name] = _flag(declared[name], hints[name], group.__dict__.get("title", ""))
    return tuple(found.values())


def _flag(one: Field[Any], hint: Any, section: str) -> Flag:
    kinds: list[type] = []
    choices: list[str] = []
    many = is_object = False
    for part in _parts(hint):
        if typing.get_origin(part) is Literal:
            choices += typing.get_args(part)
        elif typing.get_origin(part) is tuple:
            many = True
            kinds.append(str)
        elif part == JsonObject:
            is_object = True
        elif part is not type(None):
            kinds.append(part)
    declared = one.metadata[_METADATA]
    return Flag(one.name, section, one.default, declared, tuple(kinds), tuple(choices), many, is_object)


def _parts(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


_UNITS = {
    "": 1,
    **{"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12},
    **{"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40},
}
_MAX_BYTES = 1 << 50
_SIZES = "a number of bytes up to 1024 TiB, for example 4GiB or 500M"


def parse_bytes(option: str, text: int | str) -> int:
    """'4GiB', '512m', '1000000', 1000000 → bytes.  Raises `OptionError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", str(text).strip().lower())
    if not match or match[2] not in _UNITS or not 1 <= float(match[1]) * _UNITS[match[2]] <= _MAX_BYTES:
        raise OptionError(f"{option} {shortened(str(text))}: give {_SIZES}")
    return int(float(match[1]) * _UNITS[match[2]])


def shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:40]}…"
