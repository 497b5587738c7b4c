"""`dsv41-train -m`: the points of a sweep, validated as a whole, none hurt by another's failure."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict, read_write

from launcher.compose import config_flags
from launcher.messages import labels
from launcher.problems import ConfigProblems, Stop
from launcher.run_config import RunConfig
from launcher.sweep import array
from launcher.sweep.composing import Composer
from launcher.sweep.folder import Point as SweepPoint
from launcher.sweep.folder import SweepFolder, new_sweep
from launcher.sweep.objective import objective
from launcher.sweep.running import run_points, tell_end
from launcher.validate import examine, messages
from trainer.exit_codes import ExitCode

PLUGIN_MODULE = "hydra_plugins.dsv41_train"


@dataclass(frozen=True)
class Point:
    """One run of a sweep to be."""

    overrides: tuple[str, ...]
    config: RunConfig


class PointLauncher(Launcher):
    """Validates all points before the first one starts, then runs them, some at a time."""

    # Hydra instantiates plugins from modules of this name alone, and does not discover a mapped
    # one in an editable install; so register() puts this module there, in any installation.
    __module__ = PLUGIN_MODULE

    def __init__(self) -> None:
        self._context: HydraContext | None = None
        self._config: DictConfig | None = None
        self._sweep: SweepFolder | None = None
        self._code: int = ExitCode.DONE

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        global _latest
        self._context = hydra_context
        self._config = config
        _latest = self
        # It would tell of each trial beside our table, on standard error.
        logging.getLogger("optuna").setLevel(logging.WARNING)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the points, or put them into Slurm's queue. Under our own sweeper the command ends
        here, with the exit code of the sweep; any other (hydra/sweeper=optuna) gets the objective
        of each point, so its points are waited for on Slurm too, and may ask for more, which join
        the same sweep until `finish`. Of those, a point that cannot be trained is told and gets the
        worst objective; at the first time all must be sound."""
        assert self._config is not None
        points, problems = self._validated(job_overrides)
        if problems and self._sweep is None:
            raise ConfigProblems(problems)
        if problems:
            print("Left out:", *problems, sep="\n  ", file=sys.stderr, flush=True)
        sound = [point for point in points if point is not None]
        if any(point.config.launcher.slurm.dry_run for point in sound):
            print(array.preview([point.config for point in sound]), flush=True)
            sys.exit(ExitCode.DONE)
        added = iter(self._run(sound) if sound else [])
        return [
            _returned(self._sweep, overrides, next(added) if point else None)
            for overrides, point in zip(job_overrides, points, strict=True)
        ]

    def _run(self, points: Sequence[Point]) -> Sequence[SweepPoint]:
        assert self._config is not None
        first, configs = self._sweep is None, [point.config for point in points]
        words = [point.overrides for point in points]
        if self._sweep is None:
            self._sweep = new_sweep(configs[0])
            with read_write(self._config.hydra):  # where sweepers put their own files
                self._config.hydra.sweep.dir = str(self._sweep.path)
        flags = config_flags(self._config.hydra)
        asks_again = not self._config.hydra.sweeper.get("_target_", "").startswith(PLUGIN_MODULE)
        if configs[0].launcher.kind == "slurm":
            added = array.enqueue_new(self._sweep, configs, words, flags=flags, say=_say)
            code = ExitCode.DONE
            if asks_again:
                array.wait(self._sweep, added)
        else:
            added = self._sweep.add(configs, words, flags)
            try:
                code = run_points(self._sweep, added, first=first, last=not asks_again)
            except Stop:
                self._sweep.discard()
                raise
        if not asks_again or code in (ExitCode.INTERRUPTED, ExitCode.AGAIN):
            # Past Hydra by SystemExit: its own way back carries no exit code.
            sys.exit(code)
        self._code = code or self._code
        return added

    def finish(self) -> int:
        """Close a sweep whose sweeper has had enough; its exit code."""
        if self._sweep is not None:
            tell_end(self._sweep)
        return self._code

    def _validated(
        self, job_overrides: Sequence[Sequence[str]]
    ) -> tuple[list[Point | None], list[str]]:
        """The points, None where one cannot be trained, and why."""
        assert self._context is not None and self._config is not None
        points: list[Point | None] = []
        found: dict[str, list[str]] = {}
        compose = Composer(self._context.config_loader, self._config)
        for overrides, label in zip(job_overrides, labels(job_overrides), strict=True):
            cfg = compose(overrides)
            if cfg.hydra.launcher != self._config.hydra.launcher:
                ignored = (
                    "Hydra ignores a hydra/launcher chosen inside an experiment when it sweeps"
                )
                found.setdefault(f"{ignored}; take it out of the file", []).append(label)
            config, report = examine(_without_hydra(cfg))
            for problem in messages(report):
                found.setdefault(problem, []).append(label)
            points.append(None if config is None else Point(tuple(overrides), config))
        sound = [point for point in points if point is not None]
        found.update(given_ids(sound))
        every = labels(job_overrides)
        found.update(dict.fromkeys(array.mixed([p.config for p in sound]), every))
        return points, [_with_points(p, who, job_overrides) for p, who in found.items()]


_latest: PointLauncher | None = None


def finish() -> int:
    """After Hydra has come back: close the sweep that it has run, if it has; the exit code."""
    return ExitCode.DONE if _latest is None else _latest.finish()


def _returned(
    sweep: SweepFolder | None, overrides: Sequence[str], point: SweepPoint | None
) -> JobReturn:
    """What a sweeper learns of a point: its objective, infinite where there is none."""
    value = None
    if sweep is not None and point is not None:
        value = objective(point.folder.path, sweep.metric)
    return JobReturn(
        overrides=list(overrides),
        status=JobStatus.COMPLETED,
        _return_value=math.inf if value is None else value,
    )


def _say(text: str) -> None:
    print(text, flush=True)


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


def given_ids(points: Sequence[Point]) -> dict[str, list[str]]:
    """The problem of points with an id of their own, if there are any."""
    given = {p.config.id for p in points if p.config.id is not None}
    return {
        f"id={name}: a sweep numbers its runs itself; leave id out": [
            " ".join(p.overrides) for p in points if p.config.id == name
        ]
        for name in given
    }


def _without_hydra(cfg: DictConfig) -> DictConfig:
    """The user's part of a composed configuration."""
    with read_write(cfg), open_dict(cfg):
        cfg.pop("hydra", None)
    return cfg
