"""A sweep as a job array: made whole or not at all, submitted once, points of one kind."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import tools
from launcher.problems import Stop
from launcher.run_config import RunConfig
from launcher.run_dir import RunFolder
from launcher.runs import queue
from launcher.submission import Submission
from launcher.sweep import array
from launcher.sweep.folder import Point, SweepFolder, new_sweep
from tests.unit.launcher.conftest import Commands
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome

SBATCH = 'case "$1" in --test-only) ;; *) {} ;; esac'


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Those whose data were asked for; none are prepared."""
    asked: list[RunConfig] = []

    def prepare(config: RunConfig) -> list[object]:
        asked.append(config)
        return []

    monkeypatch.setattr(array, "prepared", prepare)
    return asked


def enqueue(sweep: SweepFolder, configs: Sequence[RunConfig], said: list[str]) -> list[Point]:
    overrides = [["+experiment=tiny", f"seed={config.seed}"] for config in configs]
    return array.enqueue_new(sweep, configs, overrides, flags=[], say=said.append)


def seeds(job: RunConfig, *numbers: int) -> list[RunConfig]:
    return [replace(job, seed=number) for number in numbers]


def jobs(points: Sequence[Point]) -> list[str]:
    files = [point.folder.path / "submitted.json" for point in points]
    return [json.loads(file.read_text())["job"] for file in files]


def end(point: Point, code: ExitCode, reason: str, message: str) -> None:
    attempt = point.folder.new_attempt()
    attempt.event("start", backend="slurm", ranks=1, host="n1", pid=1)
    outcome = Outcome(code, reason, 1, message)
    attempt.write_outcome(0, outcome)
    attempt.event("end", **outcome.to_dict(), next="done" if code == 0 else "stop", why="x")


def array_line(sweep: SweepFolder) -> str:
    (line,) = (x for x in sweep.script.read_text().splitlines() if "--array" in x)
    return line


