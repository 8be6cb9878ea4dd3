"""The command line and the Python API, as a user runs them."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from baton import LLM, SamplingParams, __version__
from baton.launch.options import ServeOptions
from baton.launch.planning.plan import make_plan
from tests.e2e.server import child_pids, is_engine


def baton(*arguments: str, stdin: str = "", timeout: float = 180) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "baton", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "COLUMNS": "160"},
    )


class Terminal:
    """`baton` in a pseudo-terminal for input and output; stderr apart."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "baton", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_own_terminal,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)
        self.seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
        self.process.stderr.close()

    def expect(self, pattern: str, deadline_s: float = 90) -> str:
        """Reads until the pattern shows; returns what came up to its end, and forgets that."""
        end = time.monotonic() + deadline_s
        while not (found := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self._master], [], [], max(0, end - time.monotonic()))
            assert ready, f"{pattern!r} did not show: {self.seen!r}"
            try:
                self.seen += os.read(self._master, 65536).decode(errors="replace")
            except OSError:
                pytest.fail(f"{pattern!r} did not show: {self.seen!r}; {self.process.stderr.read()!r}")
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def type(self, text: str) -> None:
        """Keys; `\\x03` is Ctrl-C and `\\x04` Ctrl-D, as the terminal makes of them."""
        os.write(self._master, text.encode())

    def interrupt_prompt(self, deadline_s: float = 60) -> None:
        """Ctrl-C at a prompt that `expect` has seen.

        readline shows its prompt a moment before it can be interrupted: what comes in between is lost until
        the next key.  Behind the prompt the main thread sleeps only where readline waits for a key.
        """
        end = time.monotonic() + deadline_s
        stat = f"/proc/{self.process.pid}/task/{self.process.pid}/stat"
        while True:
            with open(stat) as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "S":
                    break
            assert time.monotonic() < end, "the prompt does not wait for a key"
            time.sleep(0.01)
        self.type("\x03")

    def leave(self, deadline_s: float = 90) -> tuple[int, str]:
        """Waits for the end: (exit code, stderr)."""
        code = self.process.wait(deadline_s)
        return code, self.process.stderr.read().decode()

    def engine(self) -> int:
        """Process id of the engine, once it runs."""
        return self.child(is_engine)

    def child(self, wanted: Callable[[int], bool], deadline_s: float = 90) -> int:
        """Process id of the first child for which `wanted` says so, once there is one."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            try:
                tasks = os.listdir(f"/proc/{self.process.pid}/task")
            except OSError:
                break
            for task in tasks:
                path = f"/proc/{self.process.pid}/task/{task}/children"
                with open(path) as file:
                    found = [int(pid) for pid in file.read().split() if wanted(int(pid))]
                if found:
                    return found[0]
            time.sleep(0.01)
        raise AssertionError("no such process was started")


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores it for what it runs in the background


def test_version_and_help() -> None:
    assert baton("--version").stdout.strip() == f"baton {__version__}"
    text = baton("serve", "--help").stdout
    for flag in ("--max-model-len", "--max-num-seqs", "--tensor-parallel-size", "--api-key", "--prefill"):
        assert flag in text


def test_the_directory_of_a_model(tmp_path: Path) -> None:
    """For tools that load the tokenizer themselves; `root` of /v1/models says the same."""
    directory = baton("model-dir").stdout.strip()
    assert (Path(directory) / "tokenizer.json").is_file()
    assert baton("model-dir", directory).stdout.strip() == directory
    assert make_plan(ServeOptions()).served.root == directory
    nothing = baton("model-dir", str(tmp_path))
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert "config.json" in nothing.stderr


def test_generate_and_chat() -> None:
    result = baton("generate", "--chat", "-t", "0", "Hello! Who are you?")
    assert result.returncode == 0, result.stderr
    assert "Baton" in result.stdout
    talk = baton("chat", "-t", "0", stdin="Hello! Who are you?\n/new\n/quit\n")
    assert talk.returncode == 0, talk.stderr
    assert "Baton" in talk.stdout.split(">", 1)[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "/no/such/model"), "no such directory"),
        (("serve", "--max-model-len", "99999"), "--max-model-len 99999"),
        (("serve", "--num-threads", "0"), "--num-threads 0"),
        (("serve", "--tensor-parallel-size", "3"), "--tensor-parallel-size 3"),
        (("serve", "--kv-cache-memory-bytes", "lots"), "--kv-cache-memory-bytes lots"),
        (("serve", "--prefill", "-1"), "--prefill -1"),
        (("serve", "--instance"), "--join HOST:PORT"),
        (("serve", "--join", "127.0.0.1:8000"), "--instance"),
        (("serve", "--instance", "--join", "nowhere"), "--join nowhere"),
        (("serve", "--instance", "--join", "127.0.0.1:1", "--decode", "1"), "give it a --label"),
        (("serve", "--instance", "--join", "127.0.0.1:1", "--host", "0.0.0.0"), "--host 0.0.0.0"),
        (("serve", "--instance", "--join", "127.0.0.1:1", "--port", "80"), "--port 80"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    result = baton(*arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "-t", "-1", "x"), "temperature"),
        (("generate", "-n", "0", "x"), "max_tokens"),
        (("generate", "-n", "100", "--max-model-len", "100", "x"), "--max-tokens 100: the context is 100"),
        (("chat", "--top-p", "2"), "top_p"),
        (("chat", "-n", "99999999"), "--max-tokens 99999999: the context is"),
        (("generate",), "the prompt is empty"),
    ],
)
def test_a_mistake_is_known_before_the_model_is_loaded(arguments: tuple[str, ...], words: str) -> None:
    result = baton(*arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_standard_input_is_a_prompt_without_its_last_line_break() -> None:
    once, twice = (baton("generate", "-t", "0", "-n", "8", stdin=text).stdout for text in ("A\n", "A\n\n"))
    assert not once.startswith("A\n")
    assert twice.startswith("A\n")
    with Terminal("generate", "-t", "0", "-n", "8") as terminal:
        os.set_blocking(terminal.process.stderr.fileno(), True)
        assert b"Ctrl-D" in terminal.process.stderr.readline()
        terminal.type("A\n\x04")
        assert terminal.leave() == (0, "")


def test_chat_in_a_terminal() -> None:
    with Terminal("chat", "-t", "0") as terminal:
        terminal.expect("/quit[^>]*> ")
        terminal.type("/what\n")
        assert "/undo" in terminal.expect("/quit[^>]*> ")
        terminal.interrupt_prompt()
        terminal.expect("Ctrl-D or /quit leaves[^>]*> ")
        terminal.type("Tell me a story.\n")
        answer = terminal.expect(r"\n> ")
        assert len(answer.split()) > 16
        terminal.interrupt_prompt()
        terminal.expect("Ctrl-D or /quit leaves[^>]*> ")
        terminal.interrupt_prompt()
        assert terminal.leave() == (0, "")


def test_chat_survives_the_loss_of_its_instance() -> None:
    with Terminal("chat", "-t", "0", "--log-level", "error") as terminal:
        terminal.expect("/quit[^>]*> ")
        terminal.type("Hello! Who are you?\n")
        first = terminal.expect(r"\n> ")
        terminal.type("Tell me a story.\n")
        terminal.expect(r"story\.\s+\S+")
        os.kill(terminal.engine(), signal.SIGKILL)
        terminal.expect(r"> ")
        terminal.type("/undo\n")
        terminal.expect(r"> ")
        terminal.type("Hello! Who are you?\n")
        assert terminal.expect(r"\n> ") == first
        terminal.type("\x04")
        code, errors = terminal.leave()
    assert code == 0
    assert "instance lost" in errors
    assert "Traceback" not in errors
    assert sum(line.startswith("error: ") for line in errors.splitlines()) <= 1


@pytest.mark.parametrize("arguments", [("chat",), ("generate", "x")])
def test_ctrl_c_while_loading(arguments: tuple[str, ...]) -> None:
    with Terminal(*arguments) as terminal:
        terminal.child(lambda pid: True)
        terminal.type("\x03")  # the process that forks the engine begins to import PyTorch
        code, errors = terminal.leave()
    assert code == 130
    assert len(errors.splitlines()) <= 1, errors


def test_ctrl_c_during_generate() -> None:
    with Terminal("generate", "-n", "1900", *(["Once upon a time"] * 500)) as terminal:
        engine = terminal.engine()
        end = time.monotonic() + 90
        while not child_pids(engine) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(1.5)
        terminal.type("\x03")
        code, errors = terminal.leave()
    assert code == 130
    assert len(errors.splitlines()) <= 1, errors


def test_python_api() -> None:
    with LLM(dtype="float32", max_model_len=512) as llm:
        params = SamplingParams(max_tokens=12, temperature=0, logprobs=1)
        prompts = ["Once upon a time", [5, 6, 7], {"prompt": "The sky is"}]
        results = llm.generate(prompts, params, use_tqdm=False)
        assert [len(result.outputs[0].token_ids) <= 12 for result in results] == [True] * 3
        assert results[1].prompt is None
        assert results[1].prompt_token_ids == [5, 6, 7]
        assert len(results[0].outputs[0].logprobs) == len(results[0].outputs[0].token_ids)
        again = llm.generate("Once upon a time", params, use_tqdm=False)
        assert again[0].outputs[0].token_ids == results[0].outputs[0].token_ids
        (answer,) = llm.chat([{"role": "user", "content": "Hello! Who are you?"}], use_tqdm=False)
        assert answer.outputs[0].text
        many = llm.generate(
            ["a"] * 40, [SamplingParams(max_tokens=5, seed=i, ignore_eos=True) for i in range(40)]
        )
        assert len({tuple(result.outputs[0].token_ids) for result in many}) > 5
        with pytest.raises(ValueError, match="512"):
            llm.generate([[5] * 600], params, use_tqdm=False)
        stream = llm.chat_stream([{"role": "user", "content": "Tell me a story."}])
        assert next(stream)
        stream.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x", params, use_tqdm=False)
    with pytest.raises(ValueError, match="max_model_len"):
        LLM(max_model_length=4)


def test_a_broken_checkpoint_is_a_clear_failure(tmp_path) -> None:
    import shutil

    from baton.model.checkpoint.hub import resolve_model

    copy = tmp_path / "broken"
    shutil.copytree(resolve_model(None), copy)
    (copy / "model.safetensors").write_bytes(b"not safetensors")
    result = baton("serve", str(copy), "--port", "0")
    assert result.returncode == 2
    assert "model.safetensors" in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) == 1
