"""Training with views: the same bits, no waiting, one rising line of steps over attempts."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import loop
from trainer.checkpoint.store import Checkpoints
from trainer.config import EvalConfig, LoggingConfig, TrainerConfig
from trainer.exit_codes import ExitCode
from trainer.learner import build_learner
from trainer.outcome import Outcome
from trainer.progress import Say
from trainer.ranks import Ranks
from trainer.tracking.config import WandbConfig

Log = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def short(config: TrainerConfig) -> TrainerConfig:
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=4, packs_per_step=2),
        eval=EvalConfig(every=4, packs=1),
        logging=LoggingConfig(samples=4),
    )


def seen(config: TrainerConfig, **settings: Any) -> TrainerConfig:
    wandb = WandbConfig(mode="online", **settings)
    return dataclasses.replace(config, logging=dataclasses.replace(config.logging, wandb=wandb))


def train(
    config: TrainerConfig, run_dir: Path, *, attempt: int = 1, say: Say = lambda text: None
) -> Outcome:
    run_dir.mkdir(exist_ok=True)
    return loop.train(
        config, run_dir=run_dir, attempt=attempt, ranks=Ranks(), resume=attempt > 1, say=say
    )


def tensors(config: TrainerConfig, run_dir: Path) -> dict[str, torch.Tensor]:
    found = build_learner(config).tensors()
    checkpoints = Checkpoints(
        run_dir / "checkpoints", keep=9, attempt=99, ranks=Ranks(), say=lambda text: None
    )
    checkpoints.load(checkpoints.path(4), found)
    return found


def test_a_view_that_hangs_changes_no_bit_and_stops_nothing(
    short: TrainerConfig, tmp_path: Path, fake_wandb: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(short, tmp_path / "plain")
    monkeypatch.setenv("FAKE_WANDB", "sleep log")
    said: list[str] = []
    started = time.monotonic()
    outcome = train(seen(short, finish_timeout_s=1.0), tmp_path / "seen", say=said.append)
    assert time.monotonic() - started < 60
    assert outcome.code == ExitCode.DONE
    assert said[-1] == "W&B: not finished in 1 s; metrics.jsonl has everything"
    plain, watched = tensors(short, tmp_path / "plain"), tensors(short, tmp_path / "seen")
    assert plain.keys() == watched.keys()
    for name, tensor in plain.items():
        assert torch.equal(tensor, watched[name]), name


def test_one_line_of_steps_over_two_attempts(
    short: TrainerConfig, tmp_path: Path, fake_wandb: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_after_two(text: str) -> None:
        if text.startswith("step 2/4"):
            os.kill(os.getpid(), signal.SIGTERM)

    config = seen(short)
    assert train(config, tmp_path / "run", say=stop_after_two).code == ExitCode.AGAIN
    monkeypatch.setenv("FAKE_WANDB_STEP", "3")  # what the server knows then
    assert train(config, tmp_path / "run", attempt=2).code == ExitCode.DONE
    did = fake_wandb()
    logged = [entry for entry in did if entry["place"] == "log"]
    assert [e["step"] for e in logged if "loss" in e["values"]] == [1, 2, 3, 4]
    assert [e["step"] for e in logged if "eval_loss" in e["values"]] == [4]
    (texts,) = [e["values"]["samples"] for e in logged if "samples" in e["values"]]
    assert [row[0] for row in texts] == [4, 4]
    assert logged[-1]["values"]["metrics"] == str(tmp_path / "run" / "plots" / "metrics.png")
    assert {e["id"] for e in did if e["place"] == "init"} == {f"{tmp_path.name}-run"}
    assert [e["exit_code"] for e in did if e["place"] == "finish"] == [1, 0]
