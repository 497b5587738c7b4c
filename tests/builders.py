"""The one small training run that tests vary."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from data.config import DataConfig
from model.config import ModelConfig, QatConfig
from trainer.config import (
    CheckpointConfig,
    EvalConfig,
    LoggingConfig,
    OptimConfig,
    ParallelConfig,
    RouterConfig,
    TrainConfig,
    TrainerConfig,
)

GOLDEN = Path(__file__).parent / "golden"
WORDS = "the cat sat on a mat and saw one more dog run over that old red wall".split()


def trainer_config(folder: Path, **changes: Any) -> TrainerConfig:
    """The smallest model with every mechanism of text, on 40 documents of 5 to 44 words that are
    written to `folder`; `changes` replaces whole sections.

    Made for comparing ways to add up: the cache quantisers, which turn a difference in the last
    bit into a whole rounding step, are off, and Adam's eps is large, below which the sign of a
    rounding error would count.
    """
    text = folder / "text.jsonl"
    documents = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(5 + i)) for i in range(40)]
    text.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    model = ModelConfig.from_released(json.loads((GOLDEN / "tiny_text/config.json").read_text()))
    config = TrainerConfig(
        seed=5,
        model=dataclasses.replace(model, qat=QatConfig(False, False, False)),
        data=DataConfig(
            source="jsonl",
            paths=(str(text),),
            tokenizer=str(GOLDEN / "tokenizer.json"),
            pack_length=96,
            holdout=0.1,
        ),
        optim=OptimConfig(
            name="adamw",
            lr=3e-3,
            warmup_steps=2,
            hold_steps=4,
            decay_steps=4,
            final_lr=3e-4,
            beta1=0.9,
            beta2=0.95,
            eps=1e-3,
            weight_decay=0.1,
            table_lr_multiplier=5.0,
        ),
        parallel=ParallelConfig(),
        train=TrainConfig(steps=10, packs_per_step=4, threads=1),
        eval=EvalConfig(every=5, packs=3),
        checkpoint=CheckpointConfig(every=0),
        logging=LoggingConfig(),
        router=RouterConfig(balance_loss_weight=0.1),  # large enough for its gradient to count
    )
    return dataclasses.replace(config, **changes)
