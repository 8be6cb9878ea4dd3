"""Where a flag's value comes from: the command line, or a program's arguments, go before the environment, the
environment before the config file, and what nobody gave is the default.

An error names the flag as the user wrote it.  What checks values says `--max-num-seqs 0: …`; `Chosen.spelled`
turns that into `BATON_MAX_NUM_SEQS=0: …`, `serve.yaml: max_num_seqs 0: …` or `max_num_seqs=0: …`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from baton.launch.limits import OptionError
from baton.launch.options.flag import Flag, Options, flags_of, shortened

O = TypeVar("O", bound=Options)  # noqa: E741
Source = Literal["default", "config file", "environment", "command line", "argument"]

PREFIX = "BATON_"
OTHER_VARIABLES = {
    "BATON_NATIVE": "`0`: the compiled kernels are neither built nor used; `1`: no wheel without them; "
    "`cpu`: built for this machine's CPU alone, as `make serve` does.",
    "BATON_CPU_ISA": "Use the kernels of this instruction set, for tests: `amx`, `avx512bf16`, `avx2`, …",
    "BATON_SPIN_US": "Microseconds that a compute thread looks for more work before it sleeps.",
    "BATON_INSTANCE_SECRET": "Set by the supervisor for the instances that it starts.",
    "BATON_CLUSTER_SECRETS": "The same, with what is in the files of `--cluster-secret`.",
}
"""Variables that are no flags."""

_HEAD = re.compile(r"--([a-z0-9]+(?:-[a-z0-9]+)*)(?: (.*?))?: ", re.DOTALL)
_MENTION = re.compile(r"(?<![\w-])--([a-z0-9]+(?:-[a-z0-9]+)*)")
_KUBERNETES = re.compile(r"_(SERVICE_(HOST|PORT)\w*|PORT(_\d+_(TCP|UDP|SCTP)\w*)?)$")
_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


class Origin(NamedTuple):
    """Where a value came from, and what its flag is called there."""

    source: Source
    name: str
    file: str = ""

    def head(self, value: str | None) -> str:
        """The beginning of an error."""
        if value is None:
            return f"{self.file}: {self.name}" if self.file else self.name
        between = "=" if self.source in ("environment", "argument") else " "
        return f"{self.file + ': ' if self.file else ''}{self.name}{between}{value}"

    def mention(self) -> str:
        return f"{self.name} in {self.file}" if self.file else self.name

    def __str__(self) -> str:
        return (
            f"{self.source} ({self.mention()})"
            if self.source in ("config file", "environment")
            else self.source
        )


@dataclass(frozen=True)
class Chosen(Generic[O]):
    """The value of every flag, and who chose it."""

    options: O
    origins: Mapping[str, Origin]
    """Of the flags that were given."""
    style: Literal["command line", "argument"]
    """How flags that were not given are called."""
    remarks: tuple[str, ...] = field(default=())
    """Warnings for the user, one line each."""

    def given(self, name: str, *sources: Source) -> bool:
        """Whether it was given, in one of these ways."""
        origin = self.origins.get(name)
        return origin is not None and (not sources or origin.source in sources)

    @contextmanager
    def spelled(self) -> Iterator[None]:
        """Errors about flags from within name them as the user did."""
        with _spelled(type(self.options), self.origins, self.style):
            yield

    def as_dict(self) -> dict[str, Any]:
        """For people: every flag's value, secrets hidden, and where those that were given come from."""
        flags = flags_of(type(self.options))
        return {
            "flags": {one.name: one.public(getattr(self.options, one.name)) for one in flags},
            "given": {one.name: str(self.origins[one.name]) for one in flags if one.name in self.origins},
        }


