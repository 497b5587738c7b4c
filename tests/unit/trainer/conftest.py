"""A complete small run: the small reference model on made-up documents."""

import json
import random
from pathlib import Path

import pytest

from data.config import DataConfig
from model.config import ModelConfig
from tests.builders import optim_config
from trainer.config import (
    CheckpointConfig,
    EvalConfig,
    LoggingConfig,
    ParallelConfig,
    TrainConfig,
    TrainerConfig,
)

GOLDEN = Path(__file__).parents[2] / "golden"
WORDS = ["engram", "memory", "sparse", "window", "query", "expert", "token", "stream", "hash"]


def write_documents(folder: Path, *, count: int) -> None:
    """Text files of very different lengths, some shorter than a compression group."""
    dice = random.Random(5)
    for number in range(count):
        words = dice.choices(WORDS, k=dice.choice([1, 3, 8, 20]))
        (folder / f"{number:03d}.txt").write_text(" ".join(words))


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainerConfig:
    documents = tmp_path_factory.mktemp("documents")
    write_documents(documents, count=40)
    return TrainerConfig(
        seed=3,
        model=ModelConfig.from_released(json.loads((GOLDEN / "tiny_text/config.json").read_text())),
        data=DataConfig(
            source="text",
            paths=(str(documents),),
            tokenizer=str(GOLDEN / "tokenizer.json"),
            pack_length=64,
            holdout=0.1,
        ),
        optim=optim_config(
            lr=3e-3, warmup_steps=4, hold_steps=4, decay_steps=8, final_lr=3e-4, eps=1e-20
        ),
        parallel=ParallelConfig(),
        train=TrainConfig(steps=16, packs_per_step=4, packs_per_micro_batch=2, threads=1),
        eval=EvalConfig(every=6, packs=3),
        checkpoint=CheckpointConfig(every=8, keep=2),
        logging=LoggingConfig(),
    )
