"""A run with changes: exactly those, and all that a checkpoint cannot bear is told at once."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.lineage import inherit
from launcher.problems import ConfigProblems, Stop
from launcher.run_config import RunConfig
from launcher.run_dir import RunFolder, create
from launcher.runs.fitting import misfits
from launcher.runs.recorded import Words, changed, transplanted, with_changes, words_of
from trainer.exit_codes import ExitCode
from trainer.state import TrainState


def checkpoint(folder: Path, *, step: int, mesh: dict[str, int] | None = None) -> Path:
    path = folder / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    TrainState(1, 2, "d", "p", step=step, cursor=2 * step, mesh=mesh or {}).write(path)
    (path / "__0_0.distcp").write_bytes(b"tensors")
    return path


def made(config: RunConfig, overrides: Sequence[str], *flags: str) -> RunFolder:
    return create(config, overrides=overrides, flags=flags).folder


def test_new_words_replace_old_ones_about_the_same() -> None:
    old = Words(("+experiment=tiny", "optim.lr=1e-3", "++x.y=1", "data=text"), "/c")
    new = with_changes(old, ["optim.lr=2e-3", "data=jsonl", "x.y=2", "seed=3"])
    assert new.overrides == (
        *("+experiment=tiny", "optim.lr=2e-3", "data=jsonl", "x.y=2", "seed=3"),
    )
    assert new.config_dir == "/c" and new.flags == ["--config-dir", "/c"]


def test_a_run_remembers_its_words(tiny: RunConfig) -> None:
    folder = made(tiny, ["+experiment=tiny", "seed=1"], "--config-dir", "/my configs")
    assert words_of(folder) == Words(("+experiment=tiny", "seed=1"), "/my configs", None)
    assert words_of(made(tiny, [])) == Words(())


def test_only_what_differs_is_taken_over(tiny: RunConfig) -> None:
    own = replace(tiny, seed=7, optim=replace(tiny.optim, lr=0.5, beta1=0.1))
    after = replace(tiny, optim=replace(tiny.optim, lr=0.25))
    assert transplanted(own, tiny, after) == replace(own, optim=replace(own.optim, lr=0.25))
    assert transplanted(own, tiny, tiny) == own


def test_changes_leave_the_rest_as_it_was_made(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths of then stay, and what an experiment says by now does not creep in."""
    configs = tmp_path / "configs" / "experiment"
    configs.mkdir(parents=True)
    experiment = "# @package _global_\ndefaults: [tiny]\noptim: {weight_decay: %s}\n"
    (configs / "mine.yaml").write_text(experiment % 0.1)
    words = ["+experiment=mine", "data=text", "data.paths=[notes.txt]"]
    data = replace(tiny.data, source="text", paths=("/then/notes.txt",))
    own = replace(tiny, data=data, optim=replace(tiny.optim, weight_decay=0.1))
    folder = made(own, words, "--config-dir", str(tmp_path / "configs"))
    own = replace(own, id=folder.path.name)
    (configs / "mine.yaml").write_text(experiment % 0.9)
    monkeypatch.chdir(tmp_path)
    old = words_of(folder)

    def found_with(word: str) -> RunConfig:
        return changed(own, old, with_changes(old, [word]), named=[word])

    found = found_with("optim.lr=1e-3")
    assert found == replace(own, optim=replace(own.optim, lr=1e-3))
    found = found_with("data.paths=[more.txt]")
    assert found.data.paths == (str(tmp_path / "more.txt"),)
    found = found_with("optim=pretrain")
    assert found.optim.name == "pretrain" and found.model == own.model


def test_wrong_words_are_all_told(tiny: RunConfig) -> None:
    folder = made(tiny, ["+experiment=tiny"])
    old = words_of(folder)
    with pytest.raises(ConfigProblems) as caught:
        changed(tiny, old, with_changes(old, ["optim.lrr=1", "train.stebs=4"]), named=[])
    assert "did you mean optim.lr?" in caught.value.message
    assert "did you mean train.steps?" in caught.value.message


def test_a_folder_of_groups_that_is_gone(tiny: RunConfig) -> None:
    folder = made(tiny, ["+experiment=mine"], "--config-dir", "/gone")
    with pytest.raises(Stop) as caught:
        changed(tiny, words_of(folder), words_of(folder), named=[])
    assert caught.value.code == ExitCode.CONFIG and "--config-dir" in caught.value.message


