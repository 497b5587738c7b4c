"""How a run begins: data, model, and the place where an earlier attempt stopped."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from data.cache.prepare import PreparedSource
from data.corpus import Corpus, load_corpus
from model.engram.owners import OwnerStore
from trainer import phase
from trainer.checkpoint.store import Checkpoints
from trainer.config import TrainerConfig
from trainer.disk import agreed_writes
from trainer.learner import build_learner
from trainer.metrics import MetricsLog
from trainer.progress import BarProgress, LineProgress, ProgressView, Say
from trainer.ranks import Ranks
from trainer.run import Run
from trainer.state import TrainState, mesh_text
from trainer.tracking.views import Views, open_views

PATIENCE = 5.0  # seconds of silence while reading weights


def open_run(
    config: TrainerConfig,
    *,
    run_dir: Path,
    attempt: int,
    ranks: Ranks,
    device: torch.device,
    resume: bool,
    say: Say,
    sources: Sequence[PreparedSource] | None = None,
) -> Run:
    """Load the data, build the model and restore the newest checkpoint if there is one to resume.

    sources: the data, prepared; None prepares it now, which only a single rank may do.
    Raises ValueError for what a user can correct (DataError for data), DiskError when output
    cannot be written or will not fit, DamagedCheckpointsError when no checkpoint is whole.
    """
    say = say if ranks.first else _silent
    checkpoints = Checkpoints(
        run_dir / "checkpoints",
        keep=config.checkpoint.keep,
        attempt=attempt,
        ranks=ranks,
        say=say,
        staging=config.checkpoint.staging,
    )
    if not resume and (present := checkpoints.all()):
        raise ValueError(f"{present[-1]} exists already: resume this run, or start a new one")
    corpus = load_corpus(config.data, config.model, seed=config.seed, made=sources)
    _require_packs(config, corpus)
    newest = checkpoints.newest() if resume else None
    learner = build_learner(
        config,
        ranks=ranks,
        device=device,
        restored=newest is not None,
        progress=_reading(say, config.model.weights),
    )
    tensors = learner.tensors()
    state = TrainState(
        seed=config.seed,
        packs_per_step=config.train.packs_per_step,
        data_fingerprint=corpus.fingerprint,
        plan_fingerprint=corpus.plan_fingerprint,
        mesh=config.parallel.sizes(),
    )
    if newest is None and config.model.weights:
        say(f"starting from the weights in {config.model.weights}")
    if newest is not None:
        fresh, accept = state, config.data.accept_changed
        saved = TrainState.read(newest)
        saved.require_same_samples(fresh, folder=newest, accept_changed=accept)
        if config.checkpoint.strict:
            saved.require_same_mesh(fresh, folder=newest)
        state = checkpoints.load(newest, tensors)
        if isinstance(learner.store, OwnerStore):
            learner.store.publish(None)  # a checkpoint fills primary rows only
        if state.data_fingerprint != fresh.data_fingerprint:
            say("the documents have changed since; going on with those that are there now")
        state = replace(
            state,
            data_fingerprint=fresh.data_fingerprint,
            plan_fingerprint=fresh.plan_fingerprint,
            mesh=fresh.mesh,
        )
        state.require_same_tables(learner.store.fingerprint(), folder=newest)
        say(f"resuming after step {state.step} from {newest}")
        if saved.mesh != fresh.mesh:
            say(f"it was written on another mesh: {mesh_text(saved.mesh)}")
    checkpoints.check_space(tensors, saves=_saves_left(config, state))
    metrics = None
    with agreed_writes(ranks, doing="opening the metrics", path=run_dir):
        if ranks.first:
            metrics = MetricsLog(run_dir / "metrics.jsonl", last_step=state.step)
    progress: ProgressView = LineProgress(steps=config.train.steps, say=say)
    if ranks.first and sys.stdout.isatty():
        progress = BarProgress(steps=config.train.steps, first_step=state.step + 1)
    views = Views()
    if ranks.first:
        views = open_views(
            config, run_dir=run_dir, attempt=attempt, last_step=state.step, say=progress.say
        )
    return Run(config, ranks, corpus, learner, checkpoints, metrics, progress, views, state)


def _require_packs(config: TrainerConfig, corpus: Corpus) -> None:
    if found := corpus.train.problems(config.train.steps * config.train.packs_per_step):
        raise ValueError("\n".join(found))
    if config.eval.every and not corpus.heldout.available(1):
        raise ValueError(
            "eval.every is set but no document is held out; raise data.holdout, give more "
            "documents, or set eval.every=0"
        )


def _saves_left(config: TrainerConfig, state: TrainState) -> int:
    steps, every = config.train.steps - state.step, config.checkpoint.every
    return -(-steps // every) if every else min(steps, 1)


def _reading(say: Say, weights: str) -> Callable[[int, int], None]:
    """A progress callback that speaks up now and then while weights are read."""
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        phase.tick()
        if time.monotonic() - last >= PATIENCE:
            last = time.monotonic()
            say(f"reading the weights in {weights}: {100 * done / max(total, 1):.0f} %")

    return report


def _silent(text: str) -> None:
    pass
