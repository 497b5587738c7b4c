"""The small training runs that tests vary: on text, and on pictures."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from data.config import DataConfig
from data.images.shapes import draw
from data.sources.pictures import CAPTION
from data.tokenizer import load_token_map
from model.config import ModelConfig, QatConfig, VisionConfig
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

# Overrides of experiment=tiny: a model that trains in seconds, on words of 448.
SMALL_MODEL = (
    f"data.tokenizer={GOLDEN / 'tokenizer.json'}",
    "data.pack_length=64",
    "model.vocab_size=448",
    "model.hidden_size=32",
    "model.num_hidden_layers=4",
    "model.compress_ratios=[0,0,2,1]",
    "model.kv_source_layer_ids=[2,3]",
    "model.index_source_layer_ids=[2,3]",
    "model.candidate_source_layer_id=3",
    "model.moe_intermediate_size=16",
    "model.engram_layer_ids=[1]",
    "model.engram_num_embeddings=[384]",
    "model.engram_vocab_size=50",
    "model.engram_n_heads=2",
    "model.engram_compressed_vocab_size=323",
    "model.image_token_id=3",
)


def optim_config(**changes: Any) -> OptimConfig:
    """AdamW at a constant rate, but for `changes`."""
    plain = OptimConfig(
        name="adamw",
        lr=1e-2,
        warmup_steps=0,
        hold_steps=0,
        decay_steps=0,
        final_lr=0.0,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        table_lr_multiplier=5.0,
    )
    return dataclasses.replace(plain, **changes)


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
        optim=optim_config(
            lr=3e-3, warmup_steps=2, hold_steps=4, decay_steps=4, final_lr=3e-4, eps=1e-3
        ),
        parallel=ParallelConfig(),
        train=TrainConfig(steps=10, packs_per_step=4, threads=1),
        eval=EvalConfig(every=5, packs=3),
        checkpoint=CheckpointConfig(every=0),
        logging=LoggingConfig(),
        router=RouterConfig(balance_loss_weight=0.1),  # large enough for its gradient to count
    )
    return dataclasses.replace(config, **changes)


def seeing_config(folder: Path, **changes: Any) -> TrainerConfig:
    """`trainer_config` for the smallest model that sees, on the pictures that need no download.

    Its tokenizer, written to `folder`, has the captions' words: short ones, as people's are.
    """
    words = _word_tokenizer(folder / "tokenizer.json")
    document = json.loads((GOLDEN / "tiny_image/config.json").read_text())
    tower = VisionConfig(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=128,
        patch_size=8,
        max_image_tokens=64,
        min_pixels=2304,
    )
    model = dataclasses.replace(
        ModelConfig.from_released(document),
        initializer_range=0.06,
        engram_compressed_vocab_size=int(load_token_map(str(words)).max()) + 1,
        sliding_window=32,
        index_topk=32,
        candidate_topk_blocks=8,
        vision=tower,
    )
    data = DataConfig(
        source="pictures", kind="image_chat", tokenizer=str(words), pack_length=512, holdout=0.05
    )
    return dataclasses.replace(trainer_config(folder), **{"model": model, "data": data, **changes})


def _word_tokenizer(path: Path) -> Path:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    marks = ["<bos>", "<eos>", "<pad>", "<image>", "<unk>", "<｜System｜>", "<｜User｜>"]
    marks += ["<｜Assistant｜>", "</think>"]
    spoken = {word for n in range(500) for word in draw(n).caption.split()}
    spoken |= {word.capitalize() for word in spoken} | {*"First then and , .".split()}
    spoken |= {*re.findall(r"\w+|\S", CAPTION)}
    vocabulary = {token: n for n, token in enumerate([*marks, *sorted(spoken)])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.save(str(path))
    return path
