"""What README, CONTRIBUTING and docs/ say is so: commands parse, paths, functions and links exist.

Nothing is started here.  A command of `baton` is parsed by the real command line, and its values are read by
the declarations of the flags; of `python benchmarks/X.py` the options are compared with those that the file
declares; of `make` targets and variables; of `curl` the path with the routes.  What cannot be looked at like
this stands in `NOT_RUN`, with why.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main
import yaml

from baton.cli.main import app
from baton.gateway.http.rights import RIGHTS
from baton.launch.options import ServeOptions, flags_of
from baton.launch.options.sources import choose

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
SHELL = ("bash", "sh", "console")
NOT_RUN = {
    "source": "a step of the reader's shell",
    "python -m venv": "installs another engine over the network",
    "pip": "installs over the network; tests/launch and CI install from pyproject.toml",
    "git": "a step of a release",
    "export": "a step of the reader's shell",
    "twine": "uploads a release",
    "kubectl": "needs a cluster",
    "helm": "needs a cluster; tests/deploy render the chart",
    "docker": "needs a daemon and the network",
    "PREFILL=1": "a job of Slurm",
    "HOSTS=2": "a job of Slurm",
    "claude": "`make agents` runs it",
    "qwen": "`make agents` runs it",
    "aider": "`make agents` runs it",
}
"""Commands by their first words, and why nothing looks at them."""
FOREIGN = {"--json", "--no-compile"}
"""Options of other programs."""
MADE = {"latency.png", "trace.jsonl", "serve.yaml", "soak.json", "config.json", "llama.cpp", "answer.txt"}
"""A reader's files, and another engine."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_PATH = re.compile(r"(?:[\w.*-]+/)*[\w.*-]+\.(?:py|cpp|h|md|sh|toml)|(?:[\w.-]+/)+")
_PLACE = re.compile(r"((?:[\w.-]+/)*[\w-]+\.(?:py|cpp|h)):([\w.]+)")


class Command(NamedTuple):
    page: str
    words: tuple[str, ...]
    whole: bool = True
    """False: the name of a command in a sentence, perhaps without what it needs."""


def _blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, text in _FENCE.findall(page.read_text()):
        if language in languages:
            yield text


SHOWN = [
    (ROOT / name, text)
    for page in PAGES
    for name, text in re.findall(r"`(\S+\.py)`:\n\n```python\n(.*?)^```", page.read_text(), re.M | re.S)
]
"""Files that a page shows as they are."""


def _spans(page: Path) -> list[str]:
    return _SPAN.findall(_FENCE.sub("", page.read_text()))


def _commands() -> Iterator[Command]:
    for page in PAGES:
        for text in _blocks(page, *SHELL):
            for line in text.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                while words:
                    end = words.index("&&") if "&&" in words else len(words)
                    yield Command(page.name, tuple(words[:end]))
                    words = words[end + 1 :]
        for span in _spans(page):
            if re.match(r"(baton|make|python \S+\.py) ", span) and "…" not in span:
                yield Command(page.name, tuple(shlex.split(span)), whole=False)


COMMANDS = sorted(set(_commands()))


@cache
def _files() -> frozenset[str]:
    """Every file of ours and every directory (with a slash at its end), from the root."""
    found = {path.name for path in ROOT.iterdir() if path.is_file()}
    for top in ("src", "tests", "benchmarks", "tools", "docs", "findings", ".ci"):
        for path in (ROOT / top).rglob("*"):
            if "__pycache__" not in path.parts:
                found.add(path.relative_to(ROOT).as_posix() + "/" * path.is_dir())
        found.add(f"{top}/")
    return frozenset(found)


