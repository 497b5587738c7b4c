"""Whether and where Weights & Biases shows a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Mode = Literal["disabled", "offline", "online", "auto"]
PROJECT = "dsv41-train"
_NOT_IN_PROJECT = "/\\#?%:"


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases: one W&B run for all attempts of a run, NAME-ID there.

    mode: online sends as it trains; offline writes a folder inside the run's, for `wandb sync`;
    auto = what WANDB_MODE says, else online where there is an account (WANDB_API_KEY, or after
    `wandb login`), else offline. Where an empty text is given, WANDB_PROJECT, WANDB_ENTITY and
    WANDB_RUN_GROUP count, and without them project dsv41-train, the account's own entity and no
    group. init_timeout_s: after so long without an answer the run goes on without W&B.
    finish_timeout_s: how long a run that is done waits for what is still to be sent.
    """

    mode: Mode = "disabled"
    project: str = ""
    entity: str = ""
    tags: tuple[str, ...] = ()
    group: str = ""
    init_timeout_s: float = 60.0
    finish_timeout_s: float = 30.0

    def problems(self) -> list[str]:
        found = []
        if bad := sorted(set(self.project) & set(_NOT_IN_PROJECT)):
            found.append(
                f"logging.wandb.project={self.project} cannot contain {' '.join(bad)}; leave it out"
            )
        for tag in self.tags:
            if not 1 <= len(tag) <= 64:
                found.append(f"logging.wandb.tags: {tag!r} must have 1 to 64 characters")
        for key in ("init_timeout_s", "finish_timeout_s"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value > 0):
                found.append(f"logging.wandb.{key}={value} must be above 0; use 30")
        return found

    def resolved(self, environ: Mapping[str, str], *, account: bool) -> Mode:
        """The mode that auto means; account: whether an API key is at hand."""
        if self.mode != "auto":
            return self.mode
        match environ.get("WANDB_MODE", ""):
            case "online" | "offline" | "disabled" as mode:
                return mode
        return "online" if account else "offline"
