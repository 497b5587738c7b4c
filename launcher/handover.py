"""The supervisor that a submission led to takes the run over from the command."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from launcher import own_packages
from launcher.backends.protocol import Backend, Job
from launcher.history import attempts_since
from launcher.problems import Stop
from launcher.resume import continued
from launcher.run_config import RunConfig
from launcher.run_dir import Attempt, RunFolder
from launcher.submission import Submission
from launcher.supervisor import supervise
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome

HELD_S = 90.0  # that whoever worked on the run may need to leave it
LOOK_S = 0.5


def take_over(
    folder: RunFolder,
    *,
    say: Callable[[str], None],
    backend: Callable[[RunConfig], Backend],
    job: Job | None = None,
) -> tuple[RunConfig, Outcome, Attempt]:
    """Supervise a submitted run to its end, with the budgets that earlier supervisors of the same
    submission have left: its configuration, how the last attempt ended, and that attempt.

    In a process that runs the run's own code. Stop when it was never submitted, or somebody else
    works on it.
    """
    if found := own_packages.strangers(folder.code):
        raise Stop(ExitCode.BUG, f"This process must run {folder.code}, not {', '.join(found)}")
    submission = Submission.of(folder)
    config = continued(folder, submission.given)
    with _held(folder):
        outcome, attempt = supervise(
            folder,
            config,
            submission.sources,
            given=submission.given,
            say=say,
            backend=backend(config),
            job=job,
            earlier=attempts_since(folder, submission.first_attempt),
        )
    return config, outcome, attempt


@contextmanager
def _held(folder: RunFolder) -> Iterator[None]:
    """Hold the run. The command that submitted it, or the supervisor before this one, may still do
    so for a moment."""
    deadline = time.monotonic() + HELD_S
    while True:
        with folder.held() as ours:
            if ours:
                yield
                return
        if time.monotonic() > deadline:
            raise Stop(ExitCode.CONFIG, f"another process is working on {folder.path}")
        time.sleep(LOOK_S)
