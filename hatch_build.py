"""Compiles `src/baton/model/cpu/native/*.cpp` into one shared library, if there is a C++ compiler.

Run by hatchling when a wheel or an editable install is made, or by hand: `python hatch_build.py`.
Without a compiler, or if it fails, one line says so and the installation goes on: the library is optional.

Every source but those of `COMMON_SOURCES` is compiled once for each instruction set, under another name
space and symbol suffix; `dispatch.cpp` tells at run time which of them this CPU has.  The library has a plain
C interface and needs nothing but libc and libm, of glibc 2.28 or later (`glibc.h`): a wheel with it runs on
every Python and nearly every Linux.  `BATON_NATIVE=0` skips it; `BATON_NATIVE=1`, for wheels that are to be
published, fails where a part of it cannot be made; `BATON_NATIVE=cpu` compiles what this machine's CPU uses
and nothing else, in a third of the time or less (`make serve`).  Objects are kept in `build/native`, by what
they were made of, so that a second run compiles only what has changed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand where hatchling is not installed
    BuildHookInterface = object

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "src" / "baton" / "model" / "cpu" / "native"
LIBRARY = SOURCES.parent / "_native.so"
OBJECTS = ROOT / "build" / "native"

COMMON = (
    "-std=c++17 -O3 -fPIC -fvisibility=hidden -fno-exceptions -fno-rtti -fno-math-errno -fno-trapping-math "
    "-ffp-contract=fast -Wall -Wno-psabi -Wno-uninitialized -Wno-maybe-uninitialized"
).split()
COMMON_SOURCES = ("dispatch.cpp", "ranks.cpp", "team.cpp")
LINK = ["-shared", "-pthread", "-Wl,--as-needed"] if sys.platform != "darwin" else ["-shared", "-pthread"]

AVX2 = "-mavx2 -mfma -mf16c -mbmi -mbmi2 -mlzcnt -mpopcnt".split()
AVX512 = [*AVX2, *"-mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512".split()]
AVX512_BF16 = [*AVX512, "-mavx512bf16", "-mavx512vnni"]
INSTRUCTION_SETS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "amx": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
        "avx512bf16": AVX512_BF16,
        "avx512vnni": [*AVX512, "-mavx512vnni"],
        "avx512": AVX512,
        "avx2vnni": [*AVX2, "-mavxvnni"],
        "avx2": AVX2,
        "plain": [],
    },
    "aarch64": {"neon": []},
}
"""By machine, best first.  Names as in `dispatch.cpp`."""


def main() -> int:
    return 0 if build() else 1


def build() -> bool:
    """Makes the library.  Returns whether it is new; prints one line either way."""
    if os.environ.get("BATON_NATIVE") == "0":
        return _say("not built: BATON_NATIVE=0", False)
    compiler = find_compiler()
    if compiler is None:
        return _say("not built: no C++ compiler ($CXX, c++, g++, clang++); Baton works without it", False)
    begin = time.monotonic()
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    OBJECTS.mkdir(parents=True, exist_ok=True)
    sets = INSTRUCTION_SETS.get(machine, {"plain": []})
    sources = sorted(path for path in SOURCES.glob("*.cpp") if path.name not in COMMON_SOURCES)
    headers = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.h")))
    if os.environ.get("BATON_NATIVE") == "cpu":
        sets = _of_this_cpu(compiler, sets, headers)
    made: dict[str, list[Path]] = {}
    error = ""
    jobs = {
        (name, source): [*COMMON, *flags, f"-DBATON_ISA={name}", str(source)]
        for name, flags in sets.items()
        for source in sources
    }
    results = _compile_all(compiler, jobs, headers)
    for name in sets:
        objects = [results[name, source] for source in sources]
        if all(isinstance(item, Path) for item in objects):
            made[name] = [item for item in objects if isinstance(item, Path)]
        else:
            error = next(item for item in objects if isinstance(item, str))
            print(f"baton native library: no {name} build: {error}")
    if not made or (os.environ.get("BATON_NATIVE") == "1" and error):
        return _say(f"not built: {error}", False)
    # A process that has the old file mapped keeps it: the new one takes its name.
    fresh = LIBRARY.with_suffix(f".{os.getpid()}.tmp")
    failed = _link(compiler, made, headers, fresh)
    if failed:
        return _say(f"not built: {failed}", False)
    fresh.replace(LIBRARY)
    seconds = time.monotonic() - begin
    return _say(f"{', '.join(made)} with {compiler} in {seconds:.1f} s", True)


def _of_this_cpu(compiler: str, sets: dict[str, list[str]], headers: bytes) -> dict[str, list[str]]:
    """The best that this machine's CPU has; with `amx`, which Linux may refuse to a process, the next one
    too.  All, where the CPU cannot be asked."""
    asking = OBJECTS / f"asking.{os.getpid()}.so"
    try:
        failed = _link(compiler, {}, headers, asking)
        if failed:
            print(f"baton native library: built for every CPU, this one cannot be asked: {failed}")
            return sets
        library = ctypes.CDLL(str(asking))
    finally:
        asking.unlink(missing_ok=True)
    found = [name for name in sets if library.baton_cpu_has(name.encode())]
    return {name: sets[name] for name in found[: 2 if found[0] == "amx" else 1]}


def _link(compiler: str, made: dict[str, list[Path]], headers: bytes, target: Path) -> str:
    """Makes a library of these builds.  Returns one line of error, or ""."""
    flags = [*COMMON, f'-DBATON_ISAS="{",".join(made)}"', f'-DBATON_SOURCES="{sources_digest()}"']
    common = _compile_all(
        compiler,
        {("common", SOURCES / name): [*flags, str(SOURCES / name)] for name in COMMON_SOURCES},
        headers,
    )
    for item in common.values():
        if isinstance(item, str):
            return item
    objects = [*map(str, common.values()), *(str(path) for paths in made.values() for path in paths)]
    return _error(subprocess.run([compiler, *LINK, "-o", str(target), *objects], **_CAPTURE))


def sources_digest() -> str:
    """Of all C++ files: the library says what it was made of (`model/cpu/library.py` compares)."""
    made_of = hashlib.sha256()
    for path in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        made_of.update(path.name.encode() + b"\0" + path.read_bytes())
    return made_of.hexdigest()[:16]


def find_compiler() -> str | None:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


_CAPTURE: dict[str, Any] = {"capture_output": True, "text": True}
Key = tuple[str, Path]


def _compile_all(compiler: str, jobs: dict[Key, list[str]], headers: bytes) -> dict[Key, Path | str]:
    """Compiles what has changed, as many at once as there are cores: an object file or one line of error."""
    results: dict[Key, Path | str] = {}
    waiting = []
    for key, flags in jobs.items():
        # (Without the source's path, the last flag: checkouts at several places can share what one has made.)
        made_of = hashlib.sha256(repr((compiler, flags[:-1])).encode() + headers + key[1].read_bytes())
        target = OBJECTS / f"{key[1].stem}-{key[0]}-{made_of.hexdigest()[:16]}.o"
        results[key] = target
        if not target.exists():
            waiting.append((key, target, flags))
    running: list[tuple[Key, Path, Path, subprocess.Popen[str]]] = []
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            key, target, flags = waiting.pop()
            partial = target.with_suffix(f".{os.getpid()}.tmp")
            command = [compiler, *flags, "-c", "-o", str(partial)]
            pipe = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            running.append((key, target, partial, pipe))
        key, target, partial, process = running.pop(0)
        _, stderr = process.communicate()
        if process.returncode == 0:
            partial.replace(target)
        else:
            partial.unlink(missing_ok=True)
            results[key] = _first_error(stderr)
    return results


def _error(done: subprocess.CompletedProcess[str]) -> str:
    return "" if done.returncode == 0 else _first_error(done.stderr)


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if "error" in line] or output.splitlines() or ["failed"]
    return lines[0].strip()


def _say(what: str, result: bool) -> bool:
    print(f"baton native library: {what}")
    return result


class CustomBuildHook(BuildHookInterface):
    """Hatchling's hook: a wheel with the library in it is for this platform, one without it for any."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        if not build():
            LIBRARY.unlink(missing_ok=True)  # an older one would not fit
            if os.environ.get("BATON_NATIVE") == "1":
                raise RuntimeError(
                    "BATON_NATIVE=1 asks for the native library, which was not built (see above)"
                )
            return
        build_data["artifacts"].append(str(LIBRARY.relative_to(ROOT)))
        build_data["pure_python"] = False
        # ctypes loads it: it needs no particular Python, only this machine.
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{system}"


if __name__ == "__main__":
    sys.exit(main())
