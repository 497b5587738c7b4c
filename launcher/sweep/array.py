"""A sweep into Slurm's queue: one job array, whose task N is the supervisor of point N."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from data.cache.prepare import PreparedSource
from launcher import freeze
from launcher.backends.slurm.queue import (
    check_script,
    note,
    refuse_second,
    submitted,
    writing,
)
from launcher.backends.slurm.script import array_script
from launcher.data_tools.prepare import prepared
from launcher.messages import labels
from launcher.problems import ConfigProblems, Stop
from launcher.resume import given_now
from launcher.run_config import RunConfig
from launcher.submission import Submission
from launcher.sweep.folder import DIGITS, Point, SweepFolder
from launcher.sweep.table import LiveTable
from trainer.disk import put_text
from trainer.exit_codes import ExitCode

LOOK_S = 5.0  # between two looks at points that are waited for

Say = Callable[[str], None]


def preview(configs: Sequence[RunConfig]) -> str:
    """The batch script that a new sweep of these points would get; ID stands for one that is yet
    to be made."""
    first = configs[0]
    folder = SweepFolder(Path(first.runs_dir) / f"{first.name}-sweep-ID")
    return _script(folder, first, range(len(configs)), first.sweep.concurrency)


def mixed(configs: Sequence[RunConfig]) -> list[str]:
    """What is wrong with points on Slurm that do not all ask for the same machines: a job array
    has one header. Nothing for points elsewhere."""
    if all(config.launcher.kind != "slurm" for config in configs):
        return []
    named: list[str] = []
    first = configs[0]
    for other in configs[1:]:
        if _header(other) != _header(first) or other.launcher.kind != first.launcher.kind:
            named += _differing(first, other)
    if not named:
        return []
    return [
        "A sweep on Slurm is one job array, whose points all ask for the same machines; these "
        f"settings differ: {', '.join(dict.fromkeys(named))}. Start one sweep for each choice of "
        "them"
    ]


def enqueue_new(
    sweep: SweepFolder,
    configs: Sequence[RunConfig],
    overrides: Sequence[Sequence[str]],
    *,
    flags: Sequence[str],
    say: Say,
) -> list[Point]:
    """Make the runs of further points of a sweep, submit them and return at once.

    Stop 78 with Slurm's words when it refuses the array, 65 when the data of a point are bad, 73 or
    74 when something cannot be written; nothing is left of the points then.
    """
    known = sweep.size()
    numbers = range(known, known + len(configs))
    check_script(_script(sweep, configs[0], numbers, configs[0].sweep.concurrency))
    sources = _prepared(configs, labels(overrides))
    jobs: list[str] = []
    points = sweep.add(
        configs,
        overrides,
        flags,
        begin=lambda points: jobs.append(_submit(sweep, points, configs, sources)),
    )
    say(follow_up(sweep, jobs[0], points))
    return points


def enqueue_again(sweep: SweepFolder, points: Sequence[Point], *, say: Say) -> None:
    """Submit points that exist once more, from their last checkpoints. Stop as `enqueue_new`, and
    78 when a point's job still waits or runs, or some process works on it."""
    configs = [freeze.load(point.folder.config_file) for point in points]
    if problems := mixed(configs):
        raise ConfigProblems(problems)
    for point in points:
        refuse_second(point.folder)
    numbers = [point.number for point in points]
    check_script(_script(sweep, configs[0], numbers, sweep.concurrency))
    sources = _prepared(configs, [point.label for point in points])
    say(follow_up(sweep, _submit(sweep, points, configs, sources), points))


def wait(sweep: SweepFolder, points: Sequence[Point]) -> None:
    """Until no point waits or runs any more. Stop 130 when a person ends the waiting: the jobs
    stay."""
    left = list(points)
    try:
        with LiveTable(sweep, total=len(points)) as shown:
            while left:
                for point in list(left):
                    view = point.view()
                    if not view.active:
                        left.remove(point)
                        shown.ended(point, view)
                time.sleep(LOOK_S if left else 0.0)
    except KeyboardInterrupt as interrupt:
        raise Stop(
            ExitCode.INTERRUPTED,
            f"no longer waiting for {len(left)} points; their jobs stay in Slurm's queue.\n"
            f"State   dsv41 sweep status {shlex.quote(str(sweep.path))}\n"
            f"Cancel  scancel JOB, for each job that it shows",
        ) from interrupt


def _submit(
    sweep: SweepFolder,
    points: Sequence[Point],
    configs: Sequence[RunConfig],
    sources: Sequence[Sequence[PreparedSource]],
) -> str:
    """The number of the array."""
    with ExitStack() as held:
        # A task that Slurm starts at once waits for this, until all is noted.
        for point in points:
            if not held.enter_context(point.folder.held()):
                raise Stop(ExitCode.CONFIG, f"another process is working on {point.folder.path}")
        numbers = [point.number for point in points]
        with writing(sweep.path):
            for point, config, made in zip(points, configs, sources, strict=True):
                first = point.folder.last_attempt() + 1
                Submission(made, given_now(config, frozen=config), first).write(point.folder)
            put_text(sweep.script, _script(sweep, configs[0], numbers, sweep.concurrency))
            with submitted(sweep.script) as job:
                for point in points:
                    note(point.folder, f"{job}_{point.number}")
    return job


def follow_up(sweep: SweepFolder, job: str, points: Sequence[Point]) -> str:
    """What to type once an array is in the queue."""
    path, last = shlex.quote(str(sweep.path)), points[-1]
    run = shlex.quote(str(last.folder.path))
    rows = {
        "Sweep": str(sweep.path),
        "Script": str(sweep.script),
        "Queue": f"squeue --jobs={job}",
        "State": f"dsv41 sweep status {path}",
        "Point": f"dsv41 status {run}    (logs -f, stop: the same)",
        "Best": f"dsv41 sweep best {path}",
        "Again": f"dsv41 sweep retry {path}    (those that are not done)",
        "Cancel": f"scancel {job}    (one point: scancel {job}_{last.number})",
    }
    count = f"{len(points)} points" if len(points) > 1 else "1 point"
    head = f"Job {job}, an array of {count}"
    return "\n".join([head, *(f"{name:<7} {text}" for name, text in rows.items())])


def _script(
    sweep: SweepFolder, config: RunConfig, numbers: Sequence[int], limit: int | None
) -> str:
    named = replace(config, name=sweep.path.name)
    return array_script(named, sweep.path, numbers, digits=DIGITS, limit=limit)


def _header(config: RunConfig) -> str:
    """What of a batch script depends on the point."""
    return array_script(replace(config, name=""), Path(), [0], digits=DIGITS, limit=None)


def _differing(one: RunConfig, other: RunConfig) -> list[str]:
    """The settings behind different headers."""
    found: list[str] = []
    for name in ("launcher", "parallel"):
        found += freeze.differences(getattr(one, name), getattr(other, name), path=name)
    if one.resilience.grace_s != other.resilience.grace_s:
        found.append("resilience.grace_s:")
    return [line.partition(":")[0] for line in found]


def _prepared(configs: Sequence[RunConfig], names: Sequence[str]) -> list[list[PreparedSource]]:
    """The data of each point; what several share is prepared once."""
    made: dict[str, list[PreparedSource]] = {}
    found = []
    for config, name in zip(configs, names, strict=True):
        key = repr((config.data, config.model, config.seed))
        try:
            made[key] = made[key] if key in made else prepared(config)
        except Stop as stop:
            raise Stop(stop.code, f"{stop.message}\nNothing was submitted (at {name})") from stop
        found.append(made[key])
    return found
