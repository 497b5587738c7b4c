"""The metrics record of a training step."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from torch import Tensor

from model.engram.window import Figures
from trainer.metrics import Record
from trainer.state import TrainState
from trainer.step import StepResult


def step_record(
    result: StepResult, state: TrainState, *, lr: float, seconds: float, waited: float
) -> Record:
    """What metrics.jsonl says of the step that led to `state`.

    tokens, tokens_total and tokens_per_s count real tokens of all ranks; padding_share is the
    share of positions that hold none. expert_load_max_over_mean is that of the worst layer and
    expert_dead counts experts of all layers that no token of the step reached; expert_dead_text and
    expert_dead_image, in steps with images, those that no token of the kind reached. balance_loss
    is unweighted and no part of loss. index_loss (nats a query) and index_recall say how well a
    learning indexer foresees what attention looks at. Times are seconds of this rank: step_s of the
    whole step, of it data_wait_s for data and engram_wait_s in which table rows and their gradients
    were all that it worked on or waited for. engram_unique_share: rows fetched over rows read;
    engram_lookup_bytes and engram_replica_bytes went from this rank to others, for look-ups and for
    the copies of changed rows. Loss, expert load, balance loss, gate, unique share and the
    indexer's figures are null where there was nothing to measure.
    """
    tokens = result.tokens.real
    return {
        "step": state.step,
        "loss": result.loss,
        "lr": lr,
        "grad_norm": result.grad_norm,
        "tokens": tokens,
        "tokens_total": state.tokens_total,
        "tokens_per_s": tokens / seconds,
        "padding_share": 1 - tokens / result.tokens.slots,
        "expert_load_max_over_mean": _max_over_mean(result),
        **_dead(result.expert_counts),
        "balance_loss": result.balance_loss,
        "engram_gate_mean": result.gate_mean,
        "index_loss": result.index_loss,
        "index_recall": result.index_recall,
        "rss_mb": resident_mb(),
        "step_s": seconds,
        "data_wait_s": waited,
        "engram_wait_s": result.engram.waited,
        **_lookups(result.engram),
    }


def _lookups(figures: Figures) -> Record:
    return {
        "engram_unique_share": figures.distinct / figures.reads if figures.reads else None,
        "engram_lookup_bytes": figures.lookup_bytes,
        "engram_replica_bytes": figures.replica_bytes,
    }


def _dead(counts: Tensor) -> Record:
    found = {"expert_dead": int((counts.sum(1) == 0).sum())}
    if counts[:, 1].any():
        text, image = (int(n) for n in (counts == 0).sum((0, 2)))
        found |= {"expert_dead_text": text, "expert_dead_image": image}
    return found


def resident_mb() -> float:
    """Memory of this process in MB (10**6 bytes): present where the system tells, else its peak."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def _max_over_mean(result: StepResult) -> float | None:
    load = result.expert_counts.sum(1).double()
    mean = load.mean(1)
    if not bool((mean > 0).all()):
        return None
    return float((load.amax(1) / mean).max())
