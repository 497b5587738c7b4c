"""One rank and two give the same training: gradients, losses, weights, tables."""

from __future__ import annotations

import dataclasses
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from model.config import EngramStoreConfig
from model.engram.owners import OwnerStore
from model.names import table_name
from tests.builders import trainer_config
from tests.learnt import weights
from trainer.config import (
    EvalConfig,
    LoggingConfig,
    ParallelConfig,
    TrainerConfig,
)
from trainer.metrics import read_metrics

PROGRAM = Path(__file__).with_name("rank_program.py")
STEPS = 10
# Relative errors. An Engram gate near zero has the slope of a square root, up to 500, and magnifies
# the last bits of what flows through it. So the gradient's norm is compared while the two runs
# still agree to the last bits, the losses to the end.
LIMITS = {
    "loss": (1e-4, STEPS),
    "balance_loss": (1e-4, STEPS),
    "eval_loss": (1e-4, STEPS),
    "grad_norm": (1e-4, 6),
}


def run(config: TrainerConfig, folder: Path, name: str) -> Path:
    """Train on as many gloo ranks as the mesh has; the folder of the run."""
    world = config.parallel.world
    (folder / f"{name}.pickle").write_bytes(pickle.dumps(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [folder / f"{name}.pickle", folder / f"{name}.pt", folder / name]
    place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), *map(str, words)],
            env={**os.environ, **place, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    output = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0] * world, "\n".join(output)
    return folder / name


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> tuple[TrainerConfig, Path]:
    folder = tmp_path_factory.mktemp("ranks")
    config = trainer_config(folder)
    return config, run(config, folder, "one")


MESHES = {
    "shard, recomputed": ParallelConfig(dp_shard=2, recompute="full"),
    "copy": ParallelConfig(dp_replicate=2),
}


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, id=name, marks=[pytest.mark.long] if name == "copy" else [])
        for name, mesh in MESHES.items()
    ],
)
def test_two_ranks_train_like_one(single, mesh):
    config, one = single
    name = f"two_{mesh.dp_shard}"
    two = run(dataclasses.replace(config, parallel=mesh), one.parent, name)

    expected = torch.load(one.with_suffix(".pt"))
    found = torch.load(two.with_suffix(".pt"))
    assert found["first"].keys() == expected["first"].keys()
    for parameter, grad in expected["first"].items():
        error = (found["first"][parameter] - grad).norm() / grad.norm().clamp_min(1e-30)
        # Engram's gate has the slope of a square root: its weights are the least certain.
        limit = 1e-4 if parameter.endswith(("q_weight", "k_weight")) else 1e-5
        assert error <= limit, parameter
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-6)

    records = [read_metrics(path / "metrics.jsonl") for path in (one, two)]
    assert len(records[0]) == len(records[1]) == STEPS + 2
    for left, right in zip(*records, strict=True):
        for key, (limit, last) in LIMITS.items():
            if left.get(key) is not None and left["step"] <= last:
                assert right[key] == pytest.approx(left[key], rel=limit), (left["step"], key)
        assert right.get("tokens_total") == left.get("tokens_total")
        if "loss" in left:
            assert right["engram_lookup_bytes"] > left["engram_lookup_bytes"] == 0

    left, right = (weights(config, path) for path in (one, two))
    assert left.keys() == right.keys()
    for part, limit in (("model/", 1e-4), ("tables/", 2e-3)):
        names = [n for n in left if n.startswith(part)]
        change = sum(float((right[n] - left[n]).square().sum()) for n in names)
        assert change <= limit**2 * sum(float(left[n].square().sum()) for n in names), part


@pytest.mark.long
def test_two_ranks_round_to_bfloat16_like_one(tmp_path):
    """FSDP rounds parameters when it gathers them, one rank where it uses them."""
    config = trainer_config(tmp_path)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dtype="bfloat16"),
        train=dataclasses.replace(config.train, steps=2),
        eval=EvalConfig(),
    )
    found = []
    for mesh in (ParallelConfig(), ParallelConfig(dp_shard=2)):
        name = f"narrow_{mesh.world}"
        run(dataclasses.replace(config, parallel=mesh), tmp_path, name)
        found.append(
            (torch.load(tmp_path / f"{name}.pt"), read_metrics(tmp_path / name / "metrics.jsonl"))
        )
    (one, metrics), (two, others) = found
    assert one["first"].keys() == two["first"].keys()
    for parameter, grad in one["first"].items():
        assert grad.dtype == two["first"][parameter].dtype == torch.float32
        error = (two["first"][parameter] - grad).norm() / grad.norm().clamp_min(1e-30)
        assert error <= 1e-5, parameter
    assert two["norm"] == pytest.approx(one["norm"], rel=1e-6)
    for left, right in zip(metrics, others, strict=True):
        assert right["loss"] == pytest.approx(left["loss"], rel=1e-3)


@pytest.mark.long
def test_two_ranks_read_frozen_tables_and_write_samples_like_one(tmp_path):
    config = trainer_config(tmp_path)
    store = OwnerStore(dataclasses.replace(config.model, initializer_range=0.5), seed=1)
    tables = zip(store.layers, store.weight, strict=True)
    save_file({table_name(n): w for n, w in tables}, tmp_path / "model.safetensors")
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, engram=EngramStoreConfig("mapped", str(tmp_path))),
        train=dataclasses.replace(config.train, steps=2),
        eval=EvalConfig(),
        logging=LoggingConfig(samples=1),
    )
    found = []
    for mesh in (ParallelConfig(), ParallelConfig(dp_shard=2)):
        name = f"frozen_{mesh.world}"
        run(dataclasses.replace(config, parallel=mesh), tmp_path, name)
        found.append(
            (torch.load(tmp_path / f"{name}.pt"), read_metrics(tmp_path / name / "metrics.jsonl"))
        )
    (one, metrics), (two, others) = found
    assert one["first"].keys() == two["first"].keys()
    assert not any(name.startswith("table") for name in one["first"])
    assert two["norm"] == pytest.approx(one["norm"], rel=1e-6)
    for left, right in zip(metrics, others, strict=True):
        assert right["loss"] == pytest.approx(left["loss"], rel=1e-4)
        assert right["engram_gate_mean"] == pytest.approx(left["engram_gate_mean"], rel=1e-4)
