"""Sampled text: the logits are those of the training forward, and the choice is by its rules."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from data.collate import collate
from data.corpus import load_corpus
from data.engram import RowHasher
from model.config import EngramStoreConfig
from model.engram.owners import OwnerStore
from model.layout import ModelInputs
from model.names import table_name
from trainer import restore
from trainer.learner import build_learner
from trainer.restore import folder_model
from trainer.sampling import NextToken, Sampling, choose, generate

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="module")
def learner(config):
    """Weights large enough that every mechanism moves the logits."""
    learner = build_learner(config)
    assert isinstance(learner.store, OwnerStore)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in learner.model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15, generator=generator)
            if name.endswith("_weight"):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    for weight in learner.store.weight:
        weight.normal_(0, 0.5, generator=generator)
    return learner


@pytest.fixture(scope="module")
def hasher(config):
    return RowHasher.for_model(config.model, tokenizer=config.data.tokenizer)


@pytest.fixture(scope="module")
def batch(config):
    corpus = load_corpus(config.data, config.model, seed=config.seed)
    places = [corpus.train.place(index) for index in range(2)]
    return collate(corpus.train, places, sample_ids=(0, 1))


@torch.no_grad()
def training_logits(learner, batch):
    inputs = ModelInputs(batch.input_ids, batch.seq_ids, batch.position_ids, batch.token_types)
    window = learner.store.open_window([batch.engram_rows])
    logits = learner.model(inputs, engram=window.rows(0)).logits
    assert logits is not None
    return logits


def documents(batch):
    """(first column, length) of every document in a batch's first row."""
    for number in range(1, int(batch.seq_ids[0].max()) + 1):
        columns = (batch.seq_ids[0] == number).nonzero().flatten()
        yield int(columns[0]), len(columns)


def test_logits_are_those_of_the_training_forward_at_every_position(learner, hasher, batch):
    """Of a packed row with several documents, whose tokens arrive here one by one."""
    wanted, worst, positions = training_logits(learner, batch), 0.0, 0
    for start, length in documents(batch):
        source = NextToken(learner.model, learner.store, hasher)
        for t in range(start, start + length):
            found = source.after([int(batch.input_ids[0, t])])
            worst = max(worst, float((found - wanted[0, t]).norm() / wanted[0, t].norm()))
            positions += 1
    assert positions > 50
    assert worst < 1e-5


def test_logits_of_a_folder_of_weights_are_the_reference_ones(monkeypatch):
    """And its tables stay in their files: no room for them is made in memory."""
    monkeypatch.setattr(restore, "OwnerStore", None)
    folder = GOLDEN / "tiny_text"
    ids = load_file(folder / "inputs.safetensors")["input_ids"][0].tolist()
    wanted = load_file(folder / "outputs.safetensors")["logits"][0]
    config, model, store = folder_model(folder)
    hasher = RowHasher.for_model(config, tokenizer=str(folder / "tokenizer.json"))
    source = NextToken(model, store, hasher)
    found = torch.stack([source.after([token]) for token in ids])
    assert ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < 1e-4
    store.close()


def test_a_prompt_at_once_is_a_prompt_token_by_token(learner, hasher):
    prompt = [0, 17, 45, 45, 200, 13, 99, 17, 45]
    whole = NextToken(learner.model, learner.store, hasher).after(prompt)
    parts = NextToken(learner.model, learner.store, hasher)
    for piece in (prompt[:1], prompt[1:4], prompt[4:]):
        found = parts.after(piece)
    assert torch.equal(found, whole)


def test_rows_out_of_files_say_the_same(config, learner, hasher, tmp_path):
    tables = zip(learner.store.layers, learner.store.weight, strict=True)
    save_file({table_name(n): w for n, w in tables}, tmp_path / "model.safetensors")
    store = EngramStoreConfig("mapped", str(tmp_path))
    model = dataclasses.replace(config.model, engram=store)
    mapped = build_learner(dataclasses.replace(config, model=model)).store
    prompt = [0, 17, 45, 45, 200]
    found = NextToken(learner.model, mapped, hasher).after(prompt)
    assert torch.equal(found, NextToken(learner.model, learner.store, hasher).after(prompt))
    mapped.close()


