import dataclasses
import math

import pytest

from tests.builders import optim_config
from trainer.config import (
    CheckpointConfig,
    EvalConfig,
    LoggingConfig,
    ParallelConfig,
    RouterConfig,
    TrainConfig,
)

OPTIM = optim_config(lr=3e-4, warmup_steps=10, hold_steps=20, decay_steps=30, final_lr=3e-5)


def test_sound_configurations_have_no_problems():
    sound = [
        OPTIM,
        TrainConfig(steps=1, packs_per_step=1, clip_norm=math.inf),
        EvalConfig(),
        ParallelConfig(),
        CheckpointConfig(every=0),
        LoggingConfig(),
        RouterConfig(),
        RouterConfig(bias_update_rate=0, balance_loss_weight=0),
    ]
    assert [part.problems() for part in sound] == [[]] * len(sound)


@pytest.mark.parametrize(
    ("part", "key"),
    [
        (TrainConfig(steps=0, packs_per_step=1), "train.steps=0"),
        (TrainConfig(steps=1, packs_per_step=-3), "train.packs_per_step=-3"),
        (
            TrainConfig(steps=1, packs_per_step=1, packs_per_micro_batch=0),
            "train.packs_per_micro_batch=0",
        ),
        (TrainConfig(steps=1, packs_per_step=1, clip_norm=0.0), "train.clip_norm=0.0"),
        (TrainConfig(steps=1, packs_per_step=1, clip_norm=math.nan), "train.clip_norm=nan"),
        (TrainConfig(steps=1, packs_per_step=1, threads=0), "train.threads=0"),
        (EvalConfig(every=-1), "eval.every=-1"),
        (EvalConfig(packs=0), "eval.packs=0"),
        (ParallelConfig(dp_shard=0), "parallel.dp_shard=0"),
        (ParallelConfig(dp_replicate=0), "parallel.dp_replicate=0"),
        (CheckpointConfig(every=-1), "checkpoint.every=-1"),
        (CheckpointConfig(every=1, keep=0), "checkpoint.keep=0"),
        (LoggingConfig(every=0), "logging.every=0"),
        (RouterConfig(bias_update_rate=-0.001), "router.bias_update_rate=-0.001"),
        (RouterConfig(balance_loss_weight=math.inf), "router.balance_loss_weight=inf"),
        (dataclasses.replace(OPTIM, lr=0.0, final_lr=0.0), "optim.lr=0.0"),
        (dataclasses.replace(OPTIM, lr=math.inf), "optim.lr=inf"),
        (dataclasses.replace(OPTIM, final_lr=1e-3), "optim.final_lr=0.001"),
        (dataclasses.replace(OPTIM, beta1=1.0), "optim.beta1=1.0"),
        (dataclasses.replace(OPTIM, beta2=-0.1), "optim.beta2=-0.1"),
        (dataclasses.replace(OPTIM, eps=0.0), "optim.eps=0.0"),
        (dataclasses.replace(OPTIM, weight_decay=math.nan), "optim.weight_decay=nan"),
        (dataclasses.replace(OPTIM, table_lr_multiplier=-1.0), "optim.table_lr_multiplier=-1.0"),
        (dataclasses.replace(OPTIM, name="muon"), "optim.name=muon"),
        (dataclasses.replace(OPTIM, warmup_steps=-1), "optim.warmup_steps=-1"),
        (dataclasses.replace(OPTIM, tables="adagrad"), "optim.tables=adagrad"),
    ],
)
def test_each_bad_value_is_named_once_with_its_value(part, key):
    problems = part.problems()
    assert len(problems) == 1
    assert problems[0].startswith(key + " ")


def test_tables_learn_by_the_rule_that_goes_with_the_others():
    pretrain = dataclasses.replace(OPTIM, name="pretrain")
    assert (OPTIM.table_rule, pretrain.table_rule) == ("sparse_adam", "sinkhorn")
    assert dataclasses.replace(pretrain, tables="rowwise_adagrad").table_rule == "rowwise_adagrad"


@pytest.mark.parametrize("tables", ["sinkhorn", "sparse_adam", "rowwise_adagrad"])
def test_tables_in_files_do_not_learn(config, tables):
    stored = dataclasses.replace(config.model.engram, store="mapped", path="x")
    mapped = dataclasses.replace(config.model, engram=stored)

    def problems(tables: str) -> list[str]:
        optim = dataclasses.replace(config.optim, tables=tables)
        return dataclasses.replace(config, model=mapped, optim=optim).problems()

    (problem,) = problems(tables)
    assert problem.startswith(f"optim.tables={tables}, but tables in files do not learn")
    assert problems("frozen") == problems("auto") == []


def test_all_problems_of_a_part_are_reported_together():
    problems = TrainConfig(steps=0, packs_per_step=0, packs_per_micro_batch=0).problems()
    assert len(problems) == 3


def test_rules_between_parts(config):
    assert config.problems() == []

    def changed(part, **values):
        new = dataclasses.replace(getattr(config, part), **values)
        return dataclasses.replace(config, **{part: new}).problems()

    (uneven,) = changed("train", packs_per_step=3)
    assert "train.packs_per_step=3" in uneven
    (uneven,) = changed("parallel", dp_replicate=2, dp_shard=2)  # 4 ranks x 2 packs
    assert "another multiple of 8" in uneven
    (unaligned,) = changed("data", pack_length=63)
    assert "data.pack_length=63" in unaligned
    (long,) = changed("data", pack_length=2**21)
    assert "data.pack_length=2097152 exceeds model.max_position_embeddings" in long
    (negative,) = dataclasses.replace(config, seed=-1).problems()
    assert negative.startswith("seed=-1 ")


def test_experts_are_divided_evenly(config):
    """8 experts of width 2 * 32 x 64; a step of 72 packs, so that nothing else is in the way."""

    def changed(**mesh):
        train = dataclasses.replace(config.train, packs_per_step=72, packs_per_micro_batch=1)
        new = dataclasses.replace(config, train=train, parallel=ParallelConfig(**mesh))
        return new.problems()

    assert changed(dp_shard=8, ep=8) == changed(dp_shard=8, ep=2) == []
    assert changed(dp_replicate=3, dp_shard=2) == []
    (experts,) = changed(dp_shard=3, ep=3)
    assert experts.startswith("parallel.ep=3 does not divide model.n_routed_experts=8")
    inner, hidden = changed(dp_shard=12, ep=4)
    assert "2 * model.moe_intermediate_size = 64 is not divisible by the 3 ranks" in inner
    assert hidden.startswith("model.hidden_size = 64")
    assert len(changed(dp_shard=36, ep=12)) == 3, "all at once"
    assert changed(dp_shard=3, ep=2) == [], "told by the part itself"


def test_a_mesh_that_does_not_divide_is_told_in_full():
    problems = ParallelConfig(dp_shard=3, ep=2, engram_owners=2).problems()
    assert len(problems) == 2
    assert "parallel.ep=2 does not divide parallel.dp_shard=3 x parallel.cp=1" in problems[0]
    assert "parallel.engram_owners=2 does not divide the 3 ranks" in problems[1]
    assert len(ParallelConfig(dp_shard=0, cp=-1, ep=0, engram_owners=0).problems()) == 4
