"""Where documents lie in the tokens of a micro-batch, laid end to end in one row of T tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.parallel.columns import Columns
from model.parallel.group import Group


@dataclass(frozen=True)
class Images:
    """The images of a micro-batch, in the row-major order of their spans over [B, S].

    patches [P, 3 * patch_size^2]: channel first inside a patch, patches of an image row by row,
    one image after another. grids [n, 2] int64: patch rows and columns of each image.
    ranks [n] int64, where the rows are divided over a context group: the rank that each image is
    given to; `grids` are then those of all images, `patches` those of this rank's.
    """

    patches: Tensor
    grids: Tensor
    ranks: Tensor | None = None


@dataclass(frozen=True)
class ModelInputs:
    """One micro-batch as the loader makes it; every tensor is [B, S].

    Where a context group of n ranks divides the rows, `input_ids` are this rank's S / n columns,
    and the others whole: where documents lie is known without asking the other ranks.

    `seq_ids` counts documents 1, 2, ... inside a row and is 0 on padding; `position_ids` restart in
    every document; documents start at multiples of the model's alignment; `token_types` is -1 on
    text, and 0..3 inside image spans (start, image, newline, end). The image tokens take what the
    tower makes of `images`, in order; None when there is no span.
    """

    input_ids: Tensor
    seq_ids: Tensor
    position_ids: Tensor
    token_types: Tensor
    images: Images | None = None

    def to(self, device: torch.device) -> ModelInputs:
        """The same on a device, without waiting for what comes out of page-locked memory."""
        return _moved(self, device)


def _moved(value: Any, device: torch.device) -> Any:
    moved: dict[str, object] = {}
    for f in fields(value):
        part = getattr(value, f.name)
        if isinstance(part, Tensor):
            moved[f.name] = part.to(device, non_blocking=True)
        elif isinstance(part, Images):
            moved[f.name] = _moved(part, device)
    return replace(value, **moved)


@dataclass(frozen=True)
class VisibleRange:
    """Compressed entries of one ratio that each query may see: flat groups [low, high)."""

    low: Tensor  # [T] int64
    high: Tensor  # [T] int64, equal to low where nothing is visible


class Documents(NamedTuple):
    """The documents of T flat tokens, counted over all rows."""

    index: Tensor  # [T] int64: each token's document, len(lengths) on padding
    lengths: Tensor  # [documents] int64
    group: Group = Group()  # the ranks that have tokens of these documents


@dataclass(frozen=True)
class Layout:
    """The documents of T flat tokens. Tensors are [T]; padding tokens see nothing.

    Where rows are divided, T are this rank's columns of every row; flat indices count the tokens of
    whole rows all the same, and `whole` is the layout of them all.
    """

    live: Tensor  # bool: not padding
    image: Tensor  # bool: inside an image span
    position: Tensor  # int64, document-local
    index: Tensor  # int64, each token's flat index
    start: Tensor  # int64, flat index of the own document's first token; index + 1 on padding
    columns: Columns = field(default_factory=Columns)
    undivided: Layout | None = None

    @classmethod
    def of(cls, inputs: ModelInputs, columns: Columns = Columns()) -> Layout:  # noqa: B008, frozen
        """Lay the rows of `inputs` end to end; their width must be a multiple of the alignment."""
        live = inputs.seq_ids.flatten() > 0
        position = inputs.position_ids.flatten()
        index = torch.arange(live.numel(), device=live.device)
        whole = cls(
            live=live,
            image=inputs.token_types.flatten() >= 0,
            position=position,
            index=index,
            # Past the token itself: then no window key, however near, passes `key >= start`.
            start=torch.where(live, index - position, index + 1),
        )
        return whole.divide(columns) if columns.divided else whole

    def divide(self, columns: Columns) -> Layout:
        """This rank's part."""
        return Layout(
            live=columns.own(self.live),
            image=columns.own(self.image),
            position=columns.own(self.position),
            index=columns.own(self.index),
            start=columns.own(self.start),
            columns=columns,
            undivided=self,
        )

    @property
    def whole(self) -> Layout:
        """Of all tokens of all rows."""
        return self.undivided or self

    @property
    def window_start(self) -> Tensor:
        """[stretches, n]: `start` counted from a stretch's first token, negative in a document
        that begins on another rank."""
        index = self.index.unflatten(0, (self.columns.stretches, -1))
        return self.start.view_as(index) - index[:, :1]

    def documents(self) -> Documents:
        """Number the documents; their count decides shapes, so a device is waited for."""
        whole, columns = self.whole, self.columns
        first = whole.live & (whole.start == whole.index)
        number = first.cumsum(0)
        count = int(number[-1])
        index = torch.where(whole.live, number - 1, count)
        lengths = torch.bincount(index, minlength=count + 1)[:count]
        return Documents(columns.own(index), lengths, columns.group)

    def visible(self, ratio: int) -> VisibleRange:
        """Entry g of a document is visible to its position t when g < floor((t + 1) / ratio).

        A group that the document's end cuts short is never visible, since it would need a position
        past the end; so its contents need no mask.
        """
        low = torch.where(self.live, self.start // ratio, 0)
        count = torch.where(self.live, (self.position + 1) // ratio, 0)
        return VisibleRange(low, low + count)


def pad_rows(inputs: ModelInputs, width: int, *, pad_token_id: int) -> ModelInputs:
    """Widen every row to `width` columns of padding at its right."""
    extra = width - inputs.input_ids.shape[1]
    if extra == 0:
        return inputs
    return replace(
        inputs,
        input_ids=F.pad(inputs.input_ids, (0, extra), value=pad_token_id),
        seq_ids=F.pad(inputs.seq_ids, (0, extra)),
        position_ids=F.pad(inputs.position_ids, (0, extra)),
        token_types=F.pad(inputs.token_types, (0, extra), value=-1),
    )
