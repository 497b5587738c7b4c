"""`dsv41 export`: what it writes, what it refuses, and that nothing stays behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data.config import DataConfig
from launcher import export, tools
from launcher.config import LauncherConfig
from launcher.run_config import RunConfig
from launcher.run_dir import create
from model.config import EngramStoreConfig, ModelConfig
from trainer.checkpoint.store import Checkpoints
from trainer.config import (
    CheckpointConfig,
    EvalConfig,
    LoggingConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from trainer.learner import build_learner
from trainer.ranks import Ranks
from trainer.state import TrainState

GOLDEN = Path(__file__).parents[2] / "golden"
INDEX = "model.safetensors.index.json"


def make_run(folder: Path, model: ModelConfig, *, change: Callable | None = None) -> Path:
    """A run with one checkpoint, before its first step."""
    config = RunConfig(
        seed=3,
        model=model,
        data=DataConfig(
            source="text",
            paths=(str(folder / "x.txt"),),
            tokenizer=str(GOLDEN / "tokenizer.json"),
            pack_length=64,
        ),
        optim=OptimConfig("adamw", 1e-3, 1, 1, 1, 1e-4, 0.9, 0.95, 1e-8, 0.1, 5.0),
        parallel=ParallelConfig(),
        train=TrainConfig(steps=1, packs_per_step=1),
        eval=EvalConfig(),
        checkpoint=CheckpointConfig(every=0),
        logging=LoggingConfig(),
        name="small",
        id="one",
        resume="never",
        runs_dir=str(folder / "runs"),
        launcher=LauncherConfig(kind="local"),
    )
    run = create(config, overrides=[]).folder.path
    learner = build_learner(config)
    tensors = learner.tensors()
    if change:
        change(tensors)
    checkpoints = Checkpoints(
        run / "checkpoints", keep=2, attempt=1, ranks=Ranks(), say=lambda text: None
    )
    state = TrainState(3, 1, "data", "plan", step=7, engram=learner.store.fingerprint())
    checkpoints.save(tensors, state)
    learner.store.close()
    return run


@pytest.fixture(scope="module")
def started(pristine, tmp_path_factory) -> Path:
    """A run that started from the released weights, its tables mapped, untrained."""
    mapped = EngramStoreConfig("mapped", str(pristine.path))
    model = replace(pristine.config, weights=str(pristine.path), engram=mapped, carried=())
    return make_run(tmp_path_factory.mktemp("started"), model)


@pytest.fixture(scope="module")
def scratch(pristine, tmp_path_factory) -> Path:
    """A run from scratch, tables of its own."""
    return make_run(tmp_path_factory.mktemp("scratch"), replace(pristine.config, carried=()))


def command(*words: object) -> int:
    return tools.main(["export", *map(str, words)])


def test_an_untrained_run_gives_the_released_files_back(
    started: Path, pristine, tmp_path: Path, capsys
) -> None:
    to = tmp_path / "made" / "out"
    assert command(started, "--to", to, "--format", "released") == 0
    shards = [pristine.shard(number).name for number in (1, 2, 3)]
    for name in ("tokenizer.json", "tokenizer_config.json", *shards):
        assert (to / name).read_bytes() == (pristine.path / name).read_bytes(), name
    assert {p.name for p in to.iterdir()} == {p.name for p in pristine.path.iterdir()}
    found = ModelConfig.from_released(json.loads((to / "config.json").read_text()))
    assert replace(found, dtype="float32") == pristine.config
    told = capsys.readouterr().out
    assert "step_00000007" in told and "moved the weights by 0.00 %" in told
    assert "draft: copied" in told
    assert [p.name for p in to.parent.iterdir()] == ["out"]


def test_a_checkpoint_may_be_named(scratch: Path, tmp_path: Path, capsys) -> None:
    checkpoint = scratch / "checkpoints" / "step_00000007"
    to = tmp_path / "out"
    assert command(checkpoint, "--to", to, "--format", "plain") == 0
    saved = {}
    for file in to.glob("*.safetensors"):
        saved |= load_file(file)
    assert all(t.dtype == torch.float32 for t in saved.values())
    assert json.loads((to / "tokenizer_config.json").read_text())["bos_token"]
    config = json.loads((to / "config.json").read_text())
    assert config["dtype"] == "float32" and "quantization_config" not in config
    assert config["text_config"]["num_nextn_predict_layers"] == 0
    narrow = tmp_path / "narrow"
    words = ("--format", "plain", "--dtype", "bfloat16", "--shard-gb", "0.0002")
    assert command(checkpoint, "--to", narrow, *words) == 0
    index = json.loads((narrow / INDEX).read_text())["weight_map"]
    assert len(set(index.values())) > 3
    name = "layers.0.attn.wq_b.weight"
    assert torch.equal(load_file(narrow / index[name])[name], saved[name].bfloat16())


def test_a_new_start_from_the_export_is_the_same_model(scratch: Path, tmp_path: Path) -> None:
    to = tmp_path / "out"
    assert command(scratch, "--to", to, "--format", "plain") == 0
    model = ModelConfig.from_released(json.loads((to / "config.json").read_text()))
    again = make_run(tmp_path, replace(model, weights=str(to)))
    assert command(again, "--to", tmp_path / "twice", "--format", "plain") == 0
    for file in to.iterdir():
        assert file.read_bytes() == (tmp_path / "twice" / file.name).read_bytes(), file.name


def test_a_shorter_model_leaves_draft_and_later_layers_out(
    pristine, tmp_path: Path, capsys
) -> None:
    short = replace(pristine.config, num_hidden_layers=5, weights=str(pristine.path), carried=())
    run, to = make_run(tmp_path, short), tmp_path / "out"
    assert command(run, "--to", to, "--format", "released") == 0
    assert "draft" not in capsys.readouterr().out
    (file,) = to.glob("*.safetensors")
    found, expected = load_file(file), {}
    for number in (1, 2, 3):
        expected |= load_file(pristine.shard(number))
    kept = {n for n in expected if not n.startswith(("layers.5.", "mtp."))}
    assert found.keys() == kept
    for name in kept:
        ours, theirs = (t[name].contiguous().view(-1).view(torch.uint8) for t in (found, expected))
        assert torch.equal(ours, theirs), name
    config = ModelConfig.from_released(json.loads((to / "config.json").read_text()))
    assert (config.num_hidden_layers, config.num_nextn_predict_layers) == (5, 0)


def test_weights_that_have_moved(started: Path, pristine, small, tmp_path: Path, capsys) -> None:
    config = (started / "config.yaml").read_text()
    moved = tmp_path / "run"
    (moved / "checkpoints").mkdir(parents=True)
    (moved / "config.yaml").write_text(
        config.replace(f'weights: "{pristine.path}"', 'weights: "/gone"')
    )
    (moved / "checkpoints" / "step_00000007").symlink_to(started / "checkpoints/step_00000007")
    to = tmp_path / "out"
    words = (moved, "--to", to, "--format", "released")
    assert command(*words) == 78
    assert "no longer in /gone" in capsys.readouterr().err
    assert command(*words, "--like", small.path) == 0
    shard = small.shard(2)
    assert (to / shard.name).read_bytes() == shard.read_bytes()
    assert command(moved, "--to", tmp_path / "anew", "--format", "released", "--like", "none") == 0
    names = json.loads((tmp_path / "anew" / INDEX).read_text())["weight_map"]
    assert not any(name.startswith("mtp.") for name in names)
    small.shard(2).unlink()
    assert command(moved, "--to", tmp_path / "no", *words[3:], "--like", small.path) == 65
    assert f"{shard.name} is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (
            ("/no/run", "--to", "out", "--format", "plain"),
            2,
            "/no/run is no run's folder, nor a checkpoint",
        ),
        (("RUN", "--to", "taken", "--format", "plain"), 73, "taken exists already"),
        (("RUN", "--to", "out", "--format", "released", "--dtype", "float32"), 2, "--dtype is of"),
        (("RUN", "--to", "out", "--format", "plain", "--shard-gb", "0"), 2, "must be above 0"),
        (("EMPTY", "--to", "out", "--format", "plain"), 78, "has no checkpoint yet"),
        (("DAMAGED", "--to", "out", "--format", "plain"), 74, "No checkpoint of this run is whole"),
        (("DAMAGED/checkpoints/step_00000007", "--to", "out", "--format", "plain"), 74, "missing"),
    ],
)
def test_refusals(
    scratch: Path, tmp_path: Path, monkeypatch, capsys, words: tuple, code: int, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("EMPTY", "DAMAGED"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text((scratch / "config.yaml").read_text())
    (tmp_path / "DAMAGED/checkpoints/step_00000007").mkdir()
    (tmp_path / "RUN").symlink_to(scratch)
    (tmp_path / "taken").symlink_to("nowhere")
    before = {p.name for p in tmp_path.iterdir()}
    assert command(*words) == code
    assert told in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == before


def test_a_disk_that_is_too_small(scratch: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(export, "SLACK", 1 << 60)
    to = tmp_path / "deep" / "out"
    assert command(scratch, "--to", to, "--format", "plain") == 74
    assert "Free space there, or choose another place" in capsys.readouterr().err
    assert not to.parent.exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_stays_behind(
    scratch: Path, tmp_path: Path, monkeypatch, error: BaseException
) -> None:
    calls = 0
    original = os.pwrite

    def failing(*args):
        nonlocal calls
        calls += 1
        if calls == 100:
            raise error
        return original(*args)

    monkeypatch.setattr(os, "pwrite", failing)
    to = tmp_path / "deep" / "out"
    expected = 74 if isinstance(error, OSError) else 130
    assert command(scratch, "--to", to, "--format", "plain") == expected
    assert calls == 100 and not to.parent.exists()


def test_tables_that_are_not_the_runs(small, tmp_path: Path, capsys) -> None:
    mapped = EngramStoreConfig("mapped", str(small.path))
    run = make_run(tmp_path, replace(small.config, engram=mapped, carried=()))

    def change(table: torch.Tensor) -> torch.Tensor:
        table.view(torch.uint8)[0, 0] ^= 1
        return table

    small.change("layers.1.engram.embed.weight", change)
    assert command(run, "--to", tmp_path / "out", "--format", "plain") == 65
    assert "The Engram tables are not those" in capsys.readouterr().err
