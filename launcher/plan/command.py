"""`dsv41 plan +experiment=... [overrides]`: what a run will hold, without holding it."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from launcher.composed import add_run_words, composed_run
from launcher.problems import ConfigProblems, Stop
from launcher.rules import PLAN_RULES
from launcher.run_config import RunConfig
from trainer.exit_codes import ExitCode

if TYPE_CHECKING:
    from omegaconf import DictConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows a run's mesh, the bytes that every rank will hold, by class, and the size of a "
        "checkpoint. Takes the words that start the run; data.paths and model.weights may be left "
        "out. Needs no accelerator. Ends with 78 when cluster.device_memory_gb is given and too "
        "small."
    )
    add_run_words(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def run(args: argparse.Namespace) -> int:
    """Compose and validate the run's configuration, add up, print."""
    try:
        config = planned_run(args)
        from launcher.plan.holdings import holdings
        from launcher.plan.memory import memory_problems
        from launcher.plan.report import plan_data, show

        held = holdings(config)
        show(plan_data(config, held), config, as_json=args.json)
        sys.stdout.flush()
        if found := memory_problems(config, held):
            raise ConfigProblems(found)
    except Stop as stop:
        print(f"dsv41 plan: {stop.message}", file=sys.stderr)
        return stop.code
    return ExitCode.DONE


def planned_run(args: argparse.Namespace) -> RunConfig:
    """The run of a command's words, which need not be one that this machine could train."""
    return composed_run(
        args.overrides,
        config_dir=args.config_dir,
        config_name=args.config_name,
        rules=PLAN_RULES,
        complete=_complete,
    )


def _complete(cfg: DictConfig) -> None:
    """Stand-ins for where documents and weights lie: no size depends on that."""
    from omegaconf import OmegaConf

    if OmegaConf.is_missing(cfg.data, "paths"):
        cfg.data.paths = ["PATHS"]
    engram = cfg.model.engram
    if engram.store == "mapped" and not engram.path:
        cfg.model.weights = cfg.model.weights or "FOLDER"
        engram.path = "FOLDER"
