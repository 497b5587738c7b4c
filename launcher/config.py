"""How the ranks of a run are started, and on what."""

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


@dataclass(frozen=True)
class ClusterConfig:
    """The machines that the ranks run on.

    device_memory_gb: of one accelerator, in 10^9 bytes. A run that would hold more on some rank is
    refused before it starts, see `dsv41 plan`. None = unknown, nothing is refused.
    """

    device_memory_gb: float | None = None

    def problems(self) -> list[str]:
        if self.device_memory_gb is None or self.device_memory_gb > 0:
            return []
        return [
            f"cluster.device_memory_gb={self.device_memory_gb} must be above 0; give the memory of "
            "one accelerator in GB, or null if it is unknown"
        ]
