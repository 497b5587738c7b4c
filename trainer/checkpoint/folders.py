"""Which checkpoints a run has; needs no torch, for those who only look."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from trainer import faults
from trainer.checkpoint.errors import DamagedCheckpointsError
from trainer.checkpoint.manifest import damage

_STEP = re.compile(r"step_(\d{8,})")


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is, or would be, in a run's folder of checkpoints."""
    return folder / f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """The step of a finished save by its folder's name; None for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def finished(folder: Path) -> list[Path]:
    """Folders of finished saves in a run's folder of checkpoints, oldest first, whole or not."""
    if not folder.is_dir():
        return []
    steps = [(step_of(path), path) for path in folder.iterdir() if path.is_dir()]
    return [path for _, path in sorted((step, p) for step, p in steps if step is not None)]


def newest_whole(folder: Path) -> Path | None:
    """The newest whole checkpoint in a run's checkpoint folder, for those who only read.

    None when there is none at all. Raises DamagedCheckpointsError when there are some and none is
    whole. Reads every byte of the newest.
    """
    bad = []
    for path in reversed(finished(folder)):
        if not (problems := damage(path)):
            return path
        bad += problems
    if bad:
        raise DamagedCheckpointsError(none_is_whole(bad))
    return None


def remove(path: Path, **here: int) -> None:
    """Remove a checkpoint, which loses its name first: what is half removed is no checkpoint."""
    leaving = path
    if step_of(path) is not None:
        leaving = path.with_name(f"{path.name}.tmp-removed")
        path.rename(leaving)
    faults.reach("save.retire", here)
    shutil.rmtree(leaving)


def none_is_whole(problems: Sequence[str]) -> str:
    """What to tell a user whose every checkpoint is damaged."""
    report = "No checkpoint of this run is whole; restore a file or start a new run:"
    return "\n".join([report, *(f"  {problem}" for problem in problems)])
