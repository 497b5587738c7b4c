"""A device that is not the host's memory, on a machine that has none.

Its tensors are kept in host memory behind a wrapper. An operator that mixes them with host tensors
raises, as on an accelerator, and everything else computes what the host would, to the bit. So a
program that forgets to move something is found without an accelerator; how it fares there, what it
costs and what runs at the same time is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretended"
COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


class Away(Tensor):
    """A tensor of the pretended device; its values are in `held`."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Away:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Away({self.held!r})"

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _Pretending():
            return func(*args, **(kwargs or {}))


class _Pretending(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # there is nothing to pin it for
        flat = _pytree.tree_leaves((args, kwargs))
        away = [item for item in flat if isinstance(item, Away)]
        wanted = kwargs.get("device")
        here = wanted is None or torch.device(wanted).type != NAME
        if not away and here:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return func(away[0].held)
        if func is torch.ops.aten._conj.default:  # below here nobody knows of lazy conjugates
            return Away(away[0].held.conj_physical())
        home = [
            item
            for item in flat
            if isinstance(item, Tensor) and not isinstance(item, Away) and item.dim() > 0
        ]
        if away and home and func not in COPIES and not _indexes_only(func, home):
            raise RuntimeError(f"{func} is given tensors of the host and of the {NAME} device")
        inner = {name: "cpu" if name == "device" else value for name, value in kwargs.items()}
        given = _pytree.tree_map_only(Away, lambda item: item.held, (args, inner))
        result = func(*given[0], **given[1])
        if func is torch.ops.aten.copy_.default:
            return args[0]
        to_host = wanted is not None and here
        if to_host:
            # A copy, as between two memories.
            return result.clone() if result is given[0][0] else result
        wrapped = _pytree.tree_map_only(Tensor, Away, result)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _indexes_only(func: Any, home: list[Tensor]) -> bool:
    """Indexing takes indices of the host on any device."""
    names = {"aten::index.Tensor", "aten::index_put_", "aten::index_put"}
    return func.name().split(".")[0] in {name.split(".")[0] for name in names} and all(
        not tensor.is_floating_point() for tensor in home
    )


def _empty_strided(size: Any, stride: Any, **options: Any) -> Away:
    return Away(torch.empty_strided(size, stride, dtype=options.get("dtype")))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    held, given = (x.held if isinstance(x, Away) else x for x in (target, source))
    held.copy_(given)
    return target


@contextmanager
def pretended_device() -> Iterator[torch.device]:
    """Inside, the device exists. Once in a process, before its first backward: the threads of
    autograd are started then, one for each kind of device."""
    _setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("aten", "IMPL")
    # torch.tensor(..., device=) goes past every mode.
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    with _Pretending():
        yield torch.device(NAME, 0)
