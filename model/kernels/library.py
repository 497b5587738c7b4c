"""Calling the compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from model.kernels.build import built

LANES = 16  # of vectors.h


class Kernels:
    """The functions of the C files beside this one.

    A call passes torch's number of threads first, then its arguments: contiguous fp32 tensors on
    the CPU (int64 ones where the C function says so), integers, floats, None.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def run(self, name: str, *args: Tensor | int | float | None) -> None:
        getattr(self.library, name)(
            ctypes.c_int64(torch.get_num_threads()), *(_to_c(arg) for arg in args)
        )


def kernels(*tensors: Tensor, width: int = LANES) -> Kernels | None:
    """The kernels, where these tensors are fp32 on the CPU and there is a compiler; else None.

    None as well where torch.compile traces: it cannot follow a call of C. width: of the rows that
    are worked on, which kernels take in whole vectors alone.
    """
    if torch.compiler.is_compiling() or not _wanted or width % LANES:
        return None
    if not all(t.is_cpu and t.dtype == torch.float32 for t in tensors):
        return None
    return _kernels()


@contextmanager
def without_kernels() -> Iterator[None]:
    """For comparisons: torch's own operators everywhere."""
    global _wanted
    before, _wanted = _wanted, False
    try:
        yield
    finally:
        _wanted = before


_wanted = True


@cache
def _kernels() -> Kernels | None:
    library = built().library
    return None if library is None else Kernels(ctypes.CDLL(str(library)))


def _to_c(arg: Tensor | int | float | None) -> object:
    if isinstance(arg, Tensor):
        assert arg.is_contiguous(), "a kernel reads its arguments as they lie"
        return ctypes.c_void_p(arg.data_ptr())
    if arg is None:
        return ctypes.c_void_p()
    return ctypes.c_int64(arg) if isinstance(arg, int) else ctypes.c_float(arg)
