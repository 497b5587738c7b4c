"""The trainer's part of a run's configuration, and the rules that its values obey.

Every class has problems(): a list of messages, empty when all is well, each of which names the
key, its value and the fix. They are collected and shown together, so no rule raises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal, get_args

from data.config import DataConfig
from model.config import ModelConfig, Recompute
from trainer.mesh_rules import (
    experts_are_divided_evenly,
    nearest_divisors,
    packs_reach_all_ranks,
    steps_are_dealt_out_evenly,
)
from trainer.tracking.config import WandbConfig


def _whole(key: str, value: int, *, least: int) -> list[str]:
    if value >= least:
        return []
    return [f"{key}={value} is too small; use a whole number of {least} or more"]


def _number(
    key: str, value: float, *, low: float, below: float = math.inf, low_allowed: bool = True
) -> list[str]:
    """A finite number in [low, below), or in (low, below)."""
    if math.isfinite(value) and value < below and (value > low or (low_allowed and value == low)):
        return []
    lower = f"at least {low:g}" if low_allowed else f"above {low:g}"
    upper = "" if math.isinf(below) else f" and below {below:g}"
    return [f"{key}={value} is out of range; use a number {lower}{upper}"]


@dataclass(frozen=True)
class TrainConfig:
    """How many steps, and how much data each one takes.

    A step takes packs_per_step packs over all ranks, in micro-batches of packs_per_micro_batch;
    how they are split changes memory and speed, not the gradients. threads: CPU threads of one
    rank; None leaves torch's choice.
    """

    steps: int
    packs_per_step: int
    packs_per_micro_batch: int = 1
    clip_norm: float = 1.0  # inf = only measure
    threads: int | None = None

    def problems(self) -> list[str]:
        found = _whole("train.steps", self.steps, least=1)
        found += _whole("train.packs_per_step", self.packs_per_step, least=1)
        found += _whole("train.packs_per_micro_batch", self.packs_per_micro_batch, least=1)
        if not self.clip_norm > 0:
            found.append(
                f"train.clip_norm={self.clip_norm} must be above 0; "
                "use 1.0, or .inf for no clipping"
            )
        if self.threads is not None:
            found += _whole("train.threads", self.threads, least=1)
        return found


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out packs: every N steps (0 = never) and after the last step."""

    every: int = 0
    packs: int = 8

    def problems(self) -> list[str]:
        found = _whole("eval.every", self.every, least=0)
        return found + _whole("eval.packs", self.packs, least=1)


TableRule = Literal["sinkhorn", "sparse_adam", "rowwise_adagrad", "frozen"]


@dataclass(frozen=True)
class OptimConfig:
    """How parameters and Engram tables learn, on one schedule.

    name: adamw = AdamW for the parameters; pretrain = the published recipe, Muon for matrices,
    Sinkhorn-balanced momentum for embedding and head, AdamW for the rest, to which the settings of
    Adam below then belong.

    tables: sinkhorn = balanced momentum over the whole tables; on the rows alone that a step has
    read, sparse_adam = Adam, rowwise_adagrad = Adagrad with one number a row; frozen = not at all,
    without state or gradient; auto = sinkhorn with pretrain, else sparse_adam.

    lr is the peak. Counted in steps: linear warm-up, constant, cosine down to final_lr, then
    constant; decay_steps=0 keeps lr for ever. Tables learn at lr * table_lr_multiplier.
    """

    name: Literal["adamw", "pretrain"]
    lr: float
    warmup_steps: int
    hold_steps: int
    decay_steps: int
    final_lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    table_lr_multiplier: float
    tables: Literal["auto", TableRule] = "auto"

    @property
    def table_rule(self) -> TableRule:
        """How tables in memory learn."""
        if self.tables != "auto":
            return self.tables
        return "sinkhorn" if self.name == "pretrain" else "sparse_adam"

    def problems(self) -> list[str]:
        found = []
        if self.tables not in ("auto", *get_args(TableRule)):
            found.append(
                f"optim.tables={self.tables} is unknown; use auto, {', '.join(get_args(TableRule))}"
            )
        if self.name not in ("adamw", "pretrain"):
            found.append(f"optim.name={self.name} is unknown; use adamw or pretrain")
        found += _number("optim.lr", self.lr, low=0, low_allowed=False)
        found += _whole("optim.warmup_steps", self.warmup_steps, least=0)
        found += _whole("optim.hold_steps", self.hold_steps, least=0)
        found += _whole("optim.decay_steps", self.decay_steps, least=0)
        found += _number("optim.final_lr", self.final_lr, low=0)
        if self.final_lr > self.lr:
            found.append(
                f"optim.final_lr={self.final_lr} is above optim.lr={self.lr}; "
                "the rate decays from lr to final_lr, so lower final_lr"
            )
        found += _number("optim.beta1", self.beta1, low=0, below=1)
        found += _number("optim.beta2", self.beta2, low=0, below=1)
        found += _number("optim.eps", self.eps, low=0, low_allowed=False)
        found += _number("optim.weight_decay", self.weight_decay, low=0)
        found += _number("optim.table_lr_multiplier", self.table_lr_multiplier, low=0)
        return found


@dataclass(frozen=True)
class RouterConfig:
    """How the experts are kept in even use; 0 switches either way off.

    bias_update_rate: what a step adds to or takes from the bias of an expert by the sign of its
    load. balance_loss_weight: of the balance loss over each document, added to the loss that
    trains (metrics show the language-model loss alone).
    """

    bias_update_rate: float = 0.001
    balance_loss_weight: float = 1e-4

    def problems(self) -> list[str]:
        found = _number("router.bias_update_rate", self.bias_update_rate, low=0)
        return found + _number("router.balance_loss_weight", self.balance_loss_weight, low=0)


