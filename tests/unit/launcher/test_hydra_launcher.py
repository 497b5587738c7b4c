"""A sweep: all points validated first, each failure kept to its own point."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, open_dict

from launcher import freeze, hydra_launcher
from launcher.hydra_launcher import Point, given_ids
from launcher.messages import labels
from launcher.own_packages import HOME
from launcher.problems import ConfigProblems, Stop
from launcher.run_config import RunConfig
from launcher.sweep import array
from launcher.sweep.folder import Point as SweepPoint
from launcher.sweep.folder import SweepFolder
from trainer.exit_codes import ExitCode

Composed = Callable[..., DictConfig]


@pytest.fixture
def sweep(
    composed: Composed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, list[SweepPoint]]]:
    """sweep(code, overrides...): the exit code of a sweep whose points end with `code`, and those
    that were to run."""

    def run(
        code: ExitCode,
        *overrides: str,
        run_points: Callable[..., int] | None = None,
        runs_dir: Path = tmp_path,
    ) -> tuple[int, list[SweepPoint]]:
        started: list[SweepPoint] = []

        def noted(sweep: SweepFolder, points: Sequence[SweepPoint], **due: bool) -> int:
            assert due == {"first": True, "last": True}
            started.extend(points)
            return code

        monkeypatch.setattr(hydra_launcher, "run_points", run_points or noted)
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        words = [*overrides, f"runs_dir={runs_dir}"]
        cfg = hydra.compose_config("config", words, run_mode=RunMode.MULTIRUN)
        context = HydraContext(config_loader=hydra.config_loader, callbacks=None)  # pyright: ignore
        sweeper = Plugins.instance().instantiate_sweeper(
            hydra_context=context, task_function=lambda cfg: None, config=cfg
        )
        with pytest.raises(SystemExit) as left:
            sweeper.sweep(list(cfg.hydra.overrides.task))
        return int(left.value.code or 0), started

    return run


def test_points_are_runs_of_one_folder(sweep) -> None:
    code, started = sweep(ExitCode.DONE, "+experiment=tiny", "seed=1,2", "optim.lr=1,2")
    assert code == 0
    configs = [freeze.load(point.folder.config_file) for point in started]
    assert [(c.seed, c.optim.lr) for c in configs] == [(1, 1.0), (1, 2.0), (2, 1.0), (2, 2.0)]
    assert [c.id for c in configs] == ["000", "001", "002", "003"]
    assert len({point.folder.path.parent for point in started}) == 1
    assert [point.label for point in started][2] == "seed=2 optim.lr=1"
    code = [point.folder.code / "launcher" / "cli.py" for point in started]
    assert {file.stat().st_ino for file in code} == {code[0].stat().st_ino}  # one snapshot for all
    assert code[0].read_bytes() == (HOME / "launcher" / "cli.py").read_bytes()
    known = {(point.folder.path / "env.json").read_text() for point in started}
    assert len(known) == 1


def test_another_sweeper_learns_how_good_points_are_and_asks_for_more(
    composed: Composed,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    losses, rounds = iter([3.0, None, 2.0]), []

    def run_points(sweep: SweepFolder, points: Sequence[SweepPoint], **due: bool) -> int:
        rounds.append(due)
        for point, loss in zip(points, losses, strict=False):
            if loss is not None:
                line = json.dumps({"step": 1, "loss": loss})
                (point.folder.path / "metrics.jsonl").write_text(line + "\n")
        return ExitCode.DONE

    monkeypatch.setattr(hydra_launcher, "run_points", run_points)
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    words = ["+experiment=tiny", "hydra/sweeper=basic", f"runs_dir={tmp_path}"]
    cfg = hydra.compose_config("config", words, run_mode=RunMode.MULTIRUN)
    context = HydraContext(config_loader=hydra.config_loader, callbacks=None)  # pyright: ignore
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=context, task_function=lambda cfg: None, config=cfg
    )
    common = ["+experiment=tiny", f"runs_dir={tmp_path}"]
    first = launcher.launch([[*common, "seed=1"], [*common, "seed=2"]], 0)
    assert [returned.return_value for returned in first] == [3.0, math.inf]
    (folder,) = tmp_path.iterdir()
    assert cfg.hydra.sweep.dir == str(folder)  # what a sweeper writes at the end goes there

    bad, good = [*common, "seed=1", "eval.every=-1"], [*common, "seed=3"]
    then = launcher.launch([bad, good], 2)
    assert [returned.return_value for returned in then] == [math.inf, 2.0]
    assert "Left out:\n  eval.every=-1 is too small" in capsys.readouterr().err
    assert [point.label for point in SweepFolder(folder).points()] == ["seed=1", "seed=2", "seed=3"]
    assert rounds == [{"first": True, "last": False}, {"first": False, "last": False}]

    assert hydra_launcher.finish() == 0
    assert f"dsv41 sweep best {folder}" in capsys.readouterr().out


@pytest.mark.parametrize("code", [ExitCode.INTERRUPTED, ExitCode.DIVERGED])
def test_the_command_ends_with_the_sweeps_exit_code(sweep, code: ExitCode) -> None:
    assert sweep(code, "+experiment=tiny", "seed=1,2")[0] == code


def test_nothing_is_left_of_a_sweep_that_is_refused(
    sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(sweep: SweepFolder, points: Sequence[SweepPoint], **due: bool) -> int:
        assert sweep.file.is_file()
        raise Stop(ExitCode.CONFIG, "no cluster")

    runs = tmp_path / "runs"
    with pytest.raises(Stop, match="no cluster"):
        sweep(ExitCode.DONE, "+experiment=tiny", "seed=1,2", run_points=refused, runs_dir=runs)
    assert not runs.exists()


def test_nothing_starts_when_one_point_is_wrong(sweep) -> None:
    overrides = ["+experiment=tiny", "seed=1,2", "train.packs_per_step=4,x,-1"]
    with pytest.raises(ConfigProblems) as caught:
        sweep(ExitCode.DONE, *overrides)
    assert [p.partition(" (at ") for p in caught.value.problems] == [
        (
            "train.packs_per_step=x must be a whole number",
            " (at ",
            "seed=1 train.packs_per_step=x and 1 more)",
        ),
        (
            "train.packs_per_step=-1 is too small; use a whole number of 1 or more",
            " (at ",
            "seed=1 train.packs_per_step=-1 and 1 more)",
        ),
    ]


def test_a_problem_of_all_points_is_told_once(sweep) -> None:
    with pytest.raises(ConfigProblems) as caught:
        sweep(ExitCode.DONE, "+experiment=tiny", "seed=1,2", "eval.every=-1")
    assert caught.value.problems == ["eval.every=-1 is too small; use a whole number of 0 or more"]


def test_labels_show_what_differs() -> None:
    assert labels([["+experiment=tiny", "a=1"], ["+experiment=tiny", "a=2"]]) == ["a=1", "a=2"]


def test_an_id_of_ones_own_is_refused(tiny: RunConfig) -> None:
    points = [Point(("a=1",), replace(tiny, id="x")), Point(("a=2",), tiny)]
    assert given_ids(points) == {"id=x: a sweep numbers its runs itself; leave id out": ["a=1"]}
    assert given_ids(points[1:]) == {}


def test_on_slurm_the_command_ends_once_the_points_are_queued(sweep, monkeypatch, capsys) -> None:
    seen: list[tuple[str, list[int]]] = []

    def enqueue(folder, configs, overrides, *, flags, say) -> list[SweepPoint]:
        seen.append((folder.path.name, [config.seed for config in configs]))
        return []

    monkeypatch.setattr(array, "enqueue_new", enqueue)
    code, started = sweep(ExitCode.BUG, "+experiment=tiny", "launcher=slurm", "seed=1,2")
    assert (code, started) == (0, [])
    ((name, seeds),) = seen
    assert (name[:11], seeds) == ("tiny-sweep-", [1, 2])


def test_a_dry_run_of_a_sweep_on_slurm_prints_one_script(sweep, tmp_path: Path, capsys) -> None:
    words = ("launcher=slurm", "launcher.slurm.dry_run=true", "sweep.concurrency=2")
    assert sweep(ExitCode.BUG, "+experiment=tiny", "seed=1,2,3", *words) == (0, [])
    script = capsys.readouterr().out
    assert "\n#SBATCH --array=0-2%2\n" in script
    assert f"\nrun={tmp_path}/tiny-sweep-ID/$(printf" in script
    assert not list(tmp_path.iterdir())


def test_points_that_need_other_machines_are_among_the_mistakes(sweep) -> None:
    words = ("launcher=slurm", "launcher.slurm.partition=a,b")
    with pytest.raises(ConfigProblems, match=r"settings differ: launcher.slurm.partition. Start"):
        sweep(ExitCode.DONE, "+experiment=tiny", *words)


def test_another_sweeper_waits_for_slurm_and_gets_what_each_point_reached(
    composed: Composed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def enqueue(folder, configs, overrides, *, flags, say) -> list[SweepPoint]:
        return folder.add(configs, overrides, flags)

    def wait(folder: SweepFolder, points: Sequence[SweepPoint]) -> None:
        for loss in (3.0, 2.0):
            with (points[0].folder.path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": 1, "loss": loss}) + "\n")

    monkeypatch.setattr(array, "enqueue_new", enqueue)
    monkeypatch.setattr(array, "wait", wait)
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    words = ["+experiment=tiny", "launcher=slurm", f"runs_dir={tmp_path}"]
    cfg = hydra.compose_config("config", words, run_mode=RunMode.MULTIRUN)
    with open_dict(cfg):
        cfg.hydra.sweeper._target_ = "hydra_plugins.some_other.Sweeper"
    context = HydraContext(config_loader=hydra.config_loader, callbacks=None)  # pyright: ignore
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=context, task_function=lambda cfg: None, config=cfg
    )
    first = launcher.launch([[*words, "seed=1"], [*words, "seed=2"]], initial_job_idx=0)
    assert [job.return_value for job in first] == [2.5, math.inf]
    launcher.launch([[*words, "seed=3"]], initial_job_idx=2)
    (folder,) = tmp_path.iterdir()
    assert SweepFolder(folder).size() == 3
