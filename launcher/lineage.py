"""What a new run takes over from another one: a checkpoint, and where that comes from."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from launcher.run_dir import RunFolder
from trainer.checkpoint.folders import step_of
from trainer.disk import sync_folder


def inherit(checkpoint: Path, folder: RunFolder) -> None:
    """Put a whole checkpoint of another run into `folder`, and say so in lineage.json.

    Files of checkpoints never change, so where the file system can they are the same files under a
    second name: that takes no room, and each run may remove its own.
    """
    step = step_of(checkpoint)
    assert step is not None, checkpoint
    target = folder.path / "checkpoints" / checkpoint.name
    target.mkdir()
    for file in checkpoint.iterdir():
        _take(file, target / file.name)
    sync_folder(target)
    parent = checkpoint.absolute().parent.parent
    known = {"parent": str(parent), "step": step}
    folder.lineage_file.write_text(json.dumps(known) + "\n", "utf-8")


def _take(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # another file system, or one without hard links
        with file.open("rb") as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy, 4 << 20)
            copy.flush()
            os.fsync(copy.fileno())
