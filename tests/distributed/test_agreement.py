"""What goes wrong with the data of one rank ends all ranks, each with the reason."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.cache.prepare import prepare
from data.errors import DataError
from tests.builders import trainer_config
from tests.ranks import Ranks as Pool
from trainer import loop
from trainer.agreement import agreed_items
from trainer.config import EvalConfig, ParallelConfig, TrainerConfig
from trainer.outcome import Outcome
from trainer.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")


def numbers(rank: int, *, last: int | None) -> Iterator[int]:
    """10 rank, 10 rank + 1, 10 rank + 2; with `last`, an error on rank 1 behind that many."""
    for n in range(3):
        if rank == 1 and n == last:
            raise DataError("line 7 is torn")
        yield 10 * rank + n


def taken(last: int | None) -> tuple[list[int], str]:
    ranks, found = Ranks.from_process_group(), []
    try:
        for n in agreed_items(numbers(ranks.rank, last=last), ranks):
            found.append(n)
    except DataError as error:
        return found, str(error)
    return found, ""


def test_an_iterator_that_fails_on_one_rank(ranks: Pool) -> None:
    assert ranks.run(2, taken, None) == [([0, 1, 2], ""), ([10, 11, 12], "")]
    assert ranks.run(2, taken, 2) == [
        ([0, 1], "Rank 1: line 7 is torn"),
        ([10, 11], "line 7 is torn"),
    ]


def trained(config: TrainerConfig, run_dir: Path) -> Outcome:
    """A run whose data are bad on rank 1 from the second step on."""
    ranks, real = Ranks.from_process_group(), loop.batches

    def torn(*args, **options):
        yield from itertools.islice(real(*args, **options), 1)
        raise DataError("line 7 is torn")

    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(loop, "batches", torn)
        return loop.train(
            config,
            run_dir=run_dir,
            attempt=1,
            ranks=ranks,
            resume=False,
            say=lambda text: None,
            sources=prepare(config.data, config.model),
        )


@pytest.mark.slow
def test_bad_data_on_one_rank_end_the_run_on_all(ranks: Pool, tmp_path: Path) -> None:
    config = trainer_config(tmp_path, parallel=ParallelConfig(dp_shard=2), eval=EvalConfig(every=0))
    prepare(config.data, config.model)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    outcomes = ranks.run(2, trained, config, run_dir, timeout=60)
    # Data are taken a step ahead of their use.
    assert [(o.code, o.step) for o in outcomes] == [(65, 0), (65, 0)]
    assert [o.message for o in outcomes] == ["Rank 1: line 7 is torn", "line 7 is torn"]
