"""What a run's folder tells about it, for those who only look. Reads small files; needs no torch.

Nothing here fails because a file is missing, half written or of another version: a run that
somebody asks about is often one that went wrong.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from launcher.decide import LONGEST_DELAY, Next
from launcher.reduce import reduce
from launcher.run_dir import Attempt, RunFolder
from launcher.runs.names import label
from launcher.runs.queue import is_listed
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome

State = Literal["running", "waiting", "done", "stopped", "failed", "new"]

FRESH_S = 60.0  # a heartbeat that is younger tells of a rank at work
TAIL_BYTES = 1 << 18  # of metrics.jsonl, enough for many records
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
LOST = "supervisor lost, the Ray cluster may start it again"
_STOPPED = (ExitCode.AGAIN, ExitCode.INTERRUPTED)


@dataclass(frozen=True)
class Heartbeat:
    """The last sign of life of a rank: what it did, since when, and how long ago it said so."""

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    phase_s: float
    silent_s: float
    waiting: bool = False  # for other ranks


@dataclass(frozen=True)
class AttemptView:
    """One attempt. started, ended: seconds since the epoch. outcome: that of all ranks; None while
    they work, and when they died without a word. next: done, again or stop, as the supervisor
    decided then, and why. notes: what else it saw (slow ranks, an end by force)."""

    number: int
    started: float | None
    ended: float | None
    outcome: Outcome | None
    host: str | None = None
    backend: str | None = None
    ranks: int | None = None
    next: str = ""
    why: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunView:
    """A run at one moment. reason: why it is in this state, a few words. step, loss, tokens_per_s:
    of the last record. total: the steps it is to do. updated: when it last wrote something."""

    folder: RunFolder
    state: State
    reason: str
    total: int | None
    created: float
    updated: float
    attempts: list[AttemptView]
    last: dict[str, Any] = field(default_factory=dict)
    evaluated: dict[str, Any] = field(default_factory=dict)
    lineage: dict[str, Any] | None = None

    @property
    def label(self) -> str:
        return label(self.folder)

    @property
    def step(self) -> int:
        """Steps done, as far as anything tells."""
        ended = [a.outcome.step for a in self.attempts[-1:] if a.outcome is not None]
        begun = self.lineage["step"] if self.lineage else 0
        return max([self.last.get("step", 0), begun, *ended])

    @property
    def outcome(self) -> Outcome | None:
        """How the last attempt ended; None without one, or while its end is not known."""
        return self.attempts[-1].outcome if self.attempts else None

    @property
    def active(self) -> bool:
        """Whether something is still to be expected without anybody's help."""
        return self.state in ("running", "waiting")

    @property
    def may_return(self) -> bool:
        """Whether a Ray cluster starts its lost supervisor again, if that cluster is still there;
        nothing tells without asking it."""
        return self.reason == LOST

    def to_dict(self) -> dict[str, Any]:
        """Plain types, ready for json.dumps; times are seconds since the epoch."""
        return {
            "run": self.label,
            "folder": str(self.folder.path.absolute()),
            "state": self.state,
            "reason": self.reason,
            "step": self.step,
            "steps": self.total,
            "loss": self.last.get("loss"),
            "tokens_per_s": self.last.get("tokens_per_s"),
            "created": self.created,
            "updated": self.updated,
            "attempts": len(self.attempts),
            "parent": self.lineage["parent"] if self.lineage else None,
        }


def view_of(folder: RunFolder) -> RunView:
    """Look at a run now."""
    attempts = [attempt_view(folder.attempt(n)) for n in range(1, folder.last_attempt() + 1)]
    state, reason = _state(folder, attempts)
    last, evaluated = _last_records(folder.path / "metrics.jsonl")
    created = folder.config_file.stat().st_mtime
    return RunView(
        folder=folder,
        state=state,
        reason=reason,
        total=_steps(folder),
        created=created,
        updated=_updated(folder, since=created),
        attempts=attempts,
        last=last,
        evaluated=evaluated,
        lineage=folder.lineage(),
    )


def attempt_view(attempt: Attempt) -> AttemptView:
    """What is known of one attempt."""
    events = attempt.events()
    start = next((e for e in events if e.get("event") == "start"), {})
    end = next((e for e in reversed(events) if e.get("event") == "end"), None)
    outcome = _outcome(end) if end is not None else _of_ranks(attempt, start.get("ranks", 1))
    return AttemptView(
        number=attempt.number,
        started=_seconds(start.get("time")),
        ended=_seconds(end.get("time")) if end is not None else None,
        outcome=outcome,
        host=start.get("host"),
        backend=start.get("backend"),
        ranks=start.get("ranks"),
        next=str((end or {}).get("next", "")),
        why=str((end or {}).get("why", "")),
        notes=tuple(_note(e) for e in events if e.get("event") not in ("start", "end")),
    )


