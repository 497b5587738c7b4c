"""`dsv41-train -m`: the points of a sweep, one after another, none hidden by another's failure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict, read_write

from launcher.compose import config_flags
from launcher.messages import sweep_table
from launcher.problems import ConfigProblems
from launcher.run_config import RunConfig
from launcher.submit import submit
from launcher.validate import examine, messages
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome

PLUGIN_MODULE = "hydra_plugins.dsv41_train"


@dataclass(frozen=True)
class Point:
    """One run of a sweep and how it ended; None while it has not run."""

    overrides: tuple[str, ...]
    config: RunConfig
    outcome: Outcome | None = None


class PointLauncher(Launcher):
    """Validates all points before the first one starts, then runs them one after another."""

    # Hydra instantiates plugins from modules of this name alone, and does not discover a mapped
    # one in an editable install; so register() puts this module there, in any installation.
    __module__ = PLUGIN_MODULE

    def __init__(self) -> None:
        self._context: HydraContext | None = None
        self._config: DictConfig | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self._context = hydra_context
        self._config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        assert self._config is not None
        flags = config_flags(self._config.hydra)
        points = self._validated(job_overrides)
        done: list[Point] = []
        for number, label in enumerate(labels(job_overrides), start=1):
            print(f"\nPoint {number} of {len(points)}: {label}", flush=True)
            point = points[number - 1]
            outcome = submit(point.config, overrides=point.overrides, flags=flags)
            done.append(replace(point, outcome=outcome))
            if outcome.code in (ExitCode.INTERRUPTED, ExitCode.AGAIN):
                break
        points[: len(done)] = done
        print("\n" + sweep_table(labels(job_overrides), [p.outcome for p in points]), flush=True)
        failed = [p.outcome.code for p in done if p.outcome and p.outcome.code != ExitCode.DONE]
        # Past Hydra by SystemExit: its own way back carries no exit code.
        sys.exit(failed[-1] if failed else ExitCode.DONE)

    def _validated(self, job_overrides: Sequence[Sequence[str]]) -> list[Point]:
        assert self._context is not None and self._config is not None
        points: list[Point] = []
        found: dict[str, list[str]] = {}
        for overrides, label in zip(job_overrides, labels(job_overrides), strict=True):
            cfg = self._context.config_loader.load_sweep_config(self._config, list(overrides))
            if cfg.hydra.launcher != self._config.hydra.launcher:
                ignored = (
                    "Hydra ignores a hydra/launcher chosen inside an experiment when it sweeps"
                )
                found.setdefault(f"{ignored}; take it out of the file", []).append(label)
            config, report = examine(_without_hydra(cfg))
            for problem in messages(report):
                found.setdefault(problem, []).append(label)
            if config is not None:
                points.append(Point(tuple(overrides), config))
        found.update(shared_ids(points))
        if found:
            raise ConfigProblems([_with_points(p, who, job_overrides) for p, who in found.items()])
        return points


def labels(job_overrides: Sequence[Sequence[str]]) -> list[str]:
    """What tells each point of a sweep from the others: its overrides that not all points have."""
    common = set.intersection(*(set(overrides) for overrides in job_overrides))
    return [" ".join(o for o in overrides if o not in common) for overrides in job_overrides]


def _with_points(problem: str, who: Sequence[str], points: Sequence[object]) -> str:
    if len(who) == len(points):
        return problem
    more = f" and {len(who) - 1} more" if len(who) > 1 else ""
    return f"{problem} (at {who[0]}{more})"


class PointSweeper(Sweeper):
    """Hydra's own sweep over choices and ranges, leaving no multirun.yaml in the user's folder."""

    __module__ = PLUGIN_MODULE

    def __init__(self) -> None:
        self._context: HydraContext | None = None
        self._launcher: Launcher | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self._context = hydra_context
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        # Imported late: Hydra's scan for plugins executes that module anew.
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        assert self._launcher is not None and self._context is not None
        parser = OverridesParser.create(config_loader=self._context.config_loader)
        (points,) = BasicSweeper.split_arguments(parser.parse_overrides(arguments), None)
        return self._launcher.launch(points, initial_job_idx=0)


def register() -> None:
    """Make both known to Hydra as hydra/launcher=points and hydra/sweeper=points."""
    try:
        parent = import_module("hydra_plugins")  # exists where other plugins are installed
    except ModuleNotFoundError:
        parent = sys.modules["hydra_plugins"] = ModuleType("hydra_plugins")
        parent.__path__ = []
    sys.modules[PLUGIN_MODULE] = sys.modules[__name__]
    setattr(parent, PLUGIN_MODULE.rpartition(".")[2], sys.modules[__name__])
    for group, plugin in (("launcher", PointLauncher), ("sweeper", PointSweeper)):
        Plugins.instance().register(plugin)
        ConfigStore.instance().store(
            group=f"hydra/{group}",
            name="points",
            node={"_target_": f"{PLUGIN_MODULE}.{plugin.__name__}"},
            provider="dsv41-train",
        )


def shared_ids(points: Sequence[Point]) -> dict[str, list[str]]:
    """The problem of points that would share a folder, if there are any."""
    places = [(p.config.runs_dir, p.config.name, p.config.id) for p in points]
    clash = [p for p, place in zip(points, places, strict=True) if places.count(place) > 1]
    ids = {p.config.id for p in clash if p.config.id is not None}
    return {
        f"id={name} is given to several points; leave id out and each gets its own": [
            " ".join(p.overrides) for p in clash if p.config.id == name
        ]
        for name in ids
    }


def _without_hydra(cfg: DictConfig) -> DictConfig:
    """The user's part of a composed configuration."""
    with read_write(cfg), open_dict(cfg):
        cfg.pop("hydra", None)
    return cfg
