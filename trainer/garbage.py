"""Python's garbage collector, while a rank trains."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def set_up_spared() -> Iterator[None]:
    """Keep the collector from everything that exists now; what is made inside is collected as ever.

    Libraries and model are some 200,000 objects, and a full collection looks at each: 0.1 s in
    which this rank stands still every few dozen steps, and with it, at other steps than their own,
    all ranks that wait for it.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
