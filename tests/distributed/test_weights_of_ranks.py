"""Two ranks start from released weights: together the whole, each reading its own rows."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.config import DataConfig
from model.config import ModelConfig
from trainer.config import (
    CheckpointConfig,
    EvalConfig,
    LoggingConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    TrainerConfig,
)

PROGRAM = Path(__file__).with_name("weights_program.py")
OPTIM = OptimConfig("adamw", 1e-3, 1, 1, 1, 1e-4, 0.9, 0.95, 1e-8, 0.1, 5.0)


EXPERT = "layers.2.ffn.experts.3.w3.weight"  # up rows: the second rank's


def config_of(weights: Path, model: ModelConfig) -> TrainerConfig:
    return TrainerConfig(
        seed=1,
        model=replace(model, weights=str(weights)),
        data=DataConfig(source="embedded", pack_length=64),
        optim=OPTIM,
        parallel=ParallelConfig(dp_shard=2),
        train=TrainConfig(steps=1, packs_per_step=2),
        eval=EvalConfig(),
        checkpoint=CheckpointConfig(every=0),
        logging=LoggingConfig(),
    )


def on_two_ranks(configs: list[TrainerConfig], folder: Path) -> list[list[dict[str, Any]]]:
    """By rank, what `weights_program.start` found of each configuration."""
    (folder / "configs.pickle").write_bytes(pickle.dumps(configs))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder / "configs.pickle"), str(folder / "out.pt")],
            env={**os.environ, **place, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    output = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(output)
    return [torch.load(folder / f"out.{rank}") for rank in range(2)]


def test_each_rank_reads_its_own_rows_and_hears_of_the_others_faults(
    pristine, small, tmp_path: Path
) -> None:
    def spoil(scale: Tensor) -> Tensor:
        scale.view(torch.uint8)[:] = 255
        return scale

    small.change(EXPERT.replace("weight", "scale"), spoil)
    configs = [config_of(s.path, s.config) for s in (pristine, small)]
    (first, told), (second, met) = on_two_ranks(configs, tmp_path)
    assert told["error"] == "Another rank could not read its weights; see its log."
    assert EXPERT in met["error"]
    for rank in (first, second):
        for name, tensor in rank["found"].items():
            assert torch.equal(tensor, pristine.decoded[name]), name
    assert first["learns"] == second["learns"]
    assert not any(".indexer." in name for name in first["learns"])
    for name, weight in pristine.decoded.items():
        check_rows(name, len(weight), first["read"].get(name, 0), second["read"].get(name, 0))


def check_rows(name: str, rows: int, first: int, second: int) -> None:
    """How many rows of a tensor each of two ranks read."""
    if ".hc_" in name or "attn_sink" in name or "gate.bias" in name:
        assert first == second == rows, name  # every rank holds them whole
    elif "engram.emb" in name:
        assert (first, second) == (-(-rows // 2), rows // 2), name
    elif ".experts." in name and ".w2." in name:
        assert first == second == rows // 2, name
    elif ".w1." in name:  # gate rows come first
        assert (first, second) == (rows, 0), name
    elif ".w3." in name:
        assert (first, second) == (0, rows), name
    elif rows % 64 == 0 and ".compressor.w" not in name:
        assert first == second == rows // 2, name
