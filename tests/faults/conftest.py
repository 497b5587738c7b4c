"""Two real ranks under a real supervisor, and what a fault makes of them.

def test_it(rehearsal):
    ended = rehearsal.run("kill@forward,step=5,rank=1,attempt=1")
    ended.is_like_the_uninterrupted_one()
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from launcher import freeze, help_text, hydra_launcher
from launcher.processes import alive, descendants
from launcher.run_config import RunConfig
from launcher.run_dir import RunFolder
from launcher.validate import validate
from tests.builders import SMALL_MODEL, WORDS
from trainer.checkpoint.manifest import read_manifest
from trainer.metrics import read_metrics

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 8, 3  # a checkpoint after 3, 6 and 8 steps, held-out loss after 4 and 8
MEASURED = {"tokens_per_s", "rss_mb", "step_s", "data_wait_s", "engram_wait_s"}
TIMEOUT = 400.0

SMALL = (
    "+experiment=tiny",
    "data=text",
    "name=faults",
    "launcher=torchrun",
    "parallel.dp_shard=2",
    *SMALL_MODEL,
    "data.holdout=0.2",
    f"train.steps={STEPS}",
    "train.packs_per_step=4",
    "train.threads=1",
    "eval.every=4",
    "eval.packs=2",
    f"checkpoint.every={EVERY}",
    "checkpoint.keep=2",
    "resilience.grace_s=30",
)


def composed(folder: Path) -> RunConfig:
    """The run of the suite, its data and its runs below `folder`."""
    texts = folder / "texts"
    texts.mkdir()
    for number in range(24):  # no two packs alike: other samples would give another loss
        drawn = random.Random(number).choices(WORDS, k=13 * (4 + number % 5))
        (texts / f"{number:02d}.txt").write_text(" ".join(drawn))
    OmegaConf.register_new_resolver("dsv41_help", help_text.render, replace=True)
    hydra_launcher.register()
    GlobalHydra.instance().clear()
    own = (f"data.paths=[{texts}]", f"runs_dir={folder / 'runs'}")
    with initialize_config_module("conf", version_base="1.3"):
        return validate(compose("config", overrides=[*SMALL, *own]), environ={})


@dataclass
class Ended:
    """A command that has ended: its exit code, all that it printed, the folder of its run."""

    code: int
    text: str
    run: RunFolder
    rehearsal: Rehearsal

    def said(self, *texts: str) -> None:
        for text in texts:
            assert text in self.text, self.text

    def events(self, attempt: int, kind: str) -> list[dict[str, Any]]:
        lines = (self.run.attempt(attempt).path / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def is_like_the_uninterrupted_one(self, *, attempts: int = 2) -> None:
        """Done after so many attempts, with the same records and the same bits in the end."""
        assert self.code == 0, self.text
        assert self.run.last_attempt() == attempts, self.text
        through = self.rehearsal.through
        assert records(self.run) == records(through.run)
        assert tensors(self.run) == tensors(through.run)
        assert not list((self.run.path / "checkpoints").glob("*.tmp-*"))


def records(run: RunFolder) -> list[dict[str, Any]]:
    found = read_metrics(run.path / "metrics.jsonl")
    return [{k: v for k, v in record.items() if k not in MEASURED} for record in found]


def tensors(run: RunFolder) -> dict[str, str]:
    """Checksums of the files of the last checkpoint that hold tensors."""
    files = read_manifest(run.path / "checkpoints" / f"step_{STEPS:08d}")
    return {name: entry.sha256 for name, entry in files.items() if name.endswith(".distcp")}


class Running:
    """A command under way, and the processes below it."""

    def __init__(self, process: subprocess.Popen[str], run: RunFolder, rehearsal: Rehearsal):
        self.process = process
        self.run = run
        self._rehearsal = rehearsal

    def until(self, true: Callable[[], object], *, seconds: float = TIMEOUT) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.05)

    def beat(self, rank: int, *, attempt: int = 1) -> dict[str, Any]:
        """The rank's last sign of life; empty before the first."""
        try:
            file = self.run.attempt(attempt).path / f"heartbeat-{rank:05d}.json"
            return json.loads(file.read_text())
        except OSError:
            return {}

    def log(self, rank: int, *, attempt: int = 1) -> str:
        file = self.run.attempt(attempt).log(rank)
        return file.read_text() if file.exists() else ""

    def below(self) -> list[int]:
        return descendants(self.process.pid)

    def named(self, *words: str) -> list[int]:
        """Processes below the command in whose command line all `words` stand."""
        found = []
        for pid in self.below():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            except OSError:
                continue
            if all(word in line for word in words):
                found.append(pid)
        return found

    def end(self) -> Ended:
        text, _ = self.process.communicate(timeout=TIMEOUT)
        return Ended(self.process.returncode, text, self.run, self._rehearsal)


class Rehearsal:
    """Runs of one configuration; each test has its own, the uninterrupted one is shared."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = composed(folder)
        self._started: list[Running] = []
        self._count = 0
        self.through: Ended

    def start(
        self, faults: str = "", *, id: str | None = None, home: Path = ROOT, **changes: Any
    ) -> Running:
        """A command under way; `changes` replaces sections of the configuration, `id` goes on with
        that run, `home` holds the code that is submitted."""
        self._count += 1
        name = id or f"run{self._count}"
        file = self.folder / f"{name}.yaml"
        file.write_text(freeze.to_yaml(replace(self.config, **changes)))
        process = subprocess.Popen(
            [sys.executable, "-P", str(ROOT / "tests" / "faults" / "command.py"), str(file), name],
            env=os.environ
            | {"PYTHONPATH": str(home), "DSV41_FAULTS": faults, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        running = Running(process, RunFolder(self.config.home / name), self)
        self._started.append(running)
        return running

    def run(self, faults: str = "", *, id: str | None = None, **changes: Any) -> Ended:
        return self.start(faults, id=id, **changes).end()

    def clean_up(self) -> None:
        """End what a failed test has left running."""
        for running in self._started:
            if running.process.poll() is None:
                below = running.below()
                running.process.kill()
                running.process.communicate()
                end = time.monotonic() + 15
                while any(map(alive, below)) and time.monotonic() < end:
                    time.sleep(0.1)
        self._started.clear()


@pytest.fixture(scope="session")
def _suite(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    suite = Rehearsal(tmp_path_factory.mktemp("faults"))
    suite.through = suite.run(id="through")
    assert suite.through.code == 0, suite.through.text
    return suite


@pytest.fixture
def rehearsal(_suite: Rehearsal) -> Iterator[Rehearsal]:
    yield _suite
    _suite.clean_up()
