"""What goes wrong with a folder of weights, all of it at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SHOWN = 40  # lines of a message


class WeightsError(ValueError):
    """A folder of weights cannot be used; `problems` holds one line for each fault.

    The message shows the first 40.
    """

    def __init__(self, folder: Path, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        lines = "\n  ".join(shortened(self.problems))
        super().__init__(f"The weights in {folder} cannot be used:\n  {lines}")


def shortened(problems: Sequence[str]) -> list[str]:
    """The first 40, and how many more there are: weights of another model have thousands."""
    lines = list(problems[:SHOWN])
    if more := len(problems) - len(lines):
        lines.append(f"... and {more:,} more")
    return lines
