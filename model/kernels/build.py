"""Compiling the kernels, once for each kind of machine."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp", "-fPIC", "-shared"),
)
SECONDS = 120  # after which a compiler is given up


class Built(NamedTuple):
    library: Path | None
    reason: str  # why there is none; else which compiler has made it


@cache
def built() -> Built:
    """The shared library of all C files here, compiled unless this user has it already.

    It is kept in the user's cache folder under a name made of the sources, the compiler and the
    processor's abilities: machines of several kinds may share that folder. Processes that compile
    at the same time put the same file in its place, whole.
    """
    # gcc's OpenMP threads are torch's own; another compiler's would compete with them.
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        return Built(None, "no C compiler (gcc, cc, clang) on the PATH")
    try:
        target = _compiled(compiler)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return Built(None, f"{compiler} failed: {_last_line(error)}")
    try:
        ctypes.CDLL(str(target))
    except OSError as error:  # a folder, perhaps, that nothing may be run from
        return Built(None, f"{target} cannot be loaded: {error}")
    return Built(target, compiler)


def _compiled(compiler: str) -> Path:
    abilities = _run(compiler, "-march=native", "-dM", "-E", "-x", "c", "/dev/null")
    sources = sorted(HERE.glob("*.[ch]"))
    content = [abilities, *FLAGS, *(source.read_text() for source in sources)]
    name = hashlib.sha256("\0".join(content).encode()).hexdigest()[:16]
    target = _folder() / f"kernels-{name}.so"
    if not target.exists():
        files = [str(source) for source in sources if source.suffix == ".c"]
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
            made = Path(scratch) / target.name
            _run(compiler, *FLAGS, *files, "-o", str(made))
            made.replace(target)
    return target


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "dsv41-train"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run(*command: str) -> str:
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=SECONDS
    ).stdout


def _last_line(error: Exception) -> str:
    said = getattr(error, "stderr", None) or str(error)
    return said.strip().splitlines()[-1][:200]
