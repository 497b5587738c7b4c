"""The training loop of one rank."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import torch

from data.batch import Batch
from data.cache.prepare import PreparedSource
from data.loader import batches
from model.engram.store import RowStore
from trainer import faults, phase
from trainer.agreement import agreed_items
from trainer.config import TrainerConfig
from trainer.device import CPU
from trainer.exit_codes import ExitCode
from trainer.failures import failure_outcome
from trainer.garbage import set_up_spared
from trainer.outcome import Outcome
from trainer.progress import Say
from trainer.ranks import Ranks
from trainer.records import step_record
from trainer.run import Run
from trainer.schedule import learning_rate
from trainer.signals import STOP_FILE, StopSignals
from trainer.start import open_run
from trainer.step import StepSettings, train_step

NOTICE = "\nStopping after this step, with a checkpoint. Once more to leave at once, without one."


def train(
    config: TrainerConfig,
    *,
    run_dir: Path,
    attempt: int,
    ranks: Ranks,
    device: torch.device = CPU,
    resume: bool,
    say: Say,
    sources: Sequence[PreparedSource] | None = None,
) -> Outcome:
    """Train until config.train.steps steps are done or a signal comes; all ranks call this.

    sources: the data, prepared; None prepares it now, which only a single rank may do.
    Writes metrics.jsonl and checkpoints/ below run_dir, which exists. attempt numbers the
    processes that have worked on this run. resume: continue after the newest whole checkpoint, or
    from the start when there is none; without it there must be none. Ctrl-C and SIGTERM end it
    after the step under way, with a checkpoint. What a user can act on comes back as an outcome;
    an exception that leaves is a bug.
    """
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    faults.place(rank=ranks.rank, attempt=attempt)
    phase.begin()
    try:
        phase.enter("start")
        run = open_run(
            config,
            run_dir=run_dir,
            attempt=attempt,
            ranks=ranks,
            device=device,
            resume=resume,
            say=say,
            sources=sources,
        )
    except KeyboardInterrupt:
        return Outcome(ExitCode.INTERRUPTED, "interrupted", 0, "Stopped before the first step.")
    except Exception as error:
        if outcome := failure_outcome(error, step=0):
            return outcome
        if isinstance(error, ValueError):
            return Outcome(ExitCode.CONFIG, "bad configuration", 0, str(error))
        raise
    # One rank looks for the file: a thousand would load the shared folder.
    file = run_dir / "attempts" / f"{attempt:03d}" / STOP_FILE if ranks.first else None
    with StopSignals(notice=NOTICE if ranks.first else "", file=file) as stop:
        try:
            with set_up_spared():
                return run_steps(run, stop)
        except Exception as error:
            if outcome := failure_outcome(error, step=run.state.step):
                return outcome
            raise
        finally:
            stop.over()
            run.close()


def run_steps(run: Run, stop: StopSignals) -> Outcome:
    """Do the steps that are left, with everything that falls due between them."""
    config, last = run.config, run.config.train.steps
    with closing(remaining_steps(run)) as stream:
        while run.state.step < last:
            one_step(run, stream)
            run.settle_save()
            step = run.state.step
            if due(step, config.eval.every, last=last):
                run.evaluate()
            if due(step, config.logging.samples, last=last):
                run.say_samples()
            phase.enter("agree")
            stopping = agreed_stop(stop, run.ranks)
            ending = bool(stopping) or step == last
            if stopping and not run.time_to_save(stop.seconds_left):
                return Outcome(stopping, "stopped", step, f"Stopped after step {step}, unsaved.")
            if ending or due(step, config.checkpoint.every, last=last):
                run.save(wait=ending)
            if stopping and step < last:
                return Outcome(stopping, "stopped", step, f"Stopped after step {step} of {last}.")
    return Outcome(ExitCode.DONE, "done", last, f"All {last} steps are done.")


def remaining_steps(run: Run) -> Generator[list[Batch], None, None]:
    """This rank's micro-batches of each step that is left."""
    train, state = run.config.train, run.state
    steps = batches(
        run.corpus.train,
        first_step=state.step,
        steps=train.steps - state.step,
        packs_per_step=train.packs_per_step,
        packs_per_micro_batch=train.packs_per_micro_batch,
        rank=run.learner.mesh.dp_index,
        ranks=run.learner.mesh.dp_size,
        workers=run.config.data.workers,
        pin=run.learner.model.device.type == "cuda",
        stretch=run.learner.stretch,
    )
    with closing(steps):
        # Whoever watches must see which rank's data are late: the others are a phase further.
        told = agreed_items(steps, run.ranks, arrived=lambda: phase.enter("count"))
        yield from read_ahead(told, run.learner.store)


def read_ahead(steps: Iterator[list[Batch]], store: RowStore) -> Iterator[list[Batch]]:
    """The same steps; a store with far rows prepares each step's while the one before it computes.
    That takes the loader's batches one step early."""
    if not store.looks_ahead:
        yield from steps
        return
    present = next(steps, None)
    while present is not None:
        following = next(steps, None)
        if following is not None:
            store.read_ahead([batch.engram_rows for batch in following])
        yield present
        present = following


def one_step(run: Run, stream: Iterator[list[Batch]]) -> None:
    """The next step: wait for its data, learn, record."""
    config, started = run.config, time.perf_counter()
    phase.begin_step(run.state.step + 1)
    phase.enter("data")
    micro_batches = next(stream)
    waited = time.perf_counter() - started
    lr = learning_rate(run.state.step + 1, config.optim)
    logged = due(run.state.step + 1, config.logging.every, last=config.train.steps)
    settings = StepSettings(
        lr=lr,
        table_lr=lr * config.optim.table_lr_multiplier,
        clip_norm=config.train.clip_norm,
        router=config.router,
        recall=logged,
    )
    result = train_step(run.learner, micro_batches, settings, ranks=run.ranks)
    phase.enter("record")
    run.state = run.state.after_step(tokens=result.tokens.real)
    phase.end_step()
    seconds = time.perf_counter() - started
    if logged:
        record = step_record(result, run.state, lr=lr, seconds=seconds, waited=waited)
        run.log(record)
        run.progress.show(record)


def due(step: int, every: int, *, last: int) -> bool:
    """Whether something done every `every` steps, and after the last one, is due; 0 = never."""
    return every > 0 and (step % every == 0 or step == last)


def agreed_stop(stop: StopSignals, ranks: Ranks) -> ExitCode | None:
    """The exit code that some rank was asked to end with, the same on all ranks."""
    codes = (None, ExitCode.AGAIN, ExitCode.INTERRUPTED)
    return codes[ranks.largest(codes.index(stop.exit_code))]
