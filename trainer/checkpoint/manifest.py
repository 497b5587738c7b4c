"""manifest.json: size and SHA-256 of every file of a checkpoint, written last."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.disk import DiskError, sync_folder

NAME = "manifest.json"
BLOCK = 4 << 20


@dataclass(frozen=True)
class FileEntry:
    """What a file was when it was written."""

    size: int
    sha256: str


class ManifestError(Exception):
    """A checkpoint's manifest is missing or cannot be read; the message names it."""


def entry_of(path: Path) -> FileEntry:
    """Size and checksum of a file as it is now, made durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(file.tell(), digest)


def write_manifest(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """List `files`, by their names below `folder`, and make the names durable.

    Each has been made durable by whoever wrote it and computed its entry. DiskError for one that
    is not here: the ranks do not share a disk.
    """
    for name, entry in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry.size:
            raise DiskError(
                f"{path} was written by another rank and is not what the first rank finds there: "
                "all ranks must share the disk of runs_dir.",
            )
    listed = {name: asdict(entry) for name, entry in sorted(files.items())}
    manifest = folder / NAME
    with manifest.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"files": listed}, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """The entries by file name. ManifestError when there is none, or none that can be read."""
    manifest = folder / NAME
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        entries = {name: FileEntry(**entry) for name, entry in files.items()}
    except FileNotFoundError:
        raise ManifestError(f"{manifest} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ManifestError(f"{manifest} cannot be read") from None
    return entries


def damage(
    folder: Path,
    *,
    contents: bool = True,
    share: tuple[int, int] = (0, 1),
    read: Callable[[int], object] = lambda size: None,
) -> list[str]:
    """What is wrong with a checkpoint, naming each bad file; empty when it is as it was written.

    An interrupted save has no manifest and is reported as such. contents: read every byte;
    otherwise only names and sizes are looked at. share: (i, n) looks at the i-th of n parts of the
    files, of about equal size. read: is told how many bytes more were read.
    """
    try:
        files = read_manifest(folder)
    except ManifestError as error:
        return [str(error)]
    index, count = share
    by_size = sorted(files, key=lambda name: (-files[name].size, name))
    found = []
    for name in by_size[index::count]:
        if problem := _problem(folder / name, files[name], contents, read):
            found.append(problem)
    return found


def _problem(path: Path, entry: FileEntry, contents: bool, read: Callable[[int], object]) -> str:
    try:
        if not path.is_file():
            return f"{path} is missing"
        if (size := path.stat().st_size) != entry.size:
            return f"{path} has {size:,} bytes, not {entry.size:,}"
        if contents and _sha256(path, read) != entry.sha256:
            return f"{path} has changed since it was written"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror or error})"
    return ""


def _sha256(path: Path, read: Callable[[int], object]) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digest.update(block)
            read(len(block))
    return digest.hexdigest()