def test_what_a_checkpoint_bears(tiny: RunConfig, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, step=4)
    new = replace(
        tiny,
        optim=replace(tiny.optim, lr=1e-5, weight_decay=0.0),
        train=replace(tiny.train, steps=500, clip_norm=0.5),
        parallel=replace(tiny.parallel, dp_shard=2),
        checkpoint=replace(tiny.checkpoint, every=7),
        data=replace(tiny.data, workers=3, cache_dir="/other"),
        model=replace(tiny.model, weights="/unread"),
    )
    assert misfits(tiny, new, path) == []


def test_all_that_it_does_not_bear_is_told_at_once(tiny: RunConfig, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, step=4, mesh={"dp_shard": 8})
    new = replace(
        tiny,
        seed=9,
        train=replace(tiny.train, steps=4, packs_per_step=6),
        data=replace(tiny.data, pack_length=256, paths=("/x.txt",)),
        optim=replace(tiny.optim, name="pretrain"),
        checkpoint=replace(tiny.checkpoint, strict=True),
    )
    found = misfits(tiny, new, path)
    told = "\n".join(found)
    assert len(found) == 8
    for part in (
        "seed: 1 -> 9 would change the order of samples",
        f"train.packs_per_step: {tiny.train.packs_per_step} -> 6",
        "data.pack_length: 512 -> 256 would pack the documents otherwise",
        "other documents; keep them, or add data.accept_changed=true: pack 8",
        "optim.name: adamw -> pretrain",
        "optim.tables: sparse_adam -> sinkhorn",
        "checkpoint.strict=false",
        "train.steps=4, and step_00000004 has done 4; give more, for example train.steps=8",
    ):
        assert part in told
    accepted = replace(new, data=replace(new.data, accept_changed=True))
    assert len(misfits(tiny, accepted, path)) == 7


def test_another_shape_of_the_model_is_found_by_its_tensors(
    tiny: RunConfig, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path, step=4)
    more = replace(tiny.model, n_routed_experts=2 * tiny.model.n_routed_experts)
    (found,) = misfits(tiny, replace(tiny, model=more), path)
    assert found.startswith("model.n_routed_experts: ") and "would have another shape" in found
    base = replace(tiny.model, rope_theta=20000.0, dtype="bfloat16", workspace_mb=64)
    assert misfits(tiny, replace(tiny, model=base), path) == []


def test_an_inherited_checkpoint_outlives_its_parent(tiny: RunConfig) -> None:
    parent = made(tiny, [])
    path = checkpoint(parent.path, step=4)
    child = create(tiny, overrides=[], begin=lambda folder: inherit(path, folder)).folder
    assert child.lineage() == {"parent": str(parent.path), "step": 4}
    taken = child.path / "checkpoints" / path.name
    for file in path.iterdir():
        assert (taken / file.name).read_bytes() == file.read_bytes()
        file.unlink()
    assert (taken / "__0_0.distcp").read_bytes() == b"tensors"


def test_without_hard_links_it_is_copied(tiny: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    parent = made(tiny, [])
    path = checkpoint(parent.path, step=4)
    child = create(tiny, overrides=[], begin=lambda folder: inherit(path, folder)).folder
    taken = child.path / "checkpoints" / path.name / "__0_0.distcp"
    assert taken.read_bytes() == b"tensors" and taken.stat().st_nlink == 1


def test_a_run_with_nothing_but_its_inheritance_is_bare(tiny: RunConfig) -> None:
    path = checkpoint(made(tiny, []).path, step=4)
    child = create(tiny, overrides=[], begin=lambda folder: inherit(path, folder)).folder
    child.new_attempt()
    assert child.is_bare()
    (child.path / "checkpoints" / "step_00000005").mkdir()
    assert not child.is_bare()


def test_lineage_that_cannot_be_read_is_none(tiny: RunConfig) -> None:
    folder = made(tiny, [])
    assert folder.lineage() is None
    for text in ("", "[]", json.dumps({"parent": "/x"})):
        folder.lineage_file.write_text(text)
        assert folder.lineage() is None
