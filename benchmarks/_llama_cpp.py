"""Logits of llama.cpp, from a process in the virtual environment that it is installed in."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.executor.base import Int32Array

_SCRIPT = Path(__file__).parent / "_peers" / "logits_llama_cpp.py"
_ANSWER_S = 900.0
"""What loading a model, conversion included, or one text may take."""
_ROWS = 64
"""Given at a time."""


class LlamaCpp:
    """A GGUF file, or a checkpoint in one of the formats of `_peers/gguf_files.py`, computed by llama.cpp.

    Close it.
    """

    def __init__(
        self, environment: Path, model: Path, context: int, form: str = "", converted: Path | None = None
    ) -> None:
        """Raises `RuntimeError` with one line if llama.cpp does not load it."""
        settings = {
            "model": str(model.absolute()),
            "format": form,
            "converted": str(converted),
            "threads": len(os.sched_getaffinity(0)),
            "context": context,
        }
        self._directory = TemporaryDirectory()
        self._log = Path(self._directory.name) / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(environment / "bin" / "python"), str(_SCRIPT), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
            )
        try:
            told = self._read()
        except BaseException:
            self.close()
            raise
        self.version = str(told["version"])
        self.weight_bytes = int(told["weight_bytes"])
        self.parameters = int(told["parameters"])
        self._vocab_size = int(told["vocab_size"])

    def text_logits(self, tokens: Int32Array, first: int = 0) -> Iterator[Tensor]:
        """As `TextScorer.text_logits`, in float32."""
        into = Path(self._directory.name) / "logits"
        assert self._process.stdin is not None
        order = {"tokens": tokens.tolist(), "first": first, "into": str(into)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        self._read()
        logits = np.memmap(into, np.float32, "r", shape=(len(tokens) - first, self._vocab_size))
        for row in range(0, len(logits), _ROWS):
            yield torch.from_numpy(np.array(logits[row : row + _ROWS]))

    def log_probabilities(self, tokens: Int32Array, first: int) -> Iterator[Tensor]:
        """For `baton.bench.perplexity`."""
        for logits in self.text_logits(tokens, first):
            yield torch.log_softmax(logits, dim=-1)

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._directory.cleanup()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        limit = threading.Timer(_ANSWER_S, self._process.kill)
        limit.start()
        try:
            line = self._process.stdout.readline()
        finally:
            limit.cancel()
        if not line:
            said = self._log.read_text().strip().splitlines()
            raise RuntimeError(f"llama.cpp ended: {said[-1] if said else 'it said nothing'}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise RuntimeError(f"llama.cpp {found['error']}")
        return found
