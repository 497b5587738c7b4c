"""Histograms of document lengths, for a terminal and as a picture."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data.statistics import SourceStatistics

WIDTH = 40


def length_bars(found: SourceStatistics) -> Iterator[str]:
    """A line for each power of two between the shortest and the longest: range, bar, count."""
    present = np.flatnonzero(found.lengths)
    if not len(present):
        return
    most = int(found.lengths.max())
    for bits in range(int(present[0]), int(present[-1]) + 1):
        count = int(found.lengths[bits])
        eighths = -(-8 * WIDTH * count // most)
        bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
        span = f"{2 ** (bits - 1):,}-{2**bits - 1:,}"
        share = count / found.documents
        yield f"{span:>23} {bar:{WIDTH}} {count:,} ({share:.1%})"


def draw_lengths(found: Sequence[SourceStatistics], picture: Path) -> None:
    """The same as a PNG, a colour for each source; replaces `picture` whole or not at all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(found)
    places = np.flatnonzero(sum(source.lengths for source in found))
    for number, source in enumerate(found):
        shift = (number - (len(found) - 1) / 2) * width
        axes.bar(places + shift, source.lengths[places], width=width, label=source.name)
    axes.set_xticks(places, [f"{2 ** (bits - 1):,}" for bits in places.tolist()], rotation=45)
    axes.set_yscale("log" if max(int(s.lengths.max()) for s in found) > 1000 else "linear")
    axes.set_xlabel("length in tokens, from")
    axes.set_ylabel("documents")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend()
    temporary = picture.with_name(f".{picture.name}.tmp")
    try:
        figure.savefig(temporary, dpi=120, format="png")
        os.replace(temporary, picture)
    finally:
        temporary.unlink(missing_ok=True)
