"""Saves in the background, on one rank."""

import math
import os
import threading
from typing import Any

import pytest
import torch

from trainer import faults
from trainer.checkpoint.errors import NotFiniteError
from trainer.checkpoint.store import Checkpoints
from trainer.checkpoint.writing import slice_of
from trainer.disk import DiskError
from trainer.ranks import Ranks
from trainer.state import TrainState

SLICE = 400  # ten rows of the tensors here
ROOMY, TIGHT = 1 << 20, 3 * SLICE


def state(step):
    return TrainState(1, 4, "d", "p", step=step)


def tensors(value):
    return {
        "a": torch.full((100, 10), float(value)),
        "b": torch.full((7,), value, dtype=torch.int32),
        "c": torch.tensor(float(value)),
    }


@pytest.fixture
def checkpoints(tmp_path):
    return opened(tmp_path)


def opened(folder, *, staging=ROOMY, attempt=1):
    return Checkpoints(
        folder / "checkpoints",
        keep=2,
        attempt=attempt,
        ranks=Ranks(),
        say=lambda text: None,
        staging=staging,
        slice_bytes=SLICE,
    )


@pytest.fixture
def arm():
    yield faults.arm
    faults.arm("")


@pytest.fixture
def gate(monkeypatch):
    """Holds a save back just before the checkpoint appears."""
    event, reach = threading.Event(), faults.reach

    def held(point, known, **spoils):
        if point == "save.rename":
            event.wait()
        reach(point, known, **spoils)

    monkeypatch.setattr(faults, "reach", held)
    yield event
    event.set()


def assert_holds(checkpoints, step):
    target = tensors(0)
    assert checkpoints.load(checkpoints.path(step), target) == state(step)
    for name, tensor in tensors(step).items():
        assert torch.equal(target[name], tensor), name


@pytest.mark.parametrize("staging", [ROOMY, TIGHT, 1], ids=["roomy", "tight", "tiny"])
def test_the_checkpoint_is_of_its_step_whatever_training_does_next(tmp_path, staging):
    checkpoints = opened(tmp_path, staging=staging)
    live = tensors(2)
    checkpoints.save(live, state(2), wait=False)
    for tensor in live.values():
        tensor.fill_(9)
    assert checkpoints.settle(wait=True) == 2
    assert_holds(checkpoints, 2)


def test_training_goes_on_while_it_is_written(checkpoints, gate):
    checkpoints.save(tensors(2), state(2), wait=False)
    assert checkpoints.saving and checkpoints.settle() is None
    assert checkpoints.all() == []  # not visible before it is whole
    gate.set()
    assert checkpoints.settle(wait=True) == 2
    assert not checkpoints.saving and checkpoints.settle() is None
    assert checkpoints.all() == [checkpoints.path(2)]


def test_copies_never_take_more_than_the_buffer(tmp_path, monkeypatch):
    checkpoints = opened(tmp_path, staging=TIGHT)
    held = []

    def observed(shards, item):
        save = checkpoints._in_flight
        assert save is not None
        source: Any = save._source
        held.append(source._held)
        return slice_of(shards, item)

    monkeypatch.setattr("trainer.checkpoint.staging.slice_of", observed)
    checkpoints.save(tensors(1), state(1), wait=False)
    checkpoints.settle(wait=True)
    assert len(held) == 12 and max(held) <= TIGHT
    assert_holds(checkpoints, 1)


def test_one_save_at_a_time(checkpoints, gate):
    checkpoints.save(tensors(2), state(2), wait=False)
    threading.Timer(0.2, gate.set).start()
    checkpoints.save(tensors(4), state(4), wait=False)  # waits for the first
    assert checkpoints.path(2).exists()
    assert checkpoints.settle(wait=True) == 4
    assert_holds(checkpoints, 2)
    assert_holds(checkpoints, 4)


def test_the_last_save_waits(checkpoints):
    checkpoints.save(tensors(2), state(2), wait=False)
    checkpoints.save(tensors(3), state(3), wait=True)
    assert not checkpoints.saving
    assert checkpoints.all() == [checkpoints.path(2), checkpoints.path(3)]


