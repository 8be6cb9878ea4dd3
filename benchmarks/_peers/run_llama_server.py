"""llama.cpp's server, `VENV/bin/llama-server`, for one request at a time: its speculation is part of it, not
of the library that its Python package binds.  `VENV/bin/pip install gguf numpy`.

The sources of `llama-cpp-python` have it: `cmake -DGGML_NATIVE=ON -DLLAMA_BUILD_SERVER=ON` in their
vendor/llama.cpp, target `llama-server`.  `speculation` is one of its `--spec-type` that need no second model,
`ngram` is `ngram-simple` with a key of 2 tokens; drafts are as long as the others', where it lets one say so.
"""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from answering import LONGEST_DRAFT, Loaded, NotOffered, Settings, Told, answer
from gguf_files import path_of, weight_bytes, write_plain

_START_S = 300.0
_FLAGS = {
    "off": ["none"],
    "ngram": [
        *("ngram-simple", "--spec-ngram-simple-size-n", "2"),
        *("--spec-ngram-simple-size-m", str(LONGEST_DRAFT)),
    ],
    "ngram-simple": ["ngram-simple"],
    "ngram-map-k": ["ngram-map-k"],
    "ngram-mod": ["ngram-mod"],
    "ngram-cache": ["ngram-cache"],
}
"""Of `--spec-type`; the server's own numbers unless it says others."""


def load(settings: Settings) -> Loaded:
    drafting = _FLAGS.get(settings.speculation or "off")
    if settings.quantization is not None or settings.dtype != "bfloat16" or drafting is None:
        raise NotOffered(f"is compared in bfloat16, with speculation {', '.join(_FLAGS)}")
    path = path_of(Path(settings.converted), "bf16-tokens")
    if not path.exists():
        write_plain(Path(settings.model), path, tokenizer=True)
    program = Path(sys.executable).parent / "llama-server"
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    sizes = ["--ctx-size", str(settings.max_model_len), "--parallel", "1", "--no-ui", "--load-mode", "none"]
    threads = ["--threads", str(settings.threads), "--threads-batch", str(settings.threads)]
    place = ["--host", *address.split(":")[:1], "--port", *address.split(":")[1:]]
    server = subprocess.Popen(
        [str(program), "--model", str(path), *place, *sizes, *threads, "--spec-type", *drafting],
        stdout=sys.stderr,
    )
    atexit.register(server.terminate)
    limit = time.monotonic() + _START_S
    while True:
        with suppress(OSError):  # (503 until the model is loaded)
            _ask(address, "/health", None)
            break
        if server.poll() is not None or time.monotonic() > limit:
            raise RuntimeError("llama-server does not start; its messages say why")
        time.sleep(0.2)
    made: list[list[int]] = []
    counted = [0, 0]

    def complete(prompts: list[list[int]], output_len: int) -> int:
        made.clear()
        counted[:] = 0, 0
        for prompt in prompts:
            body = {"prompt": prompt, "n_predict": output_len, "temperature": 0.0, "ignore_eos": True}
            answered = _ask(address, "/completion", body | {"cache_prompt": False, "return_tokens": True})
            made.append(answered["tokens"])
            counted[0] += answered["timings"].get("draft_n", 0)
            counted[1] += answered["timings"].get("draft_n_accepted", 0)
        return sum(map(len, made))

    version = _ask(address, "/props", None).get("build_info", "")
    return Loaded(str(version), complete, weight_bytes(path), lambda: Told(made, *counted))


def _ask(address: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{address}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answered:
        found: dict[str, Any] = json.load(answered)
        return found


if __name__ == "__main__":
    answer(load)
