"""Training does not wait for a look at everything that the set-up has made."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from trainer.garbage import set_up_spared


class Knot:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.myself = self


def test_what_was_there_before_is_left_alone_and_what_is_made_inside_is_not() -> None:
    lost = weakref.ref(Knot())  # garbage already
    kept: Any = Knot()
    before = weakref.ref(kept)
    with set_up_spared():
        assert lost() is None  # not kept for ever
        inside = weakref.ref(Knot())
        seen = len(gc.get_objects())
        kept = None
        gc.collect()
        assert inside() is None
        assert before() is not None
        assert gc.get_freeze_count() > 10 * seen
    gc.collect()
    assert before() is None and gc.get_freeze_count() == 0


def test_an_error_ends_it_too() -> None:
    with pytest.raises(ValueError, match="x"), set_up_spared():
        raise ValueError("x")
    assert gc.get_freeze_count() == 0
