"""Training on a device that is not the host's memory: nothing is forgotten there or here."""

from __future__ import annotations

import dataclasses
import multiprocessing
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from model.kernels.library import without_kernels
from tests.builders import seeing_config, trainer_config
from tests.pretended_device import pretended_device
from trainer.config import CheckpointConfig, EvalConfig, IndexerConfig, TrainerConfig
from trainer.device import choose_device
from trainer.loop import train
from trainer.metrics import Record, read_metrics
from trainer.ranks import Ranks

STEPS = 2


def on_text(folder: Path) -> TrainerConfig:
    """Every mechanism of text: distillation, layers computed again, the published optimisers."""
    config = trainer_config(folder, indexer=IndexerConfig(train="distill"))
    return dataclasses.replace(
        config,
        optim=dataclasses.replace(config.optim, name="pretrain"),
        parallel=dataclasses.replace(config.parallel, recompute="selective"),
    )


def on_pictures(folder: Path) -> TrainerConfig:
    """Pictures, by AdamW, with tables in the host's memory."""
    config = seeing_config(folder)
    engram = dataclasses.replace(config.model.engram, store="host")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, engram=engram))


def run(config: TrainerConfig, folder: Path, device: torch.device, *, resume: bool) -> list[Record]:
    outcome = train(
        dataclasses.replace(
            config,
            train=dataclasses.replace(config.train, steps=STEPS, packs_per_step=1),
            eval=EvalConfig(every=STEPS, packs=1),
            checkpoint=CheckpointConfig(every=1),
        ),
        run_dir=folder,
        attempt=1,
        ranks=Ranks(),
        device=device,
        resume=resume,
        say=lambda text: None,
    )
    assert outcome.code == 0, outcome
    return read_metrics(folder / "metrics.jsonl")


def on_the_device(config: TrainerConfig, folder: Path) -> list[list[Record]]:
    """A run, and the end of the one that `folder`/resumed holds the beginning of."""
    with pretended_device() as device:
        return [
            run(config, folder / name, device, resume=name == "resumed")
            for name in ("device", "resumed")
        ]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(on_text, marks=pytest.mark.slow),
        pytest.param(on_pictures, marks=pytest.mark.long),
    ],
)
def test_a_device_computes_what_the_host_does(
    make: Callable[[Path], TrainerConfig], tmp_path: Path
) -> None:
    config = make(tmp_path)
    for name in ("device", "host"):
        (tmp_path / name).mkdir()
    with without_kernels():  # they are the CPU's alone
        host = run(config, tmp_path / "host", torch.device("cpu"), resume=False)
    shutil.copytree(tmp_path / "host", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / f"step_{STEPS:08d}")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        others = pool.submit(on_the_device, config, tmp_path).result(timeout=250)
    assert [record["step"] for record in host] == [1, 2, 2]
    for other in others:
        for found, wanted in zip(other, host, strict=True):
            assert found.keys() == wanted.keys()
            for key in ("loss", "grad_norm", "balance_loss", "index_loss", "eval_loss"):
                if wanted.get(key) is not None:
                    # The indexer's divergence is a small difference of numbers near one.
                    least = 1e-6 if key == "index_loss" else 0.0
                    assert found[key] == pytest.approx(wanted[key], rel=1e-5, abs=least), key


def test_a_rank_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert choose_device(1) == torch.device("cuda:1")
    assert current == [1]
    with pytest.raises(ValueError, match="no GPU of its own, there are 2"):
        choose_device(2)


def test_without_gpus_a_rank_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(3) == torch.device("cpu")