@dataclass(frozen=True)
class IndexerConfig:
    """How the indexer, which chooses what attention looks at, is trained.

    The language-model loss gives it no gradient. distill: it learns to rank the entries that it
    selects as attention does, by KL divergence. frozen: not at all. auto: frozen when the model
    starts from given weights, whose indexer is trained already, else distill.
    """

    train: Literal["auto", "frozen", "distill"] = "auto"

    def distills(self, model: ModelConfig) -> bool:
        """Whether the indexer of `model` learns."""
        return self.train == "distill" or (self.train == "auto" and not model.weights)


@dataclass(frozen=True)
class ParallelConfig:
    """The mesh, see `model.parallel.mesh`: dp_replicate copies of the model, each sharded over
    dp_shard * cp ranks; cp ranks divide a sequence, ep ranks the experts, engram_owners ranks
    (None = all) the Engram tables.

    engram_window_bytes: bound of the rows and their gradients that are fetched at a time.
    recompute: what a layer computes again in backward instead of keeping it, see `model.block`.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1
    engram_owners: int | None = None
    engram_window_bytes: int = 256 << 20
    recompute: Recompute = "none"

    @property
    def world(self) -> int:
        """Ranks that this mesh needs."""
        return self.dp_replicate * self.dp_shard * self.cp

    @property
    def owners(self) -> int:
        """Ranks that hold the Engram tables together."""
        return self.world if self.engram_owners is None else self.engram_owners

    def sizes(self) -> dict[str, int]:
        """What a checkpoint is cut by, under the names of the settings."""
        return {
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.cp,
            "ep": self.ep,
            "engram_owners": self.owners,
        }

    def problems(self) -> list[str]:
        found = []
        for name in ("dp_replicate", "dp_shard", "cp", "ep"):
            found += _whole(f"parallel.{name}", getattr(self, name), least=1)
        if self.engram_owners is not None:
            found += _whole("parallel.engram_owners", self.engram_owners, least=1)
        found += _whole("parallel.engram_window_bytes", self.engram_window_bytes, least=1 << 16)
        if found:
            return found
        if self.dp_shard * self.cp % self.ep:
            found.append(
                f"parallel.ep={self.ep} does not divide parallel.dp_shard={self.dp_shard} x "
                f"parallel.cp={self.cp}, the ranks that share one copy of the experts; use "
                f"{nearest_divisors(self.ep, self.dp_shard * self.cp)}"
            )
        if self.world % self.owners:
            found.append(
                f"parallel.engram_owners={self.engram_owners} does not divide the {self.world} "
                f"ranks of the mesh; use {nearest_divisors(self.owners, self.world)}"
            )
        return found


@dataclass(frozen=True)
class CheckpointConfig:
    """A checkpoint every N steps (0 = only the last); the newest `keep` good ones stay.

    async: training goes on while a checkpoint is written, once its tensors are copied; the last
    one, and that of a stop, are waited for. staging_mb: memory of each rank for that copy; what
    does not fit in is written while training waits. strict: refuse to resume from a checkpoint of
    another mesh instead of dividing it anew.
    """

    every: int
    keep: int = 2
    async_: bool = False
    staging_mb: int = 1024
    strict: bool = False

    @property
    def staging(self) -> int | None:
        """Bytes for copies; None where training waits for its checkpoints."""
        return self.staging_mb * 10**6 if self.async_ else None

    def problems(self) -> list[str]:
        found = _whole("checkpoint.every", self.every, least=0)
        found += _whole("checkpoint.keep", self.keep, least=1)
        return found + _whole("checkpoint.staging_mb", self.staging_mb, least=1)


@dataclass(frozen=True)
class LoggingConfig:
    """A metrics record and a progress line every N steps, and after the last step.

    samples: every N steps, and after the last, also two short texts that the model writes; 0 =
    never. tensorboard: also event files for TensorBoard, in the run's folder.
    """

    every: int = 1
    samples: int = 0
    tensorboard: bool = False
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def problems(self) -> list[str]:
        found = _whole("logging.every", self.every, least=1)
        found += _whole("logging.samples", self.samples, least=0)
        if self.tensorboard and find_spec("tensorboard") is None:
            found.append(
                "logging.tensorboard=true needs a package that is not installed: "
                "pip install tensorboard, or leave it false"
            )
        return found


@dataclass(frozen=True)
class TrainerConfig:
    """Everything that one rank needs to know to train; identical on all ranks."""

    seed: int
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    parallel: ParallelConfig
    train: TrainConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    router: RouterConfig = field(default_factory=RouterConfig)
    indexer: IndexerConfig = field(default_factory=IndexerConfig)

    def problems(self) -> list[str]:
        """Rules between the parts; each part's own are its own problems()."""
        found = []
        if self.seed < 0:
            found.append(f"seed={self.seed} is negative; use a whole number of 0 or more")
        if self.model.engram.store == "mapped" and self.optim.tables not in ("auto", "frozen"):
            found.append(
                f"optim.tables={self.optim.tables}, but tables in files do not learn "
                "(model.engram.store=mapped); use optim.tables=auto, or keep the tables in memory"
            )
        found += steps_are_dealt_out_evenly(self.train, self.parallel)
        found += experts_are_divided_evenly(self.model, self.parallel)
        found += self.data.model_problems(self.model)
        found += packs_reach_all_ranks(self.data, self.model, self.parallel)
        if self.data.pack_length > self.model.max_position_embeddings:
            found.append(
                f"data.pack_length={self.data.pack_length} exceeds "
                f"model.max_position_embeddings={self.model.max_position_embeddings}; shorten it"
            )
        return found
