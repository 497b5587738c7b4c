"""Suggestions for misspelt names, and how a list of problems reads."""

from __future__ import annotations

import pytest

from launcher.problems import ConfigProblems, nearest
from trainer.exit_codes import ExitCode

KNOWN = ["train", "train.steps", "train.clip_norm", "optim", "optim.lr", "model", "model.hc_mult"]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("train.stepz", "train.steps"),
        ("trian.steps", "train.steps"),
        ("train.lr", "optim.lr"),  # right name, wrong section
        ("lr", "optim.lr"),
        ("modle", "model"),
        ("steps", "train.steps"),
        ("clip_nrm", "train.clip_norm"),
        ("zebra", None),
    ],
)
def test_nearest(wrong: str, meant: str | None) -> None:
    assert nearest(wrong, KNOWN) == meant


def test_one_line_a_problem() -> None:
    told = ConfigProblems(["a is\n  wrong", "b too"])
    assert told.code == ExitCode.CONFIG
    assert told.message.splitlines() == [
        "2 problems with this configuration; nothing was started.",
        "",
        "  a is wrong",
        "  b too",
    ]