def test_a_model_without_engram_needs_no_hasher(config):
    model = dataclasses.replace(config.model, engram_layer_ids=(), engram_num_embeddings=())
    learner = build_learner(dataclasses.replace(config, model=model))
    assert isinstance(learner.store, OwnerStore)
    logits = NextToken(learner.model, learner.store, None).after([0, 5, 6])
    assert logits.shape == (model.vocab_size,) and logits.dtype == torch.float32


def texts(config, learner, hasher, sampling, *, seeds, tokens=400):
    return [
        list(
            generate(
                NextToken(learner.model, learner.store, hasher),
                [0, 17, 45],
                sampling,
                config=config.model,
                tokens=tokens,
                dice=np.random.default_rng(seed),
            )
        )
        for seed in seeds
    ]


def test_equal_seeds_give_equal_texts(config, learner, hasher):
    first, again, other = texts(config, learner, hasher, Sampling(6), seeds=(1, 1, 2))
    assert first == again != other
    greedy = texts(config, learner, hasher, Sampling(6, temperature=0), seeds=(1, 2))
    assert greedy[0] == greedy[1]


class Fixed(NextToken):
    """Logits given by hand, one row a call."""

    def __init__(self, rows):
        self.rows, self.asked = iter(rows), []

    def after(self, tokens):
        self.asked.append(list(tokens))
        return torch.tensor(next(self.rows))


def test_text_ends_at_the_end_token_and_holds_none_that_is_no_text(config):
    size, model = config.model.vocab_size, config.model
    liked = np.zeros((3, size), dtype=np.float32)
    liked[:, [model.bos_token_id, model.pad_token_id, model.image_token_id]] = 30
    liked[:, 390:] = 30
    liked[0, 7] = liked[1, 9] = liked[2, model.eos_token_id] = 20
    source = Fixed(liked)
    found = generate(
        source,
        [0, 5],
        Sampling(10, temperature=0),
        config=model,
        tokens=390,
        dice=np.random.default_rng(0),
    )
    assert list(found) == [7, 9]
    assert source.asked == [[0, 5], [7], [9]]
    endless = generate(
        Fixed(liked[[0, 0, 0]]),
        [0],
        Sampling(3, temperature=0),
        config=model,
        tokens=390,
        dice=np.random.default_rng(0),
    )
    assert list(islice(endless, 10)) == [7, 7, 7]


LOGITS = np.log(np.array([0.4, 0.1, 0.3, 0.2]))


def shares(sampling, count=4000):
    dice = np.random.default_rng(3)
    seen = Counter(choose(LOGITS, sampling, dice) for _ in range(count))
    return [seen[token] / count for token in range(4)]


def test_tokens_come_as_often_as_their_probability_says():
    assert shares(Sampling()) == pytest.approx([0.4, 0.1, 0.3, 0.2], abs=0.03)
    root = np.sqrt([0.4, 0.1, 0.3, 0.2])
    assert shares(Sampling(temperature=2)) == pytest.approx(list(root / root.sum()), abs=0.03)
    assert shares(Sampling(temperature=0)) == [1, 0, 0, 0]


def test_top_p_keeps_the_likeliest_that_reach_it():
    assert shares(Sampling(top_p=0.69)) == pytest.approx([4 / 7, 0, 3 / 7, 0], abs=0.03)
    assert shares(Sampling(top_p=0.71)) == pytest.approx([4 / 9, 0, 3 / 9, 2 / 9], abs=0.03)
    assert shares(Sampling(top_p=1e-9)) == [1, 0, 0, 0]
    banned = np.array([0.0, -np.inf, -np.inf, 0.0])
    dice = np.random.default_rng(0)
    assert {choose(banned, Sampling(), dice) for _ in range(200)} == {0, 3}


def test_broken_settings_are_all_named():
    found = Sampling(0, -1.0, 1.5).problems()
    assert [p.split("=")[0] for p in found] == ["max-tokens", "temperature", "top-p"]
    assert Sampling(temperature=float("nan")).problems() and not Sampling().problems()
