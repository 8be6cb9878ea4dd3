"""Which of NIXL's packages is taken: that for the CUDA of torch, whatever else is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from baton.transfer.transports import nixl


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that comes before all others; nothing of torch or NIXL is imported yet."""
    for name in list(sys.modules):
        if name.partition(".")[0].startswith(("nixl_", "torch")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    # Those that are really installed are not seen.
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def install(site: Path, name: str, needs: str = "") -> None:
    (site / name).mkdir()
    (site / name / "__init__.py").write_text("")
    (site / name / "_bindings.py").write_text(f"{needs}\nname = {name!r}\n")


def install_torch(site: Path, cuda: str | None) -> None:
    (site / "torch").mkdir()
    (site / "torch/__init__.py").write_text("raise AssertionError('torch is imported')")
    (site / "torch/version.py").write_text(f"__version__ = '2.13.0'\ncuda = {cuda!r}\n")


@pytest.mark.parametrize(("cuda", "package"), [("12.9", "nixl_cu12"), ("13.0", "nixl_cu13")])
@pytest.mark.parametrize("imported", [False, True])
def test_the_package_is_that_of_the_cuda_of_torch(
    site: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, package: str, imported: bool
) -> None:
    install(site, "nixl_cu12")
    install(site, "nixl_cu13")
    if imported:
        torch = ModuleType("torch")
        torch.version = SimpleNamespace(cuda=cuda)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch", torch)
    else:
        install_torch(site, cuda)
    assert nixl._bindings().name == package


def test_another_cuda_is_an_error_that_says_what_to_install(site: Path) -> None:
    install(site, "nixl_cu13")
    install_torch(site, "12.9")
    with pytest.raises(ImportError, match="CUDA 12, and nixl_cu13 is for another one: pip install nixl-cu12"):
        nixl._bindings()


@pytest.mark.parametrize("torch", [True, False])
@pytest.mark.parametrize("package", ["nixl_cu13", "nixl_cu12", "nixl_rocm"])
def test_without_cuda_whichever_is_installed(site: Path, torch: bool, package: str) -> None:
    if torch:
        install_torch(site, None)
    install(site, package)
    assert nixl._bindings().name == package


def test_none_is_an_error(site: Path) -> None:
    with pytest.raises(ImportError, match="baton-llm\\[nixl\\]"):
        nixl._bindings()
    install_torch(site, "13.0")
    with pytest.raises(ImportError, match="CUDA 13, and NIXL is not installed: pip install nixl-cu13"):
        nixl._bindings()


def test_what_the_package_lacks_is_not_taken_for_the_package(site: Path) -> None:
    install(site, "nixl_cu13", needs="import something_else")
    install(site, "nixl_cu12")
    with pytest.raises(ModuleNotFoundError, match="something_else"):
        nixl._bindings()
