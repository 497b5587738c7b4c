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
        lines = self.problems[:SHOWN]
        if more := len(self.problems) - len(lines):
            lines.append(f"... and {more:,} more")
        super().__init__(f"The weights in {folder} cannot be used:\n  " + "\n  ".join(lines))
