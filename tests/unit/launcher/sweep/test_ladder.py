"""What is compared of points, and when: by their records, however these come."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config import AshaConfig
from launcher.sweep.objective import Ladder, objective
from launcher.sweep.tune.records import Records

LOSSES = [{"step": n, "loss": 100.0 - n} for n in range(1, 41)]


def _reached(records: list[dict], rungs: list[int], metric: str = "auto") -> list[tuple]:
    ladder = Ladder(metric, rungs)
    return [found for record in records if (found := ladder.add(record))]


@pytest.mark.parametrize(
    ("config", "steps", "expected"),
    [
        (AshaConfig(), 90, [9, 27, 81]),
        (AshaConfig(), 91, [10, 30, 90]),
        (AshaConfig(), 81, [9, 27]),  # at the end nothing is left to be saved
        (AshaConfig(), 1, [1]),
        (AshaConfig(grace_steps=5, reduction=2), 41, [5, 10, 20, 40]),
        (AshaConfig(grace_steps=50), 40, [50]),
    ],
)
def test_rungs(config: AshaConfig, steps: int, expected: list[int]) -> None:
    assert config.rungs(steps) == expected


def test_each_rung_has_the_value_of_its_own_step() -> None:
    assert _reached(LOSSES, [2, 20, 50]) == [(2, 98.5), (20, 84.5)]


def test_a_step_that_is_not_logged_is_replaced_by_the_next() -> None:
    every = [record for record in LOSSES if record["step"] % 15 == 0]
    assert _reached(every, [2, 5, 20, 40]) == [(15, 85.0), (30, 77.5)]


def test_an_evaluation_counts_when_it_is_new() -> None:
    evaluated = [*LOSSES[:9], {"step": 9, "eval_loss": 7.0}, *LOSSES[9:]]
    assert _reached(evaluated, [9, 27], "eval_loss") == [(9, 7.0)]
    assert _reached(evaluated, [9, 27], "auto") == [
        (9, 95.0)
    ]  # of the same step: the loss is first
    assert _reached([*evaluated, {"step": 40, "eval_loss": 5.0}], [27]) == [(40, 5.0)]


def test_what_a_resumed_run_repeats_changes_nothing() -> None:
    repeated = [*LOSSES[:15], *LOSSES[5:15], *LOSSES[15:]]
    assert _reached(repeated, [10, 20]) == _reached(LOSSES, [10, 20])


@given(cuts=st.lists(st.integers(0, 2000)), again=st.integers(0, 40))
def test_a_file_that_grows_is_read_as_one_that_is_whole(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], again: int
) -> None:
    """Cut anywhere, in the middle of lines too, and written anew as a resume does."""
    folder = tmp_path_factory.mktemp("run")
    file, records = folder / "metrics.jsonl", Records(folder / "metrics.jsonl")
    text = "".join(json.dumps(record) + "\n" for record in LOSSES).encode()
    assert records.new() == []
    found = []
    for cut in sorted(cuts):
        with file.open("ab") as out:
            out.write(text[file.stat().st_size : cut])
        found += records.new()
    anew = "".join(json.dumps(record) + "\n" for record in LOSSES[:again])
    (folder / "new").write_text(anew)
    (folder / "new").replace(file)
    again_from = records.new()
    assert again_from == LOSSES[:again]
    with file.open("ab") as out:
        out.write(text[len(anew) :])
    again_from += records.new()
    assert again_from == LOSSES
    assert found == LOSSES[: len(found)]
    assert _reached(found + again_from, [10, 20]) == _reached(LOSSES, [10, 20])
    assert objective(folder, "auto") == sum(100.0 - n for n in range(31, 41)) / 10
