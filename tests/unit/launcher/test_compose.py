"""What Hydra cannot compose: every override to blame is named, with the fix, in one go."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig

from launcher import compose
from launcher.cli import together
from launcher.problems import ConfigProblems
from trainer.exit_codes import ExitCode

Composed = Callable[..., DictConfig]


@pytest.fixture
def diagnosed(composed: Composed) -> Callable[..., ConfigProblems]:
    """diagnosed("a=1", ...): the problems of a command line; None if there are none."""
    from hydra.errors import HydraException

    def diagnose(*argv: str) -> ConfigProblems:
        args: Namespace = get_args_parser().parse_args(together(argv))
        found = compose.diagnose(args, HydraException("what Hydra said"))
        assert found is not None
        return found

    return diagnose


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["+experiment=tinny"], "experiment=tinny does not exist; did you mean experiment=tiny?"),
        (["experiment=tiny"], "experiment=tiny: experiment has no choice to replace yet; write +"),
        (["+experiment=tiny", "model=zebra"], "model=zebra does not exist; use one of flash, tiny"),
        (["+experiment=tiny", "+model=tiny"], "+model=tiny: model is set already; write model="),
        (["+experiment=tiny", "+seed=3"], "+seed=3: seed is set already; write seed=3"),
        (["+experiment=tiny", "train.stepz=3"], "train.stepz is not a setting; did you mean"),
        (["+experiment=tiny", "modle=flash"], "modle is not a setting; did you mean model?"),
        (["+experiment=tiny", "optim.lr=1,2"], "optim.lr=1,2 gives several values; add -m"),
        (["+experiment=tiny", "~nothing"], "~nothing: Could not delete from config."),
        (["+experiment=tiny", "-m", "seed=1,2", "model=x,tiny"], "model=x does not exist; use"),
    ],
)
def test_one_mistake(diagnosed, argv: list[str], told: str) -> None:
    found = diagnosed(*argv)
    assert found.code == ExitCode.CONFIG
    assert len(found.problems) == 1, found.problems
    assert found.problems[0].startswith(told)


def test_every_mistake_of_every_kind(diagnosed) -> None:
    found = diagnosed(
        *["+experiment=tinny", "train.stepz=5", "+typo=1", "optim.lr=fast", "modle=flash"],
        *["eval.every=${nowhere}", "optim=adamm", "whatever"],
    )
    starts = [
        "whatever is not understood",
        "experiment=tinny does not exist",
        "train.stepz is not a setting",
        "modle is not a setting",
        "optim=adamm does not exist; did you mean optim=adamw?",
        "typo is not a setting",
        "eval.every=${nowhere} cannot be resolved",
        "optim.lr=fast must be a number",
    ]
    assert found.code == ExitCode.CONFIG
    assert len(found.problems) == len(starts), found.problems
    for start in starts:
        assert sum(p.startswith(start) for p in found.problems) == 1, start


def test_later_overrides_may_be_needed_by_earlier_ones(diagnosed, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "more.yaml").write_text("# @package _global_\nextra: {depth: 1}\n")
    found = diagnosed(
        *["--config-dir", str(tmp_path), "extra.depth=2", "+experiment=more", "seeed=1"]
    )
    assert found.problems[0] == "seeed is not a setting; did you mean seed?"
    assert not any(p.startswith("extra.depth") for p in found.problems)


def test_all_values_of_a_sweep_are_looked_at(diagnosed) -> None:
    found = diagnosed("+experiment=tiny", "-m", "seed=1,x,-5", "model=tiny,hugee")
    assert [p.partition(" ")[0] for p in found.problems] == [
        "model=hugee",
        "seed=x",
        "seed=-5",
    ]


def test_a_wrong_command_alone_is_usage(diagnosed) -> None:
    assert diagnosed("+experiment=tiny", "what is this").code == ExitCode.USAGE


@pytest.mark.parametrize("flags", [["--cfg", "job"], ["--help"], ["--info", "defaults"]])
def test_what_is_only_shown_need_not_be_complete(diagnosed, flags: list[str]) -> None:
    assert diagnosed("seeed=1", *flags).problems == ["seeed is not a setting; did you mean seed?"]


def test_a_broken_file_is_named(diagnosed, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bad.yaml").write_text("train: {steps: 3\n")
    (told,) = diagnosed("--config-dir", str(tmp_path), "+experiment=bad").problems
    assert told.startswith("+experiment=bad: ")
    assert "bad.yaml" in told


def test_an_option_missing_inside_an_experiment(diagnosed, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [tiny, {override /model: hugee}]\n"
    )
    (told,) = diagnosed("--config-dir", str(tmp_path), "+experiment=mine").problems
    options = "flash, tiny, tiny_image"
    assert told == f"+experiment=mine: model=hugee does not exist; use one of {options}"


def test_errors_that_no_override_explains(composed: Composed) -> None:
    args = get_args_parser().parse_args(["+experiment=tiny"])
    assert compose.diagnose(args, KeyError("bug")) is None
    usage = compose.diagnose(args, ValueError("Only one of --run, --multirun"))
    assert usage is not None
    assert usage.code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["a=1", "b=2", "-m"], ["a=1", "b=2", "-m"]),
        (["a=1", "-m", "b=2"], ["a=1", "b=2", "-m"]),
        (["--config-dir", "d", "a=1", "-m", "b=2"], ["a=1", "b=2", "--config-dir", "d", "-m"]),
        (["a=1", "--bogus"], ["a=1", "--bogus"]),
    ],
)
def test_overrides_may_stand_anywhere(argv: list[str], expected: list[str]) -> None:
    assert together(argv) == expected
