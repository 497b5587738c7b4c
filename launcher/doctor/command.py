"""`dsv41 doctor [+experiment=...]`: whether this machine is fit for a run, and what to mend."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from launcher.composed import add_run_words
from launcher.config import LauncherConfig
from launcher.doctor import folders, installation, limits, network
from launcher.doctor.check import Check, Finding, carried_out
from launcher.plan.command import planned_run
from launcher.problems import Stop
from launcher.run_config import RunConfig
from trainer.exit_codes import ExitCode

TORCH_S = 60.0  # to import torch and look at the devices, on a busy machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Looks at versions, devices, limits, folders and services, each within a deadline, and "
        "says what to do about what is wrong. With the words that start a run it looks at the "
        "folders, the launcher and the disk space of that run. Ends with 78 when a run would fail; "
        "warnings (W&B that cannot be reached) end with 0."
    )
    add_run_words(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Carry out all checks, print each as it ends, and return the exit code."""
    try:
        config = planned_run(args) if args.overrides or args.config_dir else None
    except Stop as stop:
        print(f"dsv41 doctor: {stop.message}", file=sys.stderr)
        return stop.code
    found: dict[str, Finding] = {}
    checks = all_checks(config, environ=os.environ)
    width = max(len(check.name) for check in checks)
    for name, finding in carried_out(checks):
        found[name] = finding
        if not args.json:
            print(f"{finding.level:<4}  {name:<{width}}  {finding.found}", flush=True)
            if finding.fix:
                print(f"{'':4}  {'':{width}}  -> {finding.fix}", flush=True)
    levels = [finding.level for finding in found.values()]
    code = ExitCode.CONFIG if "fail" in levels else ExitCode.DONE
    if args.json:
        listed = [{"name": name, **asdict(finding)} for name, finding in found.items()]
        print(json.dumps({"exit_code": code, "checks": listed}))
    else:
        bad, doubtful = levels.count("fail"), levels.count("warn")
        print(f"\n{len(levels)} checks: {bad} failed, {doubtful} with a warning")
    return code


def all_checks(config: RunConfig | None, *, environ: Mapping[str, str]) -> list[Check]:
    """What is looked at; config: of the run that is to be started, where one was named."""
    runs = Path(config.runs_dir) if config else Path("runs").absolute()
    pinned = config is not None and config.model.engram.store == "host"
    cached = folders.cache_folders(environ, data=_data_cache(config, environ))
    launcher = config.launcher if config else LauncherConfig("local")
    ours = launcher.ray if launcher.kind == "ray" else None
    return [
        Check("versions", installation.versions),
        Check("devices", partial(installation.devices, timeout_s=TORCH_S), TORCH_S + 5),
        Check("CPU kernels", installation.kernels, installation.COMPILING_S, late="warn"),
        Check("open files", limits.open_files),
        Check("processes", limits.processes),
        Check("locked memory", partial(limits.locked_memory, needed=pinned)),
        Check("shared memory", limits.shared_memory),
        Check("runs_dir", partial(folders.works, runs), 20),
        Check("clock", partial(folders.clock, runs)),
        Check("disk", partial(_room, runs, config), 2 * TORCH_S),
        Check("caches", partial(folders.caches, cached)),
        Check("host name", partial(network.host_name, nodes=launcher.nodes), late="warn"),
        Check("ports", partial(network.port, launcher.torchrun.port)),
        Check("Slurm", partial(network.slurm, needed=launcher.kind == "slurm"), late="warn"),
        Check(
            "Ray",
            partial(network.ray, ours, variable=environ.get("RAY_ADDRESS")),
            2 * network.PATIENCE_S,
            late="fail" if ours else "warn",
        ),
        Check("W&B", partial(network.wandb, environ.get("WANDB_BASE_URL")), late="warn"),
    ]


def _room(runs: Path, config: RunConfig | None) -> Finding:
    if config is None:
        return folders.room(runs, needed=None)
    from launcher.plan.holdings import holdings

    # A new one is written before an old one goes.
    count = config.checkpoint.keep + 1
    needed = count * holdings(config).checkpoint_bytes
    return folders.room(runs, needed=needed, why=f"{count} checkpoints of {config.name}")


def _data_cache(config: RunConfig | None, environ: Mapping[str, str]) -> Path:
    if config is not None:
        return config.data.cache_folder
    base = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dsv41-train" / "data"
