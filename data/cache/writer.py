"""Writes a prepared set, window by window, so that a killed process loses seconds, not hours.

The window in progress lies in SET/partial/. SET/progress.json says how much of each of its files
is durable and where in the source to go on; whatever was written after it is cut off again. So an
interrupted set ends up byte for byte like an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data.cache.durable import sync_file, sync_folder, write_json
from data.cache.encoded import Encoded
from data.cache.prepared import (
    ARRAYS,
    COMPLETE,
    FORMAT,
    HEADER,
    WINDOW,
    WINDOW_DOCUMENTS,
    PreparedSet,
    window_folder,
)

PARTIAL, PROGRESS = "partial", "progress.json"
APPENDED = ("tokens", "labelled", "lengths", "origins", "spans", "blobs")
SYNC_SECONDS = 5.0


class SetWriter:
    """Appends documents to the set in `folder`; the caller holds the set's lock.

    header: what set.json says, without the format. labelled: whether the set keeps a mask of
    tokens that may be predicted. After opening, `position` is where the source was left (None at
    its start) and `skip` how many documents after it are in already. dropped: documents left out
    so far. written: bytes written by this process.
    """

    def __init__(
        self,
        folder: Path,
        *,
        header: Mapping[str, Any],
        labelled: bool,
        window_documents: int = WINDOW_DOCUMENTS,
    ) -> None:
        self.folder = folder
        self.position: Any = None
        self.skip = 0
        self.window = 0
        self.dropped = 0
        self.written = 0
        self._labelled = labelled
        self._capacity = window_documents
        self._counts: dict[str, int] = dict.fromkeys(APPENDED, 0)
        self._files: dict[str, BinaryIO] = {}
        self._synced = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / HEADER).exists():
            write_json(folder / HEADER, {"format": FORMAT, **header})
        self._resume()
        self._whole = self._state()

    @property
    def empty(self) -> bool:
        """Whether no document is in."""
        return not self.window and not self._counts["lengths"]

    def append(self, encoded: Encoded, *, position: Any, dropped: int = 0) -> None:
        """Add the documents read from `self.position` on; `position` lies behind them."""
        encoded = encoded.part(self.skip, len(encoded)) if self.skip else encoded
        while len(encoded) >= (room := self._capacity - self._counts["lengths"]):
            self._write(encoded.part(0, room))
            self.skip += room
            encoded = encoded.part(room, len(encoded))
            self._finish_window()
        self._write(encoded)
        self.position, self.skip = position, 0
        self.dropped += dropped
        self._whole = self._state()
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Make everything that was appended so far durable.

        Also after an exception in the middle of `append`: what it left half-written is cut off by
        the next to open the set.
        """
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        write_json(self.folder / PROGRESS, self._whole)
        self._synced = time.monotonic()

    def complete(self) -> PreparedSet:
        """Finish the last window and the set."""
        if self._counts["lengths"]:
            self._finish_window()
        self.discard_partial()
        write_json(self.folder / COMPLETE, {"windows": self.window, "dropped": self.dropped})
        return PreparedSet.open(self.folder)

    def discard_partial(self) -> None:
        """Give the disk back what the window in progress holds; finished windows stay."""
        self.close()
        shutil.rmtree(self.folder / PARTIAL, ignore_errors=True)
        (self.folder / PROGRESS).unlink(missing_ok=True)

    def close(self) -> None:
        """Close all files, without making them durable."""
        for file in self._files.values():
            with suppress(OSError):  # a full disk refused what is still in the buffer
                file.close()
        self._files = {}

    def _write(self, encoded: Encoded) -> None:
        if not len(encoded):
            return
        spans = encoded.spans.copy()
        spans["document"] += self._counts["lengths"]
        spans["blob_offset"] += self._counts["blobs"]
        arrays = {
            "tokens": encoded.tokens,
            "lengths": encoded.lengths,
            "origins": encoded.origins,
            "spans": spans,
            "blobs": encoded.blobs,
        }
        if self._labelled:
            mask = encoded.labelled
            arrays["labelled"] = np.ones(len(encoded.tokens), bool) if mask is None else mask
        else:
            assert encoded.labelled is None, "the set was opened as one without a mask"
        for name, array in arrays.items():
            self.written += self._files[name].write(np.ascontiguousarray(array, ARRAYS[name]).data)
            self._counts[name] += len(array)

    def _finish_window(self) -> None:
        partial = self.folder / PARTIAL
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.close()
        lengths = np.fromfile(partial / "lengths.bin", ARRAYS["lengths"])
        offsets = np.zeros(len(lengths) + 1, ARRAYS["offsets"])
        np.cumsum(lengths, out=offsets[1:])
        offsets.tofile(partial / "offsets.bin")
        sync_file(partial / "offsets.bin")
        entries = {name: self._counts[name] for name in self._kept()} | {"offsets": len(offsets)}
        about = {"entries": entries, "digest": self._digest(partial), **self._place()}
        write_json(partial / WINDOW, about)
        partial.rename(window_folder(self.folder, self.window))
        sync_folder(self.folder)
        self.window += 1
        self._start_window()

    def _digest(self, partial: Path) -> str:
        """SHA-256 of the documents: their tokens, lengths, labels and images."""
        digest = hashlib.sha256()
        for name in self._kept():
            if name != "origins":
                with (partial / f"{name}.bin").open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def _kept(self) -> list[str]:
        return [name for name in APPENDED if self._labelled or name != "labelled"]

    def _state(self) -> dict[str, Any]:
        return {"window": self.window, "counts": dict(self._counts), **self._place()}

    def _place(self) -> dict[str, Any]:
        return {"position": self.position, "skip": self.skip, "dropped": self.dropped}

    def _start_window(self) -> None:
        partial = self.folder / PARTIAL
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        self._counts = dict.fromkeys(APPENDED, 0)
        self._files = {name: (partial / f"{name}.bin").open("wb") for name in self._kept()}

    def _resume(self) -> None:
        """Go on behind the last durable document."""
        while window_folder(self.folder, self.window).is_dir():
            self.window += 1
        for litter in self.folder.glob(".*.tmp"):
            litter.unlink()
        progress = _json_or_none(self.folder / PROGRESS)
        if progress is not None and progress["window"] == self.window and self._cut_back(progress):
            self._counts.update(progress["counts"])
            self._go_on(progress)
            return
        if self.window:
            about = _json_or_none(window_folder(self.folder, self.window - 1) / WINDOW)
            assert about is not None, "a window gets its name after its window.json"
            self._go_on(about)
        self._start_window()

    def _go_on(self, place: Mapping[str, Any]) -> None:
        self.position, self.skip = place["position"], place["skip"]
        self.dropped = place["dropped"]

    def _cut_back(self, progress: Mapping[str, Any]) -> bool:
        """Open the files as they were at the last sync; False if they are not there any more."""
        partial = self.folder / PARTIAL
        sizes = {name: progress["counts"][name] * ARRAYS[name].itemsize for name in self._kept()}
        for name, size in sizes.items():
            path = partial / f"{name}.bin"
            if not path.is_file() or path.stat().st_size < size:
                return False
        for name, size in sizes.items():
            os.truncate(partial / f"{name}.bin", size)
            self._files[name] = (partial / f"{name}.bin").open("ab")
        return True


def _json_or_none(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
