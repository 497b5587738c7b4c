"""What a drill rehearses. Each run has STEPS steps and a checkpoint every EVERY."""

from __future__ import annotations

from dataclasses import dataclass

STEPS, EVERY = 8, 3
MIDDLE, SAVED, LATER = 5, 6, 8  # steps: after the first checkpoint, of the second, after that


@dataclass(frozen=True)
class Case:
    """One fault. faults: what DSV41_FAULTS asks for, `{last}` being the last rank; without
    attempt=1 it strikes at every attempt. ended: how the first attempt is to end, in the words of
    its outcome. resumes: the step of the checkpoint that the next one is to go on from. watched:
    only a supervisor in a process of its own can notice it."""

    name: str
    purpose: str
    faults: str
    ended: str
    resumes: int = EVERY
    watched: bool = False


CASES = (
    Case(
        "error",
        "a rank raises in the middle of a step",
        f"raise@reduce,rank={{last}},step={MIDDLE},attempt=1",
        "bug",
    ),
    Case(
        "kill",
        "a rank is killed, as for lack of memory",
        f"kill@forward,rank={{last}},step={MIDDLE},attempt=1",
        "a rank was killed",
    ),
    Case(
        "hang",
        "a rank stops working",
        f"hang@backward,rank={{last}},step={MIDDLE},attempt=1",
        "hang",
        watched=True,
    ),
    Case(
        "stop",
        "a rank's process is frozen",
        f"stop@forward,rank={{last}},step={MIDDLE},attempt=1",
        "hang",
        watched=True,
    ),
    Case(
        "nan",
        "a gradient is not finite",
        f"nan@reduce,rank={{last}},step={MIDDLE},attempt=1",
        "diverged",
    ),
    Case(
        "kill-save",
        "a rank is killed as a checkpoint is about to appear",
        f"kill@save.rename,rank=0,step={SAVED},attempt=1",
        "a rank was killed",
    ),
    Case(
        "disk-full",
        "no space is left while a checkpoint is written",
        f"disk-full@save.slice,rank={{last}},step={SAVED},attempt=1,visit=2",
        "disk full",
    ),
    Case(
        "corrupt",
        "a bit of the newest checkpoint flips, then a rank is killed",
        f"corrupt@save.renamed,rank=0,step={SAVED},attempt=1;"
        f"kill@data,rank=0,step={LATER},attempt=1",
        "a rank was killed",
    ),
)
