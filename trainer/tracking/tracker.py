"""A view of the run in its own thread, behind a bounded queue: training never waits for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from trainer.metrics import read_metrics
from trainer.tracking.sink import Item, Sink, SinkError

CAPACITY = 4096  # records that may wait
CHUNK = 500  # records sent at a time


class Tracker:
    """Feeds one sink.

    Of the records up to last_step, which earlier attempts wrote to the file `history`, those are
    sent first that the sink has not seen; of newer ones, those it has seen from an attempt that
    was ahead of its last checkpoint are left out. So steps only rise. A sink that raises is done
    with, and one that is slow loses the oldest records. Texts for people collect in `news`, which
    the main thread says: a thread of its own would tear what that one writes.
    """

    def __init__(
        self, sink: Sink, *, history: Path, last_step: int, capacity: int = CAPACITY
    ) -> None:
        self._sink = sink
        self._history = history
        self._last_step = last_step
        self._capacity = capacity
        self._changed = threading.Condition()
        self._queue: deque[Item] = deque()
        self._news: deque[str] = deque()
        self._done: bool | None = None  # None until it is to end
        self._dropped = 0
        self._alive = True
        self._thread = threading.Thread(target=self._work, name=sink.label, daemon=True)
        self._thread.start()

    @property
    def label(self) -> str:
        """What people call the view."""
        return self._sink.label

    @property
    def alive(self) -> bool:
        """Whether it still takes what it is given."""
        return self._alive

    def put(self, item: Item) -> None:
        """Show this; returns at once."""
        with self._changed:
            if not self._alive:
                return
            if len(self._queue) >= self._capacity:
                self._drop()
            self._queue.append(item)
            self._changed.notify()

    def news(self) -> Iterator[str]:
        """What there is to say since the last call."""
        while self._news:
            yield self._news.popleft()

    def finish(self, *, done: bool) -> None:
        """Begin to end: what waits is still sent. done: the run is complete."""
        with self._changed:
            self._done = done
            self._changed.notify()

    def join(self, deadline: float) -> bool:
        """Wait for the end until time.monotonic() is `deadline`; whether it was reached."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def abandon(self, why: str) -> None:
        """Give up without waiting; says `why`, unless it has ended by itself."""
        with self._changed:
            late, self._alive = self._alive, False
        self._sink.kill()
        if late:
            self._news.append(f"{self._sink.label}: {why}; metrics.jsonl has everything")

    def _drop(self) -> None:
        """Make room: the oldest item goes, texts last."""
        oldest = next((n for n, item in enumerate(self._queue) if not item.texts), 0)
        del self._queue[oldest]
        self._dropped += 1
        if self._dropped == 1:
            self._news.append(
                f"{self._sink.label} is slower than training: leaving out its oldest waiting "
                "records; metrics.jsonl has them"
            )

    def _work(self) -> None:
        try:
            self._feed()
        except Exception as error:  # whatever it is, it must not reach training
            self._sink.kill()
            why = str(error) if isinstance(error, SinkError) else repr(error)
            self._end(f"{self._sink.label}: {why}; training goes on without it")
        else:
            count = self._dropped
            self._end(f"{self._sink.label}: {count} records were left out" if count else "")

    def _end(self, text: str) -> None:
        with self._changed:
            if self._alive and text:  # else the main thread has given up, and said so
                self._news.append(text)
            self._alive = False
            self._queue.clear()

    def _feed(self) -> None:
        opened = self._sink.open()
        self._news.append(opened.said)
        missed = self._missed(opened.after)
        for start in range(0, len(missed), CHUNK):
            self._sink.send(missed[start : start + CHUNK])
        while items := self._take():
            new = [item for item in items if item.step > opened.after]
            if new:
                self._sink.send(new)
        self._sink.close(done=bool(self._done))

    def _missed(self, after: int) -> list[Item]:
        if after >= self._last_step or not self._history.exists():
            return []
        records = read_metrics(self._history)
        return [Item.of(r) for r in records if after < r["step"] <= self._last_step]

    def _take(self) -> list[Item]:
        """The next items, when there are some; none at the end."""
        with self._changed:
            while not self._queue and self._done is None:
                self._changed.wait()
            return [self._queue.popleft() for _ in range(min(CHUNK, len(self._queue)))]
