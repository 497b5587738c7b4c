import math

import torch
from torch import nn

from trainer.gradients import Gradient, clip, gradient_norm, parameter_gradients
from trainer.ranks import Ranks


def reference_norm(tensors):
    return math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors))


def test_the_norm_is_that_of_all_elements_together():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, generator=generator) for n in [(1000, 300), (7,), ()]]
    norm = gradient_norm([Gradient(t) for t in tensors], Ranks())
    assert math.isclose(norm, reference_norm(tensors), rel_tol=1e-6)


def test_the_norm_of_a_large_tensor_is_accurate():
    tensor = torch.full((5_000_000,), 1e-3)
    assert math.isclose(gradient_norm([Gradient(tensor)], Ranks()), math.sqrt(5.0), rel_tol=1e-4)


def test_bfloat16_gradients_are_measured_in_fp32():
    tensor = torch.full((4096,), 0.5, dtype=torch.bfloat16)
    assert math.isclose(gradient_norm([Gradient(tensor)], Ranks()), 32.0, rel_tol=1e-6)


def test_an_element_on_several_ranks_counts_once(monkeypatch):
    # The two ranks of a pair: a replicated vector, and a matrix of which each holds one row.
    replicated, shards = torch.tensor([3.0, 4.0]), [torch.tensor([1.0]), torch.tensor([2.0])]
    ranks = Ranks(rank=0, world=2)
    other = [Gradient(replicated, copies=2), Gradient(shards[1])]
    others_sum = gradient_norm(other, Ranks()) ** 2
    monkeypatch.setattr(Ranks, "all_reduce_sum", lambda self, tensor: tensor + others_sum)
    norm = gradient_norm([Gradient(replicated, copies=2), Gradient(shards[0])], ranks)
    assert math.isclose(norm, math.sqrt(9 + 16 + 1 + 4))


def test_parameters_without_a_gradient_are_left_out():
    model = nn.Linear(2, 3)
    model.weight.grad = torch.ones(3, 2)
    gradients = parameter_gradients(model.parameters(), Ranks())
    assert [g.local is model.weight.grad for g in gradients] == [True]


def test_clipping_keeps_the_direction_and_reaches_the_limit():
    tensors = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    gradients = [Gradient(t) for t in tensors]
    clip(gradients, norm=5.0, limit=1.0)
    assert math.isclose(reference_norm(tensors), 1.0, rel_tol=1e-6)
    assert torch.allclose(tensors[0], torch.tensor([0.6, 0.0]))


def test_a_small_gradient_is_not_touched():
    tensor = torch.tensor([0.1, 0.2])
    before = tensor.clone()
    clip([Gradient(tensor)], norm=0.5, limit=1.0)
    assert torch.equal(tensor, before)


def test_a_single_bad_element_shows_in_the_norm():
    for bad in (math.nan, math.inf):
        tensors = [torch.ones(100), torch.ones(100)]
        tensors[1][57] = bad
        assert not math.isfinite(gradient_norm([Gradient(t) for t in tensors], Ranks()))


def test_no_gradients_at_all_have_norm_zero():
    assert gradient_norm([], Ranks()) == 0.0
