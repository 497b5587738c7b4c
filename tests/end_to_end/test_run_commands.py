"""A run that is watched, stopped from elsewhere, gone on with, and varied."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from .conftest import Place, installed

STEPS = 250


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def until_it_trains(place: Place, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not any(p.read_text().count("\n") >= 2 for p in place.metrics()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_stop_resume_and_resume_with_changes(place: Place) -> None:
    words = [*place.small, f"train.steps={STEPS}", "checkpoint.keep=1"]
    training = place.start([installed("dsv41-train"), *words])
    until_it_trains(place, training)
    (run,) = place.runs()
    listed = json.loads(place.run("dsv41", "runs", "--json").out)["runs"]
    assert [(r["run"], r["state"]) for r in listed] == [(f"small/{run.name}", "running")]
    stopped = place.run("dsv41", "stop", "small")
    assert stopped.code == 0, stopped.text
    assert training.wait(timeout=60) == 130
    step = records(run)[-1]["step"]
    assert 2 <= step < STEPS
    assert f"small/{run.name}: stopped, step {step}" in stopped.out
    assert (run / "checkpoints" / f"step_{step:08d}").is_dir()
    page = place.run("dsv41", "status", run.name).out
    assert f"stopped, step {step} of {STEPS}" in page and "whole" in page
    assert f"dsv41 resume runs/small/{run.name}" in page

    refused = place.run("dsv41", "resume", "small", "seed=2", "model.hidden_size=64")
    assert refused.code == 78 and refused.text.count("keep it") == 2
    assert place.runs() == [run]

    done = place.run("dsv41", "resume", "small", "--json", "launcher=torchrun")
    assert done.code == 0, done.text
    assert "launcher.kind: local -> torchrun" in done.err
    document = json.loads(done.out)
    assert (document["state"], document["attempts"]) == ("done", 2)
    assert f"resuming after step {step}" in done.err
    assert [r["step"] for r in records(run)] == list(range(1, STEPS + 1))

    end = STEPS + 5
    varied = place.run("dsv41", "resume", "small", f"train.steps={end}", "optim.weight_decay=0.5")
    assert varied.code == 0, varied.text
    assert f"train.steps: {STEPS} -> {end}" in varied.out
    child = next(path for path in place.runs() if path != run)
    lineage = json.loads((child / "lineage.json").read_text())
    assert lineage == {"parent": str(run), "step": STEPS}
    assert [r["step"] for r in records(child)] == list(range(STEPS + 1, end + 1))
    assert [p.name for p in (run / "checkpoints").iterdir()] == [f"step_{STEPS:08d}"]
    assert f"small/{run.name} at {STEPS}" in place.run("dsv41", "runs").out
    assert place.names() == {"configs", "words.txt", "runs"}
