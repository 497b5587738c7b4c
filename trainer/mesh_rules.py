"""What a mesh must divide evenly. All broken rules are told together, each with what would fit.

The rules of ParallelConfig itself concern the mesh alone. Those here take the other sections that
they need, by their names in a TrainerConfig. Sizes below 1 are told elsewhere and break none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from data.order import sharing_problems

if TYPE_CHECKING:
    from data.config import DataConfig
    from model.config import ModelConfig
    from trainer.config import ParallelConfig, TrainConfig


def experts_are_divided_evenly(model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    """Expert tensors are cut on their first dim over ep ranks, and on the second over the other
    ranks of a copy, on which torch allows no uneven shares."""
    if not _sound(parallel):
        return []
    found = []
    experts, ep, shards = model.n_routed_experts, parallel.ep, parallel.dp_shard * parallel.cp
    if experts % ep:
        found.append(
            f"parallel.ep={ep} does not divide model.n_routed_experts={experts}; use "
            f"{nearest_divisors(ep, math.gcd(experts, shards))}"
        )
    if shards % ep:
        return found
    sizes = {
        "2 * model.moe_intermediate_size": 2 * model.moe_intermediate_size,
        "model.hidden_size": model.hidden_size,
    }
    others = shards // ep
    fits = [n for n in divisors(math.gcd(experts, shards)) if not _uneven(sizes, shards // n)]
    fix = f"use parallel.ep={min(fits, key=lambda n: (n < ep, n))}" if fits else "use a divisor"
    found += [
        f"{name} = {sizes[name]} is not divisible by the {others} ranks (parallel.dp_shard="
        f"{parallel.dp_shard} x parallel.cp={parallel.cp} / parallel.ep={ep}) that share an "
        f"expert's matrices; {fix}"
        for name in _uneven(sizes, others)
    ]
    return found


def packs_reach_all_ranks(
    data: DataConfig, model: ModelConfig, parallel: ParallelConfig
) -> list[str]:
    """cp ranks take equal shares of a pack, each of whole compression groups. Packs of any length
    are widened for that (`Batch.shard`), so that a run's packs fit every cp; but not so short ones
    that a rank would never have a token."""
    unit, length = model.alignment * parallel.cp, data.pack_length
    share = -(-length // unit) * model.alignment if unit > 0 else 0
    if parallel.cp < 2 or length < 2 or share * (parallel.cp - 1) < length:
        return []
    return [
        f"data.pack_length={length} leaves ranks without a token: each of parallel.cp="
        f"{parallel.cp} takes {share}; use {unit} or more, or a smaller parallel.cp"
    ]


def steps_are_dealt_out_evenly(train: TrainConfig, parallel: ParallelConfig) -> list[str]:
    """Every cp group takes as many micro-batches of a step as any other."""
    if min(train.packs_per_micro_batch, train.packs_per_step) < 1 or not _sound(parallel):
        return []
    return sharing_problems(
        packs_per_step=train.packs_per_step,
        packs_per_micro_batch=train.packs_per_micro_batch,
        ranks=parallel.world // parallel.cp,
        cp=parallel.cp,
    )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def nearest_divisors(wanted: int, number: int) -> str:
    """The divisors of `number` on either side of `wanted`, to be read after "use"."""
    every = divisors(number)
    below = [n for n in every if n < wanted][-1:]
    above = [n for n in every if n > wanted][:1]
    return " or ".join(str(n) for n in below + above)


def _uneven(sizes: dict[str, int], ranks: int) -> list[str]:
    return [name for name, size in sizes.items() if size % ranks]


def _sound(parallel: ParallelConfig) -> bool:
    return min(parallel.dp_replicate, parallel.dp_shard, parallel.cp, parallel.ep) >= 1
