"""An engine in a process of its own, run by the Python of the virtual environment that it is installed in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = {
    "baton": "run_baton.py",
    "vllm": "run_vllm.py",
    "openvino": "run_openvino.py",
    "llama.cpp": "run_llama_cpp.py",
    "llama-server": "run_llama_server.py",
    "transformers": "run_transformers.py",
}
_ANSWER_S = 1200.0
"""What starting an engine, conversion included, or one batch may take."""


@dataclass(frozen=True)
class Weights:
    """What a step that makes a token reads of a model."""

    layer_bits: float
    """A weight, with its share of scales and zero points."""
    head_bits: float
    nbytes: int

    @classmethod
    def of(cls, hello: dict[str, Any]) -> Weights | None:
        """From what an engine says once it is ready; None if it does not know."""
        held, numbers = hello["weight_bytes"], hello["weight_numbers"]
        if held is None:
            return None
        layers, head = (8 * held[part] / numbers[part] for part in ("layers", "head"))
        return cls(layers, head, held["layers"] + held["head"])


class Engine:
    """One engine in its process, waiting between runs."""

    def __init__(self, name: str, python: Path, settings: dict[str, Any], log: Path) -> None:
        """Raises `RuntimeError` with one line if the engine does not start."""
        self.name = name
        script = Path(__file__).parent / "_peers" / SCRIPTS[name.partition("@")[0]]
        self._log = log
        start = time.perf_counter()
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), str(script), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=engine_environment(python),
                start_new_session=True,
            )
        try:
            hello = self._read()
        except BaseException:
            self.close()
            raise
        self.ready_s = time.perf_counter() - start
        self.version = str(hello["version"])
        self.resident_bytes = int(hello["resident_bytes"])
        self.weights = Weights.of(hello)

    def run(self, prompts: list[list[int]], output_len: int) -> float:
        """Seconds for one batch.  Raises `RuntimeError` if the answers are not of the length asked for."""
        return self.run_and_tell(prompts, output_len)[0]

    def run_and_tell(self, prompts: list[list[int]], output_len: int) -> tuple[float, dict[str, Any]]:
        """And `answering.Told`."""
        assert self._process.stdin is not None
        order = {"prompts": prompts, "output_len": output_len, "tell": True}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        result = self._read()
        self.resident_bytes = max(self.resident_bytes, int(result["resident_bytes"]))
        if result["output_tokens"] != output_len * len(prompts):
            raise RuntimeError(
                f"{self.name}: {result['output_tokens']} tokens, not {output_len * len(prompts)}"
            )
        return float(result["elapsed_s"]), result["told"] or {}

    def stop(self, stopped: bool = True) -> None:
        """Keeps it from using the CPU, or lets it go on.  Baton is let be: it uses none while it waits, and
        watches its processes by the clock."""
        if not self.name.startswith("baton"):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGSTOP if stopped else signal.SIGCONT)

    def close(self) -> None:
        """Ends the process and what it started."""
        process = self._process
        self.stop(False)
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            self._kill()
            process.wait()

    def _kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        limit = threading.Timer(_ANSWER_S, self._kill)
        limit.start()
        try:
            line = self._process.stdout.readline()
        finally:
            limit.cancel()
        if not line:
            raise RuntimeError(f"{self.name} ended; its messages are in {self._log}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise RuntimeError(f"{self.name} {found['error']}")
        return found


def engine_environment(python: Path) -> dict[str, str]:
    """Of an engine: that of its virtual environment, with Intel's OpenMP runtime if it is installed there."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment["PATH"] = f"{python.parent}:{environment.get('PATH', '')}"
    found = sorted(python.parent.parent.glob("lib*/libiomp5.so"))
    if found:
        environment["LD_PRELOAD"] = str(found[0])
    return environment
