"""Loss on held-out packs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from data.loader import eval_batches
from data.packs import PackedSet
from trainer import phase
from trainer.agreement import agreed_items
from trainer.learner import Learner
from trainer.metrics import Record
from trainer.ranks import Ranks
from trainer.step import forward


@dataclass(frozen=True)
class EvalResult:
    """loss: mean over the labels of all ranks; perplexity: its exponential."""

    loss: float
    perplexity: float

    def record(self, step: int) -> Record:
        """The metrics record of an evaluation after `step` steps."""
        return {"step": step, "eval_loss": self.loss, "eval_perplexity": self.perplexity}


@torch.no_grad()
def evaluate(
    learner: Learner, packs: PackedSet, *, count: int, packs_per_micro_batch: int, ranks: Ranks
) -> EvalResult:
    """Evaluate on the first `count` packs, the same at every step. Changes nothing."""
    sums = torch.zeros(2, dtype=torch.float64)  # loss, labels
    mine = eval_batches(
        packs,
        count=count,
        packs_per_micro_batch=packs_per_micro_batch,
        rank=learner.mesh.dp_index,
        ranks=learner.mesh.dp_size,
        stretch=learner.stretch,
    )
    for batch in agreed_items(mine, ranks):
        window = learner.store.open_window([batch.engram_rows])
        out = forward(learner, batch, window.rows(0))
        assert out.loss_sum is not None
        phase.tick()
        sums += torch.tensor([out.loss_sum.item(), batch.valid_tokens], dtype=torch.float64)
    loss, labels = ranks.all_reduce_sum(sums).tolist()
    mean = loss / labels if labels else math.nan
    return EvalResult(mean, math.exp(mean) if mean < 700 else math.inf)
