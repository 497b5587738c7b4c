"""Ranks that are killed without warning and started again, on other worlds, consume each sample as
one undisturbed run would. Real processes, loader workers included."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data.cache.encoded import Encoded
from data.cache.prepared import PreparedSet
from data.cache.writer import SetWriter
from data.documents import Document

ROOT = Path(__file__).parents[2]
STEPS, PACKS_PER_STEP = 600, 6

RANK = """
import json, sys, time, zlib
from pathlib import Path
from data.cache.prepared import PreparedSet
from data.loader import batches
from data.packs import PackedSet, PackSource
from data.plan.settings import PlanSettings
from data.plan.stored import StoredPlans

if __name__ == "__main__":
    folder, rank, ranks, first, steps, per_step, workers = sys.argv[1:]
    prepared = PreparedSet.open(Path(folder) / "set")
    plans = StoredPlans(prepared, PlanSettings(32, 4, "split", 0.0, 5))
    packs = PackedSet((PackSource("data", plans),), 32, 2, seed=5)
    log = open(Path(folder) / f"rank{rank}.log", "w", buffering=1)
    stream = batches(
        packs, first_step=int(first), steps=int(steps) - int(first),
        packs_per_step=int(per_step), packs_per_micro_batch=1,
        rank=int(rank), ranks=int(ranks), workers=int(workers),
    )
    for step, batch_list in enumerate(stream, int(first)):
        seen = [(b.sample_ids[0], zlib.crc32(b.input_ids.numpy().tobytes())) for b in batch_list]
        print(json.dumps([step, seen]), file=log)
        time.sleep(0.004)
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A set of nine windows, and the program of a rank."""
    dice = np.random.default_rng(0)
    writer = SetWriter(
        tmp_path / "set",
        header={"fingerprint": "f" * 64, "settings": {}, "files": ["made-up"]},
        labelled=False,
        window_documents=50,
    )
    documents = [
        Document(dice.integers(3, 400, n, dtype=np.int32))
        for n in dice.integers(2, 90, 420).tolist()
    ]
    writer.append(Encoded.of(documents, [(0, 1)] * len(documents)), position=None)
    writer.complete()
    assert PreparedSet.open(tmp_path / "set").windows == 9
    (tmp_path / "rank.py").write_text(RANK)
    return tmp_path


def start(folder: Path, *, ranks: int, first: int, workers: int) -> list[subprocess.Popen]:
    numbers = [str(n) for n in (ranks, first, STEPS, PACKS_PER_STEP, workers)]
    return [
        subprocess.Popen(
            [sys.executable, str(folder / "rank.py"), str(folder), str(rank), *numbers],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,  # so that its workers can be killed with it
        )
        for rank in range(ranks)
    ]


def consumed(folder: Path, ranks: int) -> dict[int, list]:
    """What all ranks together took in each step that every one of them finished."""
    logs = []
    for rank in range(ranks):
        path = folder / f"rank{rank}.log"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        logs.append(dict(map(json.loads, lines)))
    whole = set.intersection(*(set(log) for log in logs))
    return {step: [pair for log in logs for pair in log[step]] for step in whole}


@pytest.mark.long
def test_three_kills_on_one_two_and_three_ranks(folder):
    [alone] = start(folder, ranks=1, first=0, workers=0)
    assert alone.wait(120) == 0
    expected = consumed(folder, 1)
    assert len(expected) == STEPS
    dice, found, done = random.Random(3), {}, 0
    for ranks in (2, 3, 1):
        for log in folder.glob("rank*.log"):
            log.unlink()
        processes = start(folder, ranks=ranks, first=done, workers=1)
        goal = done + dice.randint(20, 120)
        deadline = time.monotonic() + 120
        while max(consumed(folder, ranks), default=0) < goal:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        now = consumed(folder, ranks)
        checkpoint = dice.randint(done + 1, max(now))  # what came after it is lost
        found |= {step: seen for step, seen in now.items() if step < checkpoint}
        done = checkpoint
    for process in start(folder, ranks=2, first=done, workers=1):
        assert process.wait(120) == 0
    found |= consumed(folder, 2)
    assert found == expected
    assert [seen[0][0] for _, seen in sorted(found.items())] == list(
        range(0, STEPS * PACKS_PER_STEP, PACKS_PER_STEP)
    )
