"""The images that stand in a pack: where, and their patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from data.errors import DataError
from data.images.pixels import open_image, patches
from data.images.sizing import plan_image
from data.plan.pieces import ranges

if TYPE_CHECKING:
    from data.packs import PackedSet, Place
    from model.config import VisionConfig


@dataclass(frozen=True, eq=False)
class PackedImage:
    """An image of a pack. column: where its span begins in the row; rows, cols: of the span's
    grid; width, height: the planned pixels; blob: the image file; where: the document it belongs
    to."""

    column: int
    rows: int
    cols: int
    width: int
    height: int
    blob: np.ndarray
    where: str


def packed_images(packs: PackedSet, place: Place) -> list[PackedImage]:
    """The images of a pack, in the order of their columns."""
    opens = packs.plan_of(place).image_starts
    if not len(opens):
        return []
    starts, lengths, columns = packs.pieces(place)
    first = np.searchsorted(opens, starts)
    counts = np.searchsorted(opens, starts + lengths) - first
    images = ranges(first, counts)
    at = opens[images] + np.repeat(columns - starts, counts)
    prepared = packs.prepared(place)
    spans, blobs = prepared.image_spans(place.window), prepared.blobs(place.window)
    found = []
    for span, column in zip(spans[images], at.tolist(), strict=True):
        begin = int(span["blob_offset"])
        found.append(
            PackedImage(
                column=column,
                rows=int(span["rows"]),
                cols=int(span["cols"]),
                width=int(span["width"]),
                height=int(span["height"]),
                blob=np.asarray(blobs[begin : begin + int(span["blob_length"])]),
                where=prepared.origin(place.window, int(span["document"])),
            )
        )
    return found


def patch_grids(images: Sequence[PackedImage], vision: VisionConfig) -> Tensor:
    """int64 [images, 2]: patch rows and columns of each, known without opening it."""
    patch = vision.patch_size
    grids = [(image.height // patch, image.width // patch) for image in images]
    return torch.tensor(grids, dtype=torch.int64)


def decode(images: Sequence[PackedImage], vision: VisionConfig) -> Tensor:
    """The patches [P, 3 * patch_size^2] bf16 of all images, in order.

    DataError for an image that cannot be decoded, or whose span was planned for other settings.
    """
    parts = [torch.empty(0, 3 * vision.patch_size**2, dtype=torch.bfloat16)]
    for image in images:
        pixels = open_image(image.blob.tobytes(), where=image.where)
        plan = plan_image(*pixels.size, vision)
        planned = (image.rows, image.cols, image.width, image.height)
        if (plan.rows, plan.cols, plan.width, plan.height) != planned:
            raise DataError(
                f"{image.where}: an image was prepared as {image.rows} x {image.cols} tokens of "
                f"{image.height} x {image.width} pixels, but model.vision makes it {plan.rows} x "
                f"{plan.cols} of {plan.height} x {plan.width}; prepare the data for this model"
            )
        parts.append(patches(pixels, plan, patch_size=vision.patch_size))
    return torch.cat(parts)
