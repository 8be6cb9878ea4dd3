"""`docs/flags.md`: every flag with all its names, made from the declarations.

python -m baton.launch.options.document > docs/flags.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby

from baton.launch.options import EngineOptions, ServeOptions
from baton.launch.options.flag import Flag, flags_of
from baton.launch.options.sources import OTHER_VARIABLES

COMMAND = "python -m baton.launch.options.document > docs/flags.md"

_HEAD = f"""\
<!-- Made by `{COMMAND}`; edit src/baton/launch/options/ instead. -->
# Flags

Every flag has one declaration, in `src/baton/launch/options/`, and the same name everywhere:

| where | how |
| --- | --- |
| command line | `baton serve --max-num-seqs 64`; switches: `--fair-queuing`, `--no-fair-queuing` |
| Python | `LLM(max_num_seqs=64)`; flags marked * are of `baton serve` alone; a JSON object may be a `dict` |
| environment | `BATON_MAX_NUM_SEQS=64`; switches: `true`, `false`; several values: with spaces between |
| config file | `max-num-seqs: 64` (YAML) or `max-num-seqs = 64` (TOML), or with `_`; objects may be tables |

The file is named with `--config FILE`, `LLM(config=FILE)` or `BATON_CONFIG`. The command line (or the
argument of `LLM`) goes before the environment, the environment before the file, and what is not given
anywhere is the default. A value that cannot be served is one line that names the flag where it was given;
a key of the file that is no flag is an error as well, and an unknown `BATON_` variable a warning. `baton
generate`, `chat`, `bench throughput` and `model-dir` have some of these flags on their command line, and
take the others that `LLM` has from the environment and the file.

```yaml
# baton serve --config serve.yaml
model: ./my-checkpoint
served-model-name: [mine, mine-latest]
max-model-len: 8192
kv-cache-memory-bytes: 8GiB
host: 0.0.0.0
```

Keys belong into `BATON_API_KEY` and `BATON_ADMIN_KEY`, or into a file that only the server's user can read:
everybody on the machine can see a command line. An empty `BATON_API_KEY` or `BATON_ADMIN_KEY` is an error,
as it would let everybody in. `GET /server_info` (for operators) shows the value of every flag, secrets
hidden, and where those that were given come from.
"""

_COLUMNS = "| flag | environment | takes | default | meaning |\n| --- | --- | --- | --- | --- |"
_OTHERS = """\
## Other variables

| variable | meaning |
| --- | --- |
"""


def document() -> str:
    """Markdown."""
    return "\n".join(_sections())


def _sections() -> Iterator[str]:
    yield _HEAD
    python = {one.name for one in flags_of(EngineOptions)}
    for title, flags in groupby(flags_of(ServeOptions), lambda one: one.section):
        yield f"## {title}\n\n{_COLUMNS}"
        yield from (_row(one, python) for one in flags)
        yield ""
    yield _OTHERS + "\n".join(f"| `{name}` | {text} |" for name, text in OTHER_VARIABLES.items()) + "\n"


def _row(one: Flag, python: set[str]) -> str:
    short = f", `{one.declared.short}`" if one.declared.short else ""
    name = f"`{one.option}`{short}" if one.name != "model" else "`MODEL` (the argument), `model=`"
    mark = "" if one.name in python else " *"
    cells = (name + mark, f"`{one.variable}`", kind_in_words(one), _default(one), one.declared.help)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def kind_in_words(one: Flag) -> str:
    """Type, choices, bounds and unit."""
    if one.declared.secret:
        return "texts, never shown"
    if one.choices and not set(one.kinds) & {int, float}:
        return ", ".join(f"`{choice}`" for choice in one.choices)
    return one.expected()


def _default(one: Flag) -> str:
    def words(quiet: bool) -> str:
        value = one.default_in(quiet=quiet)
        if value in (None, ()):
            return one.declared.unset
        return f"`{one.default_in_words(quiet=quiet)}`"

    served, quiet = words(False), words(True)
    return served if served == quiet else f"{served}; `LLM`: {quiet}"


if __name__ == "__main__":
    sys.stdout.write(document())
