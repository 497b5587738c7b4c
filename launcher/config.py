"""How the ranks of a run are started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LauncherConfig:
    """`local`: one rank, in the process of the command itself."""

    kind: Literal["local"]

    @property
    def ranks(self) -> int:
        """Ranks that this launcher starts."""
        return 1