@cache
def _options(script: str) -> tuple[frozenset[str], bool]:
    """(options, whether there are positional arguments) of a script that uses argparse."""
    options, positional = {"--help"}, False
    for node in ast.walk(ast.parse((ROOT / script).read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            names = [one.value for one in node.args if isinstance(one, ast.Constant)]
            options.update(name for name in names if name.startswith("-"))
            positional |= any(not name.startswith("-") for name in names)
    return frozenset(options), positional


@cache
def _makefile() -> tuple[frozenset[str], frozenset[str]]:
    """(targets, variables)."""
    text = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([\w-]+):(?!=)", text, re.M)
    return frozenset(targets), frozenset(re.findall(r"^(\w+) [?:]=", text, re.M))


def _subcommand(words: list[str]) -> tuple[Any, str, list[str]]:
    """(the command, its name, what follows its name)."""
    command, name = typer.main.get_command(app), "baton"
    while hasattr(command, "commands") and words:
        name, *words = words
        command = command.commands[name]
    return command, name, words


def _check_baton(words: list[str], whole: bool) -> None:
    command, name, words = _subcommand(words)
    if not whole or "--help" in words:
        known = {
            option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in words if word.startswith("--")} <= known | {"--help"}
        return
    context = command.make_context(name, words)
    declared = {one.name for one in flags_of(ServeOptions)} - {"config"}
    given = {name: value for name, value in context.params.items() if name in declared}
    choose(ServeOptions, given, environment={})


def _check_script(script: str, words: list[str]) -> None:
    options, positional = _options(script)
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in options, f"{script} has no {word}"
    if words and not words[0].startswith("-"):
        assert positional, f"{script} takes no {words[0]!r}"


def _check_curl(words: list[str]) -> None:
    (url,) = [word for word in words if "://" in word or word.startswith("HOST:")]
    path = "/" + url.split("://")[-1].partition("/")[2].partition("?")[0]
    routes = [re.sub(r"\{\w+(:path)?\}", "[^/]+", route) for route in RIGHTS]
    assert any(re.fullmatch(route, path) for route in routes), path
    for option in ("-d", "--json"):
        if option in words:
            json.loads(words[words.index(option) + 1])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: f"{one.page}: {' '.join(one.words)}"[:100])
def test_commands_can_be_given_like_this(command):
    words = [word for word in command.words if not word.startswith("OMP_")]
    if ">" in words:
        words = words[: words.index(">")]
    if words[0] == ".venv/bin/pytest":
        assert all((ROOT / word).exists() for word in words[1:] if not word.startswith("-"))
    elif words[0] == ".venv/bin/pre-commit":
        assert (ROOT / ".pre-commit-config.yaml").exists()
    elif words[0] == "make":
        targets, variables = _makefile()
        for word in words[1:]:
            name, assigned, _ = word.partition("=")
            assert name in (variables if assigned else targets), word
    elif words[0] == "curl":
        _check_curl(words[1:])
    elif words[0] == "baton":
        _check_baton(words[1:], command.whole)
    elif words[:2] == ["python", "-m"] and words[2] != "venv":
        assert f"src/{words[2].replace('.', '/')}.py" in _files()
    elif words[0] == "python" and words[1].endswith(".py"):
        assert words[1] in _files()
        _check_script(words[1], words[2:])
    else:
        told = {" ".join(words[:count]) for count in (1, 3)} | {Path(words[0]).name}
        assert told & set(NOT_RUN), (
            "nothing here knows this command: teach the test, or say why it is not run"
        )


def test_flags_that_are_mentioned_exist():
    known = {
        option
        for script in _files()
        if re.match(r"(benchmarks|tools)/[^/]+\.py", script)
        for option in _options(script)[0]
    }
    commands = [typer.main.get_command(app)]
    while commands:
        command: Any = commands.pop()
        commands += getattr(command, "commands", {}).values()
        for parameter in command.params:
            known.update((*parameter.opts, *parameter.secondary_opts))
    unknown = {
        (page.name, option)
        for page in PAGES
        for span in _spans(page)
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)
        if option not in known | FOREIGN and not option.endswith("-")
    }
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page):
    """From the root, from `src/baton`, or any end of a path: `engine/core.py`, `linear.cpp`, `handover/`."""
    ends = {f"/{path}" for path in _files()}
    missing = []
    for span in _spans(page):
        path = _PLACE.sub(r"\1", span)
        if not _PATH.fullmatch(path) or path in MADE or path.startswith(("sk-", ".")):
            continue
        end = re.compile(re.escape(f"/{path}").replace(r"\*", "[^/]*") + r"\Z")
        if not any(map(end.search, ends)):
            missing.append(span)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_functions_exist(page):
    """`engine/core.py:EngineCore.on_message`: the file has this class, function or constant."""
    missing = []
    for path, name in _PLACE.findall("\n".join(_spans(page))):
        found = [file for file in _files() if f"/{file}".endswith(f"/{path}")]
        if len(found) != 1 or not _has(found[0], name):
            missing.append((path, name, found))
    assert not missing


@cache
def _names(file: str) -> frozenset[str]:
    text = (ROOT / file).read_text()
    if not file.endswith(".py"):
        return frozenset(re.findall(r"\b(\w+)\(", text)) | set(re.findall(r"BATON_EXPORT\((\w+)\)", text))
    found = set()

    def look(node: ast.AST, inside: str) -> None:
        for one in ast.iter_child_nodes(node):
            if isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(inside + one.name)
                look(one, f"{inside}{one.name}.")
            elif isinstance(one, ast.Assign | ast.AnnAssign):
                targets = one.targets if isinstance(one, ast.Assign) else [one.target]
                found.update(inside + target.id for target in targets if isinstance(target, ast.Name))
            elif isinstance(one, ast.If | ast.Try):
                look(one, inside)

    look(ast.parse(text), "")
    return frozenset(found)


def _has(file: str, name: str) -> bool:
    return name in _names(file)


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in _LINK.findall(_FENCE.sub("", page.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            assert anchor in _anchors(there), target


def test_readme_is_one_screen():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


def test_every_page_is_in_the_index():
    index = set(_LINK.findall((ROOT / "docs/README.md").read_text()))
    assert index >= {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


def test_every_benchmark_is_in_the_list():
    page = (ROOT / "docs/benchmarks.md").read_text()
    files = [path.name for path in (ROOT / "benchmarks").glob("*.py") if not path.name.startswith("_")]
    assert not [name for name in files if f"python benchmarks/{name}" not in page]


def test_a_file_that_is_shown_is_that_file():
    assert SHOWN
    assert not [path.name for path, text in SHOWN if path.read_text() != text]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_other_examples_can_be_read(page):
    for text in _blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("baton"):
                module = __import__(node.module, fromlist=["*"])
                assert all(hasattr(module, one.name) for one in node.names)
    for text in _blocks(page, "toml"):
        tomllib.loads(text)
    for text in _blocks(page, "yaml"):
        names = {one.name for one in flags_of(ServeOptions)}
        assert {key.replace("-", "_") for key in yaml.safe_load(text)} <= names
