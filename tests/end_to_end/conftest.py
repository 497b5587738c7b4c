"""The installed commands, run as a user runs them, with a model that trains in seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

GOLDEN_TOKENIZER = Path(__file__).parents[1] / "golden" / "tokenizer.json"

T = TypeVar("T")

SMALL = """\
# @package _global_
# trains in seconds
defaults:
  - tiny
  - override /data: text
name: small
data:
  paths: [{words}]
  tokenizer: {tokenizer}
  pack_length: 64
  holdout: 0
model:
  vocab_size: 448
  hidden_size: 32
  num_hidden_layers: 4
  compress_ratios: [0, 0, 2, 1]
  kv_source_layer_ids: [2, 3]
  index_source_layer_ids: [2, 3]
  candidate_source_layer_id: 3
  moe_intermediate_size: 16
  engram_layer_ids: [1]
  engram_num_embeddings: [384]
  engram_vocab_size: 50
  engram_n_heads: 2
  engram_compressed_vocab_size: 323
  image_token_id: 3
train:
  steps: 3
  packs_per_step: 2
  threads: 1
eval:
  every: 0
"""


@dataclass
class Ended:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


@dataclass
class Place:
    """A user's folder with an own experiment in configs/, and the commands run there."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    small: tuple[str, ...] = ("--config-dir", "configs", "+experiment=small")

    def start(self, words: list[str], env: Mapping[str, str] | None = None) -> subprocess.Popen:
        return subprocess.Popen(
            words,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**clean_environment(), **self.env, **(env or {})},
            start_new_session=True,
        )

    def run(self, *words: str, env: Mapping[str, str] | None = None) -> Ended:
        """Run a command to its end. The first word may be one of our commands."""
        process = self.start([installed(words[0]), *words[1:]], env)
        out, err = process.communicate(timeout=240)
        return Ended(process.returncode, out, err)

    def train(self, *words: str, env: Mapping[str, str] | None = None) -> Ended:
        return self.run("dsv41-train", *words, env=env)

    def begin(
        self,
        *words: str,
        command: tuple[str, ...] = ("dsv41-train",),
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen:
        """Start training, and do not wait for its end."""
        return self.start([installed(command[0]), *command[1:], *words], env)

    def saved(self) -> list[Path]:
        """The finished checkpoints of all runs."""
        return list(self.folder.glob("runs/*/*/checkpoints/step_????????"))

    def wait_for(
        self, what: Callable[[], T], process: subprocess.Popen, seconds: float = 200.0
    ) -> T:
        """What `what` gives, once that is something, while `process` runs."""
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "nothing happened"
            time.sleep(0.05)
        return found

    def train_until(self, step: int, number: signal.Signals, *words: str) -> Ended:
        """Send a signal once `step` steps are logged."""
        process = self.begin(*words)
        self.wait_for(
            lambda: any(len(p.read_text().splitlines()) >= step for p in self.metrics()),
            process,
            seconds=240,
        )
        process.send_signal(number)
        out, err = process.communicate(timeout=240)
        return Ended(process.returncode, out, err)

    def losses(self, run: Path) -> dict[int, float]:
        """By step, of one run."""
        records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return {record["step"]: record["loss"] for record in records}

    def metrics(self) -> list[Path]:
        return list(self.folder.glob("runs/*/*/metrics.jsonl"))

    def runs(self) -> list[Path]:
        """Every run's folder, oldest first."""
        return sorted(self.folder.glob("runs/*/*"), key=lambda p: p.stat().st_ctime_ns)

    def names(self) -> set[str]:
        """What lies in the user's folder."""
        return {p.name for p in self.folder.iterdir()}


def installed(name: str) -> str:
    """The path of one of our commands in the environment that runs the tests."""
    path = Path(sys.executable).parent / name
    return str(path) if name.startswith("dsv41") else name


def clean_environment() -> dict[str, str]:
    """This process's environment without what would change the commands."""
    ours = ("PYTHONPATH", "PYTHONSAFEPATH", "HYDRA_FULL_ERROR", "WORLD_SIZE", "RANK")
    return {key: value for key, value in os.environ.items() if key not in ours}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    folder = tmp_path / "user"
    (folder / "configs" / "experiment").mkdir(parents=True)
    words = folder / "words.txt"
    words.write_text("the cat sat on the mat and then it ran away from the dog " * 60)
    (folder / "configs" / "experiment" / "small.yaml").write_text(
        SMALL.format(words=words, tokenizer=GOLDEN_TOKENIZER)
    )
    return Place(folder)
