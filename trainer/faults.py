"""Failures on demand, at named places, so that people and tests can see what a run makes of them.

Off unless the environment variable DSV41_FAULTS is set, which each process reads once:

    DSV41_FAULTS="kill@save.rename,step=4;slow@forward,rank=1,ms=200;hang@reduce,step=9,attempt=1"

ACTION@POINT, then conditions on what is known there: `step` (the one under way, or being saved),
`rank`, `attempt`; and `visit`, the how-manieth time that all other conditions hold. `ms` says how
slow. Several faults are separated by semicolons. Steps are done again after a failure: without
attempt=1 the same fault strikes the next attempt too.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

VARIABLE = "DSV41_FAULTS"
SLOW_MS = 500

ACTIONS = {
    "kill": "SIGKILL to this process",
    "raise": "FaultError",
    "hang": "never go on",
    "stop": "SIGSTOP to this process",
    "slow": "go on after `ms` milliseconds",
    "disk-full": "the OSError of a disk without space",
    "nan": "a gradient of this rank becomes NaN",
    "corrupt": "a bit of the largest file just written is flipped",
}

# Phases of a rank, see trainer.phase; the fault strikes as one begins.
PHASES = {
    "start": "data, model and the newest checkpoint are made ready",
    "data": "wait for the loader's micro-batches",
    "count": "agree on data and token counts; here ranks wait for one whose data is late",
    "engram": "fetch Engram rows for the next micro-batches",
    "forward": "a micro-batch forward",
    "backward": "a micro-batch backward",
    "reduce": "sum gradients over the ranks, measure and limit them",
    "update": "optimisers",
    "record": "write metrics, hear of a save in the background",
    "agree": "agree with the other ranks on whether to stop",
    "evaluate": "held-out packs",
    "samples": "what the model writes",
    "save": "a checkpoint, as far as training waits for it",
    "close": "wait for a save in the background, close files",
}

SAVE_POINTS = {
    "save.folder": "the temporary folder of a checkpoint was made",
    "save.slice": "this rank is about to write one more slice of a tensor",
    "save.tensors": "this rank has written its tensors",
    "save.manifest": "all ranks have written, the manifest is next",
    "save.rename": "the checkpoint is on the disk and about to appear",
    "save.renamed": "it has appeared, older ones are not yet removed",
    "save.retire": "an older checkpoint has lost its name and is about to be removed",
    "save.staged": "training goes on while the checkpoint is written",
}

POINTS = PHASES | SAVE_POINTS

# What an action needs to find at its point.
ONLY_AT = {"nan": ("reduce",), "corrupt": ("save.tensors", "save.renamed")}


class FaultError(Exception):
    """Raised by the action `raise`."""


@dataclass
class Fault:
    """One failure to be: `action` at `point` where all of `conditions` hold, at the visit-th time,
    or every time where it is None."""

    action: str
    point: str
    conditions: dict[str, int]
    visit: int | None = None
    ms: int = SLOW_MS
    _seen: int = field(default=0, init=False)

    def due(self, point: str, known: dict[str, int]) -> bool:
        """Count the visit if it is one of ours, and say whether to fail."""
        if point != self.point or any(known.get(k) != v for k, v in self.conditions.items()):
            return False
        self._seen += 1
        return self.visit in (None, self._seen)

    def act(self, grads: Iterable[Tensor | None] = (), folder: Path | None = None) -> None:
        match self.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                threading.Event().wait()
            case "slow":
                time.sleep(self.ms / 1000)
            case "nan":
                _spoil(grads)
            case "corrupt":
                assert folder is not None
                _flip(folder)
            case "disk-full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case _:
                raise FaultError(f"{self.action} at {self.point}, as {VARIABLE} asks")


def parse(text: str) -> list[Fault]:
    """The faults that DSV41_FAULTS=`text` asks for. ValueError for what would never happen."""
    found = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        head, *given = part.split(",")
        action, _, point = head.partition("@")
        for name, known in ((action, ACTIONS), (point, POINTS)):
            if name not in known:
                raise ValueError(f"{VARIABLE}: {part}: {name!r} is none of {', '.join(known)}")
        if point not in ONLY_AT.get(action, (point,)):
            only = ", ".join(ONLY_AT[action])
            raise ValueError(
                f"{VARIABLE}: {part}: {action} has nothing to act on there; use {only}"
            )
        conditions = {}
        for condition in given:
            name, _, value = condition.partition("=")
            if not (name.isidentifier() and value.isdigit()):
                raise ValueError(f"{VARIABLE}: {part}: {condition!r} is not NAME=NUMBER")
            conditions[name] = int(value)
        visit, ms = conditions.pop("visit", None), conditions.pop("ms", SLOW_MS)
        found.append(Fault(action, point, conditions, visit, ms))
    return found


_armed = parse(os.environ.get(VARIABLE, ""))
_place: dict[str, int] = {}


def arm(text: str) -> None:
    """From now on the faults of `text`, and no others, in this process."""
    _armed[:] = parse(text)


def place(**known: int) -> None:
    """What is known at every point of this process, besides what it says itself: rank, attempt."""
    _place.clear()
    _place.update(known)


def reach(
    point: str,
    known: Mapping[str, int],
    *,
    grads: Iterable[Tensor | None] = (),
    folder: Path | None = None,
) -> None:
    """This process has come to `point`; `known`: what a fault may depend on. grads, folder: what
    it may spoil. Costs nothing when no fault is armed."""
    for fault in _armed:
        if fault.due(point, {**_place, **known}):
            fault.act(grads, folder)


def _spoil(grads: Iterable[Tensor | None]) -> None:
    for grad in grads:
        if grad is not None:
            local = grad.to_local() if hasattr(grad, "to_local") else grad  # pyright: ignore
            if local.numel():
                local.view(-1)[0] = float("nan")
                return


def _flip(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: (path.stat().st_size, path.name))
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
