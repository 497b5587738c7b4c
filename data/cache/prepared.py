"""A prepared set: tokenised documents in windows of memory-mapped arrays.

    SET/set.json                 what was prepared, written first
    SET/window-00000/            2^20 documents, there by rename once whole
    SET/window-00001/ ...
    SET/complete.json            written last: the number of windows
    SET/failed.json              why the process that was to write the rest gave up

The writer is data.cache.writer; a reader needs no lock, and may open a set that still grows.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.cache.encoded import ORIGIN, SPAN
from data.cache.lock import held, lock_file
from data.errors import CacheError, DataError, WorkerDiedError

FORMAT = 1
WINDOW_DOCUMENTS = 2**20

# File of a window: the type of its entries. labelled.bin is only there when some token is not.
ARRAYS = {
    "tokens": np.dtype("<i4"),
    "labelled": np.dtype(bool),
    "lengths": np.dtype("<i4"),
    "offsets": np.dtype("<i8"),
    "origins": ORIGIN,
    "spans": SPAN,
    "blobs": np.dtype("u1"),
}
HEADER, COMPLETE, WINDOW = "set.json", "complete.json", "window.json"
FAILED = "failed.json"


@dataclass(frozen=True)
class PreparedSet:
    """Documents of one source in windows, numbered from 0 in each. Plain data: a path.

    Arrays are memory-mapped and read-only. Document d of a window holds tokens
    offsets[d]:offsets[d + 1].
    """

    folder: Path

    @classmethod
    def open(cls, folder: Path) -> PreparedSet:
        """The set in `folder`. DataError when there is none, or another version wrote it."""
        found = cls(Path(folder))
        version = found.header.get("format")
        if version != FORMAT:
            raise DataError(
                f"{folder} was prepared by another version (format {version}, this one reads "
                f"{FORMAT}); remove the folder to prepare the data anew"
            )
        return found

    @property
    def header(self) -> dict[str, Any]:
        """What was prepared: set.json."""
        return _read(self.folder / HEADER)

    @property
    def fingerprint(self) -> str:
        """SHA-256 that identifies the documents: their sources' content, tokenizer and settings.

        Known before the first window, and the same when the same sources are prepared elsewhere.
        """
        return str(self.header["fingerprint"])

    @property
    def complete(self) -> bool:
        """Whether all documents are in; no window is added from then on."""
        return (self.folder / COMPLETE).is_file()

    @property
    def windows(self) -> int:
        """Windows finished so far."""
        if self.complete:
            return int(_read(self.folder / COMPLETE)["windows"])
        number = 0
        while self.window_folder(number).is_dir():
            number += 1
        return number

    @property
    def dropped(self) -> int:
        """Documents of a complete set that were left out because a setting says so."""
        return int(_read(self.folder / COMPLETE)["dropped"])

    def require_growing(self) -> None:
        """Raise what ended the writing of a set that is not complete.

        DataError or CacheError with the writer's own message; WorkerDiedError when no process is
        at work on it and none has said why.
        """
        writing = held(lock_file(self.folder))
        if self.complete:
            return
        failed = self.folder / FAILED
        if failed.is_file():
            about = _read(failed)
            if about["kind"] == "DataError":
                raise DataError(about["message"])
            if about["kind"] == "CacheError":
                raise CacheError(about["message"], full=about["full"])
            raise WorkerDiedError(about["message"])
        if not writing:
            raise WorkerDiedError(
                f"The process that prepares {self.folder} is gone. What it finished is kept: the "
                "same command, resumed, goes on from there."
            )

    def window_folder(self, window: int) -> Path:
        """Where a window's arrays lie; derived arrays may be kept there too."""
        return window_folder(self.folder, window)

    def digest(self, window: int) -> str:
        """SHA-256 of a window's documents."""
        return str(self._window(window)["digest"])

    def documents(self, window: int) -> int:
        """Documents in a window."""
        return int(self._window(window)["entries"]["lengths"])

    def lengths(self, window: int) -> np.ndarray:
        """int32 [n]: tokens of each document."""
        return self._array(window, "lengths")

    def offsets(self, window: int) -> np.ndarray:
        """int64 [n + 1]: where each document begins in `tokens`."""
        return self._array(window, "offsets")

    def tokens(self, window: int) -> np.ndarray:
        """int32: the window's documents end to end."""
        return self._array(window, "tokens")

    def labelled(self, window: int) -> np.ndarray | None:
        """bool, as long as `tokens`: may this token be predicted? None when all may."""
        if "labelled" not in self._window(window)["entries"]:
            return None
        return self._array(window, "labelled")

    def image_spans(self, window: int) -> np.ndarray:
        """Structured array SPAN: the images of the window, by document and offset."""
        return self._array(window, "spans")

    def blobs(self, window: int) -> np.ndarray:
        """uint8: the image files that `image_spans` points into."""
        return self._array(window, "blobs")

    def origin(self, window: int, document: int) -> str:
        """Where a document came from, as file:line, for messages."""
        file, place = self._array(window, "origins")[document].item()
        return origin_text(self.header["files"][file], place)

    def _array(self, window: int, name: str) -> np.ndarray:
        entries = int(self._window(window)["entries"][name])
        path = self.window_folder(window) / f"{name}.bin"
        if not entries:  # an empty file cannot be mapped
            return np.zeros(0, ARRAYS[name])
        try:
            return np.memmap(path, dtype=ARRAYS[name], mode="r", shape=(entries,))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} is damaged ({error}); remove {self.folder} to prepare the data anew"
            ) from error

    def _window(self, window: int) -> dict[str, Any]:
        return _read_window(self.window_folder(window) / WINDOW)


def window_folder(folder: Path, window: int) -> Path:
    """The folder of a window of the set in `folder`."""
    return folder / f"window-{window:05d}"


def origin_text(file: str, place: int) -> str:
    """file:line or file:row; a place below 1 means the file as a whole."""
    return f"{file}:{place}" if place > 0 else file


@functools.lru_cache(maxsize=1024)  # a window never changes once it has its name
def _read_window(path: Path) -> dict[str, Any]:
    return _read(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); remove {path.parent} to prepare the data anew"
        ) from error
