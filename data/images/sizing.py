"""From an image's size to the grid of patches and the grid of tokens it becomes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data.errors import DataError

if TYPE_CHECKING:
    from model.config import VisionConfig

NOTHING = "an image of {} x {} pixels has nothing to see; remove it"


@dataclass(frozen=True)
class ImagePlan:
    """The size an image is brought to. width and height: pixels, whole patches.

    The tower sees patch_rows x patch_cols patches, the language model rows x cols tokens (the
    last row and column may cover fewer patches than `downsample_ratio`). stretch: the image is
    wider than max_wh_ratio allows, and squeezed instead of padded.
    """

    width: int
    height: int
    patch_rows: int
    patch_cols: int
    rows: int
    cols: int
    stretch: bool = False

    @property
    def patches(self) -> int:
        return self.patch_rows * self.patch_cols

    @property
    def tokens(self) -> int:
        """Length of the span: a start, every row with its newline, an end."""
        return span_length(self.rows, self.cols)


def span_length(rows: int, cols: int) -> int:
    """Tokens of an image of rows x cols: each row ends with a newline, start and end around."""
    return rows * (cols + 1) + 2


def plan_image(width: int, height: int, vision: VisionConfig) -> ImagePlan:
    """The plan of an image of width x height pixels; a function of its arguments alone.

    A width beyond max_wh_ratio heights counts as that. Below min_pixels both sides grow by the
    same factor; then they are rounded up to whole patches. If the span would be longer than
    max_image_tokens, the sides shrink by one factor to the largest grid that fits, rounded down to
    patches: for a grid of w x (a w) cells that is w (w + 1) a = max_image_tokens - 2. An image too
    narrow (wide) for that becomes the longest single column (row).

    DataError for an image without pixels.
    """
    if width <= 0 or height <= 0:
        raise DataError(NOTHING.format(width, height))
    most = vision.max_image_tokens
    assert most >= 4, "validated with the configuration"
    stretch = vision.max_wh_ratio is not None and width >= height * vision.max_wh_ratio
    w, h = float(width), float(height)
    if stretch and vision.max_wh_ratio is not None:
        w = height * vision.max_wh_ratio
    if w * h < vision.min_pixels:
        growth = math.sqrt(vision.min_pixels / (w * h))
        w, h = max(int(w * growth), 1), max(int(h * growth), 1)
    patch, cell = vision.patch_size, vision.patch_size * vision.downsample_ratio
    plan = _plan(math.ceil(w / patch), math.ceil(h / patch), vision, stretch)
    if plan.tokens <= most:
        return plan
    aspect = h / w
    most_cols = math.sqrt((most - 2) / aspect + 0.25) - 0.5
    most_rows = most_cols * aspect
    per_cell = vision.downsample_ratio
    if most_cols < 1:
        return _plan(per_cell, (most - 2) // 2 * per_cell, vision, stretch)
    if most_rows < 1:
        return _plan((most - 3) * per_cell, per_cell, vision, stretch)
    shrink = min(math.floor(most_cols) * cell / w, math.floor(most_rows) * cell / h)
    return _plan(
        max(math.floor(w * shrink / patch), 1),
        max(math.floor(h * shrink / patch), 1),
        vision,
        stretch,
    )


def _plan(patch_cols: int, patch_rows: int, vision: VisionConfig, stretch: bool) -> ImagePlan:
    return ImagePlan(
        width=patch_cols * vision.patch_size,
        height=patch_rows * vision.patch_size,
        patch_rows=patch_rows,
        patch_cols=patch_cols,
        rows=-(-patch_rows // vision.downsample_ratio),
        cols=-(-patch_cols // vision.downsample_ratio),
        stretch=stretch,
    )
