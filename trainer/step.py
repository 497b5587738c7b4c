"""One optimiser step: micro-batches in, changed weights and the step's figures out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from data.batch import Batch
from model.attention.distillation import distilled_queries
from model.config import ModelConfig
from model.engram.owners import OwnerStore
from model.engram.primaries import TableGradients
from model.engram.rows import EngramRows
from model.engram.window import Figures
from model.layout import Images, ModelInputs
from model.transformer import ForwardOutput
from trainer import phase
from trainer.balance import balance_routers
from trainer.config import RouterConfig
from trainer.gradients import Gradient, clip, gradient_norm, parameter_gradients
from trainer.learner import Learner
from trainer.optim import set_learning_rate
from trainer.ranks import Ranks
from trainer.sharding import reduce_islands


class DivergedError(Exception):
    """The loss or the gradient is not finite; this step has changed no weight."""


@dataclass(frozen=True)
class StepSettings:
    """What a step's update depends on besides the data."""

    lr: float
    table_lr: float
    clip_norm: float
    router: RouterConfig = field(default_factory=RouterConfig)
    recall: bool = False  # whether to measure a learning indexer's recall


@dataclass(frozen=True)
class TokenCounts:
    """Of a whole step, over all ranks. text: real tokens outside image spans. slots: positions,
    padding included. index_queries: tokens that choose among entries, counted in every layer whose
    indexer chooses."""

    valid: int
    real: int
    text: int
    slots: int
    index_queries: int

    @classmethod
    def of(cls, batches: Sequence[Batch], model: ModelConfig, ranks: Ranks) -> TokenCounts:
        """Count this rank's batches and add up the ranks."""
        mine = [
            sum(batch.valid_tokens for batch in batches),
            sum(batch.real_tokens for batch in batches),
            sum(batch.text_tokens for batch in batches),
            sum(batch.labels.numel() for batch in batches),
            sum(
                distilled_queries(model, seq_ids=batch.seq_ids, position_ids=batch.position_ids)
                for batch in batches
            ),
        ]
        return cls(*ranks.all_reduce_sum(torch.tensor(mine, dtype=torch.int64)).tolist())


@dataclass(frozen=True)
class StepResult:
    """A step's figures, equal on all ranks.

    loss: mean over the step's labels, None when it had none. grad_norm: before clipping.
    expert_counts: int64 [layers, 2, experts], text and image tokens given to each expert.
    balance_loss: unweighted, mean over layers and over documents weighted by their tokens, 1 when
    experts are evenly used; None when it is off. gate_mean: mean Engram gate over layers and text
    tokens, None without Engram. index_loss: mean divergence of index scores from attention, in
    nats; index_recall: see `selection_recall`, mean over the queries measured; None when the
    indexer is frozen or nothing was measured. engram: what this rank's look-ups have cost.
    """

    loss: float | None
    grad_norm: float
    tokens: TokenCounts
    expert_counts: Tensor
    balance_loss: float | None
    gate_mean: float | None
    index_loss: float | None
    index_recall: float | None
    engram: Figures


def train_step(
    learner: Learner, batches: Sequence[Batch], settings: StepSettings, *, ranks: Ranks
) -> StepResult:
    """Learn from this rank's micro-batches of one step.

    The loss is the sum over labels divided by the label count of the whole step (all ranks, all
    micro-batches), the balance loss one over documents divided by its token count, and the
    indexer's one over choosing tokens and layers divided by theirs, so the gradient does not depend
    on how the tokens are split; what has no label contributes zero. Raises DivergedError, on all
    ranks, before any weight changes.
    """
    router = settings.router
    phase.enter("count")
    tokens = TokenCounts.of(batches, learner.model.config, ranks)
    learner.store.take_figures()  # of an evaluation
    sums = accumulate(
        learner,
        batches,
        tokens,
        balance_weight=router.balance_loss_weight,
        recall=settings.recall,
        ranks=ranks,
    )
    phase.enter("reduce", grads=(p.grad for p in learner.model.parameters()))
    reduce_islands(learner.model, ranks)
    tables = learner.store.collect()
    norm = _limit_gradient(learner, tables, sums.loss, clip_norm=settings.clip_norm, ranks=ranks)
    phase.enter("update")
    # Tables first: the next step's rows travel while the parameters learn.
    _update_tables(learner, tables, lr=settings.table_lr)
    set_learning_rate(learner.optimizer, settings.lr)
    learner.optimizer.step()
    learner.optimizer.zero_grad()
    balance_routers(learner.model, sums.experts, rate=router.bias_update_rate)
    return StepResult(
        loss=sums.loss / tokens.valid if tokens.valid else None,
        grad_norm=norm,
        tokens=tokens,
        expert_counts=sums.experts,
        balance_loss=_balance_loss(sums, tokens, router),
        gate_mean=sums.gates / tokens.text if learner.store.layers and tokens.text else None,
        index_loss=_index_loss(sums, tokens, learner),
        index_recall=sums.recall / sums.recalled if sums.recalled else None,
        engram=learner.store.take_figures(),
    )


