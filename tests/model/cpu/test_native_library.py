"""The native library: built without fuss or not at all, chosen by the CPU."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch

from baton.model.cpu import library as kernels
from baton.model.cpu.library import LIBRARY, SOURCES, check_sources, instruction_sets, load, native
from baton.model.cpu.openmp import openmp

ROOT = Path(__file__).parents[3]
BUILT = pytest.mark.skipif(not instruction_sets(), reason="the native library is not built")


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """hatch_build, with sources of one small kernel and a place of its own for what it makes."""
    spec = importlib.util.spec_from_file_location("hatch_build_under_test", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sources = tmp_path / "native"
    sources.mkdir()
    for name in ("blocking.h", "glibc.h", "parallel.h", *module.COMMON_SOURCES):
        (sources / name).write_bytes((module.SOURCES / name).read_bytes())
    (sources / "one.cpp").write_text('#include "parallel.h"\nBATON_EXPORT(one)(int* out) { *out = 1; }\n')
    monkeypatch.setattr(module, "SOURCES", sources)
    monkeypatch.setattr(module, "LIBRARY", tmp_path / "_native.so")
    monkeypatch.setattr(module, "OBJECTS", tmp_path / "objects")
    return module


def test_without_a_compiler_one_line_and_no_library(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert not build.build()
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "no C++ compiler" in said
    assert not build.LIBRARY.exists()


def test_switched_off(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_NATIVE", "0")
    assert not build.build()
    assert "BATON_NATIVE=0" in capsys.readouterr().out


def test_a_source_that_does_not_compile_is_no_disaster(
    build: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    if build.find_compiler() is None:
        pytest.skip("no compiler")
    (build.SOURCES / "bad.cpp").write_text("this is not C++\n")
    assert not build.build()
    assert "error" in capsys.readouterr().out.splitlines()[-1]
    assert not build.LIBRARY.exists()


def test_an_instruction_set_that_the_compiler_does_not_know_is_left_out(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if build.find_compiler() is None:
        pytest.skip("no compiler")
    sets = {"future": ["-mno-such-instructions"], "plain": []}
    monkeypatch.setattr(build, "INSTRUCTION_SETS", {build.platform.machine(): sets})
    assert build.build()
    first, last = capsys.readouterr().out.splitlines()
    assert "no future build" in first
    assert ": plain with" in last
    made = build.LIBRARY.stat().st_ino
    assert build.build()  # from the kept objects
    assert build.LIBRARY.stat().st_ino != made


def test_the_hook_marks_the_wheel(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = build.CustomBuildHook.__new__(build.CustomBuildHook)
    monkeypatch.setattr(build.CustomBuildHook, "target_name", "wheel", raising=False)
    monkeypatch.setattr(build, "ROOT", build.LIBRARY.parent)
    for made in (True, False):
        monkeypatch.setattr(build, "build", lambda made=made: made)
        data: dict[str, object] = {"artifacts": [], "pure_python": True}
        hook.initialize("standard", data)
        assert data["pure_python"] is not made
        assert data["artifacts"] == (["_native.so"] if made else [])
        assert str(data.get("tag", "")).startswith("py3-none-" if made else "")


def test_a_wheel_for_others_has_every_part_of_the_library(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make wheel` sets BATON_NATIVE=1: then nothing is left out, and no wheel lacks the library."""
    if build.find_compiler() is None:
        pytest.skip("no compiler")
    monkeypatch.setenv("BATON_NATIVE", "1")
    sets = {"future": ["-mno-such-instructions"], "plain": []}
    monkeypatch.setattr(build, "INSTRUCTION_SETS", {build.platform.machine(): sets})
    assert not build.build()
    hook = build.CustomBuildHook.__new__(build.CustomBuildHook)
    monkeypatch.setattr(build.CustomBuildHook, "target_name", "wheel", raising=False)
    with pytest.raises(RuntimeError, match="BATON_NATIVE=1 asks for the native library"):
        hook.initialize("standard", {"artifacts": [], "pure_python": True})


