"""Several images in one pass of the tower: their order, their positions, their cells."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PackedImages(NamedTuple):
    """The patches of n images, those of images with equally many patches side by side.

    order[i] is the given place of patch i, inverse the way back. row and col [P] are a patch's
    place in its own image. buckets lists (images, patches of each) in order.
    """

    order: Tensor
    inverse: Tensor
    row: Tensor
    col: Tensor
    buckets: list[tuple[int, int]]

    @classmethod
    def of(cls, grids: Tensor) -> PackedImages:
        """grids [n, 2]: patch rows and columns of each image; its tensors are on that device."""
        sizes = [rows * cols for rows, cols in grids.tolist()]
        starts = [0, *torch.tensor(sizes).cumsum(0).tolist()]
        chosen = sorted(range(len(sizes)), key=lambda i: sizes[i])
        order, row, col = [], [], []
        for i in chosen:
            place = torch.arange(sizes[i])
            order.append(starts[i] + place)
            row.append(place // int(grids[i, 1]))
            col.append(place % int(grids[i, 1]))
        where = torch.cat(order)
        inverse = torch.empty_like(where)
        inverse[where] = torch.arange(len(where))
        device = grids.device
        return cls(
            order=where.to(device),
            inverse=inverse.to(device),
            row=torch.cat(row).to(device),
            col=torch.cat(col).to(device),
            buckets=[(sizes.count(size), size) for size in sorted(set(sizes))],
        )


def cell_patches(grids: Tensor, downsample: int) -> Tensor:
    """[cells of all images, downsample^2] int64: the patches that each cell covers, row by row.

    Cells stand in row-major order, image by image; P (one past the last patch) where a cell
    reaches over the edge of its image.
    """
    total = int(grids.prod(1).sum())
    out, start = [], 0
    for rows, cols in grids.tolist():
        place = torch.arange(start, start + rows * cols).view(rows, cols)
        over = (0, -cols % downsample, 0, -rows % downsample)
        place = torch.nn.functional.pad(place, over, value=total)
        cells = place.unfold(0, downsample, downsample).unfold(1, downsample, downsample)
        out.append(cells.flatten(2).flatten(0, 1))
        start += rows * cols
    return torch.cat(out).to(grids.device)
