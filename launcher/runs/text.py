"""How times and figures of a run are written for people."""

from __future__ import annotations

import os
import shlex
from collections.abc import Container, Sequence
from datetime import UTC, datetime
from pathlib import Path


def age(seconds: float) -> str:
    """45s, 12m, 3h 20m or 5d 4h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if hours < 1:
        return f"{minutes}m"
    if days < 1:
        return f"{hours}h {minutes % 60:02d}m"
    return f"{days}d {hours % 24}h"


def moment(seconds: float | None) -> str:
    """A time in UTC to the second; `?` when it is not known."""
    return "?" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%SZ}"


def number(value: object, form: str) -> str:
    """A figure, or nothing where there was none to measure."""
    return form.format(value) if isinstance(value, int | float) else ""


def as_typed(path: Path) -> str:
    """A path as one would type it here: relative where that is shorter, quoted where needed."""
    here = os.path.relpath(path)
    return shlex.quote(here if len(here) < len(str(path)) else str(path))


def aligned(rows: Sequence[Sequence[str]], *, right: Container[int] = ()) -> list[str]:
    """Rows as lines of columns two spaces apart; those in `right` end below one another."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            f"{cell:>{width}}" if i in right else f"{cell:<{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
