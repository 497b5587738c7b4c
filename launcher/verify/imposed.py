"""Index sources that take a reference's selections instead of their own.

In bfloat16 the last bit of a sum that was added up in another order moves a query's choice of
entries, and a choice moves its logits further than all rounding together. With equal choices what
is left is the rounding, which a gate can hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from launcher.verify.case import CaseError, Tensors
from model.attention.indexer import Indexer
from model.layout import ModelInputs
from model.transformer import DeepseekV41


@contextmanager
def imposing(
    model: DeepseekV41, reference: Tensors | None, inputs: ModelInputs
) -> Iterator[dict[str, Tensor]]:
    """Forwards over `inputs` select what `topk.N` of `reference` says, where it says something.

    Without a reference nothing changes. Yields what the model would have selected, by the same
    names: [B, W, K] int64, counted along the own row, -1 absent.
    """
    own: dict[str, Tensor] = {}
    changed: list[Indexer] = []
    for n, layer in enumerate(model.layers):
        indexer = getattr(layer.attn, "indexer", None)
        if isinstance(indexer, Indexer) and reference and (name := f"topk.{n}") in reference:
            given = _flat(reference, name, inputs, ratio=model.config.ratio(n), k=indexer.topk)
            _impose(indexer, given, own, name, rows=len(inputs.input_ids))
            changed.append(indexer)
    try:
        yield own
    finally:
        for indexer in changed:
            del indexer.select


def along_rows(selected: Tensor, *, rows: int, entries: int) -> Tensor:
    """Flat entries [rows * W, K] counted along their own row of so many entries: [rows, W, K]."""
    first = torch.arange(rows)[:, None, None] * entries
    by_row = selected.unflatten(0, (rows, -1))
    return torch.where(by_row >= 0, by_row - first, -1)


def _impose(
    indexer: Indexer, given: Tensor, own: dict[str, Tensor], name: str, *, rows: int
) -> None:
    choose = indexer.select

    def select(q, weights, keys, *args, **kwargs):
        chosen, pool = choose(q, weights, keys, *args, **kwargs)
        own[name] = along_rows(chosen, rows=rows, entries=len(keys) // rows)
        return given, pool

    indexer.select = select


def _flat(reference: Tensors, name: str, inputs: ModelInputs, *, ratio: int, k: int) -> Tensor:
    """The reference's selections as the indexer gives them: flat, ascending, -1 last."""
    topk, (rows, width) = reference[name], inputs.input_ids.shape
    if topk.ndim != 3 or len(topk) != rows or topk.shape[1] > width or topk.shape[2] > k:
        raise CaseError(
            f"{reference.path}: {name} has shape {list(topk.shape)}, not [{rows}, up to {width}, "
            f"up to {k}]"
        )
    wide = F.pad(topk, (0, k - topk.shape[2], 0, width - topk.shape[1]), value=-1)
    wide = wide.masked_fill(inputs.seq_ids[..., None] == 0, -1)
    first = torch.arange(rows)[:, None, None] * (width // ratio)
    absent = torch.iinfo(torch.int64).max
    flat = torch.where(wide >= 0, wide + first, absent).flatten(0, 1).sort(-1).values
    return flat.masked_fill_(flat == absent, -1)