@pytest.mark.parametrize("staging", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("where", ["save.folder", "save.slice", "save.manifest", "save.rename"])
def test_a_full_disk_is_heard_of_at_the_next_border(tmp_path, arm, where, staging):
    checkpoints = opened(tmp_path, staging=staging)
    checkpoints.save(tensors(2), state(2), wait=True)
    arm(f"disk-full@{where},step=4,visit=1")
    checkpoints.save(tensors(4), state(4), wait=False)
    with pytest.raises(DiskError, match="No space left while saving step 4") as error:
        checkpoints.settle(wait=True)
    assert error.value.full
    assert [p.name for p in checkpoints.folder.iterdir()] == ["step_00000002"]
    checkpoints.save(tensors(4), state(4), wait=False)  # the next one is free to succeed
    assert checkpoints.settle(wait=True) == 4


def test_old_ones_go_only_after_the_new_one_has_appeared(checkpoints, gate):
    for step in (2, 4):
        gate.set()
        checkpoints.save(tensors(step), state(step), wait=True)
    gate.clear()
    checkpoints.save(tensors(6), state(6), wait=False)
    assert checkpoints.all() == [checkpoints.path(2), checkpoints.path(4)]
    gate.set()
    checkpoints.settle(wait=True)
    assert checkpoints.all() == [checkpoints.path(4), checkpoints.path(6)]


def test_values_that_are_not_finite_are_not_saved(checkpoints):
    checkpoints.save({"a": torch.full((100, 10), math.nan)}, state(4), wait=False)
    with pytest.raises(NotFiniteError, match="a is not finite after step 4"):
        checkpoints.settle(wait=True)
    assert list(checkpoints.folder.iterdir()) == []


def test_a_copy_that_fails_is_told_of_like_any_failure(checkpoints, monkeypatch):
    def no_memory(tensor):
        raise MemoryError("no room for a copy")

    monkeypatch.setattr("trainer.checkpoint.staging._host_copy", no_memory)
    checkpoints.save(tensors(2), state(2), wait=False)
    with pytest.raises(MemoryError, match="no room for a copy"):
        checkpoints.settle(wait=True)
    assert list(checkpoints.folder.iterdir()) == []


def test_a_run_that_ends_badly_still_finishes_its_save(checkpoints, gate, arm, monkeypatch):
    checkpoints.save(tensors(2), state(2), wait=False)
    threading.Timer(0.2, gate.set).start()
    assert checkpoints.close() == 2
    arm("disk-full@save.manifest")
    checkpoints.save(tensors(4), state(4), wait=False)
    said = []
    monkeypatch.setattr(checkpoints, "_say", said.append)
    assert checkpoints.close() is None and checkpoints.close() is None
    assert len(said) == 1 and said[0].startswith("step 4: not saved: No space left")
    assert checkpoints.all() == [checkpoints.path(2)]


def test_too_little_memory_for_copies_is_noticed_before_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.checkpoint.space._available_memory", lambda: 10**6)
    big = {"a": torch.empty(1_000_000)}  # 4 MB
    opened(tmp_path, staging=900_000).check_space(big, saves=5)
    greedy = opened(tmp_path, staging=10**9)
    with pytest.raises(ValueError, match=r"async needs 4 MB .* 1 MB are free") as error:
        greedy.check_space(big, saves=5)
    assert "checkpoint.staging_mb" in str(error.value)
    greedy.check_space(big, saves=1)  # the only one is waited for


KILLS = [
    (point, way) for point in faults.SAVE_POINTS for way in ("waited for", "in the background")
]
KILLS.remove(("save.staged", "waited for"))


@pytest.mark.parametrize(("point", "way"), KILLS)
def test_killed_anywhere_the_next_start_takes_the_last_whole_one(tmp_path, point, way):
    checkpoints = opened(tmp_path)
    for step in (2, 4):
        checkpoints.save(tensors(step), state(step))
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            faults.arm(f"kill@{point},step=6" + (",visit=4" if point == "save.slice" else ""))
            checkpoints.save(tensors(6), state(6), wait=way == "waited for")
            checkpoints.settle(wait=True)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "it was not killed"

    later = opened(tmp_path, attempt=2)
    newest = later.newest()
    appeared = point in ("save.renamed", "save.retire")
    assert newest is not None
    if point != "save.staged":  # there, the thread may have come to any place
        assert newest == later.path(6 if appeared else 4)
    assert_holds(later, int(newest.name[5:]))
    assert not list(later.folder.glob("*.tmp-*"))
    later.save(tensors(8), state(8))
    assert later.newest() == later.path(8) and len(later.all()) == 2
