"""Packages for a machine that has a GPU and no network: fetched here, unpacked there.

    python tools/gpu_packages.py fetch [--python 3.12]     where there is a network: build/gpu-wheels
    python tools/gpu_packages.py unpack                    what is missing here, into build/gpu/site

Such a machine has torch, triton, transformers and numpy, and perhaps no pip.  A wheel is a zip archive whose
content is put beside other packages: so it is unpacked, and build/gpu/site stands in PYTHONPATH.  What the
machine has already, in a version that is new enough, is left alone.  A virtual environment would not do: one
made by the Python of another one does not see that one's packages.

The compiled library of Baton travels as well (it needs no particular Python): without it a CPU's side of a
comparison is slower, and tests of sampling are skipped.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / "build" / "gpu-wheels"
SITE = ROOT / "build" / "gpu" / "site"
LIBRARY = ROOT / "src" / "baton" / "model" / "cpu" / "_native.so"
_GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34)
"""Of wheels: pip matches each number exactly."""
_MOST_BYTES = 40 << 20
MISSING = " is missing"
"""Ends the line of a package that is neither here nor was fetched."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("fetch", "unpack"))
    parser.add_argument("--python", default="3.12", help="fetch: of the machine with the GPU (3.12)")
    asked = parser.parse_args()
    if asked.what == "fetch":
        sys.exit(fetch(asked.python))
    said = unpack()
    print("\n".join(said))
    sys.exit(any(line.endswith(MISSING) for line in said))


def fetch(python: str) -> str | int:
    """Wheels for x86-64 Linux; 0, or what failed."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    WHEELS.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    for name in (*(f"manylinux_2_{number}_x86_64" for number in _GLIBC), "manylinux2014_x86_64"):
        command += ["--platform", name]
    done = subprocess.run([*command, "--dest", str(WHEELS), *_pinned()])
    if done.returncode:
        return "pip could not fetch all of tests/gpu/requirements.txt (see above)"
    if not _is_current():
        _build().build()
    if _is_current():
        shutil.copy2(LIBRARY, WHEELS / f"native-{_build().sources_digest()}.so")
    size = sum(path.stat().st_size for path in WHEELS.iterdir())
    print(f"{WHEELS.relative_to(ROOT)}: {len(list(WHEELS.iterdir()))} files, {size / 1e6:.1f} MB")
    return 0 if size <= _MOST_BYTES else f"more than {_MOST_BYTES >> 20} MiB: too much beside the repository"


def _pinned() -> list[str]:
    """Names of requirements.txt with the versions of constraints.txt."""
    versions: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if "==" in line and not line.startswith("#"):
            name, _, version = line.partition("==")
            versions[_plain(name)] = version.split(";")[0].strip()
    lines = (ROOT / "tests" / "gpu" / "requirements.txt").read_text().splitlines()
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return [f"{name}=={versions[_plain(name)]}" if _plain(name) in versions else name for name in names]


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-").partition("[")[0]


def unpack() -> list[str]:
    """Puts what is missing into build/gpu/site; a line of text for each, and for what remains missing."""
    from packaging.tags import sys_tags  # (transformers brings it)
    from packaging.utils import parse_wheel_filename

    shutil.rmtree(SITE, ignore_errors=True)
    SITE.mkdir(parents=True)
    here, least = set(sys_tags()), _least_versions()
    said, done = [], set()
    for wheel in sorted(WHEELS.glob("*.whl")):
        name, version, _, tags = parse_wheel_filename(wheel.name)
        installed = _installed(name)
        if installed is not None and (name not in least or least[name].contains(installed, prereleases=True)):
            continue
        if not tags & here:
            said.append(f"{wheel.name} is not for this Python, {sys.version.split()[0]}: fetch with --python")
            continue
        _unpack(wheel)
        done.add(name)
        said.append(f"{name} {version} unpacked" + (f" in the place of {installed}" if installed else ""))
    for requirement in _pinned():
        name = _plain(requirement.partition("==")[0])
        if name not in done and _installed(name) is None:
            said.append(name + MISSING)
    return [*said, _library()]


def _least_versions() -> dict[str, Any]:
    """What pyproject.toml asks for."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [Requirement(text) for text in project["dependencies"]]
    return {canonicalize_name(one.name): one.specifier for one in asked}


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _unpack(wheel: Path) -> None:
    """Into `SITE`, with what a wheel keeps apart of it (NAME.data/purelib); programs are not needed."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(SITE)
    for apart in SITE.glob("*.data"):
        for kind in ("purelib", "platlib"):
            if (apart / kind).is_dir():
                shutil.copytree(apart / kind, SITE, dirs_exist_ok=True)
        shutil.rmtree(apart)


def _library() -> str:
    """Puts the compiled library in its place, if it is not there or of other sources."""
    if _is_current():
        return "the compiled library is there"
    carried = WHEELS / f"native-{_build().sources_digest()}.so"
    if carried.exists():
        shutil.copy2(carried, LIBRARY)
        return "the compiled library was put in its place"
    return "there is no compiled library of these sources: CPUs compute without it, slower"


def _is_current() -> bool:
    """Whether the library is there, and made of these sources: it says of which."""
    return LIBRARY.exists() and _build().sources_digest().encode() in LIBRARY.read_bytes()


def _build() -> Any:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
