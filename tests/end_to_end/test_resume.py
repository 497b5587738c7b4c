"""A run that its system kills, as a process of its own, and what the next attempt makes of it."""

import dataclasses
import json
import os
import pickle
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data.config import DataConfig
from model.config import ModelConfig
from trainer.checkpoint.store import Checkpoints
from trainer.config import (
    CheckpointConfig,
    EvalConfig,
    LoggingConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    TrainerConfig,
)
from trainer.learner import build_learner
from trainer.metrics import read_metrics
from trainer.ranks import Ranks

GOLDEN = Path(__file__).parents[1] / "golden"
MEASURED = {"tokens_per_s", "rss_mb", "step_s", "data_wait_s", "engram_wait_s"}

WORKER = """
import pickle, sys
from pathlib import Path
from trainer.loop import train
from trainer.ranks import Ranks

if __name__ == "__main__":
    run_dir, attempt = Path(sys.argv[1]), int(sys.argv[2])
    config = pickle.loads((run_dir.parent / "config.pickle").read_bytes())

    outcome = train(
        config, run_dir=run_dir, attempt=attempt, ranks=Ranks(), resume=attempt > 1,
        say=lambda text: print(text, flush=True),
    )
    print(outcome.message, flush=True)
    sys.exit(outcome.code)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the configuration, and a run in it that nothing interrupted."""
    folder = tmp_path_factory.mktemp("runs")
    documents, dice = folder / "documents", random.Random(1)
    documents.mkdir()
    for number in range(30):
        words = dice.choices("to learn is to remember what was read before".split(), k=12)
        (documents / f"{number}.txt").write_text(" ".join(words))
    config = TrainerConfig(
        seed=1,
        model=ModelConfig.from_released(json.loads((GOLDEN / "tiny_text/config.json").read_text())),
        data=DataConfig(
            source="text",
            paths=(str(documents),),
            tokenizer=str(GOLDEN / "tokenizer.json"),
            pack_length=64,
            workers=1,
        ),
        optim=OptimConfig("adamw", 3e-3, 2, 2, 4, 3e-4, 0.9, 0.95, 1e-20, 0.1, 5.0),
        parallel=ParallelConfig(),
        train=TrainConfig(steps=8, packs_per_step=4, packs_per_micro_batch=2, threads=1),
        eval=EvalConfig(),
        checkpoint=CheckpointConfig(every=2),
        logging=LoggingConfig(),
    )
    (folder / "config.pickle").write_bytes(pickle.dumps(config))
    (folder / "worker.py").write_text(WORKER)
    process = start(folder, "through")
    assert finish(process)[0] == 0
    return folder


def start(place, name, attempt=1, faults=""):
    """A worker as a process group of its own, like a job step's."""
    run_dir = place / name
    run_dir.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(place / "worker.py"), str(run_dir), str(attempt)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(GOLDEN.parents[1]), "DSV41_FAULTS": faults},
    )


def finish(process):
    """(exit code, the rest of the output)."""
    out, _ = process.communicate(timeout=120)
    return process.returncode, out


def wait_for(process, text):
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the worker ended with {process.wait()} before it said {text!r}")


def checkpoints_of(run_dir):
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir())


def assert_same_end(place, name):
    config = pickle.loads((place / "config.pickle").read_bytes())
    ends = []
    for run_dir in (place / name, place / "through"):
        tensors = build_learner(config).tensors()
        checkpoints = Checkpoints(
            run_dir / "checkpoints", keep=9, attempt=99, ranks=Ranks(), say=print
        )
        state = checkpoints.load(checkpoints.path(8), tensors)
        records = [
            {k: v for k, v in record.items() if k not in MEASURED}
            for record in read_metrics(run_dir / "metrics.jsonl")
        ]
        ends.append((tensors, state, records))
    (tensors, state, records), (expected_tensors, *expected) = ends
    assert [state, records] == expected
    assert tensors.keys() == expected_tensors.keys()
    assert all(torch.equal(tensors[name], t) for name, t in expected_tensors.items())


@pytest.mark.slow
def test_a_save_cut_short_and_a_flipped_bit_cost_only_the_steps_in_between(place):
    run_dir = place / "killed"
    code, out = finish(start(place, "killed", faults="kill@save.manifest,step=6"))
    assert code == -signal.SIGKILL, out
    before = ["step_00000002", "step_00000004", "step_00000006.tmp-001"]
    assert checkpoints_of(run_dir) == before
    data = run_dir / "checkpoints/step_00000004/__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 3] ^= 4
    data.write_bytes(content)

    code, out = finish(start(place, "killed", attempt=2))
    assert code == 0, out
    assert f"{data} has changed since it was written" in out
    assert "resuming after step 2 from" in out
    after = ["step_00000004.damaged-002", "step_00000006", "step_00000008"]
    assert checkpoints_of(run_dir) == after
    assert_same_end(place, "killed")


@pytest.mark.long
def test_sigterm_to_a_whole_process_group_still_saves(place):
    process = start(place, "preempted")
    wait_for(process, "step 3/8")
    os.killpg(process.pid, signal.SIGTERM)
    code, out = finish(process)
    assert code == 75, out
    step = max(int(p[5:]) for p in checkpoints_of(place / "preempted"))
    assert f"Stopped after step {step} of 8." in out
    code, out = finish(start(place, "preempted", attempt=2))
    assert code == 0, out
    assert f"resuming after step {step} from" in out
    assert_same_end(place, "preempted")


@pytest.mark.long
@pytest.mark.parametrize("point", ["save.slice", "save.rename", "save.retire", "save.staged"])
def test_killed_while_it_saves_in_the_background_a_run_ends_the_same(place, point):
    folder, name = place / "background", point.replace(".", "-")
    folder.mkdir(exist_ok=True)
    config = pickle.loads((place / "config.pickle").read_bytes())
    checkpoint = dataclasses.replace(config.checkpoint, async_=True, keep=1)
    config = dataclasses.replace(config, checkpoint=checkpoint)
    (folder / "config.pickle").write_bytes(pickle.dumps(config))
    (folder / "worker.py").write_text(WORKER)
    code, out = finish(start(folder, name, faults=f"kill@{point},step=4"))
    assert code == -signal.SIGKILL, out
    code, out = finish(start(folder, name, attempt=2))
    assert code == 0, out
    assert "resuming after step" in out
    assert checkpoints_of(folder / name) == ["step_00000008"]
    assert_same_end(place, f"background/{name}")
