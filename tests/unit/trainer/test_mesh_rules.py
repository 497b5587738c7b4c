"""What a mesh must divide: every broken rule at once, and the fixes that are named fit."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from tests.builders import trainer_config
from trainer.config import ParallelConfig, TrainerConfig
from trainer.mesh_rules import divisors, nearest_divisors


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainerConfig:
    return trainer_config(tmp_path_factory.mktemp("config"))


def problems(config: TrainerConfig, *, packs: int = 2880, length: int = 96, **mesh) -> list[str]:
    train = dataclasses.replace(config.train, packs_per_step=packs, packs_per_micro_batch=1)
    data = dataclasses.replace(config.data, pack_length=length)
    parallel = ParallelConfig(**mesh)
    whole = dataclasses.replace(config, train=train, data=data, parallel=parallel)
    return parallel.problems() + whole.problems()


def test_every_rule_at_once(config: TrainerConfig) -> None:
    """8 experts of 2 * 32 x 64, alignment 2."""
    assert (config.model.n_routed_experts, config.model.alignment) == (8, 2)
    found = problems(config, packs=7, length=4, dp_shard=2, cp=3, ep=4, engram_owners=4)
    starts = [
        "parallel.ep=4 does not divide parallel.dp_shard=2 x parallel.cp=3",
        "parallel.engram_owners=4 does not divide the 6 ranks",
        "train.packs_per_step=7 cannot be dealt out evenly to 2 group(s) of parallel.cp=3 ranks",
        "data.pack_length=4 leaves ranks without a token: each of parallel.cp=3 takes 2",
    ]
    assert [s for s in starts if not any(f.startswith(s) for f in found)] == []
    assert len(found) == 4
    assert "use 3 or 6" in found[0] and "use 3 or 6" in found[1]
    assert "use 6 or more" in found[3]
    found = problems(config, dp_shard=36, ep=12)
    assert [f.split(" ")[0] for f in found] == ["parallel.ep=12", "2", "model.hidden_size"]


def test_a_step_is_dealt_to_groups_not_to_ranks(config: TrainerConfig) -> None:
    assert problems(config, packs=2, dp_shard=2, cp=4) == []
    (told,) = problems(config, packs=3, dp_shard=2, cp=4)
    assert "another multiple of 2" in told


def test_packs_of_any_length_are_divided_if_every_rank_has_some(config: TrainerConfig) -> None:
    for length, cp in itertools.product(range(2, 60, 2), range(2, 9)):
        share = next(n for n in range(2, 60, 2) if n * cp >= length)
        every = problems(config, length=length, cp=cp, packs=cp)
        found = [told for told in every if told.startswith("data.pack_length")]
        assert len(found) == (share * (cp - 1) >= length), (length, cp, found)
        assert all(f"use {2 * cp} or more" in told for told in found)


def test_what_is_advised_for_ep_is_no_problem(config: TrainerConfig) -> None:
    advised = 0
    for dp_shard, cp, ep in itertools.product((6, 32, 64, 128, 256), (1, 2, 4), (1, 2, 3, 4, 8)):
        for told in problems(config, dp_shard=dp_shard, cp=cp, ep=ep):
            if m := re.search(r"use parallel\.ep=(\d+)$", told):
                left = problems(config, dp_shard=dp_shard, cp=cp, ep=int(m[1]))
                assert not any("matrices" in f or ".ep=" in f for f in left), (told, left)
                advised += 1
    assert advised > 10


def test_divisors() -> None:
    for number in range(1, 200):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
    assert nearest_divisors(5, 12) == "4 or 6"
    assert nearest_divisors(50, 12) == "12"