@dataclass(frozen=True)
class Sums:
    """Of a step's outputs, over all ranks; gates: mean over layers, summed over text tokens;
    recall: over `recalled` queries."""

    loss: float
    gates: float
    balance: float
    index: float
    recall: float
    recalled: float
    experts: Tensor


def accumulate(
    learner: Learner,
    batches: Sequence[Batch],
    tokens: TokenCounts,
    *,
    balance_weight: float,
    recall: bool = False,
    ranks: Ranks,
) -> Sums:
    """Add to the parameters, and to what learner.store will `collect`, the gradient of the losses,
    each summed over `batches` and divided by the whole step's count: labels for the language-model
    loss, real tokens for the balance loss, choosing tokens for the indexer's."""
    floats = torch.zeros(6, dtype=torch.float64, device=learner.model.device)
    counts, balances = [], balance_weight > 0
    windows = learner.store.windows([batch.engram_rows for batch in batches])
    rows_of_each = (rows for window in windows for rows in window.micro_batches())
    phase.enter("engram")
    for rows, batch in zip(rows_of_each, batches, strict=True):
        phase.enter("forward")
        out = forward(learner, batch, rows, balance=balances, recall=recall)
        assert out.loss_sum is not None
        loss = out.loss_sum / max(tokens.valid, 1)
        if out.balance_loss is not None:
            loss = loss + out.balance_loss * (balance_weight / max(tokens.real, 1))
            floats[2] += out.balance_loss.detach()
        if out.index_loss is not None:
            loss = loss + out.index_loss / max(tokens.index_queries, 1)
            floats[3] += out.index_loss.detach()
        if out.index_recall is not None:
            floats[4:] += out.index_recall
        phase.enter("backward")
        loss.backward()
        phase.enter("engram")
        floats[0] += out.loss_sum.detach()
        if rows:
            floats[1] += out.engram_gate_mean.detach().mean() * batch.text_tokens
        counts.append(out.expert_counts)
    experts = ranks.all_reduce_sum(torch.stack(counts).sum(0))
    loss, gates, balance, index, held, recalled = ranks.all_reduce_sum(floats).tolist()
    return Sums(loss, gates, balance, index, held, recalled, experts)


def forward(
    learner: Learner,
    batch: Batch,
    engram: list[EngramRows],
    *,
    balance: bool = False,
    recall: bool = False,
) -> ForwardOutput:
    """The model's output for one micro-batch, the loss summed over its labels."""
    images, rows = batch.images, batch.whole or batch
    inputs = ModelInputs(
        input_ids=batch.input_ids,
        seq_ids=rows.seq_ids,
        position_ids=rows.position_ids,
        token_types=rows.token_types,
        images=images and Images(images.patches, images.grids, images.ranks),
    )
    device, options = learner.model.device, {"balance": balance, "recall": recall}
    labels = batch.labels.to(device, non_blocking=True)
    return learner.model(inputs.to(device), engram=engram, labels=labels, **options)


def _update_tables(learner: Learner, tables: TableGradients, *, lr: float) -> None:
    optimizer, store = learner.table_optimizer, learner.store
    if optimizer is None:
        return
    assert isinstance(store, OwnerStore)
    optimizer.step(tables.ids, tables.grads, lr=lr)
    store.publish(tables.ids if optimizer.sparse else None)


def _balance_loss(sums: Sums, tokens: TokenCounts, router: RouterConfig) -> float | None:
    if router.balance_loss_weight == 0 or tokens.real == 0:
        return None
    return sums.balance / tokens.real / len(sums.experts)


def _index_loss(sums: Sums, tokens: TokenCounts, learner: Learner) -> float | None:
    if not learner.model.distill or tokens.index_queries == 0:
        return None
    return sums.index / tokens.index_queries


def _limit_gradient(
    learner: Learner, tables: TableGradients, loss: float, *, clip_norm: float, ranks: Ranks
) -> float:
    """Clip parameters and table rows together; return the norm from before."""
    gradients = parameter_gradients(learner.model.parameters(), ranks)
    gradients += [Gradient(grad) for grad in tables.grads]
    norm = gradient_norm(gradients, ranks)
    if ranks.any(not (math.isfinite(norm) and math.isfinite(loss))):
        raise DivergedError(f"loss sum {loss:g}, gradient norm {norm:g}")
    clip(gradients, norm=norm, limit=clip_norm)
    return norm
