"""The process that runs a sweep's points through Ray Tune.

Usage: python -P -m launcher.sweep.tune.driver SWEEP FOLDER POINT...

A process of its own, as the one for the ranks of a run (`launcher.backends.ray.driver`): what Ray
prints goes to the sweep's ray.log, and it can be ended with its cluster. POINT: names of points.
FOLDER: for the files of Ray. Lines of JSON on its standard output say what happens: connected,
failed with a text, or ended, with the errors of trials.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher import freeze
from launcher.backends.ray.cluster import CLUSTER, Refused, connected
from launcher.backends.ray.driver import Orders
from launcher.backends.ray.reports import Report
from launcher.guard import PARENT
from launcher.run_config import RunConfig
from launcher.sweep.folder import Point, SweepFolder
from launcher.sweep.objective import Ladder
from launcher.sweep.point import point_environment
from trainer.disk import put_text
from trainer.metrics import read_metrics

# What this process needs to know of Ray, and points do not.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a point may fail before it has any
}
SHARE = 0.001  # of this node's own resource, which keeps trials here


def main() -> None:
    parent = int(os.environ.pop(PARENT, os.getppid()))
    sweep, temporary, names = SweepFolder(Path(sys.argv[1])), sys.argv[2], sys.argv[3:]
    report = Report()
    Orders(parent=parent, temporary=temporary)
    points = {point.folder.path.name: point for point in sweep.points()}
    configs = [freeze.load(points[name].folder.config_file) for name in names]
    cpus = max(c.parallel.world * c.launcher.ray.cpus_per_rank for c in configs)
    try:
        with connected(
            configs[0].launcher.ray, cpus=cpus * (sweep.concurrency or 1), temporary=temporary
        ) as address:
            report("connected")
            errors = _tune(sweep, points, names, configs, address=address, temporary=temporary)
        report("ended", errors=errors)
    except Refused as refusal:
        report("failed", text=str(refusal))


def _tune(
    sweep: SweepFolder,
    points: dict[str, Point],
    names: Sequence[str],
    configs: Sequence[RunConfig],
    *,
    address: str,
    temporary: str,
) -> list[str]:
    """Run the points `names`; the last line of each trial's error."""
    from ray import tune

    from launcher.sweep.tune.scheduler import POINT, Asha
    from launcher.sweep.tune.trial import Course, PointTrial

    def ask(name: str, step: int) -> None:
        put_text(points[name].early_file, f"stopped early by asha at step {step:,}\n")

    asha, steps = configs[0].sweep.asha, max(config.train.steps for config in configs)
    rungs = tuple(asha.rungs(steps))
    scheduler = Asha(asha, steps=steps, ask=ask)
    for name, point in points.items():
        metrics = point.folder.path / "metrics.jsonl"
        if name not in names and metrics.is_file():
            scheduler.remember(name, read_metrics(metrics), Ladder(sweep.metric, rungs))
    environment = {k: v for k, v in point_environment().items() if k not in SETTINGS}
    course = Course(sweep, rungs, {**environment, CLUSTER: address})
    trainable: Any = tune.with_parameters(PointTrial, course=course)
    here = tune.PlacementGroupFactory([{_own_resource(): SHARE}])
    results = tune.Tuner(
        tune.with_resources(trainable, here),
        param_space={POINT: tune.grid_search(list(names))},
        tune_config=tune.TuneConfig(
            scheduler=scheduler, max_concurrent_trials=sweep.concurrency or 1, reuse_actors=True
        ),
        run_config=tune.RunConfig(
            name="sweep",
            storage_path=f"{temporary}/tune",
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # runs have their own
            verbose=0,
        ),
    ).fit()
    return [str(error).strip().splitlines()[-1] for error in results.errors]


def _own_resource() -> str:
    """What Ray calls the node that this process is on."""
    import ray

    me = ray.get_runtime_context().get_node_id()
    (node,) = [known for known in ray.nodes() if known["NodeID"] == me]
    names = [n for n in node["Resources"] if n.startswith("node:")]
    return next(n for n in names if n != "node:__internal_head__")


if __name__ == "__main__":
    main()
