import dataclasses
import math

import pytest
import torch

from data.collate import collate
from data.corpus import load_corpus
from data.loader import batches
from model.engram.owners import OwnerStore
from model.moe.router import Router
from trainer import step as module
from trainer.balance import balance_routers
from trainer.config import RouterConfig
from trainer.evaluate import evaluate
from trainer.learner import build_learner
from trainer.ranks import Ranks
from trainer.records import resident_mb, step_record
from trainer.state import TrainState
from trainer.step import DivergedError, StepSettings, TokenCounts, accumulate, train_step

SETTINGS = StepSettings(lr=1e-3, table_lr=5e-3, clip_norm=1.0)
STATE = TrainState(seed=0, packs_per_step=4, data_fingerprint="", plan_fingerprint="")


@pytest.fixture(scope="module")
def corpus(config):
    return load_corpus(config.data, config.model, seed=config.seed)


@pytest.fixture
def learner(config):
    return build_learner(config)


def micro_batches(corpus, size, step=0):
    (found,) = batches(
        corpus.train,
        first_step=step,
        steps=1,
        packs_per_step=4,
        packs_per_micro_batch=size,
        rank=0,
        ranks=1,
        workers=0,
    )
    return found


def padding(corpus, rows=2):
    return collate(corpus.train, [None] * rows, sample_ids=(-1,) * rows)


def gradients(config, split):
    """Parameter gradients by name, dense table gradients and the step's sums, unclipped."""
    learner = build_learner(config)
    tokens = TokenCounts.of(split, config.model, Ranks())
    weight = config.router.balance_loss_weight
    sums = accumulate(learner, split, tokens, balance_weight=weight, ranks=Ranks())
    found = {n: p.grad for n, p in learner.model.named_parameters() if p.grad is not None}
    assert isinstance(learner.store, OwnerStore)
    tables = learner.store.collect()
    for layer, (ids, grad) in enumerate(zip(tables.ids, tables.grads, strict=True)):
        dense = torch.zeros_like(learner.store.weight[layer])
        found[f"table {layer}"] = dense.index_copy_(0, ids, grad)
    return found, sums


def test_gradients_do_not_depend_on_the_micro_batches(config, corpus):
    config = dataclasses.replace(config, router=RouterConfig(balance_loss_weight=0.1))
    whole, whole_sums = gradients(config, micro_batches(corpus, 4))
    assert any(name.startswith("table") for name in whole)
    for size in (1, 2):
        split, sums = gradients(config, micro_batches(corpus, size))
        assert sums.loss == pytest.approx(whole_sums.loss, rel=1e-6)
        assert sums.balance == pytest.approx(whole_sums.balance, rel=1e-6)
        assert sums.index == pytest.approx(whole_sums.index, rel=1e-5)
        assert torch.equal(sums.experts, whole_sums.experts)
        assert split.keys() == whole.keys()
        for name, grad in whole.items():
            scale = grad.abs().max()
            assert (split[name] - grad).abs().max() <= 1e-5 * scale, name


