"""The plan of one window of documents: pieces, best fit, places in the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from data.errors import DataError
from data.order import split_documents
from data.plan.best_fit import best_fit
from data.plan.pieces import Pieces, TooLongError, cut
from data.plan.settings import PlanSettings


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """Which stretches of a window's tokens each pack holds, and where in the row they stand.

    Pack p holds pieces pack_offsets[p]:pack_offsets[p + 1], in row order. Piece i is
    tokens[starts[i]:starts[i] + lengths[i]] and begins at columns[i], a multiple of the
    alignment. image_starts: place of each image's first token among the window's, ascending.
    int64, but lengths and columns int32. The first `training` packs are for training, the others
    are held out; no document is in both. dropped: numbers of the documents that were too long.
    """

    pack_offsets: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    columns: np.ndarray
    image_starts: np.ndarray
    dropped: np.ndarray
    training: int

    def __len__(self) -> int:
        return len(self.pack_offsets) - 1


def plan_window(
    *,
    window: int,
    offsets: np.ndarray,
    spans: np.ndarray,
    settings: PlanSettings,
    origin: Callable[[int], str],
) -> WindowPlan:
    """Pack the documents of one window, a function of the arguments alone.

    offsets, spans: as in a prepared set. origin names a document. DataError when one is too long
    for the settings. About a microsecond and 150 bytes of memory a document.
    """
    both = split_documents(
        len(offsets) - 1,
        holdout=settings.held_out_share(window),
        seed=settings.seed,
        window=window,
    )
    parts = [_cut(chosen, offsets, spans, settings, origin) for chosen in both]
    training, held_out = (_packed(part, settings) for part in parts)
    return WindowPlan(
        pack_offsets=np.append(training[0], training[0][-1] + held_out[0][1:]),
        starts=np.append(training[1], held_out[1]),
        lengths=np.append(training[2], held_out[2]),
        columns=np.append(training[3], held_out[3]),
        image_starts=offsets[spans["document"]] + spans["offset"],
        dropped=np.append(parts[0].dropped, parts[1].dropped),
        training=len(training[0]) - 1,
    )


def require_places(
    *,
    offsets: np.ndarray,
    spans: np.ndarray,
    settings: PlanSettings,
    origin: Callable[[int], str],
) -> None:
    """DataError when a document of the window is too long for the settings; much less work than
    the plan."""
    if settings.on_long_document == "refuse" or len(spans):
        _cut(np.arange(len(offsets) - 1), offsets, spans, settings, origin)


def _cut(
    documents: np.ndarray,
    offsets: np.ndarray,
    spans: np.ndarray,
    settings: PlanSettings,
    origin: Callable[[int], str],
) -> Pieces:
    try:
        return cut(
            documents,
            offsets=offsets,
            spans=spans,
            pack_length=settings.pack_length,
            on_long=settings.on_long_document,
        )
    except TooLongError as error:
        raise DataError(_too_long(origin(error.document), error, settings)) from error


def _packed(pieces: Pieces, settings: PlanSettings) -> tuple[np.ndarray, ...]:
    """(pack_offsets, starts, lengths, columns) of the pieces, each widened to whole groups."""
    assert settings.pack_length % settings.alignment == 0, "validated with the configuration"
    groups = -(-pieces.lengths // settings.alignment)
    order, bins = best_fit(groups, capacity=settings.pack_length // settings.alignment)
    order = order[np.argsort(bins, kind="stable")]  # those of a pack together, the longest first
    counts = np.bincount(bins)
    pack_offsets = np.append(0, np.cumsum(counts, dtype=np.int64))
    widths = groups[order].astype(np.int64) * settings.alignment
    ends = np.cumsum(widths)
    row_starts = np.append(0, ends)[pack_offsets[:-1]]
    columns = (ends - widths - np.repeat(row_starts, counts)).astype(np.int32)
    return pack_offsets, pieces.starts[order], pieces.lengths[order], columns


def _too_long(where: str, error: TooLongError, settings: PlanSettings) -> str:
    if settings.on_long_document == "split":
        return (
            f"{where}: an image takes {error.longest} tokens, more than a pack of "
            f"{settings.pack_length}, and images are not cut; raise data.pack_length, lower "
            "model.vision.max_image_tokens, or set on_long_document=drop for its source"
        )
    return (
        f"{where}: {error.longest} tokens, more than a pack of {settings.pack_length}; raise "
        "data.pack_length, or set on_long_document=split or drop for its source"
    )
