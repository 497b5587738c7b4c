"""Initial weights for training from scratch."""

from __future__ import annotations

import torch
from torch import nn

from model.parallel.held import held_part
from model.random import fill_normal, stream_of

ONES = ("norm.weight", "norm1.weight", "norm2.weight", "q_weight", "k_weight", ".scale")
ZEROS = ("attn_sink", ".base", ".bias")


@torch.no_grad()
def init_weights(model: nn.Module, *, seed: int, std: float) -> None:
    """Matrices and image delimiters normal with deviation `std`, norms and scales 1, sinks, bases
    and biases 0.

    An element is a function of (seed, its parameter's name, its place in the whole parameter). So
    each rank fills the parts that it holds, whatever the mesh, and all of them together are what
    one rank alone would have; and no parameter depends on which others there are.
    """
    for name, parameter in model.named_parameters():
        part, offset = held_part(parameter)
        if name.endswith(ONES):
            part.fill_(1.0)
        elif name.endswith(ZEROS):
            part.zero_()
        else:
            stream = stream_of(f"{seed}/{name}")
            fill_normal(part, shape=parameter.shape, offset=offset, stream=stream, std=std)
    for _, buffer in model.named_buffers():
        buffer.zero_()