def choose(
    kind: type[O],
    given: Mapping[str, Any],
    *,
    style: Literal["command line", "argument"] = "command line",
    environment: Mapping[str, str] | None = None,
    quiet: bool = False,
    known: type[Options] | None = None,
) -> Chosen[O]:
    """Options from everywhere.

    `given`: what the command line (texts, lists of texts, bools) or a program has; None on the command line
    is "not given".  `quiet`: with the defaults of `LLM`.  `known`: the flags that a config file may have;
    those that are not of `kind` are skipped; default: `kind`.  Raises `OptionError`.
    """
    environment = os.environ if environment is None else environment
    flags = {one.name: one for one in flags_of(kind)}
    every = flags_of(known or kind)
    origins: dict[str, Origin] = {}
    values = {name: one.default_in(quiet=quiet) for name, one in flags.items()}

    def take(one: Flag, value: object, origin: Origin) -> None:
        origins[one.name] = origin
        with _spelled(kind, origins, style):
            values[one.name] = _read(one, value, origin)

    variables = {one.variable: one for one in every}
    ours: dict[str, tuple[object, Origin]] = {}
    for name, value in given.items():
        if name not in flags:
            raise OptionError(_unknown_argument(name, flags, every))
        if value is None and (style == "command line" or flags[name].default is None):
            continue
        spelling = flags[name].option if style == "command line" else name
        ours[name] = (value, Origin(style, spelling))
    for variable, one in variables.items():
        text = environment.get(variable, "")
        if one.name not in flags or one.name in ours:
            continue
        if one.declared.secret and variable in environment and not text.strip():
            raise OptionError(
                f"{variable}: an empty key would let everybody in; unset it, or give a real one"
            )
        if text.strip() and not (one.name == "port" and _ADDRESS.match(text)):
            ours[one.name] = (text, Origin("environment", variable))
    path, where = ours.get("config", (None, None))
    if path is not None and where is not None:
        take(flags["config"], path, where)
        for name, entry in _from_file(str(values["config"]), every).items():
            if name in flags:
                ours.setdefault(name, entry)
    for name, (value, origin) in ours.items():
        take(flags[name], value, origin)
    with _spelled(kind, origins, style):
        options = kind(**values)
    return Chosen(options, origins, style, _remarks(environment, variables))


def _read(one: Flag, value: object, origin: Origin) -> Any:
    if origin.source == "argument":
        return one.read(value)
    if one.many:
        texts = value.split() if origin.source == "environment" and isinstance(value, str) else value
        return one.read(texts)
    if isinstance(value, str):
        value = one.from_text(value)
    return one.read(value)


def _from_file(path: str, every: tuple[Flag, ...]) -> dict[str, tuple[object, Origin]]:
    from baton.launch.options.config_file import read_config

    names = {one.name for one in every} - {"config"}
    objects = {one.name for one in every if one.is_object}
    found: dict[str, tuple[object, Origin]] = {}
    for key, value in read_config(path).items():
        name = key.replace("-", "_")
        if isinstance(value, dict) and name not in objects:
            raise OptionError(
                f"{path}: {shortened(key)}: a table; every flag is a key of its own, outside of tables"
            )
        if name not in names:
            dashes = "-" in key or "_" not in key
            written = {one.replace("_", "-") if dashes else one: one for one in names}
            raise OptionError(f"{path}: {shortened(key)}: no such flag{_nearest(key, written)}")
        if name in found:
            raise OptionError(f"{path}: {key}: stands there twice, with - and with _")
        found[name] = (value, Origin("config file", key, path))
    return found


def _unknown_argument(name: str, flags: Mapping[str, Flag], every: tuple[Flag, ...]) -> str:
    if any(one.name == name for one in every):
        return f"{name}: LLM has no such argument; it is a flag of `baton serve`"
    return f"{name}: no such argument{_nearest(name, flags)}"


def _nearest(name: str, names: Mapping[str, object]) -> str:
    """`; did you mean X?`, or where all of them stand."""
    from difflib import get_close_matches

    close = get_close_matches(name, names, 1)
    return f"; did you mean {close[0]}?" if close else "; docs/flags.md lists them all"


def _remarks(environment: Mapping[str, str], variables: Mapping[str, Flag]) -> tuple[str, ...]:
    known = {*variables, *OTHER_VARIABLES}
    return tuple(
        f"{name} in the environment: no such flag{_nearest(name, variables)}"
        for name in environment
        if name.startswith(PREFIX) and name not in known
        if not _KUBERNETES.search(name)  # what it sets for a service called baton
    )


@contextmanager
def _spelled(
    kind: type[Options], origins: Mapping[str, Origin], style: Literal["command line", "argument"]
) -> Iterator[None]:
    try:
        yield
    except OptionError as error:
        message = in_users_words(str(error), kind, origins, style)
        if message == str(error):
            raise
        raise OptionError(message) from None


def in_users_words(
    message: str,
    kind: type[Options],
    origins: Mapping[str, Origin],
    style: Literal["command line", "argument"],
) -> str:
    """A message that names flags as on the command line, with the names that the user gave them."""
    names = {one.name for one in flags_of(kind)}

    def origin(option: str) -> Origin | None:
        name = option.replace("-", "_")
        if name not in names:
            return None
        return origins.get(name) or Origin(style, f"--{option}" if style == "command line" else name)

    def mention(match: re.Match[str]) -> str:
        found = origin(match[1])
        if found is not None:
            return found.mention()
        turned_off = origin(match[1].removeprefix("no-"))
        if turned_off is None or turned_off.source == "command line":
            return match[0]
        return f"{turned_off.head('False' if turned_off.source == 'argument' else 'false')}"

    start = _HEAD.match(message)
    first = origin(start[1]) if start else None
    if start is None or first is None:
        return _MENTION.sub(mention, message)
    return f"{first.head(start[2])}: {_MENTION.sub(mention, message[start.end() :])}"
