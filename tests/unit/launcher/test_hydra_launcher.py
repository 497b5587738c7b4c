"""A sweep: all points validated first, each failure kept to its own point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from launcher import hydra_launcher
from launcher.hydra_launcher import Point, labels, shared_ids
from launcher.problems import ConfigProblems
from launcher.run_config import RunConfig
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome

Composed = Callable[..., DictConfig]


@pytest.fixture
def sweep(composed: Composed, monkeypatch) -> Callable[..., tuple[int, list[RunConfig]]]:
    """sweep(codes, overrides...): the exit code of a sweep whose runs end with `codes`."""

    def run(codes: list[ExitCode], *overrides: str) -> tuple[int, list[RunConfig]]:
        started: list[RunConfig] = []

        def submit(config: RunConfig, **_: Any) -> Outcome:
            started.append(config)
            return Outcome(codes[len(started) - 1], "ended", len(started))

        monkeypatch.setattr(hydra_launcher, "submit", submit)
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        cfg = hydra.compose_config("config", list(overrides), run_mode=RunMode.MULTIRUN)
        context = HydraContext(config_loader=hydra.config_loader, callbacks=None)  # pyright: ignore
        sweeper = Plugins.instance().instantiate_sweeper(
            hydra_context=context, task_function=lambda cfg: None, config=cfg
        )
        with pytest.raises(SystemExit) as left:
            sweeper.sweep(list(cfg.hydra.overrides.task))
        return int(left.value.code or 0), started

    return run


def test_points_run_in_order(sweep, capsys) -> None:
    code, started = sweep([ExitCode.DONE] * 4, "+experiment=tiny", "seed=1,2", "optim.lr=1,2")
    assert code == 0
    assert [(c.seed, c.optim.lr) for c in started] == [(1, 1.0), (1, 2.0), (2, 1.0), (2, 2.0)]
    assert "Point 3 of 4: seed=2 optim.lr=1\n" in capsys.readouterr().out


def test_a_failing_point_hides_no_other(sweep, capsys) -> None:
    codes = [ExitCode.DONE, ExitCode.DIVERGED, ExitCode.DONE]
    code, started = sweep(codes, "+experiment=tiny", "seed=1,2,3")
    assert code == ExitCode.DIVERGED
    assert len(started) == 3
    table = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split()[1:] for line in table[1:]] == [
        ["0", "1", "seed=1"],
        ["77", "2", "seed=2"],
        ["0", "3", "seed=3"],
    ]


@pytest.mark.parametrize("stop", [ExitCode.INTERRUPTED, ExitCode.AGAIN])
def test_a_stop_ends_the_sweep_and_shows_what_is_left(sweep, capsys, stop: ExitCode) -> None:
    code, started = sweep([stop, ExitCode.DONE], "+experiment=tiny", "seed=1,2")
    assert code == stop
    assert len(started) == 1
    assert capsys.readouterr().out.splitlines()[-1].split() == ["not", "run", "seed=2"]


def test_nothing_starts_when_one_point_is_wrong(sweep) -> None:
    overrides = ["+experiment=tiny", "seed=1,2", "train.packs_per_step=4,x,-1"]
    with pytest.raises(ConfigProblems) as caught:
        sweep([], *overrides)
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
        sweep([], "+experiment=tiny", "seed=1,2", "eval.every=-1")
    assert caught.value.problems == ["eval.every=-1 is too small; use a whole number of 0 or more"]


def test_labels_show_what_differs() -> None:
    assert labels([["+experiment=tiny", "a=1"], ["+experiment=tiny", "a=2"]]) == ["a=1", "a=2"]


def test_one_id_for_several_points_is_refused(tiny: RunConfig) -> None:
    points = [Point(("a=1",), replace(tiny, id="x")), Point(("a=2",), replace(tiny, id="x"))]
    assert list(shared_ids(points)) == [
        "id=x is given to several points; leave id out and each gets its own"
    ]
    assert shared_ids([points[0], Point(("a=2",), replace(tiny, id="y"))]) == {}
    assert shared_ids([Point(("a=1",), tiny), Point(("a=2",), tiny)]) == {}
