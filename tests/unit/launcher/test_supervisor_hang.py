"""What a supervisor makes of ranks that do nothing."""

from __future__ import annotations

from dataclasses import replace

from launcher.backends.protocol import Plan
from launcher.reduce import Death
from launcher.run_config import RunConfig
from launcher.run_dir import Attempt, create
from launcher.supervisor import supervise
from trainer.exit_codes import ExitCode


class Absent:
    """Ranks that never give a sign of life."""

    def __init__(self) -> None:
        self.killed = 0

    def start(self, attempt: Attempt, plan: Plan) -> Absent:
        return self

    def poll(self) -> list[Death] | None:
        return None

    def signal(self, number: int) -> None:
        pass

    def kill(self) -> None:
        self.killed += 1


def test_a_hang_is_a_failure_that_is_tried_again(tiny: RunConfig) -> None:
    config = replace(
        tiny,
        launcher=replace(tiny.launcher, kind="torchrun"),
        resilience=replace(tiny.resilience, hang_s=0.5, max_without_progress=2),
    )
    folder, said, ranks = create(config, overrides=[]).folder, [], Absent()
    outcome, attempt = supervise(folder, config, [], given={}, say=said.append, backend=ranks)
    assert (ranks.killed, attempt.number) == (2, 2)
    assert (outcome.code, outcome.reason) == (ExitCode.HANG, "hang")
    why, _, _ = outcome.message.partition("\n")  # the command's last line but for where things are
    assert why.endswith(
        "Rank 0 never gave a sign of life. Not started again: 2 attempts one after another brought "
        "no new checkpoint (resilience.max_without_progress)."
    )
    assert said[0].startswith("Attempt 1 ended (hang): Nothing was finished for ")
    assert "Starting again in 1 s from the beginning" in said[0]
