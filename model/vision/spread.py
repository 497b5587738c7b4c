"""Images of divided rows: one rank sees each, and its features go to where its span lies."""

from __future__ import annotations

import torch
from torch import Tensor

from model.layout import Images
from model.parallel.columns import Columns
from model.parallel.exchange import exchange
from model.vision.spans import IMAGE, require_filled


def own_images(images: Images, columns: Columns) -> Images | None:
    """Those that this rank's patches belong to; None if it is given none."""
    if not columns.divided:
        return images
    assert images.ranks is not None, "images of divided rows are given to ranks"
    grids = images.grids[images.ranks == columns.group.rank]
    return Images(images.patches, grids) if len(grids) else None


def to_spans(
    features: Tensor, images: Images, types: Tensor, columns: Columns, *, downsample: int
) -> Tensor:
    """[tokens of type IMAGE in this rank's columns, D] in their order, from every rank's features.

    features [cells of this rank's images, D]; types [B * S] of whole rows. The n-th image token
    takes the n-th feature of all images, wherever in the group it is; the gradient goes back. All
    ranks of the group call it together. ValueError, on all, when tokens and features are not
    equally many.
    """
    assert images.ranks is not None
    ranks, me, width = columns.group.size, columns.group.rank, len(types) // columns.stretches
    cells = (images.grids + downsample - 1).div(downsample, rounding_mode="floor").prod(1)
    source = images.ranks.repeat_interleave(cells)
    slots = (types == IMAGE).nonzero().flatten()
    require_filled(len(slots), len(source))
    target = slots % width // (width // ranks)
    sent, wanted = target[source == me], source[target == me]
    got = exchange(
        features[sent.argsort(stable=True)],
        columns.group,
        send=torch.bincount(sent, minlength=ranks).tolist(),
        receive=torch.bincount(wanted, minlength=ranks).tolist(),
    )
    # They come by rank, of each in order.
    return got[wanted.argsort(stable=True).argsort()]
