"""Models that are made, looked at and cut up before any of their tensors has memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@contextmanager
def without_memory() -> Iterator[None]:
    """Modules made inside have the shapes of their tensors and nothing else (device meta)."""
    with torch.device("meta"), _NoDraws():
        yield


def give_memory(model: nn.Module, *, device: torch.device) -> None:
    """Give every tensor of a model that was made `without_memory` its own, with undefined values.

    A sharded tensor gets room for this rank's part. Like Module.to_empty, which would load the
    compiler for plain tensors as well.
    """

    def empty(tensor: Tensor) -> Tensor:
        if hasattr(tensor, "to_local"):
            return torch.empty_like(tensor, device=device)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    model._apply(empty)


class _NoDraws(TorchFunctionMode):
    """torch's layers draw values when they are made. Without memory that does nothing, but it
    loads the compiler: two seconds and 130 MB."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            return kwargs["tensor"]
        return func(*args, **kwargs)
