"""A view's thread: bounded, in order, once; whatever its sink does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from trainer.tracking.sink import Item, Opened, SinkError
from trainer.tracking.tracker import Tracker
from trainer.tracking.views import Views


class Recorder:
    """A sink that keeps what it is sent; `gate` holds it in open, log or close until it is set."""

    label = "view"

    def __init__(self, *, after: int = 0, hold: str = "", fail: str = "") -> None:
        self.items: list[Item] = []
        self.done: bool | None = None
        self.killed = False
        self.gate = threading.Event()
        self.reached = threading.Event()
        self._after, self._hold, self._fail = after, hold, fail

    def open(self) -> Opened:
        self._reach("open")
        return Opened(self._after, "view: here")

    def send(self, items: Sequence[Item]) -> None:
        self._reach("send")
        self.items += items

    def close(self, *, done: bool) -> None:
        self._reach("close")
        self.done = done

    def kill(self) -> None:
        self.killed = True
        self.gate.set()

    def _reach(self, place: str) -> None:
        if place == self._fail:
            raise SinkError(f"no {place}")
        if place == self._hold:
            self.reached.set()
            self.gate.wait(20)

    @property
    def steps(self) -> list[int]:
        return [item.step for item in self.items]


def history(folder: Path, last: int) -> Path:
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": s, "loss": 1 / s}) + "\n" for s in range(1, last)))
    return file


def view(sink: Recorder, file: Path, *, last_step: int = 0, **options: int) -> Tracker:
    return Tracker(sink, history=file, last_step=last_step, **options)


def ended(tracker: Tracker, *, done: bool = True) -> list[str]:
    tracker.finish(done=done)
    assert tracker.join(time.monotonic() + 20)
    return list(tracker.news())


def test_figures_arrive_in_order_without_those_that_are_null(tmp_path: Path) -> None:
    sink = Recorder()
    tracker = view(sink, tmp_path / "none")
    for step in (1, 2, 3):
        tracker.put(Item.of({"step": step, "loss": 0.5, "gate": None, "norm": float("inf")}))
    tracker.put(Item(3, texts=(("a", "b"),)))
    assert ended(tracker) == ["view: here"]
    assert sink.steps == [1, 2, 3, 3]
    assert sink.items[0].values == {"loss": 0.5}
    assert sink.items[3].texts == (("a", "b"),)
    assert sink.done is True


def test_steps_rise_over_attempts_and_none_is_missing(tmp_path: Path) -> None:
    file = history(tmp_path, 20)
    ahead = Recorder(after=12)  # an attempt died at step 12; this one goes on from step 10
    tracker = view(ahead, file, last_step=10)
    for step in range(11, 15):
        tracker.put(Item.of({"step": step, "loss": 1.0}))
    ended(tracker)
    assert ahead.steps == [13, 14]
    behind = Recorder(after=7)  # it was lost at step 7, training went on to 10
    tracker = view(behind, file, last_step=10)
    tracker.put(Item.of({"step": 11, "loss": 1.0}))
    ended(tracker)
    assert behind.steps == [8, 9, 10, 11]


def test_a_slow_sink_loses_the_oldest_figures_and_says_how_many(tmp_path: Path) -> None:
    sink = Recorder(hold="open")
    tracker = view(sink, tmp_path / "none", capacity=5)
    tracker.put(Item(0, texts=(("a", "b"),)))
    started = time.monotonic()
    for step in range(1, 1001):
        tracker.put(Item.of({"step": step, "loss": 1.0}))
    assert time.monotonic() - started < 1  # nothing waited
    sink.gate.set()
    said = ended(tracker)
    assert sink.steps[-4:] == [997, 998, 999, 1000]
    assert len(sink.items) <= 5
    assert "slower than training" in said[0]
    assert said[-1] == "view: 996 records were left out"


@pytest.mark.parametrize("place", ["open", "send", "close"])
def test_a_sink_that_raises_is_done_with_in_one_line(tmp_path: Path, place: str) -> None:
    sink = Recorder(fail=place)
    tracker = view(sink, tmp_path / "none")
    tracker.put(Item.of({"step": 1, "loss": 1.0}))
    said = ended(tracker)
    assert sink.killed
    assert said[-1] == f"view: no {place}; training goes on without it"
    tracker.put(Item.of({"step": 2, "loss": 1.0}))
    assert list(tracker.news()) == []


@pytest.mark.parametrize("place", ["open", "send", "close"])
def test_a_sink_that_hangs_is_left_behind_in_time(tmp_path: Path, place: str) -> None:
    sink, said = Recorder(hold=place), list[str]()
    views = Views([view(sink, tmp_path / "none")], say=said.append, patience=0.3)
    views.show({"step": 1, "loss": 1.0})
    started = time.monotonic()
    views.close(done=True)
    assert time.monotonic() - started < 5
    assert sink.killed
    assert said[-1] == "view: not finished in 0.3 s; metrics.jsonl has everything"


def test_ctrl_c_while_waiting_leaves_the_view_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, said = Recorder(hold="close"), list[str]()
    views = Views([view(sink, tmp_path / "none")], say=said.append, patience=20)

    def interrupted(tracker: Tracker, deadline: float) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tracker, "join", interrupted)
    views.close(done=True)
    assert sink.killed
    assert said[-1] == "view: not waited for; metrics.jsonl has everything"


def test_without_views_nothing_happens(capsys: pytest.CaptureFixture[str]) -> None:
    views = Views()
    views.show({"step": 1, "loss": None})
    views.show_samples(1, [("a", "b")])
    views.close(done=True)
    assert capsys.readouterr().out == ""
