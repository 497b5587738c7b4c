"""A whole run as one frozen tree: what a rank trains, and what the launcher adds around it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from launcher.config import ClusterConfig, LauncherConfig, ResilienceConfig, SweepConfig
from trainer.config import TrainerConfig

_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class RunConfig(TrainerConfig):
    """Everything that `dsv41-train` needs to know.

    The run lives in runs_dir/name/id. A name may repeat; the id is the run's identity over all its
    attempts, and is made up from the time when null. resume: never = always a new run; auto =
    continue the newest unfinished run of that name with an equal configuration, if there is one.
    """

    name: str
    id: str | None
    resume: Literal["never", "auto"]
    runs_dir: str
    launcher: LauncherConfig
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)

    @property
    def home(self) -> Path:
        """The folder of all runs of this name."""
        return Path(self.runs_dir) / self.name

    def problems(self) -> list[str]:
        found = super().problems()
        found += name_problems("name", self.name) + name_problems("id", self.id)
        if not self.runs_dir:
            found.append("runs_dir is empty; name the folder that is to hold the runs")
        return found


def name_problems(key: str, value: str | None) -> list[str]:
    """Why `value` cannot be a folder's name; empty when it can, or is None."""
    if value is None or (_FOLDER_NAME.fullmatch(value) and len(value) <= 100):
        return []
    return [
        f"{key}={value} cannot name a folder; use up to 100 letters, digits, '.', '_' and '-', "
        "with a letter or digit first"
    ]
