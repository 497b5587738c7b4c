"""manifest.json: size and SHA-256 of every file of a checkpoint, written last."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from trainer.disk import sync_folder

NAME = "manifest.json"


def write_manifest(folder: Path) -> None:
    """List every file below `folder`, each read back from disk, and make all of it durable."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        _sync_file(path)
        files[path.relative_to(folder).as_posix()] = {
            "size": path.stat().st_size,
            "sha256": _sha256(path),
        }
    manifest = folder / NAME
    manifest.write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
    _sync_file(manifest)
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        sync_folder(path)


def damage(folder: Path) -> list[str]:
    """What is wrong with a checkpoint, naming each bad file; empty when it is as it was written.

    Reads every byte. An interrupted save has no manifest and is reported as such.
    """
    try:
        files = json.loads((folder / NAME).read_text(encoding="utf-8"))["files"]
        expected = {name: (entry["size"], entry["sha256"]) for name, entry in files.items()}
    except FileNotFoundError:
        return [f"{folder / NAME} is missing"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"{folder / NAME} cannot be read"]
    found = []
    for name, (size, digest) in expected.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{path} is missing")
        elif path.stat().st_size != size:
            found.append(f"{path} has {path.stat().st_size:,} bytes, not {size:,}")
        elif _sha256(path) != digest:
            found.append(f"{path} has changed since it was written")
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
