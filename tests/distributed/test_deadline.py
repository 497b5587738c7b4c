"""A rank that its cluster ends soon decides for all whether a checkpoint still fits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from data.cache.prepare import prepare
from tests.builders import trainer_config
from tests.ranks import Ranks as Pool
from trainer import faults, loop
from trainer.config import CheckpointConfig, EvalConfig, ParallelConfig, TrainerConfig
from trainer.outcome import Outcome
from trainer.ranks import Ranks
from trainer.signals import GRACE

pytestmark = pytest.mark.xdist_group("ranks")


def trained(
    config: TrainerConfig, run_dir: Path, number: int, grace: str
) -> tuple[Outcome, list[str]]:
    """Rank 1 hears a signal in the fourth step; the save after the second took a second."""
    ranks, real, said = Ranks.from_process_group(), loop.learning_rate, list[str]()

    def signalled(step, optim):
        if step == 4 and ranks.rank == 1:
            os.kill(os.getpid(), number)
        return real(step, optim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "learning_rate", signalled)
        patch.setenv(GRACE, grace)
        faults.arm("slow@save.tensors,step=2,rank=0,ms=1000")
        try:
            outcome = loop.train(
                config,
                run_dir=run_dir,
                attempt=1,
                ranks=ranks,
                resume=False,
                say=said.append,
                sources=prepare(config.data, config.model),
            )
        finally:
            faults.arm("")
    return outcome, said


@pytest.mark.parametrize(
    ("number", "grace", "saved"),
    [
        (signal.SIGTERM, "0.9", [2]),
        pytest.param(signal.SIGTERM, "60", [2, 4], marks=pytest.mark.long),
        # a person waits for it
        pytest.param(signal.SIGINT, "0.9", [2, 4], marks=pytest.mark.long),
    ],
)
def test_a_save_that_cannot_fit_is_left_out(
    ranks: Pool, tmp_path: Path, number: int, grace: str, saved: list[int]
) -> None:
    config = trainer_config(
        tmp_path,
        parallel=ParallelConfig(dp_shard=2),
        eval=EvalConfig(every=0),
        checkpoint=CheckpointConfig(every=2, keep=3),
    )
    prepare(config.data, config.model)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    ends = ranks.run(2, trained, config, run_dir, int(number), grace, timeout=60)
    found = sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step_*"))
    assert found == saved
    unsaved = saved == [2]
    code = 130 if number == signal.SIGINT else 75
    assert [(end.code, end.step) for end, _ in ends] == [(code, 4)] * 2
    assert all(("unsaved" in end.message) == unsaved for end, _ in ends)
    told = [line for line in ends[0][1] if line.startswith("step 4: not saved")]
    assert len(told) == unsaved
    if told:
        assert "since a checkpoint takes" in told[0] and "(resilience.grace_s)" in told[0]
