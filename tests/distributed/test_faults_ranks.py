"""What goes wrong on one rank alone: all ranks hear of it together, or it adds nothing."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from data.batch import Batch
from data.collate import collate
from data.corpus import load_corpus
from tests.builders import trainer_config
from tests.ranks import Ranks as Pool
from trainer.config import ParallelConfig, TrainerConfig
from trainer.learner import Learner, build_learner
from trainer.ranks import Ranks, is_sharded
from trainer.step import DivergedError, StepSettings, train_step

pytestmark = pytest.mark.xdist_group("ranks")

SETTINGS = StepSettings(lr=1e-3, table_lr=5e-3, clip_norm=1.0)
SICK = 1  # the rank that something happens to
MESHES = {
    "sharded": ParallelConfig(dp_shard=2),
    "replicated": ParallelConfig(dp_replicate=2),
    "experts": ParallelConfig(dp_shard=2, ep=2, recompute="selective"),
}


def batch(config: TrainerConfig, number: int | None) -> Batch:
    """One pack, or padding alone."""
    packs = load_corpus(config.data, config.model, seed=config.seed).train
    if number is None:
        return collate(packs, [None], sample_ids=(-1,))
    return collate(packs, [packs.place(number)], sample_ids=(number,))


def local(learner: Learner) -> dict[str, Tensor]:
    """Copies of this rank's part of everything that a step may change."""
    return {
        name: (tensor.to_local() if is_sharded(tensor) else tensor).clone()
        for name, tensor in learner.tensors().items()
    }


def _times_nan(module: nn.Module, args: object, out: Any) -> Tensor:
    return out * math.nan


def spoil_loss(model: nn.Module) -> RemovableHandle:
    """NaN in the forward: what the first layer is given."""
    embed = model.get_submodule("embed")
    return embed.register_forward_hook(_times_nan)


def spoil_gradient(model: nn.Module) -> RemovableHandle:
    """The loss is sound; NaN begins behind the last layer and reaches everything, tables too."""

    def hook(module: nn.Module, args: object, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: grad * math.nan)

    return model.get_submodule("norm").register_forward_hook(hook)


def spoil_whole_parameter(model: nn.Module) -> RemovableHandle:
    """NaN in the gradient of one parameter that every rank holds whole."""
    (sink,) = [p for name, p in model.named_parameters() if name == "layers.0.attn.attn_sink"]
    return sink.register_hook(lambda grad: torch.full_like(grad, math.nan))


SPOILS = (spoil_loss, spoil_gradient, spoil_whole_parameter)


def spoilt_steps(config: TrainerConfig) -> list[tuple[str, list[str]]]:
    """Of steps that go wrong on one rank, each in its way: the error, and what it has changed."""
    ranks = Ranks.from_process_group()
    learner, found = build_learner(config), []
    train_step(learner, [batch(config, 2 + ranks.rank)], SETTINGS, ranks=ranks)
    before = local(learner)
    for spoil in SPOILS:
        handle = spoil(learner.model) if ranks.rank == SICK else None
        with pytest.raises(DivergedError) as raised:
            train_step(learner, [batch(config, ranks.rank)], SETTINGS, ranks=ranks)
        after = local(learner)
        found.append(
            (str(raised.value), [n for n in after if not torch.equal(after[n], before[n])])
        )
        if handle is not None:
            handle.remove()
        learner.optimizer.zero_grad()
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_nan_on_one_rank_stops_all_before_any_weight_changes(
    ranks: Pool, tmp_path: Path, mesh: str
) -> None:
    config = trainer_config(tmp_path, parallel=MESHES[mesh])
    for found in ranks.run(2, spoilt_steps, config):
        (loss, _), (gradient, _), (whole, _) = found
        assert loss.startswith("loss sum nan, gradient norm nan")
        assert "nan" not in gradient.split(",")[0]
        assert gradient.endswith("norm nan")
        assert whole.endswith("norm nan")
        assert [changed for _, changed in found] == [[], [], []]


def step_outside_the_table(config: TrainerConfig) -> tuple[str, list[str], float | None]:
    """The error of a step in which one rank asks for a row that no table has, what it has changed,
    and the loss of a sound step after it."""
    ranks = Ranks.from_process_group()
    learner, mine = build_learner(config), batch(config, ranks.rank)
    before = local(learner)
    if ranks.rank == SICK:
        rows = mine.engram_rows.clone()
        rows[0, 0, 1, 0] = learner.store.rows[1]
        mine = dataclasses.replace(mine, engram_rows=rows)
    with pytest.raises(ValueError, match="outside") as raised:
        train_step(learner, [mine], SETTINGS, ranks=ranks)
    after = local(learner)
    changed = [name for name in after if not torch.equal(after[name], before[name])]
    sound = train_step(learner, [batch(config, ranks.rank)], SETTINGS, ranks=ranks)
    return str(raised.value), changed, sound.loss


def test_a_row_outside_its_table_on_one_rank_stops_all(ranks: Pool, tmp_path: Path) -> None:
    config = trainer_config(tmp_path, parallel=MESHES["experts"])
    (one, other) = ranks.run(2, step_outside_the_table, config)
    assert one == other
    error, changed, loss = one
    layer, rows = config.model.engram_layers[1], config.model.engram_num_embeddings[1]
    assert f"layer {layer}" in error
    assert f"to {rows}, outside its {rows} rows" in error
    assert changed == []
    assert loss is not None


def steps_with_padding(config: TrainerConfig) -> list[tuple[float | None, float, int]]:
    """Loss, gradient norm and labels of steps in which one rank of two has padding alone, then the
    other, then both."""
    ranks = Ranks.from_process_group()
    learner, found = build_learner(config), []
    for numbers in ([0, None], [None, 1], [None, None]):
        mine = [batch(config, number) for number in numbers[ranks.rank :: ranks.world]]
        result = train_step(learner, mine, SETTINGS, ranks=ranks)
        found.append((result.loss, result.grad_norm, result.tokens.valid))
    return found


def test_a_rank_with_padding_alone_adds_nothing(ranks: Pool, tmp_path: Path) -> None:
    alone = trainer_config(tmp_path)
    wanted = steps_with_padding(alone)
    assert [loss is None for loss, _, _ in wanted] == [False, False, True]
    for mesh in ("replicated", "experts"):
        config = dataclasses.replace(alone, parallel=MESHES[mesh])
        for found in ranks.run(2, steps_with_padding, config):
            for (loss, norm, labels), (own_loss, own_norm, own_labels) in zip(
                wanted, found, strict=True
            ):
                assert labels == own_labels
                assert own_norm == pytest.approx(norm, rel=1e-5, abs=1e-12)
                assert own_loss == (None if loss is None else pytest.approx(loss, rel=1e-5))
