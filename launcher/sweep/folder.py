"""A sweep's folder: runs_dir/NAME-sweep-ID/, with a run for each point and sweep.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.messages import labels
from launcher.problems import Stop
from launcher.run_config import RunConfig
from launcher.run_dir import NewRun, RunFolder, create, new_id
from launcher.runs.view import RunView, view_of
from launcher.sweep.objective import objective
from trainer.disk import put_text
from trainer.exit_codes import ExitCode
from trainer.signals import STOP_FILE

DIGITS = 3  # at least, of a point's number, which is its run's id


@dataclass(frozen=True)
class Point:
    """One run of a sweep. label: the settings that not all points share."""

    label: str
    overrides: tuple[str, ...]
    folder: RunFolder

    @property
    def number(self) -> int:
        return int(self.folder.path.name)

    def view(self) -> RunView:
        return view_of(self.folder)

    @property
    def log(self) -> Path:
        """What the point's process printed."""
        return self.folder.path / "point.log"

    @property
    def exit_file(self) -> Path:
        return self.folder.path / "point.code"

    @property
    def pid_file(self) -> Path:
        """Names the point's process, while it runs as a trial of Ray Tune."""
        return self.folder.path / "point.pid"

    @property
    def early_file(self) -> Path:
        """Says that the point was stopped since others were better, and when."""
        return self.folder.path / "point.early"

    @property
    def early(self) -> str:
        """What `early_file` says of a point that has not been trained on since; else nothing."""
        if not self.early_file.is_file() or self.folder.finished():
            return ""
        return self.early_file.read_text("utf-8").strip()

    def begin_anew(self) -> None:
        """Forget how its process ended the last time."""
        for file in (self.exit_file, self.pid_file, self.early_file):
            file.unlink(missing_ok=True)

    def state(self, view: RunView) -> str:
        """In a few words: what it does or how it ended."""
        if view.state == "stopped" and self.early:
            return self.early
        if view.state == "new" and self.exit_file.is_file():
            return f"could not begin (exit code {self.exit_file.read_text().strip()})"
        if view.state in ("done", "running", "new"):
            return view.state
        if view.state == "waiting":
            return f"waiting ({view.reason})"
        outcome = view.outcome
        return view.reason if outcome is None else f"{view.reason} (exit code {int(outcome.code)})"


@dataclass(frozen=True)
class SweepFolder:
    """Where a sweep lies."""

    path: Path

    @property
    def file(self) -> Path:
        return self.path / "sweep.json"

    @property
    def stop_file(self) -> Path:
        """Asks for the end of the sweep, see `trainer.signals.request_stop`."""
        return self.path / STOP_FILE

    @property
    def picture(self) -> Path:
        return self.path / "sweep.png"

    @property
    def script(self) -> Path:
        """What sbatch was given last, where the points are Slurm's."""
        return self.path / "sweep.sbatch"

    def size(self) -> int:
        """How many points there are."""
        return len(self._read()["points"]) if self.file.is_file() else 0

    def points(self) -> list[Point]:
        """All points, in the order of their start."""
        return [
            Point(point["label"], tuple(point["overrides"]), RunFolder(self.path / point["run"]))
            for point in self._read()["points"]
        ]

    @property
    def metric(self) -> str:
        return self._read()["metric"]

    @property
    def concurrency(self) -> int | None:
        return self._read()["concurrency"]

    def measured(self) -> list[tuple[float | None, Point]]:
        """All points with how good they are so far, in the order of their start."""
        metric = self.metric
        return [(objective(p.folder.path, metric), p) for p in self.points()]

    def ranked(self) -> list[tuple[float, Point]]:
        """The points that have been measured, best first. Those that were stopped early come last:
        others were better at the same step."""
        found = [(value, point) for value, point in self.measured() if value is not None]
        return sorted(found, key=lambda pair: (bool(pair[1].early), pair[0]))

    def _read(self) -> dict[str, Any]:
        return json.loads(self.file.read_text("utf-8"))

    def add(
        self,
        configs: Sequence[RunConfig],
        overrides: Sequence[Sequence[str]],
        flags: Sequence[str],
        *,
        begin: Callable[[list[Point]], None] = lambda points: None,
    ) -> list[Point]:
        """Make the runs of further points, note them, and `begin` them. When any of it fails,
        nothing is left of them. Stop 73 if they cannot be made."""
        before = self.file.read_text("utf-8") if self.file.is_file() else None
        known = json.loads(before) if before is not None else _empty(configs[0])
        made: list[NewRun] = []
        try:
            for config, words in zip(configs, overrides, strict=True):
                own = self._own(config, number=len(known["points"]))
                # The same code for all, also if somebody edits it meanwhile.
                twin = self._twin(known["points"])
                made.append(create(own, overrides=words, flags=flags, twin=twin))
                known["points"].append({"run": own.id, "overrides": list(words), "label": ""})
            every = [point["overrides"] for point in known["points"]]
            for point, label in zip(known["points"], labels(every), strict=True):
                point["label"] = label
            put_text(self.file, json.dumps(known, indent=1) + "\n")
            points = self.points()[-len(configs) :]
            begin(points)
        except BaseException:
            self._take_back(made, before)
            raise
        return points

    def _own(self, config: RunConfig, *, number: int) -> RunConfig:
        """The configuration of a point: its place, and its group in Weights & Biases."""
        wandb = config.logging.wandb
        wandb = replace(wandb, group=wandb.group or self.path.name)
        return replace(
            config,
            runs_dir=str(self.path.parent),
            name=self.path.name,
            id=f"{number:0{DIGITS}d}",
            logging=replace(config.logging, wandb=wandb),
        )

    def _take_back(self, made: Sequence[NewRun], before: str | None) -> None:
        if before is not None:
            put_text(self.file, before)
        else:
            for file in (self.file, self.script):
                file.unlink(missing_ok=True)
        for run in reversed(made):  # the first one made the folders that all lie in
            run.discard()

    def discard(self) -> None:
        """Leave nothing of a new sweep whose points were refused; no-op once one has begun."""
        if any(point.folder.last_attempt() for point in self.points()):
            return
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # other runs are there
            self.path.parent.rmdir()

    def _twin(self, known: Sequence[dict[str, Any]]) -> RunFolder | None:
        """The first of the points that is still there."""
        folders = (RunFolder(self.path / point["run"]) for point in known)
        return next((folder for folder in folders if folder.code.is_dir()), None)


def new_sweep(config: RunConfig) -> SweepFolder:
    """Where a sweep whose first point is `config` goes; it appears with its first points."""
    return SweepFolder(Path(config.runs_dir) / f"{config.name}-sweep-{new_id()}")


def existing_sweep(path: Path) -> SweepFolder:
    """The sweep in the folder `path`. Stop 2 when it is none, with what may have been meant."""
    folder = SweepFolder(path)
    if folder.file.is_file():
        return folder
    near = sorted(path.parent.glob("*/sweep.json"), key=lambda p: p.stat().st_mtime)
    near += sorted(path.glob("*/sweep.json"), key=lambda p: p.stat().st_mtime)
    hint = f"did you mean {near[-1].parent}?" if near else "give a sweep's folder"
    raise Stop(ExitCode.USAGE, f"{path} is no sweep: it holds no sweep.json; {hint}")


def _empty(config: RunConfig) -> dict[str, Any]:
    sweep = config.sweep
    return {"metric": sweep.metric, "concurrency": sweep.concurrency, "points": []}
