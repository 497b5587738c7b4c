"""One rank's run while it goes on: its parts, and what happens around the steps."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from data.corpus import Corpus
from trainer import phase
from trainer.checkpoint.store import Checkpoints
from trainer.config import TrainerConfig
from trainer.disk import agreed_writes
from trainer.evaluate import evaluate
from trainer.learner import Learner
from trainer.metrics import MetricsLog, Record
from trainer.progress import ProgressView
from trainer.ranks import Ranks
from trainer.samples import say_samples
from trainer.state import TrainState
from trainer.tracking.views import Views

UNLIMITED_S = 1e9  # stands for no limit where ranks compare whole numbers


@dataclass
class Run:
    """The parts of a run and where it stands. metrics is None on all ranks but the first."""

    config: TrainerConfig
    ranks: Ranks
    corpus: Corpus
    learner: Learner
    checkpoints: Checkpoints
    metrics: MetricsLog | None
    progress: ProgressView
    views: Views
    state: TrainState
    save_seconds: float = 0.0  # of the longest save that was waited for

    def log(self, record: Record) -> None:
        """Write a record where records go."""
        with agreed_writes(self.ranks, doing="writing the metrics", path=self.checkpoints.folder):
            if self.metrics is not None:
                self.metrics.write(record)
        self.views.show(record)

    def evaluate(self) -> None:
        """Measure the loss on held-out packs, record it and say it."""
        phase.enter("evaluate")
        result = evaluate(
            self.learner,
            self.corpus.heldout,
            count=self.config.eval.packs,
            packs_per_micro_batch=self.config.train.packs_per_micro_batch,
            ranks=self.ranks,
        )
        self.log(result.record(self.state.step))
        self.progress.say(
            f"step {self.state.step}: held-out loss {result.loss:.3f}, "
            f"perplexity {result.perplexity:,.1f}"
        )

    def say_samples(self) -> None:
        """Say what the model writes, and show it."""
        phase.enter("samples")
        texts = say_samples(
            self.config,
            self.learner,
            self.corpus.heldout,
            step=self.state.step,
            ranks=self.ranks,
            say=self.progress.say,
        )
        self.views.show_samples(self.state.step, texts)

    def save(self, *, wait: bool) -> None:
        """Write the checkpoint of this step; without `wait`, in the background where that is set.

        The metrics up to this step are on the disk before it can appear.
        """
        phase.enter("save")
        with agreed_writes(self.ranks, doing="writing the metrics", path=self.checkpoints.folder):
            if self.metrics is not None:
                self.metrics.sync()
        self.settle_save(wait=True)
        state = replace(self.state, engram=self.learner.store.fingerprint())
        began = time.monotonic()
        self.checkpoints.save(self.learner.tensors(), state, wait=wait)
        if wait or not self.checkpoints.saving:
            self.save_seconds = max(self.save_seconds, time.monotonic() - began)
        if not self.checkpoints.saving:
            self._say_saved(state.step)

    def time_to_save(self, seconds_left: float) -> bool:
        """Whether a checkpoint fits into the time that is left to this run; says so if not.

        seconds_left: to this rank; what counts is the rank that has least. As long as none was
        written nobody knows how long it takes, and it is tried: a save that is cut short leaves the
        older ones whole.
        """
        needed = self.ranks.largest(math.ceil(1000 * self.save_seconds)) / 1000
        left = -self.ranks.largest(-math.floor(1000 * min(seconds_left, UNLIMITED_S))) / 1000
        if needed <= left:
            return True
        self.progress.say(
            f"step {self.state.step}: not saved, since a checkpoint takes {needed:.0f} s and "
            f"{max(left, 0):.0f} s are left (resilience.grace_s)"
        )
        return False

    def settle_save(self, *, wait: bool = False) -> None:
        """Say that the save in the background is finished, if it is, or raise why it failed."""
        step = self.checkpoints.settle(wait=wait)
        if step is not None:
            self._say_saved(step)

    def close(self) -> None:
        """Finish a save in the background; release terminal, metrics and tables; end the views."""
        phase.enter("close")
        step = self.checkpoints.close()
        if step is not None:
            self._say_saved(step)
        self.progress.close()
        self.learner.store.close()
        if self.metrics is not None:
            self.metrics.close()
        self.views.close(done=self.state.step == self.config.train.steps)

    def _say_saved(self, step: int) -> None:
        self.progress.say(f"step {step}: saved {self.checkpoints.path(step)}")
