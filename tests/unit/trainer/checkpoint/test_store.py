import dataclasses
import errno
import json
import math
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from data.errors import DataError
from trainer.checkpoint import store as module
from trainer.checkpoint.errors import DamagedCheckpointsError, NotFiniteError
from trainer.checkpoint.manifest import damage
from trainer.checkpoint.reading import CheckpointReader
from trainer.checkpoint.store import Checkpoints
from trainer.disk import DiskError
from trainer.ranks import Ranks
from trainer.state import TrainState

FRESH = TrainState(seed=1, packs_per_step=4, data_fingerprint="d", plan_fingerprint="p")


def state(step):
    return TrainState(
        seed=1,
        packs_per_step=4,
        data_fingerprint="d",
        plan_fingerprint="p",
        step=step,
        cursor=4 * step,
        tokens_total=100 * step,
    )


def tensors(value):
    return {
        "model/a.weight": torch.full((3, 4), float(value)),
        "model/a.half": torch.full((5,), float(value), dtype=torch.bfloat16),
        "optimizer/a.weight/step": torch.tensor(float(value)),
        "table_optimizer/steps": torch.full((7,), value, dtype=torch.int32),
    }


@pytest.fixture
def said():
    return []


@pytest.fixture
def open_checkpoints(tmp_path, said):
    def opened(attempt=1, keep=2, **options):
        return Checkpoints(
            tmp_path / "checkpoints",
            keep=keep,
            attempt=attempt,
            ranks=Ranks(),
            say=said.append,
            **options,
        )

    return opened


def save(checkpoints, step):
    checkpoints.save(tensors(step), state(step))
    return checkpoints.path(step)