def heartbeats(attempt: Attempt) -> list[Heartbeat]:
    """The last one of each rank that gives any, by rank."""
    found = []
    for file in sorted(attempt.path.glob("heartbeat-*.json")):
        beat = read_json(file)
        try:
            age = time.time() - file.stat().st_mtime
            found.append(
                Heartbeat(
                    rank=int(beat["rank"]),
                    host=str(beat["host"]),
                    pid=int(beat["pid"]),
                    step=int(beat["step"]),
                    phase=str(beat["phase"]),
                    phase_s=max(0.0, float(beat["time"]) - float(beat["phase_since"])) + age,
                    silent_s=max(0.0, age),
                    waiting=bool(beat.get("waiting")),
                )
            )
        except (OSError, KeyError, TypeError, ValueError):
            continue
    return found


def is_worked_on(folder: RunFolder) -> bool:
    """Whether a process works on the run, here or, as far as its heartbeats tell, elsewhere."""
    if folder.is_held():
        return True
    here, last = socket.gethostname(), folder.last_attempt()
    if not last:
        return False
    attempt = attempt_view(folder.attempt(last))
    if attempt.outcome is not None:
        elsewhere = read_json(folder.path / "supervisor.json").get("host", here) != here
        recent = time.time() - (attempt.ended or 0) < LONGEST_DELAY + FRESH_S
        return elsewhere and recent and attempt.next == Next.AGAIN.value
    beats = heartbeats(folder.attempt(last))
    return any(beat.host != here and beat.silent_s < FRESH_S for beat in beats)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file; empty when there is none, or none that can be read."""
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _state(folder: RunFolder, attempts: list[AttemptView]) -> tuple[State, str]:
    if is_worked_on(folder):
        return "running", _doing(folder, attempts)
    if queued := _queued(read_json(folder.submitted_file), attempts):
        return queued
    if not attempts:
        return "new", "never started"
    outcome = attempts[-1].outcome
    asked = folder.attempt(len(attempts)).stop_file.exists()
    if outcome is None:
        if asked:
            return "stopped", "at once"
        kept = folder.submission_file.exists() and not folder.ended_file.exists()
        lost = attempts[-1].backend == "ray" and kept
        return "failed", LOST if lost else "ended without a word"
    if outcome.code == ExitCode.DONE:
        return "done", outcome.reason
    if outcome.code in _STOPPED and (asked or outcome.reason in ("stopped", "interrupted")):
        return "stopped", outcome.reason
    return "failed", outcome.reason


def _queued(job: dict[str, Any], attempts: list[AttemptView]) -> tuple[State, str] | None:
    """The state of a run whose job has not begun, or is to come back; None if it is neither."""
    if not job:
        return None
    name, begun = f"{job.get('backend')} job {job.get('job')}", job.get("time", 0)
    never = all((a.started or 0) < begun for a in attempts)
    if job.get("cancelled"):
        return ("stopped", "taken out of the queue") if never else None
    known = is_listed(str(job.get("job")), since=begun)
    if never:
        return ("failed", f"{name} left the queue") if known is False else ("waiting", name)
    settled = attempts[-1].next in (Next.DONE.value, Next.STOP.value)
    return ("waiting", name) if known and not settled else None


def _doing(folder: RunFolder, attempts: list[AttemptView]) -> str:
    if not attempts:
        return "preparing"
    if attempts[-1].outcome is not None:
        return "between two attempts"
    beats = heartbeats(folder.attempt(attempts[-1].number))
    return beats[0].phase if beats else "at work"


def _steps(folder: RunFolder) -> int | None:
    try:
        return int(yaml.load(folder.config_file.read_text("utf-8"), _LOADER)["train"]["steps"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None


def _updated(folder: RunFolder, *, since: float) -> float:
    last = folder.last_attempt()
    files = [folder.path / "metrics.jsonl", folder.path / "checkpoints"]
    if last:
        files += [folder.attempt(last).path, folder.attempt(last).log(0)]
    times = [since]
    for file in files:
        try:
            times.append(file.stat().st_mtime)
        except OSError:
            continue
    return max(times)


def _last_records(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last record of a step, and of an evaluation, near the end of the file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").split("\n")[:-1]
    except OSError:
        return {}, {}
    step: dict[str, Any] = {}
    evaluated: dict[str, Any] = {}
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:  # the first one, of which the beginning is missing
            continue
        if "eval_loss" in record:
            evaluated = evaluated or record
        else:
            step = step or record
        if step and evaluated:
            break
    return step, evaluated


def _note(event: dict[str, Any]) -> str:
    """An event in one line: what it is called, and what it says."""
    said = {k: v for k, v in event.items() if k not in ("time", "event")}
    parts = [f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in said.items()]
    return f"{event.get('event')}: {', '.join(parts)}" if parts else str(event.get("event"))


def _outcome(event: dict[str, Any]) -> Outcome | None:
    try:
        return Outcome(
            ExitCode(event["code"]), event["reason"], event["step"], event.get("message", "")
        )
    except (KeyError, ValueError):
        return None


def _of_ranks(attempt: Attempt, world: object) -> Outcome | None:
    """What all ranks say together; None as long as one of them says nothing."""
    outcomes = attempt.outcomes()
    return reduce(outcomes, [], world=len(outcomes)) if len(outcomes) == world else None


def _seconds(when: object) -> float | None:
    if isinstance(when, int | float):
        return float(when)
    try:
        return datetime.fromisoformat(str(when)).timestamp()
    except ValueError:
        return None
