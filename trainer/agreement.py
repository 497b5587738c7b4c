"""What goes wrong on one rank is raised on all: one that left alone would be waited for forever."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from trainer.ranks import Ranks

T = TypeVar("T")


@contextmanager
def agreed(ranks: Ranks) -> Iterator[None]:
    """Turn an exception of any rank into one on all of them.

    All ranks enter together, and inside none waits for another. A rank that did not fail raises
    what the first failing one did, with its number.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as failure:
        error = failure
    if not ranks.any(error is not None):
        return
    told = ranks.all_gather_objects(_portable(error))
    if error is not None:
        raise error
    rank, theirs = next((rank, e) for rank, e in enumerate(told) if e is not None)
    theirs.args = (f"Rank {rank}: {theirs}",)
    raise theirs


def agreed_items(
    items: Iterator[T], ranks: Ranks, *, arrived: Callable[[], None] = lambda: None
) -> Iterator[T]:
    """The same items, equally many on all ranks; what one rank's source raises is raised on all.

    arrived: called when an item is here, before the other ranks' are waited for.
    """
    end = object()
    while True:
        with agreed(ranks):
            item = next(items, end)
            arrived()
        if item is end:
            return
        yield item  # pyright: ignore[reportReturnType]


def _portable(error: Exception | None) -> Exception | None:
    """The error itself, or one of the same text if it does not survive a journey."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