def flip_byte(path, at=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def names(checkpoints):
    return sorted(p.name for p in checkpoints.folder.iterdir())


def test_what_was_saved_comes_back(open_checkpoints):
    checkpoints = open_checkpoints()
    folder = save(checkpoints, 3)
    assert folder.name == "step_00000003"
    target = tensors(0)
    assert checkpoints.load(folder, target) == state(3)
    for name, tensor in tensors(3).items():
        assert target[name].dtype == tensor.dtype
        assert torch.equal(target[name], tensor), name


def test_the_manifest_lists_every_other_file(open_checkpoints):
    folder = save(open_checkpoints(), 1)
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    present = {p.name for p in folder.iterdir()} - {"manifest.json"}
    assert set(listed) == present
    assert {"trainer.json", ".metadata"} < present
    assert all(entry["size"] == (folder / name).stat().st_size for name, entry in listed.items())


def test_a_flipped_byte_in_any_file_is_found_and_named(open_checkpoints):
    folder = save(open_checkpoints(), 1)
    assert damage(folder) == []
    for path in folder.iterdir():
        if path.name == "manifest.json":
            continue
        content = path.read_bytes()
        flip_byte(path)
        assert damage(folder) == [f"{path} has changed since it was written"]
        path.write_bytes(content)
    assert damage(folder) == []


def test_a_short_or_missing_file_is_found_and_named(open_checkpoints):
    folder = save(open_checkpoints(), 1)
    data = folder / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    assert [str(data) in problem and "bytes" in problem for problem in damage(folder)] == [True]
    data.unlink()
    assert damage(folder) == [f"{data} is missing"]


def test_a_broken_or_missing_manifest_is_found(open_checkpoints):
    folder = save(open_checkpoints(), 1)
    manifest = folder / "manifest.json"
    flip_byte(manifest, at=0)
    assert damage(folder) == [f"{manifest} cannot be read"]
    manifest.unlink()
    assert damage(folder) == [f"{manifest} is missing"]


def test_the_newest_are_kept(open_checkpoints):
    checkpoints = open_checkpoints()
    for step in (2, 4, 6, 8):
        save(checkpoints, step)
    assert names(checkpoints) == ["step_00000006", "step_00000008"]


def test_a_damaged_one_does_not_count_as_kept(open_checkpoints):
    save(open_checkpoints(), 2)
    flip_byte(save(open_checkpoints(), 4) / "__0_0.distcp")
    later = open_checkpoints(attempt=2)  # has verified nothing yet
    save(later, 6)
    assert names(later) == ["step_00000002", "step_00000004", "step_00000006"]
    save(later, 8)
    assert names(later) == ["step_00000004", "step_00000006", "step_00000008"]


def test_the_newest_whole_one_is_found(open_checkpoints):
    checkpoints = open_checkpoints()
    assert checkpoints.newest() is None
    save(checkpoints, 2)
    latest = save(checkpoints, 4)
    assert checkpoints.newest() == latest


def test_a_damaged_newest_is_reported_and_set_aside(open_checkpoints, said):
    good = save(open_checkpoints(), 2)
    bad = save(open_checkpoints(), 4)
    flip_byte(bad / "__0_0.distcp")
    checkpoints = open_checkpoints(attempt=7)
    assert checkpoints.newest() == good
    assert str(bad / "__0_0.distcp") in "\n".join(said)
    assert names(checkpoints) == ["step_00000002", "step_00000004.damaged-007"]
    save(checkpoints, 4)  # its place is free again
    assert checkpoints.newest() == bad


def test_when_all_are_damaged_nothing_is_touched(open_checkpoints):
    for step in (2, 4):
        flip_byte(save(open_checkpoints(), step) / ".metadata")
    checkpoints = open_checkpoints(attempt=2)
    with pytest.raises(DamagedCheckpointsError) as error:
        checkpoints.newest()
    assert "step_00000002/.metadata" in str(error.value)
    assert "step_00000004/.metadata" in str(error.value)
    assert names(checkpoints) == ["step_00000002", "step_00000004"]


def test_leftovers_of_a_killed_save_are_never_loaded_and_go(open_checkpoints):
    good = save(open_checkpoints(), 2)
    shutil.copytree(good, good.with_name("step_00000004.tmp-001"))
    checkpoints = open_checkpoints(attempt=2)
    assert checkpoints.newest() == good
    assert names(checkpoints) == ["step_00000002"]


def no_space(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["tensors", "trainer.json", "manifest.json"])
def test_a_full_disk_leaves_the_old_one_and_is_named(open_checkpoints, monkeypatch, where):
    checkpoints = open_checkpoints()
    good = save(checkpoints, 2)
    with monkeypatch.context() as patch:
        if where == "tensors":
            patch.setattr(os, "fsync", no_space)
        elif where == "trainer.json":
            patch.setattr(TrainState, "write", no_space)
        else:
            patch.setattr(module, "write_manifest", no_space)
        with pytest.raises(DiskError) as error:
            save(checkpoints, 4)
    assert error.value.full
    assert "No space left while saving step 4: the disk at /" in str(error.value)
    assert names(checkpoints) == ["step_00000002"]
    assert open_checkpoints(attempt=2).newest() == good
    save(checkpoints, 4)


def test_too_little_space_is_noticed_before_the_start(open_checkpoints, monkeypatch):
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10**7, 10**7))
    big = {"model/a": torch.empty(1_000_000)}  # 4 MB
    checkpoints = open_checkpoints(keep=2)
    checkpoints.check_space(big, saves=2)  # 8 MB
    with pytest.raises(DiskError, match=r"need 13 MB more, but the disk at .* has 10 MB free"):
        checkpoints.check_space(big, saves=10)  # two stay while a third is written


def test_checkpoints_that_are_there_count_as_space(open_checkpoints, monkeypatch):
    checkpoints = open_checkpoints(keep=1)
    big = {"model/a": torch.zeros(1_000_000)}
    checkpoints.save(big, state(1))
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, 5 * 10**6))
    checkpoints.check_space(big, saves=10)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda t: t | {"model/b": torch.zeros(2)}, "model/b"),
        (
            lambda t: {k: v for k, v in t.items() if k != "optimizer/a.weight/step"},
            "optimizer/a.weight/s",
        ),
        (lambda t: t | {"model/a.weight": torch.zeros(4, 3)}, "model/a.weight"),
        (lambda t: t | {"model/a.half": torch.zeros(5)}, "model/a.half"),
    ],
)
def test_state_that_does_not_match_by_name_shape_and_dtype_is_refused(
    open_checkpoints, change, name
):
    checkpoints = open_checkpoints()
    folder = save(checkpoints, 1)
    with pytest.raises(ValueError, match=name):
        checkpoints.load(folder, change(tensors(0)))


