"""A run's attempts one after another: started, watched, ended, and what comes next.

The supervisor trains nothing and knows no collective: it sees processes, outcome files and
checkpoints. Its backend starts the ranks of an attempt; the ranks do not outlive it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from data.cache.prepare import PreparedSource
from launcher.backends.opening import backend_of
from launcher.backends.protocol import Backend, Fate, Handle, Job, Plan
from launcher.decide import FINAL, AttemptEnd, Decision, Next, decide
from launcher.environment import code_digest
from launcher.history import remembered
from launcher.problems import Stop
from launcher.reduce import Death, reduce
from launcher.run_config import RunConfig
from launcher.run_dir import Attempt, RunFolder
from launcher.watch.watchdog import Hang, Watchdog
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome
from trainer.signals import request_stop, requested_stop, wanted_now

POLL_SECONDS = 0.2
PEERS_SECONDS = 30.0  # that ranks have to notice that one has died, before they are ended

Say = Callable[[str], None]


def supervise(
    folder: RunFolder,
    config: RunConfig,
    sources: Sequence[PreparedSource],
    *,
    given: Mapping[str, object],
    say: Say,
    backend: Backend | None = None,
    job: Job | None = None,
    earlier: Sequence[AttemptEnd] = (),
) -> tuple[Outcome, Attempt]:
    """Run `folder` to its end on the backend of config.launcher: how the last attempt ended, and
    it.

    given: settings of the data for these attempts alone. job: of a batch system, that this process
    runs in. earlier: how the attempts ended that count with these, see `decide`. Ctrl-C and SIGTERM
    ask the ranks to checkpoint and end; a second one ends them at once. Stop when the folder of an
    attempt cannot be made.
    """
    backend = backend or backend_of(config, say=say)
    limits, ends = config.resilience, list(earlier)
    plan = Plan(
        folder,
        world=config.parallel.world,
        nodes=config.launcher.nodes,
        grace_s=limits.grace_s,
    )
    code = code_digest(folder.code)
    requests = StopRequests(limits.grace_s, in_job=job is not None)
    with _registered(folder, config, job), requests:
        if ends and (left := _left_to_stop(folder, ends[-1])) is not None:
            return left
        while True:
            before = folder.saved_step()
            attempt = begin_attempt(folder, config, sources, given, code=code)
            watchdog = Watchdog(
                attempt, world=plan.world, hang_s=limits.hang_s, say=say, now=time.monotonic()
            )
            requests.about(attempt)
            try:
                outcome = _run(backend, attempt, plan, requests, watchdog)
            except Stop as stop:
                return _refused(attempt, stop, before), attempt
            end, fate = _end_of(attempt, outcome, requests, job)
            ends.append(replace(end, saved_before=before, saved=folder.saved_step()))
            decision = decide(ends, limits)
            attempt.event(
                "end",
                **outcome.to_dict(),
                next=decision.next.value,
                why=decision.why,
                **remembered(ends[-1]),
            )
            if decision.next not in (Next.AGAIN, Next.REQUEUE):
                return _last_word(outcome, decision, ends[-1]), attempt
            say(_verdict(attempt, outcome, decision, folder.saved_step()))
            if decision.next is Next.REQUEUE:
                assert job is not None
                job.make_way(fate, requests.sleep)
                return outcome, attempt
            if (asked := requests.wait(decision.delay_s)) is not None:
                return _between(attempt, ends[-1], asked), attempt


def _refused(attempt: Attempt, stop: Stop, saved: int) -> Outcome:
    """The end of an attempt whose ranks could not be started as things are."""
    outcome = Outcome(stop.code, "refused", saved, stop.message)
    attempt.event(
        "end",
        **outcome.to_dict(),
        next=Next.STOP.value,
        why="it could not begin",
        **remembered(AttemptEnd(outcome, saved_before=saved, saved=saved)),
    )
    return outcome


def _left_to_stop(folder: RunFolder, end: AttemptEnd) -> tuple[Outcome, Attempt] | None:
    """The end of a run that a person told to stop, which its supervisor did not live to see."""
    attempt = folder.attempt(folder.last_attempt())
    # A batch system's request ends an attempt; only a person's ends the run.
    wanted = requested_stop(attempt.stop_file) == ExitCode.INTERRUPTED
    if not wanted or end.outcome.code == ExitCode.DONE:
        return None
    end = replace(end, saved=folder.saved_step())
    return _between(attempt, end, ExitCode.INTERRUPTED), attempt


def _between(attempt: Attempt, end: AttemptEnd, code: ExitCode) -> Outcome:
    """The end of a run that was told to stop when an attempt had ended and no other had begun."""
    attempt.event(
        "end",
        **end.outcome.to_dict(),
        next=Next.STOP.value,
        why="it was told to stop",
        **remembered(replace(end, asked=True)),
    )
    number, reason = attempt.number, end.outcome.reason
    text = f"Stopped before attempt {number + 1}; attempt {number} had ended ({reason})."
    return Outcome(code, "stopped", end.saved, text)


def _end_of(
    attempt: Attempt, outcome: Outcome, requests: StopRequests, job: Job | None
) -> tuple[AttemptEnd, Fate]:
    asked = requests.asked or requested_stop(attempt.stop_file) is not None
    stopped = outcome.code == ExitCode.AGAIN and outcome.reason == "stopped"
    fate = Fate.STAYS
    if job is not None and outcome.code != ExitCode.DONE:
        fate = job.fate(stopped=stopped and not asked)
    leaving = fate in (Fate.PREEMPTED, Fate.TIME)
    if requests.terminated and leaving:  # what looked like a person's wish was the batch system's
        asked = False
    asked = asked or fate is Fate.CANCELLED
    preempted = (stopped or leaving) and not asked
    return AttemptEnd(outcome, asked=asked, preempted=preempted, leaving=leaving), fate


def begin_attempt(
    folder: RunFolder,
    config: RunConfig,
    sources: Sequence[PreparedSource],
    given: Mapping[str, object],
    *,
    code: str,
) -> Attempt:
    """The folder of a new attempt, with what its ranks must know. code: the digest of what they
    run. Stop 73 if it cannot be made."""
    try:
        attempt = folder.new_attempt()
        attempt.write_sources(sources)
        attempt.write_given(given)
        attempt.event(
            "start",
            backend=config.launcher.kind,
            ranks=config.parallel.world,
            host=socket.gethostname(),
            pid=os.getpid(),
            code_sha256=code,
        )
    except OSError as error:
        raise Stop(
            ExitCode.CANNOT_CREATE,
            f"Cannot begin an attempt in {folder.attempts}: {error.strerror}.\n"
            "Make room there, or make it writable.",
        ) from error
    return attempt


def _run(
    backend: Backend, attempt: Attempt, plan: Plan, requests: StopRequests, watchdog: Watchdog
) -> Outcome:
    """One attempt from its start to its end; nothing of it is left running."""
    handle = backend.start(attempt, plan)
    try:
        ended = watch(handle, attempt, plan, requests, watchdog)
    finally:
        handle.kill()
        watchdog.close()
    if isinstance(ended, Outcome):
        return ended
    if isinstance(ended, Hang):
        return ended.outcome()
    return reduce(attempt.outcomes(), ended, world=plan.world)


def watch(
    handle: Handle, attempt: Attempt, plan: Plan, requests: StopRequests, watchdog: Watchdog
) -> Sequence[Death] | Hang | Outcome:
    """Until nothing of an attempt runs, or it is to be ended by force: who died, or why it ends."""
    one_ended: float | None = None
    while (deaths := handle.poll()) is None:
        if requests.overdue or wanted_now(attempt.stop_file):
            attempt.event("forced end", why="it was told to end at once, or took too long")
            return _by_force(attempt, plan.folder.saved_step())
        if one_ended is None and attempt.outcomes():
            one_ended = time.monotonic()
        if one_ended is not None and time.monotonic() - one_ended > PEERS_SECONDS + plan.grace_s:
            attempt.event("forced end", why="some ranks ended, others did not")
            return []
        if hang := watchdog.check(time.monotonic()):
            return hang
        time.sleep(POLL_SECONDS)
    return deaths


def _by_force(attempt: Attempt, saved: int) -> Outcome:
    """The end of ranks that were not given the time for a checkpoint."""
    where = f"the newest is of step {saved}" if saved else "there is none"
    text = f"Ended by force, without a checkpoint of this moment; {where}."
    return Outcome(requested_stop(attempt.stop_file) or ExitCode.AGAIN, "stopped", saved, text)


def _verdict(attempt: Attempt, outcome: Outcome, decision: Decision, saved: int) -> str:
    """One line: why an attempt ended and what comes next."""
    first, _ = _sentence(outcome)
    where = f"from the checkpoint of step {saved}" if saved else "from the beginning"
    when = f" in {decision.delay_s:.0f} s" if decision.delay_s else ""
    if decision.next is Next.REQUEUE:
        when = ", once the job has its machines again,"
    return (
        f"Attempt {attempt.number} ended ({outcome.reason}): {first} "
        f"Starting again{when} {where} ({decision.why})."
    )


def _last_word(outcome: Outcome, decision: Decision, end: AttemptEnd) -> Outcome:
    """The outcome of the last attempt; where nothing in its message explains why no other follows,
    with the reason in its first line."""
    if decision.next is not Next.STOP or end.asked or outcome.code in FINAL:
        return outcome
    first, rest = _sentence(outcome)
    return replace(outcome, message=f"{first} Not started again: {decision.why}.{rest}")


def _sentence(outcome: Outcome) -> tuple[str, str]:
    """The first line of its message, with a full stop, and the rest."""
    first, more, rest = outcome.message.strip().partition("\n")
    first = first or outcome.reason
    return first if first.endswith((".", "!", "?")) else f"{first}.", more + rest


@dataclass
class StopRequests:
    """While entered, SIGINT and SIGTERM ask the attempt at hand to checkpoint and end.

    The first one writes the attempt's stop file. A SIGTERM comes from a system that waits no longer
    than grace_s: the ranks are told, and ended by force once these have passed; after Ctrl-C they
    have all the time that a checkpoint takes. A second signal ends them at once. in_job: inside a
    job of a batch system, which repeats its SIGTERM for every process: only Ctrl-C counts as a
    second one.
    """

    grace_s: float
    in_job: bool = False
    asked: bool = False
    overdue: bool = False
    _code: ExitCode = ExitCode.AGAIN
    _until: float | None = None
    _attempt: Attempt | None = None
    _timer: threading.Timer | None = None
    _woken: threading.Event = field(default_factory=threading.Event)
    _previous: dict[int, object] = field(default_factory=dict)

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        if self._timer is not None:
            self._timer.cancel()

    def about(self, attempt: Attempt) -> None:
        """Requests concern this attempt from now on, also one that came before."""
        self._attempt = attempt
        if self.asked:
            self._pass_on()

    def wait(self, seconds: float) -> ExitCode | None:
        """Wait between two attempts, until a request comes, here or by the last one's stop file:
        the exit code that it asks for; None without one."""
        assert self._attempt is not None
        end = time.monotonic() + seconds
        while True:
            if self.asked:
                return self._code
            if (code := requested_stop(self._attempt.stop_file)) is not None:
                return code
            if (left := end - time.monotonic()) <= 0:
                return None
            self._woken.wait(min(left, POLL_SECONDS))

    def sleep(self, seconds: float) -> bool:
        """Wait, also when a request came long ago; whether one comes meanwhile."""
        self._woken.clear()
        return self._woken.wait(seconds)

    @property
    def code(self) -> ExitCode:
        """What a request asks the run to end with: 130 by Ctrl-C, 75 by SIGTERM."""
        return self._code

    @property
    def terminated(self) -> bool:
        """Whether the request was a SIGTERM, which batch systems send too."""
        return self.asked and self._code == ExitCode.AGAIN

    def _note(self, number: int, frame: object) -> None:
        self._woken.set()
        if self.asked:
            self.overdue = self.overdue or number == signal.SIGINT or not self.in_job
            return
        self.asked = True
        self._code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.AGAIN
        self._until = time.time() + self.grace_s if number == signal.SIGTERM else None
        self._pass_on()
        if number == signal.SIGTERM:
            self._timer = threading.Timer(self.grace_s, self._force)
            self._timer.daemon = True
            self._timer.start()
        if self.in_job:
            return
        # Not print: the handler may have interrupted another write to the same stream.
        os.write(
            2,
            b"\nStopping after this step, with a checkpoint. "
            b"Once more to leave at once, without one.\n",
        )

    def _pass_on(self) -> None:
        if self._attempt is not None:
            why = "interrupted" if self._code == ExitCode.INTERRUPTED else "told to end"
            request_stop(self._attempt.stop_file, self._code, why=why, until=self._until)

    def _force(self) -> None:
        self.overdue = True


@contextmanager
def _registered(folder: RunFolder, config: RunConfig, job: Job | None) -> Iterator[None]:
    """While entered, supervisor.json in the run's folder says who supervises it."""
    file = folder.path / "supervisor.json"
    known = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "backend": config.launcher.kind,
        "job": None if job is None else job.id,
    }
    file.write_text(json.dumps(known) + "\n", "utf-8")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
