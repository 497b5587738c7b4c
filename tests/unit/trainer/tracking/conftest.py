"""A module `wandb` that misbehaves on request, for the process that imports it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FAKE = """
import json, os, time

def reach(place, **said):
    with open(os.environ["FAKE_WANDB_LOG"], "a") as file:
        file.write(json.dumps({"place": place, **said}) + "\\n")
    how, _, where = os.environ.get("FAKE_WANDB", "").partition(" ")
    if where == place and how == "raise":
        raise RuntimeError(f"no {place} today")
    if where == place and how == "sleep":
        time.sleep(600)
    if where == place and how == "die":
        os._exit(3)

class Settings:
    def __init__(self, **values):
        self.values = values

class Config:
    def update(self, values, allow_val_change):
        reach("config", config=values)

class Run:
    config = Config()
    url = "https://wandb.test/it"
    starting_step = int(os.environ.get("FAKE_WANDB_STEP", "0"))

    def __init__(self, dir):
        self.dir = dir + "/wandb/offline-run-x/files"

    def log(self, values, step=None):
        reach("log", step=step, values={k: v for k, v in values.items() if not callable(v)})

    def log_artifact(self, artifact):
        pass

    def finish(self, exit_code):
        reach("finish", exit_code=exit_code)

class Artifact:
    def __init__(self, name, type):
        pass

    def add_dir(self, path, skip_cache, policy):
        reach("code", path=path)

def Table(columns, data):
    return data

def Image(path):
    return path

def init(*, dir, mode, settings, **named):
    print("noise of wandb")
    reach("init", mode=mode, **named)
    reach(f"init {mode}")
    return Run(dir)
"""

Log = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def fake_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    """Processes started from here import the fake; the result reads what it was asked to do.

    FAKE_WANDB="raise init" (or sleep, die; init, log, finish) makes it misbehave;
    FAKE_WANDB_STEP is the first step that the W&B run lacks.
    """
    home = tmp_path / "fake"
    home.mkdir()
    (home / "wandb.py").write_text(FAKE)
    log = home / "log.jsonl"
    paths = [str(home), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("FAKE_WANDB_LOG", str(log))
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(home / "no-netrc"))
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]
