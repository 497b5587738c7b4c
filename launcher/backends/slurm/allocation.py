"""The job that a supervisor runs in, and who takes its machines away."""

from __future__ import annotations

from collections.abc import Callable

from launcher.backends.protocol import Fate
from launcher.backends.slurm.tools import SlurmError, job_facts, slurm
from launcher.problems import Stop
from trainer.exit_codes import ExitCode

LOOK_S = 10.0  # between two looks while waiting to be ended
REQUEUED_S = 300.0  # that Slurm has to end a job that it has queued again

_NEVER = ("", "None", "Unknown", "N/A")


class SlurmJob:
    """Slurm's job `id`, which this process is part of.

    Slurm tells only the tasks of steps that a job is to end, not why; so it is asked. comes_back:
    whether the job has made way, and goes on later.
    """

    def __init__(self, id: str, *, say: Callable[[str], None]) -> None:
        self.id, self._say = id, say
        self.comes_back = False

    def fate(self, *, stopped: bool) -> Fate:
        try:
            facts = job_facts(self.id)
        except SlurmError as error:
            self._say(f"Slurm does not tell what becomes of job {self.id}: {error}")
            return Fate.STAYS
        return fate_of(facts, stopped=stopped)

    def make_way(self, fate: Fate, wait: Callable[[float], bool]) -> None:
        """A preempted job is queued again by Slurm, if it is there to be ended: one that has left
        by itself counts as completed, or failed, and never comes back."""
        if fate is Fate.TIME:
            self._requeue()
        self.comes_back = True
        waited = 0.0
        while not wait(LOOK_S):
            waited += LOOK_S
            if fate is Fate.TIME and waited >= REQUEUED_S:
                self._say(f"Slurm has queued job {self.id} again, but does not end it.")
                return

    def _requeue(self) -> None:
        try:
            slurm("scontrol", "requeue", self.id)
        except SlurmError as error:
            raise Stop(
                ExitCode.AGAIN,
                f"Slurm does not queue job {self.id} again: {error}\n"
                "The checkpoint is written. Submit the run's train.sbatch once more to go on.",
            ) from error


def fate_of(facts: dict[str, str], *, stopped: bool) -> Fate:
    """facts: what scontrol shows of the job. stopped: its ranks were told to end, not through the
    run's folder; while the job goes on that is the warning before its time ends."""
    if facts.get("PreemptTime", "") not in _NEVER:
        return Fate.PREEMPTED
    if facts.get("JobState") == "RUNNING":
        return Fate.TIME if stopped else Fate.STAYS
    if facts.get("JobState") == "TIMEOUT" or facts.get("Reason") == "TimeLimit":
        return Fate.TIME
    return Fate.CANCELLED
