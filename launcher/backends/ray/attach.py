"""The command's side of a run that a Ray cluster keeps: hand it over, follow it, come back to it.

A running cluster gets the run's supervisor as well as its ranks (see `resident`), so that the
command may be lost: it only shows what the supervisor says and passes a wish to stop on, as
`dsv41 stop` does. A cluster that is started for one run ends with the command, as that run does.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from data.cache.prepare import PreparedSource
from launcher.backends.protocol import OWNED
from launcher.backends.ray.backend import CONNECT_SECONDS
from launcher.backends.ray.reports import Reports, last_words, started
from launcher.backends.ray.resident import supervisor_log
from launcher.backends.ray.screen import Screen
from launcher.backends.ray.work import NOT_STARTED, how_it_ended
from launcher.problems import Stop
from launcher.processes import end_tree, killed_by
from launcher.resume import as_last, moved
from launcher.run_config import RunConfig
from launcher.run_dir import Attempt, RunFolder
from launcher.submission import Submission
from launcher.supervisor import StopRequests
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome
from trainer.signals import request_stop

POLL_SECONDS = 0.2
START_SECONDS = 150.0  # more than the link's own
END_SECONDS = 3.0  # that the link has to leave the cluster
SHOWN_LINES = 20  # of what the supervisor said before somebody came back
TAIL_BYTES = 1 << 16  # enough for so many

Say = Callable[[str], None]


def stays(config: RunConfig) -> bool:
    """Whether the run's cluster keeps it when its command is lost."""
    launcher = config.launcher
    return launcher.kind == "ray" and launcher.ray.address is not None and OWNED not in os.environ


def living(folder: RunFolder, config: RunConfig) -> Link | None:
    """An open link to the cluster that keeps the run now; None when none does.

    config: what the run is to go on with. Stop 78 when the cluster that kept it cannot be asked;
    but for a run that goes elsewhere that cluster may as well be gone.
    """
    last = as_last(folder)
    if not stays(last) or how_it_ended(folder) is not None or not folder.submission_file.exists():
        return None
    address = str(last.launcher.ray.address)
    with ExitStack() as closing:
        link = closing.enter_context(Link(folder, address))
        try:
            if not link.find():
                return None
        except Stop:
            if config.launcher.ray.address == address and stays(config):
                raise
            return None
        closing.pop_all()
        return link


def come_back(
    folder: RunFolder, config: RunConfig, link: Link, *, say: Say
) -> tuple[Outcome, Attempt]:
    """Follow a run that its cluster keeps until it ends, or a person wants it to: how its last
    attempt ended, and it. Stop 78 when `config` would have it go on otherwise than it does."""
    where = f"{folder.path} is being trained in the Ray cluster at {link.address}"
    with StopRequests(config.resilience.grace_s) as requests, link:
        if changes := moved(folder, config):
            lines = "\n".join(f"  {change}" for change in changes)
            raise Stop(
                ExitCode.CONFIG,
                f"{where} and cannot be changed meanwhile:\n{lines}\n"
                f"Stop it first: dsv41 stop {folder.path}",
            )
        say(
            f"{where}; following it (Ctrl-C stops it, with a checkpoint; if this command is lost, "
            "it goes on)."
        )
        return _follow(folder, link, requests, at=_near_end(supervisor_log(folder)))


def hand_over(
    folder: RunFolder,
    config: RunConfig,
    sources: Sequence[PreparedSource],
    *,
    given: Mapping[str, object],
    held: ExitStack,
    say: Say,
) -> tuple[Outcome, Attempt]:
    """Have the cluster of config.launcher.ray keep the run, and follow it as `come_back` does.

    held: what holds the run for this process; let go once the cluster has it. Stop when it cannot
    be handed over; then nothing of it is left in the cluster.
    """
    address = str(config.launcher.ray.address)
    with StopRequests(config.resilience.grace_s) as requests, Link(folder, address) as link:
        if link.find(requests):
            raise Stop(
                ExitCode.CONFIG,
                f"{folder.path} is being trained in the Ray cluster at {address} already.\n"
                f"Follow it: dsv41 resume {folder.path}",
            )
        log = supervisor_log(folder)
        said = log.stat().st_size if log.exists() else 0
        _write_submission(folder, Submission(sources, given, folder.last_attempt() + 1))
        try:
            link.start()
        except BaseException:
            folder.submission_file.unlink()
            raise
        held.close()
        say(
            f"The Ray cluster at {address} has the run and goes on if this command is lost; "
            f"dsv41 resume {folder.path} comes back to it."
        )
        return _follow(folder, link, requests, at=said)


