"""Images in the text: span tokens get the tower's features and the learned delimiters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.config import VisionConfig
from model.layout import Images

START, IMAGE, NEWLINE, END = range(4)  # types of the tokens of a span; text is -1


def fill_spans(
    x: Tensor, types: Tensor, features: Tensor, delimiters: dict[int, nn.Parameter]
) -> Tensor:
    """x [T, D] with the tokens of image spans replaced; types [T] int8, features [cells, D].

    The n-th image token takes the n-th feature; a token of another type of `delimiters` takes that
    vector. ValueError when tokens and features are not equally many.
    """
    slots = (types == IMAGE).nonzero().flatten()
    require_filled(len(slots), len(features))
    x = x.index_copy(0, slots, features.to(x.dtype))
    for kind, vector in delimiters.items():
        x = torch.where((types == kind)[:, None], vector.to(x.dtype), x)
    return x


def require_filled(tokens: int, cells: int) -> None:
    """ValueError when the spans' image tokens and the images' features are not equally many."""
    if tokens != cells:
        raise ValueError(
            f"the image spans hold {tokens} image tokens, but the images make {cells}: "
            "give every span its image, in order, with the span's grid"
        )


def require_sound(images: Images, vision: VisionConfig) -> None:
    """ValueError when patches and grids do not belong together or fit another patch size."""
    if not len(images.grids):
        raise ValueError("images hold no image: leave them out where there is none")
    width, count = 3 * vision.patch_size**2, int(images.grids.prod(1).sum())
    if images.patches.shape != (count, width) or (images.grids < 1).any():
        raise ValueError(
            f"patches have shape {list(images.patches.shape)}, but grids {images.grids.tolist()} "
            f"of {vision.patch_size}-pixel patches need [{count}, {width}]"
        )


def blank_image(vision: VisionConfig, *, like: Tensor) -> Images:
    """One patch of zeros: makes the tower run where there is nothing to see."""
    patches = like.new_zeros(1, 3 * vision.patch_size**2)
    return Images(patches, torch.ones(1, 2, dtype=torch.int64, device=like.device))
