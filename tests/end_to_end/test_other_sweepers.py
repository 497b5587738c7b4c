"""Hydra's plugin for Optuna, where it is installed, as a user starts it."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import yaml

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("optuna") is None, reason="hydra-optuna-sweeper is not installed"),
]


def test_optuna_seeks_the_lowest_evaluation_loss(place) -> None:
    for number in range(12):
        words = " ".join(
            f"the cat {'sat ran saw'.split()[i % 3]} on a mat" for i in range(number + 9)
        )
        (place.folder / "configs" / f"{number}.txt").write_text(words)
    ended = place.train(
        *(*place.small, "-m", "hydra/sweeper=optuna", "optim.lr=tag(log,interval(1e-3,1e-1))"),
        *("optim.final_lr=0", "data.paths=[configs]", "data.holdout=0.3", "eval.every=2"),
        *("hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=2", "hydra.sweeper.sampler.seed=1"),
    )
    assert ended.code == 0, ended.text
    assert ended.err == ""
    assert ended.out.count("Sweep   ") == 1
    (sweep,) = (place.folder / "runs").iterdir()
    told = json.loads(place.run("dsv41", "sweep", "status", str(sweep), "--json").out)
    assert [point["state"] for point in told] == ["done"] * 4
    found = yaml.safe_load((sweep / "optimization_results.yaml").read_text())
    assert found["best_value"] == min(point["objective"] for point in told)
    assert place.names() == {"configs", "words.txt", "runs"}