def test_a_read_only_place_is_named(tmp_path, said):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DiskError, match=str(tmp_path)) as error:
        Checkpoints(tmp_path / "file" / "x", keep=1, attempt=1, ranks=Ranks(), say=said.append)
    assert not error.value.full


def test_the_samples_of_a_resume_must_be_the_same():
    saved = state(3)
    saved.require_same_samples(FRESH, folder=Path("step_3"))
    for change, message in [
        ({"data_fingerprint": "other"}, "documents are not those"),
        ({"plan_fingerprint": "other"}, "packed otherwise"),
        ({"seed": 2}, "set seed=1"),
        ({"packs_per_step": 8}, "set train.packs_per_step=4"),
    ]:
        now = TrainState(**{**vars(FRESH), **change})
        with pytest.raises(ValueError, match=message):
            saved.require_same_samples(now, folder=Path("step_3"))
    other = TrainState(**{**vars(FRESH), "data_fingerprint": "d2", "plan_fingerprint": "p2"})
    with pytest.raises(DataError, match=r"data\.accept_changed=true"):
        saved.require_same_samples(other, folder=Path("step_3"))
    saved.require_same_samples(other, folder=Path("step_3"), accept_changed=True)


def test_strict_refuses_another_mesh_and_names_both():
    mesh = {"dp_replicate": 1, "dp_shard": 4, "cp": 1, "ep": 2, "engram_owners": 4}
    saved = dataclasses.replace(state(3), mesh=mesh)
    saved.require_same_mesh(dataclasses.replace(FRESH, mesh=dict(mesh)), folder=Path("step_3"))
    other = dataclasses.replace(FRESH, mesh=mesh | {"engram_owners": 2})
    with pytest.raises(ValueError, match=r"strict") as error:
        saved.require_same_mesh(other, folder=Path("step_3"))
    text = str(error.value)
    assert "parallel.ep=2 parallel.engram_owners=4" in text
    assert "parallel.ep=2 parallel.engram_owners=2" in text


def test_values_that_are_not_finite_are_not_saved(open_checkpoints):
    checkpoints = open_checkpoints()
    good = save(checkpoints, 2)
    for bad in (math.nan, math.inf, -math.inf):
        broken = tensors(4)
        broken["model/a.half"][3] = bad
        with pytest.raises(NotFiniteError, match=r"model/a\.half is not finite after step 4"):
            checkpoints.save(broken, state(4))
    assert checkpoints.all() == [good]


def test_large_tensors_are_written_in_slices_and_come_back(open_checkpoints):
    checkpoints = open_checkpoints(slice_bytes=100)
    whole = {
        "rows": torch.arange(900.0).view(100, 9),  # 36 bytes a row: two rows a slice
        "wide": torch.arange(60.0).view(2, 30),  # one row is more than a slice
        "small": torch.arange(10),
        "column": torch.arange(12.0).view(3, 4)[:, :1].t().bfloat16(),
        "number": torch.tensor(7.0),
        "empty": torch.zeros(0, 4),
    }
    checkpoints.save(whole, state(1))
    reader = CheckpointReader(checkpoints.path(1))
    metadata: dict[str, Any] = reader.read_metadata().state_dict_metadata
    assert {name: len(entry.chunks) for name, entry in metadata.items()} == {
        "rows": 50,
        "wide": 2,
        "small": 1,
        "column": 1,
        "number": 1,
        "empty": 1,
    }
    target = {name: torch.full_like(tensor, 5) for name, tensor in whole.items()}
    checkpoints.load(checkpoints.path(1), target)
    assert all(torch.equal(target[name], tensor) for name, tensor in whole.items())


def test_a_tensor_that_is_saved_in_part_only_is_noticed(open_checkpoints):
    """A table left empty after a load would only show in the outputs."""
    checkpoints = open_checkpoints(slice_bytes=100)
    checkpoints.save({"rows": torch.ones(100, 9)}, state(1))
    file = checkpoints.path(1) / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    del metadata.state_dict_metadata["rows"].chunks[7]
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpointsError, match="rows is saved in part only: 882 of 900"):
        checkpoints.load(checkpoints.path(1), {"rows": torch.zeros(100, 9)})