class Link:
    """The process that knows the cluster (see `link`), for the run in `folder`. Ends when closed,
    and leaves the run alone."""

    def __init__(self, folder: RunFolder, address: str) -> None:
        self.address = address
        self._log = folder.path / "ray.log"
        self._process = started(
            "launcher.backends.ray.link",
            *(str(folder.path.absolute()), address),
            code=folder.code,
            log=self._log,
        )
        self._reports = Reports(self._process)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        end_tree(self._process.pid)
        self._process.wait()

    def find(self, requests: StopRequests | None = None) -> bool:
        """Whether the run is in the cluster. Stop 78 when there is no cluster, or none answers."""
        return bool(self._hear_of("connected", CONNECT_SECONDS, requests)["found"])

    def start(self) -> None:
        """Have the cluster keep the run, which it does not. Stop 78 when it cannot."""
        assert self._process.stdin is not None
        with suppress(OSError):
            print("start", file=self._process.stdin, flush=True)
        self._hear_of("started", START_SECONDS, None)

    def ended(self) -> bool:
        """Whether the cluster keeps the run no longer. ConnectionError when the link is lost."""
        gone = self._process.poll()
        if any(report["state"] == "ended" for report in self._reports.new(POLL_SECONDS)):
            return True
        if gone is not None:
            raise ConnectionError(killed_by(-gone) if gone < 0 else f"ended with exit code {gone}")
        return False

    def _hear_of(
        self, state: str, seconds: float, requests: StopRequests | None
    ) -> dict[str, object]:
        deadline = time.monotonic() + seconds
        while True:
            gone = self._process.poll() is not None
            for report in self._reports.new(POLL_SECONDS):
                if report["state"] == state:
                    return report
                raise Stop(ExitCode.CONFIG, report["text"])
            if requests is not None and requests.asked:
                raise Stop(requests.code, "asked to stop; nothing was started.")
            if gone or time.monotonic() > deadline:
                text = f"Ray at {self.address} gave no answer{last_words(self._log)}"
                raise Stop(ExitCode.CONFIG, text)


def _follow(
    folder: RunFolder, link: Link, requests: StopRequests, *, at: int
) -> tuple[Outcome, Attempt]:
    """at: from which byte on to show what the supervisor says."""
    told = forced = Submission.of(folder).first_attempt - 1
    screen = Screen(supervisor_log(folder), at=at)
    try:
        while not link.ended():
            newest = folder.last_attempt()
            if newest > told:
                requests.about(folder.attempt(newest))
                told = newest
            if requests.overdue and newest > forced:
                stop_file = folder.attempt(newest).stop_file
                request_stop(stop_file, requests.code, why="told to end at once", now=True)
                forced = newest
        outcome = how_it_ended(folder) or _without_a_word(folder)
    except ConnectionError as error:
        outcome = Outcome(
            ExitCode.AGAIN,
            "out of sight",
            folder.saved_step(),
            f"The link to the Ray cluster at {link.address} {error}, see {folder.path / 'ray.log'}."
            f"\nThe run may go on there; dsv41 resume {folder.path} comes back to it.",
        )
    finally:
        screen.close()
    if outcome.reason == NOT_STARTED:
        raise Stop(outcome.code, outcome.message)
    return outcome, folder.attempt(max(1, folder.last_attempt()))


def _without_a_word(folder: RunFolder) -> Outcome:
    log = supervisor_log(folder)
    text = f"The run's supervisor ended without a word of how, see {log}{last_words(log)}"
    return Outcome(ExitCode.AGAIN, "lost", folder.saved_step(), text)


def _write_submission(folder: RunFolder, submission: Submission) -> None:
    try:
        folder.ended_file.unlink(missing_ok=True)
        submission.write(folder)
    except OSError as error:
        raise Stop(
            ExitCode.CANNOT_CREATE,
            f"Cannot write to {error.filename or folder.path}: {error.strerror or error}.\n"
            "Make room there, or make it writable.",
        ) from error


def _near_end(log: Path) -> int:
    """The byte at which the last SHOWN_LINES lines of a log begin."""
    if not log.exists():
        return 0
    with log.open("rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(begin)
        lines = file.read().splitlines(keepends=True)
    return begin + sum(map(len, lines[:-SHOWN_LINES]))