def test_one_array_for_all_points_and_only_what_ended_badly_again(
    job: RunConfig, command: Commands, prepared: list[RunConfig], capsys
) -> None:
    command("sbatch", SBATCH.format("echo '17;here'"))
    sweep, said = new_sweep(job), []
    points = enqueue(sweep, seeds(job, 1, 2, 1), said)
    assert jobs(points) == ["17_0", "17_1", "17_2"]
    assert [config.seed for config in prepared] == [1, 2]  # once for those that share it
    assert said[0].startswith("Job 17, an array of 3 points\n")
    assert f"dsv41 sweep status {sweep.path}" in said[0]
    assert array_line(sweep) == "#SBATCH --array=0-2"
    data = {"cache_dir": job.data.cache_dir, "processes": None, "accept_changed": False}
    assert Submission.of(points[2].folder) == Submission([], {"data": data}, 1)

    command("squeue", "echo 17 17 17_2; echo 18 17 17_0; echo 19 17 17_1")
    assert [p.state(p.view()) for p in points] == [f"waiting (slurm job 17_{n})" for n in range(3)]
    retry = ["sweep", "retry", str(sweep.path)]
    assert tools.main(retry) == 0
    assert "in the queue" in capsys.readouterr().out

    end(points[0], ExitCode.DONE, "done", "")
    end(points[1], ExitCode.DIVERGED, "diverged", "The loss of step 1 is nan.\nmore")
    command("squeue", 'case "$*" in *17_2*) echo 17_2;; *--jobs*) ;; *) echo 17 17 17_2;; esac')
    assert points[1].state(points[1].view()) == "diverged (exit code 77)"
    assert tools.main(["sweep", "status", str(sweep.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [t["state"] for t in told] == ["done", "failed", "waiting"]
    assert (told[1]["exit_code"], told[1]["message"]) == (77, "The loss of step 1 is nan.\nmore")
    assert tools.main(["sweep", "status", str(sweep.path)]) == 0
    assert "\nseed=2:\n  The loss of step 1 is nan.\n  Look    dsv41" in capsys.readouterr().out

    command("sbatch", SBATCH.format("echo 40"))
    assert tools.main(retry) == 0
    assert capsys.readouterr().out.startswith("Job 40, an array of 1 point\n")
    assert array_line(sweep) == "#SBATCH --array=1"
    assert jobs(points) == ["17_0", "40_1", "17_2"]
    assert Submission.of(points[1].folder).first_attempt == 2


def test_at_most_so_many_at_a_time(job: RunConfig, command: Commands) -> None:
    command("sbatch", "echo 17")
    some = replace(job, sweep=replace(job.sweep, concurrency=2))
    enqueue(sweep := new_sweep(job), seeds(some, 1, 2, 3), [])
    assert array_line(sweep) == "#SBATCH --array=0-2%2"


def test_points_that_a_sweeper_asks_for_later_join_the_sweep(
    job: RunConfig, command: Commands, tmp_path: Path
) -> None:
    command("sbatch", "echo 17")
    sweep = new_sweep(job)
    first = enqueue(sweep, seeds(job, 1, 2), [])
    listed = tmp_path / "listed"
    listed.write_text("17 17 17_0 18 17 17_1")
    command("squeue", f"read all < {listed}; echo $all")
    assert first[0].view().state == "waiting"
    command("sbatch", SBATCH.format("echo 'error: no' >&2; exit 1"))
    with pytest.raises(Stop, match="does not take this job"):
        enqueue(sweep, seeds(job, 3, 4), [])
    assert [p.name for p in sorted(sweep.path.iterdir())] == [
        *("000", "001", "sweep.json", "sweep.sbatch")
    ]
    assert sweep.points() == first
    command("sbatch", "echo 18")
    assert not queue.is_listed("18_2")
    listed.write_text("19 18 18_2 20 18 18_3")
    more = enqueue(sweep, seeds(job, 3, 4), [])
    assert more[0].view().state == "waiting"  # an answer of before does not count
    assert (jobs(more), array_line(sweep)) == (["18_2", "18_3"], "#SBATCH --array=2-3")


@pytest.mark.parametrize("when", ["asked", "submitted", "prepared"])
def test_a_sweep_that_is_refused_leaves_nothing(
    job: RunConfig, command: Commands, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    code = ExitCode.CONFIG
    no = "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1"
    command("sbatch", no if when == "asked" else SBATCH.format(no))
    told = "Slurm does not take this job: invalid partition specified: x\nCorrect launcher.slurm"
    if when == "prepared":
        code, told = ExitCode.BAD_DATA, "words.txt:1: bad\nNothing was submitted .at seed=1"

        def prepare(config: RunConfig) -> None:
            raise Stop(code, "words.txt:1: bad")

        monkeypatch.setattr(array, "prepared", prepare)
    with pytest.raises(Stop, match=told) as raised:
        enqueue(new_sweep(job), seeds(job, 1, 2), [])
    assert raised.value.code == code
    assert not Path(job.runs_dir).exists()


def test_an_array_that_cannot_be_noted_is_cancelled_again(
    job: RunConfig, command: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(folder: RunFolder, job: str) -> None:
        if job == "17_1":
            raise OSError(errno.ENOSPC, "No space left on device", folder.path)

    monkeypatch.setattr(array, "note", full)
    command("sbatch", "echo 17")
    command("scancel", f'echo "$@" > {tmp_path}/asked')
    with pytest.raises(Stop, match="001: No space left on device; no job is left") as raised:
        enqueue(new_sweep(job), seeds(job, 1, 2), [])
    assert raised.value.code == ExitCode.CANNOT_CREATE
    assert (tmp_path / "asked").read_text() == "17\n"
    assert not Path(job.runs_dir).exists()


def test_points_that_need_other_machines_are_refused_by_the_names_of_settings(
    job: RunConfig,
) -> None:
    slurm = replace(job.launcher.slurm, partition="gpu", time="1:00:00")
    parallel = replace(job.parallel, dp_shard=2)
    others = [
        replace(job, launcher=replace(job.launcher, slurm=slurm)),
        replace(job, parallel=parallel, resilience=replace(job.resilience, grace_s=7.0)),
    ]
    (problem,) = array.mixed([job, *others])
    names = "launcher.slurm.partition, launcher.slurm.time, parallel.dp_shard, resilience.grace_s"
    assert f"settings differ: {names}. Start one sweep" in problem
    (problem,) = array.mixed([replace(job, launcher=replace(job.launcher, kind="torchrun")), job])
    assert "settings differ: launcher.kind. Start" in problem
    inside = replace(job.launcher.slurm, srun=("--exclusive",), python="/opt/python")
    assert array.mixed([job, replace(job, launcher=replace(job.launcher, slurm=inside))]) == []
    assert (
        array.mixed([replace(c, launcher=replace(c.launcher, kind="local")) for c in others]) == []
    )


def test_waiting_ends_when_no_point_is_at_work(
    job: RunConfig, command: Commands, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    command("sbatch", "echo 17")
    command("squeue", "echo 17 17 17_1; echo 18 17 17_0")
    points = enqueue(sweep := new_sweep(job), seeds(job, 1, 2), [])

    def later(seconds: float) -> None:
        assert capsys.readouterr().out == ""
        end(points[0], ExitCode.DONE, "done", "")
        command("squeue", "echo 99 99 99")  # the other one was cancelled while it waited
        monkeypatch.setattr(array.time, "sleep", lambda seconds: None)

    monkeypatch.setattr(array.time, "sleep", later)
    array.wait(sweep, points)
    told = capsys.readouterr().out
    assert told == "seed=1: done\nseed=2: slurm job 17_1 left the queue\n"


def test_who_waits_no_longer_is_told_that_the_jobs_stay(
    job: RunConfig, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("sbatch", "echo 17")
    points = enqueue(sweep := new_sweep(job), seeds(job, 1), [])

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(array.time, "sleep", interrupted)
    with pytest.raises(Stop, match=r"jobs stay in Slurm's queue") as raised:
        array.wait(sweep, points)
    assert raised.value.code == ExitCode.INTERRUPTED
