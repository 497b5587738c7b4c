"""A sweep: all points validated first, each failure kept to its own point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from launcher import freeze, hydra_launcher
from launcher.hydra_launcher import Point, given_ids
from launcher.messages import labels
from launcher.problems import ConfigProblems
from launcher.run_config import RunConfig
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

    def run(code: ExitCode, *overrides: str) -> tuple[int, list[SweepPoint]]:
        started: list[SweepPoint] = []

        def run_points(sweep: SweepFolder, points: Sequence[SweepPoint]) -> int:
            started.extend(points)
            return code

        monkeypatch.setattr(hydra_launcher, "run_points", run_points)
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        words = [*overrides, f"runs_dir={tmp_path}"]
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


@pytest.mark.parametrize("code", [ExitCode.INTERRUPTED, ExitCode.DIVERGED])
def test_the_command_ends_with_the_sweeps_exit_code(sweep, code: ExitCode) -> None:
    assert sweep(code, "+experiment=tiny", "seed=1,2")[0] == code


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
