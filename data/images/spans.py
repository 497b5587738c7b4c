"""The tokens that stand for an image in the text, and what each of them is."""

from __future__ import annotations

import numpy as np

from data.images.sizing import span_length

TEXT, START, IMAGE, NEWLINE, END = -1, 0, 1, 2, 3


def span_types(rows: int, cols: int) -> np.ndarray:
    """int8 [rows * (cols + 1) + 2]: start, each row's image tokens and its newline, end.

    Every token of a span has the same id, image_token_id; only these types tell them apart.
    """
    types = np.full(span_length(rows, cols), IMAGE, dtype=np.int8)
    types[0], types[-1] = START, END
    types[1 + cols : -1 : cols + 1] = NEWLINE
    return types
