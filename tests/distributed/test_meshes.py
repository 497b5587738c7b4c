"""Any mesh trains like one rank: the first gradient and its norm, then losses, weights and tables.

Each case runs every mechanism that it names together with the trainer around it: loader, windows of
Engram rows, optimisers, clipping, evaluation, checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from data.cache.prepare import prepare
from model.config import QatConfig
from tests.builders import seeing_config, trainer_config
from tests.distributed.rank_program import first_gradient
from tests.learnt import weights
from tests.ranks import Ranks as Pool
from trainer.config import IndexerConfig, ParallelConfig, TrainConfig, TrainerConfig
from trainer.loop import train
from trainer.metrics import read_metrics
from trainer.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

# Relative errors allowed. An Engram gate near zero has the slope of a square root, up to 500, and
# magnifies the last bits of what flows through it: its weights are the least certain, and over many
# steps the gradient's norm is compared only while the runs still agree to the last bits.
GRADIENT, GATE_WEIGHTS, TRAINING = 1e-5, 1e-4, 1e-4
NORM_STEPS = 6
# Nats. The indexer's divergence falls to 5e-5 and is what is left of terms near one, whose last
# bits are 1e-7: beside the loss it is added to, 8 nats, this is nothing.
DIVERGENCE = 5e-6
ALL = ParallelConfig(dp_replicate=2, dp_shard=2, cp=2, ep=2, engram_owners=4, recompute="selective")


def gentle(config: TrainerConfig, steps: int) -> TrainerConfig:
    """A rate at which learning does not magnify last bits: at 3e-3 a choice of experts or entries
    that falls otherwise moves the loss by 1e-4 after some ten steps, on any mesh."""
    return dataclasses.replace(
        config,
        train=TrainConfig(steps=steps, packs_per_step=4, threads=1),
        optim=dataclasses.replace(config.optim, lr=2e-4, final_lr=2e-5),
    )


def on_text(folder: Path, steps: int) -> TrainerConfig:
    config = gentle(trainer_config(folder), steps)
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, pack_length=144),
        indexer=IndexerConfig(train="distill"),
    )


def published(folder: Path, steps: int) -> TrainerConfig:
    config = on_text(folder, steps)
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, name="pretrain"))


def rowwise(folder: Path, steps: int) -> TrainerConfig:
    config = on_text(folder, steps)
    return dataclasses.replace(
        config, optim=dataclasses.replace(config.optim, tables="rowwise_adagrad")
    )


def frozen(folder: Path, steps: int) -> TrainerConfig:
    config = on_text(folder, steps)
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, tables="frozen"))


def on_pictures(folder: Path, steps: int) -> TrainerConfig:
    config = gentle(seeing_config(folder), steps)
    # As in trainer_config: the quantisers would turn a last bit into a whole rounding step.
    model = dataclasses.replace(config.model, qat=QatConfig(False, False, False))
    return dataclasses.replace(config, model=model)


Task = Callable[[Path, int], TrainerConfig]


def gradient_and_training(config: TrainerConfig, run_dir: Path) -> dict[str, object]:
    """What `first_gradient` finds, and a whole training run that writes to run_dir."""
    ranks = Ranks.from_process_group()
    found = first_gradient(config, ranks)
    if ranks.first:
        run_dir.mkdir(exist_ok=True)
    ranks.barrier()
    outcome = train(
        config,
        run_dir=run_dir,
        attempt=1,
        ranks=ranks,
        resume=False,
        say=lambda text: None,
        sources=prepare(config.data, config.model),  # in the cache since the run of one rank
    )
    assert outcome.code == 0, outcome
    return found if ranks.first else {}


class Alone:
    """Runs of one rank, each made once."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self._runs: dict[tuple[Task, int], tuple[TrainerConfig, Path, dict]] = {}

    def run(self, task: Task, steps: int) -> tuple[TrainerConfig, Path, dict]:
        key = task, steps
        if key not in self._runs:
            folder = self._folder / f"{task.__name__}_{steps}"
            folder.mkdir()
            config = task(folder, steps)
            (found,) = self._pool.run(1, gradient_and_training, config, folder / "one")
            self._runs[key] = config, folder / "one", found
        return self._runs[key]


