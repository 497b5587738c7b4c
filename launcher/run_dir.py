"""A run's folder, runs/<name>/<id>/: made whole or not at all, held by one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data.cache.prepare import PreparedSource
from launcher import freeze
from launcher.environment import describe
from launcher.own_packages import HOME, NAMES
from launcher.problems import Stop
from launcher.run_config import RunConfig
from trainer.checkpoint.folders import finished, step_folder, step_of
from trainer.disk import put_text
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome
from trainer.signals import STOP_FILE

LOOKS_S = 0.3  # a look at the lock, see is_held, is over long before


@dataclass(frozen=True)
class RunFolder:
    """Where everything of one run lies."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def code(self) -> Path:
        """The snapshot of our packages that ranks run."""
        return self.path / "code"

    @property
    def environment_file(self) -> Path:
        """What it was started with, see `launcher.environment`."""
        return self.path / "env.json"

    @property
    def submitted_file(self) -> Path:
        """Which job of a batch system the run waits for, see `launcher.backends.slurm.queue`."""
        return self.path / "submitted.json"

    @property
    def submission_file(self) -> Path:
        """What a supervisor elsewhere takes the run over with, see `launcher.submission`."""
        return self.path / "submission.json"

    @property
    def ended_file(self) -> Path:
        """How the last submission to a Ray cluster ended, see `launcher.backends.ray.work`."""
        return self.path / "ended.json"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    def last_attempt(self) -> int:
        """The number of the newest attempt; 0 when there was none."""
        if not self.attempts.is_dir():
            return 0
        return max((int(p.name) for p in self.attempts.iterdir() if p.name.isdigit()), default=0)

    def attempt(self, number: int) -> Attempt:
        return Attempt(self.attempts / f"{number:03d}")

    def new_attempt(self) -> Attempt:
        """Make the folder of the next attempt. FileExistsError if another process just did."""
        attempt = self.attempt(self.last_attempt() + 1)
        attempt.path.mkdir(parents=True)
        return attempt

    def is_bare(self) -> bool:
        """Whether the only attempt left nothing: no checkpoint but the one that the run began
        with, no metrics and no traceback."""
        metrics, log = self.path / "metrics.jsonl", self.attempt(1).log(0)
        lineage = self.lineage()
        begun = step_folder(self.path / "checkpoints", lineage["step"]) if lineage else None
        return (
            self.last_attempt() == 1
            and not any(p != begun for p in (self.path / "checkpoints").glob("step_*"))
            and not (metrics.exists() and metrics.stat().st_size)
            and (not log.exists() or "\nTraceback " not in "\n" + log.read_text("utf-8"))
        )

    def finished(self) -> bool:
        """Whether the newest attempt trained to the end."""
        last = self.last_attempt()
        outcome = self.attempt(last).outcome(0) if last else None
        return outcome is not None and outcome.code == ExitCode.DONE

    def saved_step(self) -> int:
        """The step of the newest finished checkpoint, whole or not; 0 when there is none."""
        return max((step_of(p) or 0 for p in finished(self.path / "checkpoints")), default=0)

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Hold the run against other processes; False where one holds it already.

        The lock lies on the folder itself and goes with the process, however that ends.
        """
        handle = os.open(self.path, os.O_RDONLY)
        try:
            deadline = time.monotonic() + LOOKS_S
            while not (ours := _locked(handle, fcntl.LOCK_EX)) and time.monotonic() < deadline:
                time.sleep(0.02)
            yield ours
        finally:
            os.close(handle)

    def is_held(self) -> bool:
        """Whether a process that can be seen from this machine holds the run."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            return not _locked(handle, fcntl.LOCK_SH)
        finally:
            os.close(handle)

    @property
    def lineage_file(self) -> Path:
        return self.path / "lineage.json"

    def lineage(self) -> dict[str, Any] | None:
        """{parent: folder, step}: the run and step that this one began with; None for a run that
        began with nothing."""
        try:
            found = json.loads(self.lineage_file.read_text("utf-8"))
            return {"parent": str(found["parent"]), "step": int(found["step"])}
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class Attempt:
    """One start of a run's ranks: attempts/NNN/."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    def log(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.log"

    @property
    def data_file(self) -> Path:
        """Where the prepared data of this attempt lies."""
        return self.path / "data.json"

    def write_sources(self, sources: Sequence[PreparedSource]) -> None:
        """Say what the ranks are to train on; they prepare nothing themselves."""
        text = json.dumps([source.to_dict() for source in sources], indent=1)
        self.data_file.write_text(text + "\n", "utf-8")

    def sources(self) -> list[PreparedSource] | None:
        """What write_sources said; None if it said nothing."""
        if not self.data_file.is_file():
            return None
        given = json.loads(self.data_file.read_text("utf-8"))
        return [PreparedSource.from_dict(source) for source in given]

    def write_given(self, values: Mapping[str, object]) -> None:
        """Settings that hold for this attempt, whatever the run's own are: `resume.given_now`."""
        (self.path / "given.json").write_text(json.dumps(dict(values)) + "\n", "utf-8")

    def given(self) -> dict[str, Any]:
        """What write_given said; nothing if it said nothing."""
        file = self.path / "given.json"
        return json.loads(file.read_text("utf-8")) if file.is_file() else {}

    def outcome_file(self, rank: int) -> Path:
        return self.path / f"outcome-{rank:05d}.json"

    def outcome(self, rank: int) -> Outcome | None:
        """How that rank ended; None while it runs, or when it died without a word."""
        try:
            return Outcome.from_dict(json.loads(self.outcome_file(rank).read_text("utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def outcomes(self) -> dict[int, Outcome]:
        """By rank, of all ranks that have ended with a word."""
        ranks = sorted(int(p.stem.rpartition("-")[2]) for p in self.path.glob("outcome-*.json"))
        found = {rank: self.outcome(rank) for rank in ranks}
        return {rank: outcome for rank, outcome in found.items() if outcome is not None}

    @property
    def stop_file(self) -> Path:
        """Asks the ranks to checkpoint and end, see `trainer.signals.request_stop`."""
        return self.path / STOP_FILE

    def write_outcome(self, rank: int, outcome: Outcome) -> None:
        """By a temporary name, so that a reader finds it whole or not at all."""
        put_text(self.outcome_file(rank), json.dumps(outcome.to_dict(), indent=1) + "\n")

    def ending(self) -> str | None:
        """What follows this attempt (see `launcher.decide.Next`), once it has ended."""
        ends = [event for event in self.events() if event.get("event") == "end"]
        return ends[-1].get("next", "stop") if ends else None

    def events(self) -> list[dict[str, Any]]:
        """What `event` has written so far, oldest first, without a line that is not whole."""
        try:
            lines = self.events_file.read_text("utf-8").split("\n")
        except OSError:
            return []
        found = []
        for line in lines:
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    found.append(event)
        return found

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    def event(self, kind: str, **details: object) -> None:
        """Append a line to events.jsonl: what the launcher did and saw, with the time (UTC)."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": kind}
        with self.events_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, **details}) + "\n")


@dataclass(frozen=True)
class NewRun:
    """A run that was just made; `parents`: folders made for it on the way, innermost first."""

    folder: RunFolder
    config: RunConfig
    parents: tuple[Path, ...]

    def discard(self) -> None:
        """Leave nothing behind of a run that could not begin."""
        _remove(self.folder.path, parents=self.parents)


def new_id() -> str:
    """UTC time to the second and six random digits: ids sort by age."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def create(
    config: RunConfig,
    *,
    overrides: Sequence[str],
    flags: Sequence[str] = (),
    begin: Callable[[RunFolder], None] | None = None,
    twin: RunFolder | None = None,
) -> NewRun:
    """Make the folder of a new run, exclusively, with an id if `config` has none.

    flags: options that belong to the overrides, kept in env.json. begin: puts there what the run
    begins with. twin: a run of the same command, whose env.json and snapshot of the code it shares,
    by hard links where the disk has them.
    Filled under a temporary name and renamed, so it appears whole. When that fails nothing is left
    behind, not even a parent folder made on the way; Stop 73 says what failed and the fix, Stop 78
    that the id is taken.
    """
    config = replace(config, id=config.id or new_id())
    assert config.id is not None
    folder = RunFolder(config.home / config.id)
    temporary = config.home / f".{config.id}.{secrets.token_hex(4)}"
    made = [p for p in (config.home, *config.home.parents) if not p.exists()]
    try:
        temporary.mkdir(parents=True)
        _fill(RunFolder(temporary), config, overrides, flags, twin)
        if begin is not None:
            begin(RunFolder(temporary))
        if folder.path.exists():  # rename would silently replace an empty folder
            raise taken(config)
        temporary.rename(folder.path)
    except BaseException as error:
        _remove(temporary, parents=made)
        if isinstance(error, OSError):
            if folder.path.exists():
                raise taken(config) from error
            raise Stop(
                ExitCode.CANNOT_CREATE,
                f"Cannot create the run's folder {folder.path}: {error.strerror or error}"
                f" ({error.filename or folder.path}).\n"
                "Make room there, or make it writable, or choose another place: runs_dir=FOLDER",
            ) from error
        raise
    return NewRun(folder, config, tuple(made))


def taken(config: RunConfig) -> Stop:
    """The refusal of an id that exists."""
    return Stop(
        ExitCode.CONFIG,
        f"id={config.id}: the run {config.home / str(config.id)} exists.\n"
        "Add resume=auto to continue it, or leave id out to start a new run.",
    )


def runs_of(config: RunConfig) -> list[RunFolder]:
    """The runs of this name, newest first."""
    if not config.home.is_dir():
        return []
    found = [p for p in config.home.iterdir() if (p / "config.yaml").is_file() and p.name[0] != "."]
    found.sort(key=lambda p: ((p / "config.yaml").stat().st_mtime_ns, p.name), reverse=True)
    return [RunFolder(p) for p in found]


def _locked(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(folder: Path, *, parents: Sequence[Path]) -> None:
    """`folder`, and those of its parents, innermost first, that are empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    for parent in parents:
        try:
            parent.rmdir()
        except OSError:
            return


def _fill(
    folder: RunFolder,
    config: RunConfig,
    overrides: Sequence[str],
    flags: Sequence[str],
    twin: RunFolder | None,
) -> None:
    folder.config_file.write_text(freeze.to_yaml(config), "utf-8")
    text = "".join(f"{override}\n" for override in overrides)
    # A file name that is no UTF-8 reaches Python as lone surrogates.
    (folder.path / "overrides.txt").write_text(text, "utf-8", errors="surrogateescape")
    for name in ("attempts", "checkpoints", "plots"):
        (folder.path / name).mkdir()
    if twin is not None:
        _shared(twin.environment_file, folder.environment_file)
        shutil.copytree(
            twin.code,
            folder.code,
            copy_function=_shared,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        return
    known = {**describe(), "flags": list(flags)}
    folder.environment_file.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    for name in NAMES:
        shutil.copytree(
            HOME / name, folder.code / name, ignore=shutil.ignore_patterns("__pycache__")
        )


def _shared(source: Path | str, target: Path | str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
