"""The command stays quick to start: heavy packages wait until they are used."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from launcher.own_packages import HOME

HEAVY = ["torch", "transformers", "ray", "wandb", "datasets", "matplotlib", "pandas"]

PROGRAM = f"""
import json, sys
from launcher import cli
at_start = [m for m in {HEAVY} if m in sys.modules]
from trainer import loop
from data.tokenizer import load_tokenizer
load_tokenizer("deepseek")
print(json.dumps([at_start, [m for m in {HEAVY} if m in sys.modules]]))
"""


def test_heavy_packages_wait() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(HOME)},
    )
    at_start, when_training = json.loads(done.stdout)
    assert at_start == []
    assert set(when_training) == {"torch", "transformers"}
