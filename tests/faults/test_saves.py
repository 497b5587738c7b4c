"""Saves that are cut short, and checkpoints that are damaged afterwards."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.conftest import Ended, Rehearsal
from trainer.checkpoint.folders import newest_whole
from trainer.exit_codes import ExitCode

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.timeout(900)]

# A rank that comes to the point, and the step that the next attempt goes on from.
CUTS = {
    "save.folder": (0, 3),
    "save.slice": (1, 3),
    "save.tensors": (1, 3),
    "save.manifest": (0, 3),
    "save.rename": (0, 3),
    "save.renamed": (0, 6),
}


@pytest.mark.long
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("point", CUTS)
def test_a_kill_at_any_point_of_a_save(rehearsal: Rehearsal, point: str, background: bool) -> None:
    rank, resumed = CUTS[point]
    checkpoint = replace(rehearsal.config.checkpoint, async_=background)
    visit = ",visit=3" if point == "save.slice" else ""
    faults = f"kill@{point},step=6,rank={rank},attempt=1{visit}"
    ended = rehearsal.run(faults, checkpoint=checkpoint)
    ended.said("Attempt 1 ended (a rank was killed): ", f"from the checkpoint of step {resumed} ")
    ended.said(f"resuming after step {resumed} from ")
    ended.is_like_the_uninterrupted_one()


@pytest.mark.long
def test_a_flipped_bit_is_found_and_named(rehearsal: Rehearsal) -> None:
    ended = rehearsal.run("corrupt@save.renamed,step=6,attempt=1;kill@data,step=8,attempt=1")
    ended.said("Checkpoint step_00000006 is damaged and was set aside", "has changed since")
    ended.said("resuming after step 3 from ")
    ended.is_like_the_uninterrupted_one()


def cut_short(folder: Path) -> None:
    shard = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-100])


def without_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


def without_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


@pytest.mark.long
@pytest.mark.parametrize("damage", [cut_short, without_metadata, without_manifest])
def test_a_checkpoint_damaged_meanwhile(
    rehearsal: Rehearsal, damage: Callable[[Path], None]
) -> None:
    never = replace(rehearsal.config.resilience, max_failures=0)
    first = rehearsal.run("kill@data,step=8,rank=1", resilience=never)
    assert first.code == ExitCode.AGAIN, first.text
    first.said("of memory) after step 7. Not started again: resilience.max_failures=0 is used up.")
    damage(first.run.path / "checkpoints" / "step_00000006")
    ended = rehearsal.run(id=first.run.path.name, resilience=never)
    ended.said("Checkpoint step_00000006 is damaged and was set aside", "resuming after step 3")
    ended.is_like_the_uninterrupted_one()


def stands_at_3(ended: Ended) -> None:
    assert ended.code == ExitCode.IO_ERROR, ended.text
    assert ended.run.last_attempt() == 1  # a person must make room
    newest = newest_whole(ended.run.path / "checkpoints")
    assert newest is not None and newest.name == "step_00000003"
    assert not list(newest.parent.glob("*.tmp-*"))


@pytest.mark.long
@pytest.mark.parametrize("background", [False, True])
def test_one_ranks_disk_is_full(rehearsal: Rehearsal, background: bool) -> None:
    checkpoint = replace(rehearsal.config.checkpoint, async_=background)
    ended = rehearsal.run("disk-full@save.slice,rank=1,step=6,visit=2", checkpoint=checkpoint)
    stands_at_3(ended)
    ended.said("\nRank 1: No space left while saving step 6: the disk at ")
    ended.said("Free space there, then resume.")
    rehearsal.run(id=ended.run.path.name, checkpoint=checkpoint).is_like_the_uninterrupted_one()


@pytest.mark.long
def test_a_disk_that_really_is_full(rehearsal: Rehearsal, tmp_path: Path) -> None:
    """A small disk for the checkpoints, which something else fills after the first of them."""
    running = rehearsal.start("slow@forward,step=5,attempt=1,ms=8000")
    running.until((running.run.path / "checkpoints").is_dir)
    disk = running.run.path / "checkpoints"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    try:
        running.until(lambda: "saved" in running.log(0))
        blocks = 1 << 20
        with (disk / "filler").open("wb", buffering=0) as filler:
            while blocks >= 4096:
                try:
                    filler.write(bytes(blocks))
                except OSError:
                    blocks //= 4
        ended = running.end()
        stands_at_3(ended)
        ended.said("No space left while saving step 6: the disk at ", "has 0 MB free")
        (disk / "filler").unlink()
        rehearsal.run(id=ended.run.path.name).is_like_the_uninterrupted_one()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