def test_for_this_cpu_alone(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make serve` sets BATON_NATIVE=cpu: what this CPU uses is compiled, and nothing that it cannot run."""
    if build.find_compiler() is None or len(instruction_sets()) < 2:
        pytest.skip("no compiler, or no choice")
    usable = instruction_sets()
    monkeypatch.setenv("BATON_NATIVE", "cpu")
    assert build.build()
    library = ctypes.CDLL(str(build.LIBRARY))
    library.baton_instruction_sets.restype = ctypes.c_char_p
    made = library.baton_instruction_sets().decode().split(",")
    assert made == usable[: 2 if usable[0] == "amx" else 1]
    assert not list(build.OBJECTS.glob("*.so"))


def test_a_cpu_that_cannot_be_asked_gets_all(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if build.find_compiler() is None:
        pytest.skip("no compiler")
    monkeypatch.setenv("BATON_NATIVE", "cpu")
    monkeypatch.setattr(build, "INSTRUCTION_SETS", {build.platform.machine(): {"plain": [], "other": []}})
    (build.SOURCES / "dispatch.cpp").write_text("this is not C++\n")
    assert not build.build()
    first, last = capsys.readouterr().out.splitlines()
    assert "built for every CPU, this one cannot be asked" in first
    assert "not built" in last


@BUILT
def test_the_library_loads_beside_an_old_glibc() -> None:
    """A wheel with it is tagged manylinux_2_28; see glibc.h, where a function may be missing."""
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no readelf")

    def read(what: str) -> str:
        command = [readelf, what, "-W", str(LIBRARY)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    libraries = set(re.findall(r"\(NEEDED\).*\[(.*)\]", read("-d")))
    assert libraries <= {"libc.so.6", "libm.so.6"}
    needed = re.findall(r"(\w+)@([A-Z]+)_([\d.]+)", read("--dyn-syms"))
    newer = [(name, v) for name, _, v in needed if tuple(map(int, v.split("."))) > (2, 28)]
    assert not newer, "glibc.h: ask for these by their older names"
    assert {library for _, library, _ in needed} == {"GLIBC"}


@BUILT
def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = native.__wrapped__
    names = instruction_sets()
    for wanted, expected in (("", names[0]), (names[-1], names[-1])):
        monkeypatch.setenv("BATON_CPU_ISA", wanted)
        assert fresh().instruction_set == expected
    monkeypatch.setenv("BATON_CPU_ISA", "mmx")
    with pytest.raises(ValueError, match=f"BATON_CPU_ISA=mmx: this CPU and build have {names[0]}"):
        fresh()
    monkeypatch.setenv("BATON_NATIVE", "0")
    assert fresh() is None


@BUILT
@pytest.mark.parametrize("built", [[], ["plain"], None])
def test_kernels_of_another_cpu_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, built: list[str] | None
) -> None:
    best, *others = instruction_sets()
    if not others:
        pytest.skip("this CPU has no choice")
    built = instruction_sets() if built is None else built
    monkeypatch.delenv("BATON_CPU_ISA", raising=False)
    monkeypatch.setattr(kernels, "instruction_sets", lambda: built)
    with caplog.at_level("INFO", kernels.__name__):
        found = native.__wrapped__()
    assert (found is None) == (not built)
    told = [record.getMessage() for record in caplog.records]
    if best in built:
        assert told == []
    else:
        (line,) = told
        assert line.startswith(f"this CPU has {best}, for which the kernels were not compiled here")
        assert caplog.records[0].levelname == ("INFO" if built else "WARNING")


@BUILT
def test_the_best_instruction_set_comes_first() -> None:
    assert instruction_sets()[-1] in ("plain", "neon")
    chosen = native()
    if chosen is not None and not os.environ.get("BATON_CPU_ISA"):
        assert chosen.instruction_set == instruction_sets()[0]
    assert load(instruction_sets()[0]) is load(instruction_sets()[0])
    with pytest.raises(AttributeError):
        load(instruction_sets()[0]).function("no_such_kernel")


@BUILT
def test_as_many_threads_as_pytorch() -> None:
    """And linked to no OpenMP runtime: PyTorch has one."""
    needed = subprocess.run(["ldd", str(LIBRARY)], capture_output=True, text=True, check=False).stdout
    assert "omp" not in needed
    assert "libtorch" not in needed
    found = openmp()
    assert found is not None
    max_threads = ctypes.CFUNCTYPE(ctypes.c_int)(found.max_threads)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert max_threads() == ctypes.CDLL(str(LIBRARY)).baton_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@BUILT
def test_a_library_of_other_sources_is_refused(build: ModuleType, tmp_path: Path) -> None:
    library = ctypes.CDLL(str(LIBRARY))
    check_sources(library, SOURCES)
    check_sources(library, tmp_path / "an installed wheel has no sources")
    with pytest.raises(ValueError, match=r"built from other C\+\+ files .*python hatch_build.py"):
        check_sources(library, build.SOURCES)
    assert build.build()
    check_sources(ctypes.CDLL(str(build.LIBRARY)), build.SOURCES)
