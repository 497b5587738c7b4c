from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from model.kernels.build import built
from model.kernels.library import Kernels


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that have run so far."""
    if built().library is None:
        pytest.skip(f"no kernels: {built().reason}")
    names: list[str] = []
    own = Kernels.run

    def run(self: Kernels, name: str, *args: Tensor | int | float | None) -> None:
        names.append(name)
        own(self, name, *args)

    monkeypatch.setattr(Kernels, "run", run)
    return names


@pytest.fixture(scope="session")
def both_ways() -> Callable[..., tuple[list[Tensor], list[Tensor]]]:
    """both_ways(function, tensors, weights) -> its outputs, and the gradients of all tensors.

    `weights` are the outputs' gradients; both are cast to the tensors' type.
    """

    def run(
        function: Callable[..., Tensor | tuple[Tensor, ...]],
        tensors: list[Tensor],
        weights: list[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        made = function(*leaves)
        outputs = [made] if isinstance(made, Tensor) else list(made)
        grads = torch.autograd.grad(outputs, leaves, [w.to(leaves[0].dtype) for w in weights])
        return [o.detach() for o in outputs], list(grads)

    return run
