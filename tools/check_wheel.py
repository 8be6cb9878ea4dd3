"""Installs a wheel as somebody without a compiler does, and chats: `python tools/check_wheel.py FILE.whl`.

A fresh virtual environment in a temporary directory, whose programs are the only ones that are found (no
compiler, nothing of this checkout).  Then `baton serve` answers a chat request with the embedded model, and
its banner must name the C++ kernels.  The exit code is 1 if something is not as it should be.  Takes minutes:
pip installs PyTorch and all else, with the versions of `constraints.txt`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--keep", type=Path, help="make the environment there, and keep it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-wheel-") as scratch:
        return check(args.wheel.resolve(), args.keep or Path(scratch) / "venv", Path(scratch))


def check(wheel: Path, home: Path, scratch: Path) -> int:
    venv.create(home, with_pip=True, symlinks=True)
    python = home / "bin" / "python"
    names = ("HOME", "LANG", "TMPDIR", "SSL_CERT_FILE")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    alone = {**kept, "PATH": str(home / "bin")}
    install = [python, "-m", "pip", "install", "--quiet", "--only-binary=:all:"]
    subprocess.run(
        [*install, "-c", ROOT / "constraints.txt", wheel], cwd=scratch, env={**alone, **pip}, check=True
    )
    subprocess.run([python, "-m", "pip", "check"], cwd=scratch, env=alone, check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    output = scratch / "server.txt"
    with output.open("w") as log:
        server = subprocess.Popen(
            [home / "bin" / "baton", "serve", "--port", str(port)],
            cwd=scratch,
            env=alone,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        text = _talk(server, f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait(60)
        said = output.read_text()
        print(said)
    print(f"answered: {text!r}")
    if not text or "attention by C++" not in said:
        print("not as it should be: no answer, or not by the C++ kernels", file=sys.stderr)
        return 1
    return 0


def _talk(server: subprocess.Popen[bytes], url: str) -> str:
    deadline = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()
            break
        except (urllib.error.URLError, ConnectionError):
            if server.poll() is not None or time.monotonic() > deadline:
                return ""
            time.sleep(0.3)
    body = json.dumps({"messages": [{"role": "user", "content": "Hello! Who are you?"}], "max_tokens": 24})
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", body.encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: str = json.load(answer)["choices"][0]["message"]["content"]
    return content


if __name__ == "__main__":
    sys.exit(main())