def test_gradients_do_not_depend_on_the_windows(config, corpus, monkeypatch):
    found = micro_batches(corpus, 1)
    whole, whole_sums = gradients(config, found)
    opened = []
    fetch = OwnerStore._fetch
    monkeypatch.setattr(
        OwnerStore, "_fetch", lambda s, plan, n: (opened.append(n), fetch(s, plan, n))[1]
    )
    # No window holds two micro-batches: each reads more than 400 rows of 128 bytes.
    narrow = dataclasses.replace(config.parallel, engram_window_bytes=1 << 16)
    split, sums = gradients(dataclasses.replace(config, parallel=narrow), found)
    assert opened == [0, 1, 2, 3]
    assert sums.loss == whole_sums.loss
    for name, grad in whole.items():
        if name.startswith("table"):
            assert (split[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name
        else:
            assert torch.equal(split[name], grad), name


def test_a_micro_batch_of_padding_adds_nothing(config, corpus):
    some = micro_batches(corpus, 2)
    plain, plain_sums = gradients(config, some)
    padded, sums = gradients(config, [*some, padding(corpus)])
    assert (sums.loss, sums.balance) == (plain_sums.loss, plain_sums.balance)
    assert torch.equal(sums.experts, plain_sums.experts)
    for name, grad in plain.items():
        assert torch.allclose(padded[name], grad, rtol=0, atol=1e-7), name


def test_a_step_without_labels_divides_by_nothing(learner, corpus):
    before = {name: tensor.clone() for name, tensor in learner.tensors().items()}
    result = train_step(learner, [padding(corpus)], SETTINGS, ranks=Ranks())
    assert (result.loss, result.grad_norm, result.gate_mean) == (None, 0.0, None)
    assert result.tokens == TokenCounts(valid=0, real=0, text=0, slots=128, index_queries=0)
    after = learner.tensors()
    assert all(bool(torch.isfinite(t.float()).all()) for t in after.values())
    assert torch.equal(after["model/embed.weight"], before["model/embed.weight"])
    record = step_record(result, STATE.after_step(tokens=0), lr=1e-3, seconds=0.1, waited=0.0)
    assert record["loss"] is record["balance_loss"] is None
    assert record["expert_load_max_over_mean"] is None
    assert record["padding_share"] == 1.0


def test_the_loss_is_the_mean_over_labels(config, learner, corpus):
    found = micro_batches(corpus, 2)
    result = train_step(learner, found, SETTINGS, ranks=Ranks())
    labels = sum(int((batch.labels >= 0).sum()) for batch in found)
    assert result.tokens.valid == labels
    assert result.loss == pytest.approx(math.log(config.model.vocab_size), rel=0.05)


def test_both_optimisers_use_the_clipped_gradient(learner, corpus, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        learner.table_optimizer,
        "step",
        lambda ids, grads, *, lr: seen.update(tables=[g.clone() for g in grads], lr=lr),
    )
    monkeypatch.setattr(
        learner.optimizer,
        "step",
        lambda: seen.update(
            norms=[p.grad.norm() for p in learner.model.parameters() if p.grad is not None],
            rates={group["lr"] for group in learner.optimizer.param_groups},
        ),
    )
    settings = dataclasses.replace(SETTINGS, clip_norm=0.01)
    result = train_step(learner, micro_batches(corpus, 2), settings, ranks=Ranks())
    squares = sum(float(n) ** 2 for n in seen["norms"])
    squares += sum(float(g.double().square().sum()) for g in seen["tables"])
    assert result.grad_norm > 0.01
    assert math.sqrt(squares) == pytest.approx(0.01, rel=1e-5)
    assert (seen["lr"], seen["rates"]) == (5e-3, {1e-3})


def test_repeating_steps_gives_the_same_bits_on_two_threads(config, corpus):
    threads = torch.get_num_threads()
    learners = [build_learner(config) for _ in range(2)]
    try:
        torch.set_num_threads(2)
        for learner in learners:
            for step in range(2):
                train_step(learner, micro_batches(corpus, 4, step), SETTINGS, ranks=Ranks())
    finally:
        torch.set_num_threads(threads)
    first, second = (learner.tensors() for learner in learners)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("where", ["model/layers.2.attn.wkv.weight", "table"])
def test_a_diverged_step_changes_nothing(learner, corpus, where):
    tensors = learner.tensors()
    found = micro_batches(corpus, 2)
    if where == "table":
        row = int(found[0].engram_rows[0, 0, 0, 0])
        assert isinstance(learner.store, OwnerStore)
        learner.store.weight[0][row] = math.nan
    else:
        tensors[where][0, 0] = math.inf
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(DivergedError):
        train_step(learner, found, SETTINGS, ranks=Ranks())
    for name, tensor in learner.tensors().items():
        assert torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(before[name])), name


def test_a_gradient_that_is_not_finite_on_another_rank_stops_this_one(learner, corpus, monkeypatch):
    monkeypatch.setattr(module.Ranks, "any", lambda self, flag: True)
    before = learner.tensors()["model/embed.weight"].clone()
    with pytest.raises(DivergedError):
        train_step(learner, micro_batches(corpus, 2), SETTINGS, ranks=Ranks())
    assert torch.equal(learner.tensors()["model/embed.weight"], before)


def test_router_biases_push_towards_the_mean_load(learner):
    routers = [m for m in learner.model.modules() if isinstance(m, Router)]
    experts = routers[0].bias.numel()
    counts = torch.full((len(routers), 2, experts), 10)
    counts[0, 0, 0], counts[0, 0, 1] = 14, 6
    counts[1, 1, 2], counts[1, 1, 3] = 11, 9
    counts[2, 1] = 0  # no image token reached any expert
    balance_routers(learner.model, counts, rate=0.25)
    text, image = torch.zeros(2, len(routers), experts)
    text[0, 0], text[0, 1] = -0.25, 0.25
    image[1, 2], image[1, 3] = -0.25, 0.25
    assert torch.equal(torch.stack([r.bias for r in routers]), text)
    assert torch.equal(torch.stack([r.bias_vl for r in routers]), image)


def test_both_ways_of_balancing_can_be_switched_off(config, corpus):
    off = RouterConfig(bias_update_rate=0, balance_loss_weight=0)
    learner = build_learner(config)
    settings = dataclasses.replace(SETTINGS, router=off)
    result = train_step(learner, micro_batches(corpus, 2), settings, ranks=Ranks())
    assert result.balance_loss is None
    routers = [m for m in learner.model.modules() if isinstance(m, Router)]
    assert not any(r.bias.any() or r.bias_vl.any() for r in routers)
    learner = build_learner(config)
    result = train_step(learner, micro_batches(corpus, 2), SETTINGS, ranks=Ranks())
    assert result.balance_loss is not None and 1 <= result.balance_loss < 4
    routers = [m for m in learner.model.modules() if isinstance(m, Router)]
    assert any(r.bias.any() for r in routers)


def test_the_balance_loss_moves_the_routers_by_its_weight(config, corpus):
    """The gradient is linear in the weight, and only what leads to a router's scores feels it."""

    def with_weight(weight):
        router = RouterConfig(balance_loss_weight=weight)
        return gradients(dataclasses.replace(config, router=router), micro_batches(corpus, 2))[0]

    none, one, two = (with_weight(w) for w in (0.0, 1.0, 2.0))
    moved = [name for name in none if not torch.equal(none[name], one[name])]
    assert all(f"layers.{n}.ffn.gate.weight" in moved for n in range(6))
    assert "head.weight" not in moved and "layers.5.ffn.experts.w2" not in moved
    for name in moved:
        first, second = one[name] - none[name], two[name] - one[name]
        assert (second - first).norm() <= 1e-3 * first.norm() + 1e-6 * one[name].norm(), name


def test_dead_experts_are_told_by_kind_when_there_are_images(learner, corpus):
    result = train_step(learner, [padding(corpus)], SETTINGS, ranks=Ranks())

    def dead(counts):
        found = step_record(
            dataclasses.replace(result, expert_counts=torch.tensor(counts)),
            STATE,
            lr=1e-3,
            seconds=1.0,
            waited=0.0,
        )
        return {k: v for k, v in found.items() if k.startswith("expert_dead")}

    assert dead([[[4, 0, 0], [0, 0, 0]]]) == {"expert_dead": 2}
    assert dead([[[4, 0, 0], [0, 0, 0]], [[1, 0, 3], [0, 2, 2]]]) == {
        "expert_dead": 2,
        "expert_dead_text": 3,
        "expert_dead_image": 4,
    }


def test_evaluation_is_the_mean_loss_of_its_packs_and_changes_nothing(learner, corpus):
    before = {name: tensor.clone() for name, tensor in learner.tensors().items()}
    count = corpus.heldout.available(10**6)
    results = [
        evaluate(learner, corpus.heldout, count=n, packs_per_micro_batch=size, ranks=Ranks())
        for n, size in [(count, 1), (count + 5, 2)]
    ]
    places = [corpus.heldout.place(index) for index in range(count)]
    batch = collate(corpus.heldout, places, sample_ids=tuple(range(count)))
    window = learner.store.open_window([batch.engram_rows])
    out = module.forward(learner, batch, window.rows(0))
    assert out.loss_sum is not None
    expected = out.loss_sum.item() / batch.valid_tokens
    for result in results:
        assert result.loss == pytest.approx(expected, rel=1e-6)
        assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
    assert results[0].record(7) == {
        "step": 7,
        "eval_loss": results[0].loss,
        "eval_perplexity": results[0].perplexity,
    }
    assert all(torch.equal(t, before[n]) for n, t in learner.tensors().items())
    assert all(p.grad is None for p in learner.model.parameters())


def test_the_record_counts_real_tokens(learner, corpus):
    found = micro_batches(corpus, 2)
    result = train_step(learner, found, SETTINGS, ranks=Ranks())
    real = sum(int((batch.seq_ids > 0).sum()) for batch in found)
    state = dataclasses.replace(STATE, tokens_total=1000).after_step(tokens=real)
    record = step_record(result, state, lr=1e-3, seconds=2.0, waited=0.5)
    assert record["tokens"] == real
    assert record["tokens_total"] == 1000 + real
    assert record["tokens_per_s"] == real / 2
    assert record["padding_share"] == pytest.approx(1 - real / (4 * 64))
    assert (record["step"], record["step_s"], record["data_wait_s"]) == (1, 2.0, 0.5)
    assert not result.expert_counts[:, 1].any()
    loads = result.expert_counts[:, 0].double()
    assert loads.sum(1).tolist() == [2.0 * real] * len(loads)  # two experts a token
    assert record["expert_load_max_over_mean"] == pytest.approx(
        float((loads.max(1).values / (2 * real / loads.shape[1])).max())
    )
    assert 0.3 < record["engram_gate_mean"] < 0.7
    reads = sum(batch.engram_rows.numel() for batch in found)
    rows = torch.cat([batch.engram_rows.flatten(0, 1) for batch in found])
    distinct = sum(len(rows[:, layer].unique()) for layer in range(rows.shape[1]))
    assert record["engram_unique_share"] == distinct / reads
    assert record["engram_lookup_bytes"] == record["engram_replica_bytes"] == 0
    assert 0 < record["engram_wait_s"] < 5
    assert 50 < record["rss_mb"] < 20_000
    assert record["rss_mb"] == pytest.approx(resident_mb(), rel=0.2)
