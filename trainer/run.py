"""One rank's run while it goes on: its parts, and what happens around the steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from data.corpus import Corpus
from trainer.checkpoint import Checkpoints
from trainer.config import TrainerConfig
from trainer.disk import agreed_writes
from trainer.evaluate import evaluate
from trainer.learner import Learner
from trainer.metrics import MetricsLog, Record
from trainer.progress import ProgressView
from trainer.ranks import Ranks
from trainer.samples import say_samples
from trainer.state import TrainState


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
    state: TrainState

    def log(self, record: Record) -> None:
        """Write a record where records go."""
        with agreed_writes(self.ranks, doing="writing the metrics", path=self.checkpoints.folder):
            if self.metrics is not None:
                self.metrics.write(record)

    def evaluate(self) -> None:
        """Measure the loss on held-out packs, record it and say it."""
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
        """Say what the model writes."""
        say_samples(
            self.config,
            self.learner,
            self.corpus.heldout,
            step=self.state.step,
            ranks=self.ranks,
            say=self.progress.say,
        )

    def save(self) -> None:
        """Write the checkpoint of this step, unless it is there already."""
        if self.checkpoints.path(self.state.step).exists():
            return
        state = replace(self.state, engram=self.learner.store.fingerprint())
        folder = self.checkpoints.save(
            self.learner.tensors(), state, before_rename=self._sync_metrics
        )
        self.progress.say(f"step {self.state.step}: saved {folder}")

    def close(self) -> None:
        """Release the terminal, the metrics file and the tables."""
        self.progress.close()
        self.learner.store.close()
        if self.metrics is not None:
            self.metrics.close()

    def _sync_metrics(self) -> None:
        if self.metrics is not None:
            self.metrics.sync()