@pytest.fixture(scope="module")
def alone(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(ranks, tmp_path_factory.mktemp("meshes"))


CASES = {
    "experts, context, owners": (
        on_text,
        ParallelConfig(dp_shard=2, cp=2, ep=2, engram_owners=2, recompute="selective"),
    ),
}
MANY = {
    "all on eight": (on_text, ALL),
    "all on eight, images": (on_pictures, ALL),
    "shard": (on_text, ParallelConfig(dp_shard=2, recompute="full")),
    "copy": (on_text, ParallelConfig(dp_replicate=2, engram_owners=1)),
    "context 2": (on_text, ParallelConfig(cp=2)),
    "context 4": (on_text, ParallelConfig(cp=4, engram_owners=2)),
    "context 2, images": (on_pictures, ParallelConfig(cp=2)),
    "row-wise Adagrad": (rowwise, ParallelConfig(dp_shard=2)),
    "frozen tables": (frozen, ParallelConfig(dp_shard=2)),
    "experts": (on_text, ParallelConfig(dp_shard=2, ep=2, engram_owners=1)),
    "experts and shards": (published, ParallelConfig(dp_shard=4, ep=2, engram_owners=4)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("task", "mesh"), CASES.values(), ids=CASES.keys())
def test_a_mesh_trains_like_one_rank(
    ranks: Pool, alone: Alone, tmp_path: Path, task: Task, mesh: ParallelConfig
) -> None:
    compare(ranks, alone.run(task, 6), tmp_path, mesh)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_steps_of_the_published_optimisers_on_eight_ranks(
    ranks: Pool, alone: Alone, tmp_path: Path
) -> None:
    compare(ranks, alone.run(published, 20), tmp_path, ALL)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("task", "mesh"), MANY.values(), ids=MANY.keys())
def test_twenty_steps_on_a_mesh_are_those_of_one_rank(
    ranks: Pool, alone: Alone, tmp_path: Path, task: Task, mesh: ParallelConfig
) -> None:
    compare(ranks, alone.run(task, 20), tmp_path, mesh)


def compare(
    pool: Pool, alone: tuple[TrainerConfig, Path, dict], folder: Path, mesh: ParallelConfig
) -> None:
    config, one, expected = alone
    meshed = dataclasses.replace(config, parallel=mesh)
    found = pool.run(mesh.world, gradient_and_training, meshed, folder / "many")[0]
    assert found.keys() == expected.keys()
    norm, wanted = found.pop("norm"), dict(expected)
    assert norm == pytest.approx(wanted.pop("norm"), rel=1e-6)
    worst = {name: error(found[name], grad) for name, grad in wanted.items()}
    for name, size in worst.items():
        assert size <= (GATE_WEIGHTS if name.endswith(("q_weight", "k_weight")) else GRADIENT), name

    records = [read_metrics(run / "metrics.jsonl") for run in (one, folder / "many")]
    assert len(records[0]) == len(records[1]) > config.train.steps
    for left, right in zip(*records, strict=True):
        for key in ("loss", "balance_loss", "index_loss", "eval_loss", "grad_norm"):
            late = key == "grad_norm" and left["step"] > NORM_STEPS
            if left.get(key) is not None and not late:
                least = DIVERGENCE if key == "index_loss" else 0.0
                wanted = pytest.approx(left[key], rel=TRAINING, abs=least)
                assert right[key] == wanted, (left["step"], key)
        assert right.get("tokens_total") == left.get("tokens_total")
        assert right.get("expert_dead") == left.get("expert_dead")

    left, right = (weights(config, run) for run in (one, folder / "many"))
    assert left.keys() == right.keys()
    for part, limit in (("model/", TRAINING), ("tables/", 2e-3)):
        names = [name for name in left if name.startswith(part)]
        change = sum(float((right[name] - left[name]).square().sum()) for name in names)
        assert change <= limit**2 * sum(float(left[n].square().sum()) for n in names), part


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))
