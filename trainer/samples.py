"""A few texts during training, begun as held-out documents begin."""

from __future__ import annotations

import numpy as np

from data.engram import RowHasher
from data.loader import eval_batches
from data.packs import PackedSet
from data.tokenizer import load_tokenizer
from trainer import phase
from trainer.config import TrainerConfig
from trainer.learner import Learner
from trainer.progress import Say
from trainer.ranks import Ranks
from trainer.sampling import NextToken, Sampling, generate

COUNT = 2
PROMPT = 16  # tokens
SAMPLING = Sampling(max_tokens=32, top_p=0.9)


def say_samples(
    config: TrainerConfig,
    learner: Learner,
    heldout: PackedSet,
    *,
    step: int,
    ranks: Ranks,
    say: Say,
) -> list[tuple[str, str]]:
    """Say how the model goes on from the first words of COUNT held-out packs.

    Returns pairs of these words and how they go on. COUNT * 32 forwards of up to 48 tokens. Changes
    nothing; the same at every resume. All ranks call it.
    """
    tokenizer = load_tokenizer(config.data.tokenizer)
    hasher = RowHasher.for_model(config.model, tokenizer=config.data.tokenizer)
    texts = []
    for number, prompt in enumerate(_prompts(config, heldout)):
        tokens = generate(
            NextToken(learner.model, learner.store, hasher),
            prompt,
            SAMPLING,
            config=config.model,
            tokens=len(tokenizer),
            dice=np.random.default_rng([config.seed, step, number]),
            ranks=ranks,
        )
        begun, added = tokenizer.decode(prompt[1:]), tokenizer.decode(list(tokens))
        phase.tick()
        say(f"step {step}: {begun!r} goes on {added!r}")
        texts.append((begun, added))
    return texts


def _prompts(config: TrainerConfig, heldout: PackedSet) -> list[list[int]]:
    """The text at the beginning of packs, without what would end it; from nothing without packs."""
    if not heldout.available(1):
        return [[config.model.bos_token_id]] * COUNT
    found = []
    for batch in eval_batches(heldout, count=COUNT, packs_per_micro_batch=1, rank=0, ranks=1):
        first = (batch.seq_ids[0] == 1) & (batch.token_types[0] < 0)
        end = int(first.logical_not().nonzero()[0]) if not first.all() else len(first)
        tokens = batch.input_ids[0, : min(end, PROMPT)].tolist()
        found.append([t for t in tokens if t != config.model.eos_token_id])
    return found
