"""The ranks of an attempt as one step of the job that the supervisor runs in."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from launcher.backends.protocol import Plan
from launcher.backends.slurm.config import SlurmConfig
from launcher.backends.slurm.tools import SlurmError, first_node_address, slurm, steps_of
from launcher.problems import Stop
from launcher.processes import end_tree, killed_by, without_rank
from launcher.reduce import Death
from launcher.run_dir import Attempt
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome

KILL_SECONDS = 20.0  # that Slurm has to end a step
PORTS = range(15000, 32000)  # below those that systems hand out by themselves

_TASKS = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$", re.MULTILINE)
_ERROR = re.compile(r"^srun: error: (.+)$", re.MULTILINE)
_SIGNALS = {
    "Killed": signal.SIGKILL,
    "Terminated": signal.SIGTERM,
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "User defined signal 2": signal.SIGUSR2,
}


@dataclass(frozen=True)
class Signalled(Death):
    """A death by the signal `number`."""

    number: int


class SlurmSteps:
    """The backend inside the job `job`, whose nodes are `nodes`.

    number: the job's own, also where `job` names a task of an array, ARRAY_TASK.
    """

    def __init__(self, config: SlurmConfig, *, job: str, number: int, nodes: str) -> None:
        self._config, self._job, self._number, self._nodes = config, job, number, nodes

    def start(self, attempt: Attempt, plan: Plan) -> Step:
        """Start a task for each rank. They meet on the job's first node, at a port that belongs to
        the job and the attempt, so that neither two jobs nor two attempts meet. Stop 78 where its
        address does not resolve."""
        address = self._address()
        port = meeting_port(self._number, attempt.number)
        attempt.event("meeting place", address=address, port=port)
        environment = {
            **without_rank(),
            **plan.environment(),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        if self._config.cpus_per_task is not None:
            environment["OMP_NUM_THREADS"] = str(self._config.cpus_per_task)
        with (attempt.path / "agent-00000.log").open("ab") as log:
            return Step(self._job, attempt, self._words(attempt, plan), environment, log)

    def _words(self, attempt: Attempt, plan: Plan) -> list[str]:
        config = self._config
        words = [
            *("srun", f"--job-name={step_name(attempt)}"),
            *(f"--nodes={plan.nodes}", f"--ntasks={plan.world}"),
            *(f"--ntasks-per-node={plan.ranks_per_node}", "--distribution=block"),
            # What follows the end of a rank is decided here, not by the site's defaults.
            *("--kill-on-bad-exit=0", "--wait=0", "--input=none", "--export=ALL"),
        ]
        if config.cpus_per_task is not None:  # srun does not take it over from the job
            words.append(f"--cpus-per-task={config.cpus_per_task}")
        if config.container is not None:
            words.append(f"--container-image={config.container}")
        words += [*config.srun, config.python or sys.executable, "-P", "-m", "launcher.worker"]
        return [*words, str(plan.folder.path), str(attempt.number)]

    def _address(self) -> str:
        try:
            address = first_node_address(self._nodes)
        except SlurmError as error:
            raise Stop(
                ExitCode.CONFIG, f"Slurm does not tell the address of the first node: {error}"
            ) from error
        try:
            socket.getaddrinfo(address, None)
        except OSError as error:
            raise Stop(
                ExitCode.CONFIG,
                f"The address {address} of the job's first node does not resolve ({error}), so "
                f"ranks on other nodes cannot join.\nAsk whoever runs the cluster to correct "
                f"NodeAddr, or leave that node out: launcher.slurm.extra=[--exclude={address}]",
            ) from error
        return address


class Step:
    """The srun of an attempt, in a session of its own, and the step that it started."""

    def __init__(
        self,
        job: str,
        attempt: Attempt,
        words: list[str],
        environment: dict[str, str],
        log: IO[bytes],
    ) -> None:
        self._job, self._attempt, self._name = job, attempt, step_name(attempt)
        self._log = attempt.path / "agent-00000.log"
        try:
            self._process = subprocess.Popen(
                words, env=environment, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            raise Stop(
                ExitCode.CONFIG, f"Cannot start srun ({error.strerror}); it must be on the PATH"
            ) from error

    def poll(self) -> list[Death] | None:
        code = self._process.poll()
        if code is None:
            return None
        found = deaths(self._log.read_text("utf-8", errors="replace"), code)
        for death in found:
            # Told to end before it was ready to note it.
            told = isinstance(death, Signalled) and death.number in (signal.SIGTERM, signal.SIGUSR2)
            if told and death.rank is not None and self._attempt.outcome(death.rank) is None:
                message = "Asked to stop before the first step."
                self._attempt.write_outcome(
                    death.rank, Outcome(ExitCode.AGAIN, "stopped", 0, message)
                )
        return found

    def kill(self) -> None:
        deadline = time.monotonic() + KILL_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            with suppress(SlurmError):
                for step in steps_of(self._job, self._name):
                    slurm("scancel", f"--signal={int(signal.SIGKILL)}", step)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(2.0)
        end_tree(self._process.pid)
        self._process.wait()


def step_name(attempt: Attempt) -> str:
    """What an attempt's step is called in Slurm's lists."""
    return f"attempt-{attempt.number:03d}"


def meeting_port(job: int, attempt: int) -> int:
    """Different for the attempts of a job, and for the jobs that may run beside it."""
    return PORTS[(64 * job + attempt) % len(PORTS)]


def deaths(log: str, code: int) -> list[Death]:
    """What srun, ended with `code`, wrote of tasks that died; tasks that left an exit code of their
    own told why themselves."""
    found: list[Death] = []
    for node, tasks, how in _TASKS.findall(log):
        if how.startswith("Exited with exit code"):
            continue
        number = next((n for words, n in _SIGNALS.items() if how.startswith(words)), None)
        for rank in _numbers(tasks):
            if number is None:
                found.append(Death(rank, f"ended ({how}) on {node}"))
            else:
                found.append(Signalled(rank, f"{killed_by(number)} on {node}", number))
    said = [line for line in _ERROR.findall(log) if not re.match(r"\S+: tasks? ", line)]
    if code and said and not found:
        found.append(Death(None, f"srun: {said[0].rstrip('.')}"))
    if code < 0:
        found.append(Death(None, f"srun {killed_by(-code)}"))
    return found


def _numbers(text: str) -> list[int]:
    """0,2-4 -> [0, 2, 3, 4]"""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
