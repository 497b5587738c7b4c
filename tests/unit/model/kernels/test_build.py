"""Compiling: with a compiler, without, with one that fails, and many processes at once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from model.kernels import build, library
from model.kernels.build import built
from model.moe.swiglu import swiglu


@pytest.fixture
def afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and nothing built so far."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for known in (built, library._kernels):
        known.cache_clear()
    yield tmp_path / "cache" / "dsv41-train"
    for known in (built, library._kernels):
        known.cache_clear()


def compiler(folder: Path, script: str) -> None:
    folder.mkdir()
    (folder / "gcc").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "gcc").chmod(0o755)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler here")
def test_where_there_is_a_compiler_there_are_kernels(afresh: Path) -> None:
    assert built().library is not None, built().reason
    assert [file.name for file in afresh.iterdir()] == [built().library.name]  # type: ignore[union-attr]
    assert library.kernels(torch.ones(1)) is not None
    assert library.kernels(torch.ones(1), torch.ones(1).bfloat16()) is None
    assert library.kernels(torch.ones(1, device="meta")) is None


def test_without_a_compiler_torch_serves(afresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = torch.randn(3, 32)
    with library.without_kernels():
        wanted = swiglu(both, 3.0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert built() == (None, "no C compiler (gcc, cc, clang) on the PATH")
    assert library.kernels(both) is None
    assert torch.equal(swiglu(both, 3.0), wanted)


def test_a_compiler_that_fails_is_named_and_leaves_nothing(
    afresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its preprocessor works; it is out of memory when it matters.
    script = 'case "$*" in *-dM*) exit 0;; esac\necho half > "$XDG_CACHE_HOME/x"\n'
    compiler(tmp_path / "bin", script + "echo 'cc1: out of memory' >&2; exit 4")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    found = built()
    assert found.library is None
    assert found.reason == f"{tmp_path / 'bin' / 'gcc'} failed: cc1: out of memory"
    assert not list(afresh.iterdir())


def test_what_cannot_be_loaded_is_no_failure(
    afresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'case "$*" in *-dM*) exit 0;; esac\nfor out; do :; done\necho no library > "$out"'
    compiler(tmp_path / "bin", script)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    assert built().library is None and "cannot be loaded" in built().reason
    assert library.kernels(torch.ones(1)) is None


def test_a_user_without_a_home_is_no_failure(afresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert built().library is None and "home" in built().reason


def test_a_cache_folder_that_cannot_be_written_is_no_failure(
    afresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert built().library is None and "Not a directory" in built().reason
    assert library.kernels(torch.ones(1)) is None


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler here")
def test_processes_that_compile_at_once_leave_one_whole_file(afresh: Path, tmp_path: Path) -> None:
    """Each loads what it has built, or what another has."""
    (tmp_path / "one.c").write_text("int one(void) { return 1; }\n")
    call = (
        "import ctypes, pathlib; from model.kernels import build; "
        f"build.HERE = pathlib.Path({str(tmp_path)!r}); "
        "assert ctypes.CDLL(str(build.built().library)).one() == 1"
    )
    root = Path(build.__file__).parents[2]
    processes = [subprocess.Popen([sys.executable, "-c", call], cwd=root) for _ in range(6)]
    assert [process.wait(120) for process in processes] == [0] * 6
    assert len(list(afresh.iterdir())) == 1


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler here")
def test_other_sources_get_another_file(
    afresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.c").write_text("int one(void) { return 1; }\n")
    monkeypatch.setattr(build, "HERE", sources)
    first = built()
    built.cache_clear()
    assert built() == first
    (sources / "one.c").write_text("int one(void) { return 2; }\n")
    built.cache_clear()
    assert built().library not in (None, first.library)
    assert len(list(afresh.iterdir())) == 2
