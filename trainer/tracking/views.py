"""All views of a run, as the loop sees them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from trainer import phase
from trainer.config import TrainerConfig
from trainer.metrics import Record
from trainer.progress import Say
from trainer.tracking.sink import Item, Sink
from trainer.tracking.tensorboard_sink import TensorBoardSink
from trainer.tracking.tracker import Tracker
from trainer.tracking.wandb_sink import WandbSink, has_account

HURRY = 10.0  # seconds that a run which is not done waits at most: others wait for its end
QUIET = 2.0  # seconds of waiting without a word


class Views:
    """Hands each record and sample to every view, and says what they have to say."""

    def __init__(
        self, trackers: Sequence[Tracker] = (), *, say: Say = print, patience: float = HURRY
    ) -> None:
        self._trackers = trackers
        self._say = say
        self._patience = patience

    def show(self, record: Record) -> None:
        """Show a metrics record."""
        self._put(Item.of(record))

    def show_samples(self, step: int, texts: Sequence[tuple[str, str]]) -> None:
        """Show what the model wrote: pairs of a prompt and how it went on."""
        self._put(Item(step, texts=tuple(texts)))

    def close(self, *, done: bool) -> None:
        """End all views, in bounded time; one that is not done then is left behind."""
        limit = self._patience if done else min(self._patience, HURRY)
        start = time.monotonic()
        try:
            for tracker in self._trackers:
                tracker.finish(done=done)
            if not self._joined(start + min(limit, QUIET)):
                self._news()
                names = " and ".join(t.label for t in self._trackers if t.alive)
                self._say(f"waiting up to {limit:g} s for {names}")
            if not self._joined(start + limit):
                self._abandon(f"not finished in {limit:g} s")
        except KeyboardInterrupt:
            self._abandon("not waited for")
        self._news()

    def _joined(self, deadline: float) -> bool:
        """Whether all have ended by then; whoever watches this rank sees that it is waiting."""
        for tracker in self._trackers:
            while not tracker.join(min(deadline, time.monotonic() + 1)):
                if time.monotonic() >= deadline:
                    return False
                phase.tick()
        return True

    def _abandon(self, why: str) -> None:
        for tracker in self._trackers:
            tracker.abandon(why)

    def _put(self, item: Item) -> None:
        for tracker in self._trackers:
            tracker.put(item)
        self._news()

    def _news(self) -> None:
        for tracker in self._trackers:
            for text in tracker.news():
                self._say(text)


def open_views(
    config: TrainerConfig, *, run_dir: Path, attempt: int, last_step: int, say: Say
) -> Views:
    """The views that `config` asks for, beginning in the background. Only the first rank has any.

    last_step: of the checkpoint that this attempt goes on from; metrics.jsonl ends there.
    """
    chosen: list[Sink] = []
    wandb = config.logging.wandb
    if config.logging.tensorboard:
        chosen.append(TensorBoardSink(run_dir / "tensorboard", last_step=last_step))
    mode = wandb.resolved(os.environ, account=has_account(os.environ))
    if mode != "disabled":
        log = run_dir / "attempts" / f"{attempt:03d}" / "wandb.log"
        facts = asdict(config)
        chosen.append(WandbSink(wandb, mode=mode, run_dir=run_dir, log=log, settings=facts))
    history = run_dir / "metrics.jsonl"
    trackers = [Tracker(sink, history=history, last_step=last_step) for sink in chosen]
    return Views(trackers, say=say, patience=wandb.finish_timeout_s)
