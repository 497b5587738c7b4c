"""Files of a source: which they are, whether they can be read, and what identifies them."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import BrokenFileError, DataError

SAMPLES, SAMPLE_BYTES = 16, 2**14
MOST_LISTED = 10
THREADS = 16


@dataclass(frozen=True)
class FileMark:
    """A file as it was found. sample: SHA-256 of up to 16 stretches of 16 KiB, evenly spread from
    first to last byte: of all of it up to 256 KiB."""

    path: str
    size: int
    mtime_ns: int
    sample: str


def find_files(paths: Sequence[str], *, patterns: Sequence[str], setting: str) -> list[Path]:
    """The files that `paths` name: in the given order, sorted inside a glob or folder, each once.

    A folder gives its own files that match `patterns`. DataError lists every path without a file;
    `setting` is what the paths are called in the configuration.
    """
    found: list[Path] = []
    missing: list[str] = []
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            files = sorted({p for pattern in patterns for p in path.glob(pattern) if p.is_file()})
            if not files:
                missing.append(f"{path}: the folder holds no {' or '.join(patterns)} file")
        elif path.exists():
            files = [path]
        else:
            matches = glob.glob(str(path), recursive=True)
            files = sorted(p for p in map(Path, matches) if p.is_file())
            if not files:
                missing.append(f"{path}: no such file, folder or match")
        found += files
    if missing:
        raise DataError(listed(missing, fix=f"correct {setting}"))
    return list(dict.fromkeys(found))


def mark_files(paths: Sequence[Path], *, setting: str) -> tuple[FileMark, ...]:
    """Look at every file. DataError lists all that cannot be read or are empty."""
    marks: list[FileMark] = []
    bad: list[str] = []
    with ThreadPoolExecutor(THREADS) as threads:  # a network's answers take their time
        for path, mark in zip(paths, threads.map(_mark_or_error, paths), strict=True):
            if isinstance(mark, OSError):
                bad.append(f"{path}: cannot be read ({mark.strerror or mark})")
            elif not mark.size:
                bad.append(f"{path}: the file is empty")
            else:
                marks.append(mark)
    if bad:
        fix = f"make them readable (chmod +r), give them content, or leave them out of {setting}"
        raise DataError(listed(bad, fix=fix))
    return tuple(marks)


def identity(marks: Iterable[FileMark]) -> list[Any]:
    """What the files hold, wherever they lie and whenever they were written."""
    return [[mark.size, mark.sample] for mark in marks]


def stamp(marks: Iterable[FileMark]) -> list[Any]:
    """The files as they are now: rewriting one changes this, even by the same bytes."""
    return [[mark.path, mark.size, mark.mtime_ns, mark.sample] for mark in marks]


def require_unchanged(mark: FileMark) -> None:
    """DataError when the file is not the one that was looked at: half of each would be read."""
    try:
        found = os.stat(mark.path)
    except OSError as error:
        raise unreadable(mark.path, error) from error
    if (found.st_size, found.st_mtime_ns) != (mark.size, mark.mtime_ns):
        raise DataError(
            f"{mark.path}: changed while it was read; wait until it is written, and start again"
        )


@contextmanager
def blamed_on(file: int, path: str) -> Iterator[None]:
    """What goes wrong with reading a file as BrokenFileError."""
    try:
        yield
    except OSError as error:
        raise BrokenFileError(str(unreadable(path, error)), file=file) from error
    except DataError as error:
        raise BrokenFileError(str(error), file=file) from error


def unreadable(path: str | Path, error: OSError) -> DataError:
    """The DataError for a file that the system refuses."""
    return DataError(
        f"{path}: cannot be read ({error.strerror or error}); check that it is there and readable"
    )


def listed(lines: Sequence[str], *, fix: str) -> str:
    """Up to ten lines, how many more there are, and one fix for all of them."""
    if len(lines) == 1:
        return f"{lines[0]}; {fix}"
    shown = [f"  {line}" for line in lines[:MOST_LISTED]]
    if len(lines) > MOST_LISTED:
        shown.append(f"  and {len(lines) - MOST_LISTED:,} more")
    head = f"{len(lines):,} files or paths cannot be used:"
    return "\n".join([head, *shown, f"{fix[0].upper()}{fix[1:]}."])


def _mark_or_error(path: Path) -> FileMark | OSError:
    try:
        return _mark(path)
    except OSError as error:
        return error


def _mark(path: Path) -> FileMark:
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        digest = hashlib.sha256()
        last = max(0, stat.st_size - SAMPLE_BYTES)
        starts = (
            range(0, stat.st_size, SAMPLE_BYTES)
            if stat.st_size <= SAMPLES * SAMPLE_BYTES
            else [last * i // (SAMPLES - 1) for i in range(SAMPLES)]
        )
        for start in starts:
            file.seek(start)
            digest.update(file.read(SAMPLE_BYTES))
    return FileMark(str(path), stat.st_size, stat.st_mtime_ns, digest.hexdigest())
