"""The tokens of a model case as the model wants them: documents aligned inside rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.verify.case import CaseError, Tensors, Unsupported
from model.config import ModelConfig
from model.layout import Images, ModelInputs
from model.loss import IGNORED

IMAGE_INPUTS = {"pixel_values", "image_grid_hws", "vision_token_types"}
KNOWN_INPUTS = {"input_ids", "labels", "attention_mask", "seq_lens"} | IMAGE_INPUTS


@dataclass(frozen=True)
class Documents:
    """A case's rows with every document moved right to a multiple of the model's alignment.

    `inputs` and `labels` are [B, W]; a label is the next token of the same document, -100 where
    there is none. Live token i of the case stands in row `row[i]`, in column `case_column[i]` of
    the case's own tensors and in column `column[i]` of the aligned row.
    """

    inputs: ModelInputs
    labels: Tensor
    row: Tensor
    case_column: Tensor
    column: Tensor


def place(inputs: Tensors, config: ModelConfig) -> Documents:
    """Lay out the documents of `inputs`: rows of `seq_lens`, or one right-padded document a row.

    Images come as `pixel_values` [P, 3, p, p], `image_grid_hws` [n, 2] and `vision_token_types`
    [B, S]. Unsupported when the case takes yet other inputs; CaseError when they contradict.
    """
    if unknown := sorted(set(inputs) - KNOWN_INPUTS):
        raise Unsupported(f"inputs {', '.join(unknown)} are not supported yet")
    ids, labels = inputs["input_ids"], inputs["labels"]
    if ids.ndim != 2 or ids.shape != labels.shape:
        raise CaseError(
            f"{inputs.path}: input_ids {list(ids.shape)} and labels {list(labels.shape)} must be "
            "rows of one shape"
        )
    _expect_tokens(inputs, config.vocab_size)
    types, images = _images(inputs)
    lengths = _lengths(inputs)
    step = config.alignment
    ends = [sum(-(-n // step) * step for n in row) for row in lengths]
    width = -(-max(ids.shape[1], *ends) // step) * step
    out = ModelInputs(
        input_ids=torch.full((len(ids), width), config.pad_token_id),
        seq_ids=torch.zeros(len(ids), width, dtype=torch.int64),
        position_ids=torch.zeros(len(ids), width, dtype=torch.int64),
        token_types=torch.full((len(ids), width), -1, dtype=torch.int8),
        images=images,
    )
    aligned_labels = torch.full((len(ids), width), IGNORED)
    places: list[tuple[int, int, int]] = []
    for b, row in enumerate(lengths):
        source = target = 0
        for number, n in enumerate(row, start=1):
            here = slice(target, target + n)
            out.input_ids[b, here] = ids[b, source : source + n]
            out.token_types[b, here] = types[b, source : source + n]
            out.seq_ids[b, here] = number
            out.position_ids[b, here] = torch.arange(n)
            aligned_labels[b, target : target + n - 1] = labels[b, source + 1 : source + n]
            places += [(b, source + i, target + i) for i in range(n)]
            source += n
            target += -(-n // step) * step
    row_of, case_column, column = torch.tensor(places).unbind(1)
    return Documents(out, aligned_labels, row_of, case_column, column)


def _images(inputs: Tensors) -> tuple[Tensor, Images | None]:
    """Token types like input_ids (-1 on text), and the images in the order of their spans."""
    ids = inputs["input_ids"]
    if not IMAGE_INPUTS & set(inputs):
        return torch.full_like(ids, -1), None
    types, pixels = inputs["vision_token_types"], inputs["pixel_values"]
    grids = inputs["image_grid_hws"]
    if types.shape != ids.shape or pixels.ndim != 4 or grids.ndim != 2:
        raise CaseError(
            f"{inputs.path}: pixel_values {list(pixels.shape)}, image_grid_hws "
            f"{list(grids.shape)} and vision_token_types {list(types.shape)} do not fit input_ids "
            f"{list(ids.shape)}"
        )
    return types, Images(pixels.flatten(1), grids)


def _expect_tokens(inputs: Tensors, vocab_size: int) -> None:
    for name in ("input_ids", "labels"):
        ids = inputs[name]
        outside = ((ids < 0) | (ids >= vocab_size)) & ((ids != IGNORED) | (name == "input_ids"))
        if outside.any():
            raise CaseError(
                f"{inputs.path}: {name} holds {int(ids[outside][0])}, no token of a vocabulary of "
                f"{vocab_size}"
            )


def _lengths(inputs: Tensors) -> list[list[int]]:
    """Tokens of every document, row by row."""
    width = inputs["input_ids"].shape[1]
    if "seq_lens" in inputs:
        lengths = [[n for n in row if n > 0] for row in inputs["seq_lens"].tolist()]
    elif "attention_mask" in inputs:
        mask = inputs["attention_mask"]
        if (mask[:, 1:] > mask[:, :-1]).any():
            raise Unsupported("padding before tokens is not supported")
        lengths = [[n] if n else [] for n in mask.sum(1).tolist()]
    else:
        lengths = [[width] for _ in inputs["input_ids"]]
    if max(sum(row) for row in lengths) > width or not any(lengths):
        raise CaseError(f"{inputs.path}: documents of {lengths} tokens in rows of {width}")
    return lengths
