"""Failures on demand, at named places, so that tests can see what a run makes of them.

Off unless the environment variable DSV41_FAULTS is set, which each process reads once:

    DSV41_FAULTS="kill@save.rename,step=4;disk-full@save.slice,rank=1,visit=3"

ACTION@POINT, then conditions on what the point knows about itself (step, rank) and on `visit`, the
how-manieth time that all other conditions hold. Several are separated by semicolons.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from dataclasses import dataclass, field

VARIABLE = "DSV41_FAULTS"

ACTIONS = {
    "kill": "SIGKILL to this process",
    "raise": "FaultError",
    "hang": "never go on",
    "disk-full": "the OSError of a disk without space",
}

POINTS = {
    "save.folder": "the temporary folder of a checkpoint was made",
    "save.slice": "this rank is about to write one more slice of a tensor",
    "save.tensors": "this rank has written its tensors",
    "save.manifest": "all ranks have written, the manifest is next",
    "save.rename": "the checkpoint is on the disk and about to appear",
    "save.renamed": "it has appeared, older ones are not yet removed",
    "save.retire": "an older checkpoint has lost its name and is about to be removed",
    "save.staged": "training goes on while the checkpoint is written",
}


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
    _seen: int = field(default=0, init=False)

    def due(self, point: str, known: dict[str, int]) -> bool:
        """Count the visit if it is one of ours, and say whether to fail."""
        if point != self.point or any(known.get(k) != v for k, v in self.conditions.items()):
            return False
        self._seen += 1
        return self.visit in (None, self._seen)

    def act(self) -> None:
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "hang":
            threading.Event().wait()
        if self.action == "disk-full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
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
        conditions = {}
        for condition in given:
            name, _, value = condition.partition("=")
            if not (name.isidentifier() and value.isdigit()):
                raise ValueError(f"{VARIABLE}: {part}: {condition!r} is not NAME=NUMBER")
            conditions[name] = int(value)
        found.append(Fault(action, point, conditions, conditions.pop("visit", None)))
    return found


_armed = parse(os.environ.get(VARIABLE, ""))


def arm(text: str) -> None:
    """From now on the faults of `text`, and no others, in this process."""
    _armed[:] = parse(text)


def reach(point: str, **known: int) -> None:
    """This process has come to `point`; `known`: what a fault may depend on. Costs nothing when
    no fault is armed."""
    for fault in _armed:
        if fault.due(point, known):
            fault.act()
