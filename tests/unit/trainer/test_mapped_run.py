"""Runs whose Engram tables are rows in files: frozen, not in checkpoints, and never another's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.config import EngramStoreConfig
from model.engram.mapped import MappedStore
from model.engram.owners import OwnerStore
from model.engram.tables.table import sampled_rows
from model.names import table_name
from trainer import loop
from trainer.exit_codes import ExitCode
from trainer.loop import read_ahead
from trainer.metrics import read_metrics
from trainer.ranks import Ranks
from trainer.state import TrainState

MEASURED = {"tokens_per_s", "rss_mb", "step_s", "data_wait_s", "engram_wait_s"}


def write_tables(config, folder: Path, seed: int = 0) -> Path:
    local = OwnerStore(dataclasses.replace(config.model, initializer_range=0.5), seed=seed)
    weights = {table_name(n): w for n, w in zip(local.layers, local.weight, strict=True)}
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    return folder


def reading(config, folder: Path, **train):
    store = EngramStoreConfig("mapped", str(folder))
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, engram=store),
        train=dataclasses.replace(config.train, **train),
    )


def train(config, run_dir, *, attempt=1, resume=False):
    run_dir.mkdir(exist_ok=True)
    return loop.train(
        config,
        run_dir=run_dir,
        attempt=attempt,
        ranks=Ranks(),
        resume=resume,
        say=lambda text: None,
    )


def records(run_dir):
    found = read_metrics(run_dir / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k not in MEASURED} for r in found]


@pytest.fixture
def tables(config, tmp_path):
    return write_tables(config, tmp_path / "tables")


def test_a_run_resumes_exactly_and_leaves_the_tables_alone(config, tables, tmp_path):
    before = (tables / "model.safetensors").read_bytes()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(reading(config, tables, steps=4), whole).code == ExitCode.DONE
    assert train(reading(config, tables, steps=2), parts).code == ExitCode.DONE
    done = train(reading(config, tables, steps=4), parts, attempt=2, resume=True)
    assert (done.code, done.step) == (ExitCode.DONE, 4)
    steps = [[r for r in records(run) if "loss" in r] for run in (whole, parts)]
    assert steps[0] == steps[1] and len(steps[0]) == 4
    assert steps[0][-1]["engram_gate_mean"] > 0
    assert (tables / "model.safetensors").read_bytes() == before
    checkpoint = whole / "checkpoints" / "step_00000004"
    saved = sum(f.stat().st_size for f in checkpoint.rglob("*"))
    state = TrainState.read(checkpoint)
    assert state.engram["source"] == str(tables)
    assert len(state.engram["tables"]) == 2
    moved = tables.rename(tmp_path / "elsewhere")
    assert train(reading(config, moved, steps=5), whole, attempt=2, resume=True).step == 5
    local = tmp_path / "local"
    short = dataclasses.replace(config.train, steps=1)
    assert train(dataclasses.replace(config, train=short), local).code == ExitCode.DONE
    with_tables = sum(f.stat().st_size for f in (local / "checkpoints").rglob("*"))
    rows, dim = sum(config.model.engram_num_embeddings), config.model.engram_head_dim
    assert with_tables - saved > 3 * 4 * rows * dim  # values and two moments


def test_the_first_step_is_that_of_the_same_tables_in_memory(config, tables, tmp_path, monkeypatch):
    train(reading(config, tables, steps=1), tmp_path / "mapped")
    weights = load_file(tables / "model.safetensors")
    build = loop.open_run

    def filled(*args, **kwargs):
        run = build(*args, **kwargs)
        assert isinstance(run.learner.store, OwnerStore)
        for layer, weight in zip(run.learner.store.layers, run.learner.store.weight, strict=True):
            weight.copy_(weights[table_name(layer)])
        return run

    monkeypatch.setattr(loop, "open_run", filled)
    short = dataclasses.replace(config.train, steps=1)
    train(dataclasses.replace(config, train=short), tmp_path / "local")
    (mapped,), (local,) = (
        [r for r in records(tmp_path / name) if "loss" in r] for name in ("mapped", "local")
    )
    assert mapped["loss"] == local["loss"]
    assert mapped["engram_gate_mean"] == local["engram_gate_mean"]
    assert mapped["grad_norm"] < local["grad_norm"]  # without the tables' part


def test_another_source_at_resume_is_refused_with_both_named(config, tables, tmp_path):
    run = tmp_path / "run"
    train(reading(config, tables, steps=1), run)
    other = write_tables(config, tmp_path / "other", seed=1)
    outcome = train(reading(config, other, steps=2), run, attempt=2, resume=True)
    assert outcome.code == ExitCode.BAD_DATA
    for text in (f"now:  {other}: ", f"then: {tables}: ", "layers.1.engram.embed.weight"):
        assert text in outcome.message
    assert train(reading(config, tables, steps=2), run, attempt=3, resume=True).step == 2


def test_a_restored_table_that_is_not_the_saved_one_is_refused(config, tmp_path, monkeypatch):
    run = tmp_path / "run"
    short = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=1))
    train(short, run)
    fingerprint = OwnerStore.fingerprint

    def emptied(self):
        for weight in self.weight:
            weight.zero_()
        return fingerprint(self)

    monkeypatch.setattr(OwnerStore, "fingerprint", emptied)
    outcome = train(short, run, attempt=2, resume=True)
    assert outcome.code == ExitCode.BAD_DATA
    assert "are not those that were saved" in outcome.message


def test_missing_tables_are_a_configuration_error(config, tables, tmp_path):
    (tables / "model.safetensors").unlink()
    outcome = train(reading(config, tables), tmp_path / "run")
    assert outcome.code == ExitCode.CONFIG
    assert "model.engram.path" in outcome.message


def test_a_damaged_row_ends_the_run_as_bad_data(config, tables, tmp_path):
    weights = load_file(tables / "model.safetensors")
    weight = weights[table_name(1)]
    sampled = torch.zeros(len(weight), dtype=torch.bool)
    sampled[torch.from_numpy(sampled_rows(len(weight)))] = True
    weight[~sampled] = torch.nan
    save_file(weights, tables / "model.safetensors")
    outcome = train(reading(config, tables), tmp_path / "run")
    assert (outcome.code, outcome.step) == (ExitCode.BAD_DATA, 0)
    assert f"of {table_name(1)} holds values that are no finite numbers" in outcome.message


def test_rows_are_asked_for_one_step_ahead(config, tables, monkeypatch):
    store = MappedStore(reading(config, tables).model, token_map=None)
    asked = []
    monkeypatch.setattr(store, "read_ahead", asked.append)
    steps: list = [[SimpleNamespace(engram_rows=number)] for number in range(4)]
    begun = [(step[0].engram_rows, len(asked)) for step in read_ahead(iter(steps), store)]
    assert begun == [(0, 1), (1, 2), (2, 3), (3, 3)]
    assert asked == [[1], [2], [3]]
    store.close()
