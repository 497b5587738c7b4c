"""TensorBoard's event files over two attempts."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.tracking.sink import Item
from trainer.tracking.tensorboard_sink import TensorBoardSink
from trainer.tracking.tracker import Tracker


def attempt(run: Path, *, last_step: int, until: int) -> list[str]:
    """What is said by an attempt that goes on after last_step and logs up to `until`."""
    sink = TensorBoardSink(run / "tensorboard", last_step=last_step)
    tracker = Tracker(sink, history=run / "metrics.jsonl", last_step=last_step)
    for step in range(last_step + 1, until + 1):
        tracker.put(Item.of({"step": step, "loss": 1 / step, "gate": None}))
    tracker.put(Item(until, texts=(("once", "upon"),)))
    tracker.finish(done=True)
    assert tracker.join(time.monotonic() + 60)
    return list(tracker.news())


def test_a_later_attempt_replaces_what_an_earlier_one_had_too_much(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the tensorboard package is not installed")
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore
        EventAccumulator,
    )

    said = attempt(tmp_path, last_step=0, until=6)
    assert said == [f"TensorBoard: tensorboard --logdir {tmp_path / 'tensorboard'}"]
    attempt(tmp_path, last_step=4, until=8)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == list(range(1, 9))
    assert [e.value for e in events.Scalars("loss")] == pytest.approx([1 / s for s in range(1, 9)])
    assert events.Tags()["tensors"] == ["sample 0/text_summary"]


def test_a_run_that_begins_to_write_late_catches_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            written.append(purge_step)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def add_text(self, name: str, text: str, step: int) -> None:
            written.append((name, text, step))

        def close(self) -> None:
            written.append("closed")

    module = type("Module", (), {"SummaryWriter": Writer})
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    lines = [json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    attempt(tmp_path, last_step=2, until=3)
    assert written == [
        None,
        ("loss", 1.0, 1),
        ("loss", 0.5, 2),
        ("loss", 1 / 3, 3),
        ("sample 0", "'once' goes on 'upon'", 3),
        "closed",
    ]
