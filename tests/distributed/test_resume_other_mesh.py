"""A run of four ranks, its experts and sequences divided by two and its tables by four, goes on
with another number of ranks: the same weights, moments and losses."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from data.corpus import load_corpus
from model.engram.owners import OwnerStore
from tests.builders import trainer_config
from tests.ranks import Ranks as Pool
from trainer.checkpoint.reading import read_tensors
from trainer.checkpoint.store import Checkpoints
from trainer.config import CheckpointConfig, EvalConfig, ParallelConfig, TrainConfig, TrainerConfig
from trainer.learner import build_learner
from trainer.loop import train
from trainer.metrics import read_metrics
from trainer.ranks import Ranks, is_sharded

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow]

FOUR = ParallelConfig(dp_shard=2, cp=2, ep=2, engram_owners=4)
OTHERS = {
    "one rank": ParallelConfig(),
    "two ranks, one owner": ParallelConfig(dp_shard=2, ep=2, engram_owners=1),
    "three ranks, three owners": ParallelConfig(dp_replicate=3, engram_owners=3),
    "four ranks, two owners": ParallelConfig(dp_shard=2, cp=2, ep=4, engram_owners=2),
}
SAVED, LAST = 2, 3


def go_on(config: TrainerConfig, run_dir: Path, resume: bool) -> tuple[int, str, list[str]]:
    said: list[str] = []
    outcome = train(
        config,
        run_dir=run_dir,
        attempt=2 if resume else 1,
        ranks=Ranks.from_process_group(),
        resume=resume,
        say=said.append,
    )
    return outcome.code, outcome.message, said


def differences(config: TrainerConfig, run_dir: Path) -> list[str]:
    """What this mesh makes of the checkpoint and what a process alone reads in it, where they are
    not the same bits; and the fingerprint of the tables if it is not the one that was saved."""
    learner = build_learner(config, restored=True)
    ranks = Ranks.from_process_group()
    store = Checkpoints(run_dir / "checkpoints", keep=2, attempt=3, ranks=ranks, say=print)
    tensors = learner.tensors()
    state = store.load(store.path(SAVED), tensors)
    assert isinstance(learner.store, OwnerStore)
    learner.store.publish(None)
    plain = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()
    }
    read_tensors(store.path(SAVED), plain, whole=True)
    different = []
    for name, tensor in tensors.items():
        got = tensor.full_tensor() if is_sharded(tensor) else tensor
        if not torch.equal(got, plain[name]):
            different.append(name)
    if learner.store.fingerprint()["tables"] != state.engram["tables"]:
        different.append("fingerprint")
    return different


def losses(run_dir: Path) -> dict[str, list[float]]:
    records = [r for r in read_metrics(run_dir / "metrics.jsonl") if "loss" in r]
    return {key: [float(r[key]) for r in records] for key in ("loss", "grad_norm")}


@pytest.fixture(scope="module", params=["adamw", pytest.param("pretrain", marks=pytest.mark.long)])
def run(
    request: pytest.FixtureRequest, ranks: Pool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainerConfig, Path]:
    """The configuration, and a run of four ranks with a checkpoint in its middle, written in the
    background, and at its end."""
    folder = tmp_path_factory.mktemp("mesh")
    config = trainer_config(
        folder,
        parallel=FOUR,
        train=TrainConfig(steps=LAST, packs_per_step=6, threads=1),
        eval=EvalConfig(every=0),
        checkpoint=CheckpointConfig(every=SAVED, keep=2, async_=True, staging_mb=1),
    )
    optim = dataclasses.replace(config.optim, name=request.param)
    config = dataclasses.replace(config, optim=optim)
    load_corpus(config.data, config.model, seed=config.seed)  # prepared once
    run_dir = folder / "run"
    run_dir.mkdir()
    for code, message, _ in ranks.run(4, go_on, config, run_dir, False):
        assert code == 0, message
    return config, run_dir


def resumed(run: tuple[TrainerConfig, Path], mesh: str, place: Path, **changes: Any):
    """The configuration on another mesh, and a copy of the run as it was at its checkpoint."""
    config, run_dir = run
    shutil.copytree(run_dir, place / "run")
    shutil.rmtree(place / "run" / "checkpoints" / f"step_{LAST:08d}")
    checkpoint = dataclasses.replace(config.checkpoint, **changes)
    config = dataclasses.replace(config, parallel=OTHERS[mesh], checkpoint=checkpoint)
    return config, place / "run"


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, marks=pytest.mark.long if mesh.startswith("four") else ())
        for mesh in OTHERS
    ],
)
def test_weights_moments_and_next_losses_are_those_of_the_run(
    ranks: Pool, run: tuple[TrainerConfig, Path], tmp_path: Path, mesh: str
) -> None:
    config, run_dir = resumed(run, mesh, tmp_path)
    world = config.parallel.world
    assert ranks.run(world, differences, config, run_dir) == [[]] * world
    ended = ranks.run(world, go_on, config, run_dir, True)
    assert [code for code, _, _ in ended] == [0] * world, ended
    assert any("written on another mesh: parallel.dp_replicate=1" in s for s in ended[0][2])
    ours, theirs = losses(run_dir), losses(run[1])
    assert len(ours["loss"]) == len(theirs["loss"]) == LAST
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def test_strict_refuses_another_mesh_on_every_rank_at_once(
    ranks: Pool, run: tuple[TrainerConfig, Path], tmp_path: Path
) -> None:
    config, run_dir = resumed(run, "two ranks, one owner", tmp_path, strict=True)
    before = sorted(p.name for p in (run_dir / "checkpoints").iterdir())
    for code, message, _ in ranks.run(2, go_on, config, run_dir, True):
        assert code == 78
        assert "parallel.dp_shard=2 parallel.cp=1 parallel.ep=2 parallel.engram_owners=1" in message
        assert "parallel.dp_shard=2 parallel.cp=2 parallel.ep=2 parallel.engram_owners=4" in message
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == before
