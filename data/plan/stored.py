"""Plans on disk, beside the documents that they pack: made once, memory-mapped ever after.

SET/window-00000/plan-<key>/   an array a file, and plan.json; there by rename once whole
SET/plans.lock                 held by the process that makes one
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.cache.durable import sync_file, sync_folder, write_json
from data.cache.prepared import PreparedSet
from data.cache.room import told_when_full
from data.errors import DataError
from data.plan.settings import PlanSettings
from data.plan.window import WindowPlan, plan_window, require_places

ARRAYS = ("pack_offsets", "starts", "lengths", "columns", "image_starts", "dropped")
HEADER, LOCK = "plan.json", "plans.lock"
MAPPED_BYTES = 2**16  # a smaller array is read; mapping it would cost more


@dataclass(frozen=True)
class StoredPlans:
    """The plans of a prepared set's windows under one packing. Plain data: a path and settings."""

    prepared: PreparedSet
    settings: PlanSettings

    def plan(self, window: int) -> WindowPlan:
        """The plan of a window that is there; made and stored first if nobody has yet.

        DataError for documents that cannot be packed under these settings.
        """
        return _open(self._made(window))

    def training_packs(self, window: int) -> int:
        """How many packs for training a window has; as `plan`, but cheap."""
        return int(_header(self._made(window))["training"])

    def require_places(self, window: int) -> None:
        """DataError when the window has a document that cannot be packed under these settings."""
        require_places(settings=self.settings, **self._documents(window))

    def plan_ahead(self, window: int) -> None:
        """Make the plan of a window that is there, unless it is made or being made elsewhere."""
        if not (_folder(self.prepared, self.settings, window) / HEADER).is_file():
            with _locked(self.prepared.folder / LOCK, wait=False) as mine:
                if mine:
                    self._make(window)

    def _made(self, window: int) -> Path:
        folder = _folder(self.prepared, self.settings, window)
        if not (folder / HEADER).is_file():
            with _locked(self.prepared.folder / LOCK):
                self._make(window)
        return folder

    def _make(self, window: int) -> None:
        """Under the lock."""
        folder = _folder(self.prepared, self.settings, window)
        if (folder / HEADER).is_file():
            return
        temporary = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
        plan = plan_window(window=window, settings=self.settings, **self._documents(window))
        try:
            needed = sum(getattr(plan, name).nbytes for name in ARRAYS)
            with told_when_full(self.prepared.folder, needed=needed):
                _write(plan, temporary)
                temporary.rename(folder)
                sync_folder(folder.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _documents(self, window: int) -> dict[str, Any]:
        """A window's documents as the planning functions take them."""
        prepared = self.prepared
        return {
            "offsets": np.asarray(prepared.offsets(window)),
            "spans": np.asarray(prepared.image_spans(window)),
            "origin": lambda document: prepared.origin(window, document),
        }


@functools.lru_cache(maxsize=4096)  # asked for with every pack
def _folder(prepared: PreparedSet, settings: PlanSettings, window: int) -> Path:
    key = settings.key(prepared.digest(window), str(window))
    return prepared.window_folder(window) / f"plan-{key[:16]}"


def _write(plan: WindowPlan, folder: Path) -> None:
    folder.mkdir()
    for name in ARRAYS:
        np.save(folder / f"{name}.npy", getattr(plan, name))
        sync_file(folder / f"{name}.npy")
    write_json(folder / HEADER, {"training": plan.training})


@functools.lru_cache(maxsize=256)  # a stored plan never changes
def _open(folder: Path) -> WindowPlan:
    with _damage_named(folder):
        arrays = {name: _load(folder / f"{name}.npy") for name in ARRAYS}
        return WindowPlan(**arrays, training=_header(folder)["training"])


def _header(folder: Path) -> dict[str, int]:
    with _damage_named(folder):
        return json.loads((folder / HEADER).read_text(encoding="utf-8"))


@contextmanager
def _damage_named(folder: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, LookupError) as error:
        raise DataError(
            f"{folder} is damaged ({error}); remove it, and the plan is made anew"
        ) from error


def _load(path: Path) -> np.ndarray:
    mapped = path.stat().st_size > MAPPED_BYTES
    return np.asarray(np.load(path, mmap_mode="r" if mapped else None))


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock file, whoever else asks for it; False where it is taken and we don't wait."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)
