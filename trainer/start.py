"""How a run begins: data, model, and the place where an earlier attempt stopped."""

from __future__ import annotations

import sys
from pathlib import Path

from data.corpus import Corpus, load_corpus
from trainer.checkpoint import Checkpoints
from trainer.config import TrainerConfig
from trainer.disk import agreed_writes
from trainer.learner import build_learner
from trainer.metrics import MetricsLog
from trainer.progress import BarProgress, LineProgress, ProgressView, Say
from trainer.ranks import Ranks
from trainer.run import Run
from trainer.state import TrainState


def open_run(
    config: TrainerConfig, *, run_dir: Path, attempt: int, ranks: Ranks, resume: bool, say: Say
) -> Run:
    """Load the data, build the model and restore the newest checkpoint if there is one to resume.

    Raises ValueError for what a user can correct (DataError for data), DiskError when output
    cannot be written or will not fit, DamagedCheckpointsError when no checkpoint is whole.
    """
    say = say if ranks.first else _silent
    checkpoints = Checkpoints(
        run_dir / "checkpoints", keep=config.checkpoint.keep, attempt=attempt, ranks=ranks, say=say
    )
    if not resume and (present := checkpoints.all()):
        raise ValueError(f"{present[-1]} exists already: resume this run, or start a new one")
    corpus = load_corpus(config.data, config.model, seed=config.seed)
    _require_packs(config, corpus)
    learner = build_learner(config)
    tensors = learner.tensors()
    state = TrainState(
        seed=config.seed,
        packs_per_step=config.train.packs_per_step,
        data_fingerprint=corpus.fingerprint,
        plan_fingerprint=corpus.plan_fingerprint,
    )
    if resume and (newest := checkpoints.newest()):
        TrainState.read(newest).require_same_samples(state, folder=newest)
        state = checkpoints.load(newest, tensors)
        state.require_same_tables(learner.store.fingerprint(), folder=newest)
        say(f"resuming after step {state.step} from {newest}")
    checkpoints.check_space(tensors, saves=_saves_left(config, state))
    metrics = None
    with agreed_writes(ranks, doing="opening the metrics", path=run_dir):
        if ranks.first:
            metrics = MetricsLog(run_dir / "metrics.jsonl", last_step=state.step)
    progress: ProgressView = LineProgress(steps=config.train.steps, say=say)
    if ranks.first and sys.stdout.isatty():
        progress = BarProgress(steps=config.train.steps, first_step=state.step + 1)
    return Run(config, ranks, corpus, learner, checkpoints, metrics, progress, state)


def _require_packs(config: TrainerConfig, corpus: Corpus) -> None:
    if not len(corpus.train):
        raise ValueError("there is no document to train on; give more, or lower data.holdout")
    if config.eval.every and not len(corpus.heldout):
        raise ValueError(
            "eval.every is set but no document is held out; raise data.holdout, give more "
            "documents, or set eval.every=0"
        )


def _saves_left(config: TrainerConfig, state: TrainState) -> int:
    steps, every = config.train.steps - state.step, config.checkpoint.every
    return -(-steps // every) if every else min(steps, 1)


def _silent(text: str) -> None:
    pass
