"""Initial weights for training from scratch."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

ONES = ("norm.weight", "norm1.weight", "norm2.weight", "q_weight", "k_weight", ".scale")
ZEROS = ("attn_sink", ".base", ".bias")


@torch.no_grad()
def init_weights(model: nn.Module, *, seed: int, std: float) -> None:
    """Matrices and image delimiters normal with deviation `std`, norms and scales 1, sinks, bases
    and biases 0.

    Every parameter draws from a generator of its own, keyed by (seed, name): no parameter's values
    depend on which others exist or on the order they come in.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(ONES):
            parameter.fill_(1.0)
        elif name.endswith(ZEROS):
            parameter.zero_()
        else:
            parameter.copy_(_normal(name, parameter, seed=seed, std=std))
    for _, buffer in model.named_buffers():
        buffer.zero_()


def _normal(name: str, like: Tensor, *, seed: int, std: float) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(like.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
