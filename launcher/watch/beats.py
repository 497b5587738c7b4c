"""The heartbeats of an attempt's ranks, as a watchdog keeps them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from launcher.run_dir import Attempt
from trainer.heartbeat import heartbeat_file


@dataclass(frozen=True)
class Beat:
    """The last sign of life of a rank, see `trainer.heartbeat`.

    seen: when this one was first found, by the watchdog's own clock: those of the ranks' machines
    may differ from it.
    """

    rank: int
    host: str
    pid: int
    beat: int
    step: int
    steps: int
    phase: str
    turn: int
    progress: int
    waiting: bool
    seconds: dict[str, float] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    seen: float = 0.0

    @property
    def where(self) -> str:
        """What the rank does, in words."""
        return self.phase if self.phase == "start" else f"{self.phase} of step {self.step}"

    @property
    def named(self) -> str:
        return f"Rank {self.rank} ({self.host}, pid {self.pid})"


_NAMES = tuple(each.name for each in fields(Beat) if each.name != "seen")


class Beats:
    """The newest beat of each rank of `world`, and when anything was last finished."""

    def __init__(self, attempt: Attempt, world: int, *, now: float) -> None:
        self._attempt = attempt
        self._world = world
        self.of: dict[int, Beat] = {}
        self.finished = now

    def read(self, now: float) -> None:
        """Look at all files."""
        for rank in range(self._world):
            before = self.of.get(rank)
            found = _read(heartbeat_file(self._attempt.path, rank), seen=now)
            if found is None or (before is not None and before.beat == found.beat):
                continue
            if before is None or _done(before) != _done(found):
                self.finished = now
            self.of[rank] = found

    def forgive(self, seconds: float) -> None:
        """Nobody is to blame for the last `seconds`, in which we ourselves did not run."""
        self.finished += seconds
        for rank, beat in self.of.items():
            self.of[rank] = replace(beat, seen=beat.seen + seconds)


def _done(beat: Beat) -> tuple[int, int, int]:
    return beat.turn, beat.progress, beat.steps


def _read(file: Path, *, seen: float) -> Beat | None:
    try:
        said: dict[str, Any] = json.loads(file.read_text("utf-8"))
        return Beat(**{name: said[name] for name in _NAMES}, seen=seen)
    except (OSError, ValueError, KeyError, TypeError):
        return None
