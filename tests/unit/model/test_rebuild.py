"""Tensors that are made again in backward: really freed, same bits, as often as asked."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from model.rebuild import rebuilding


def parts() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (6, 4), (4, 4)
    x, w = (torch.randn(s, generator=generator, requires_grad=True) for s in shapes)
    return x, w


def plain(x: Tensor, w: Tensor) -> Tensor:
    middle = x.sin()
    other = middle.cos()
    return (middle @ w).square() + (other @ w) * middle


class Rebuilt:
    """`plain` with both of its inner tensors rebuilt."""

    def __init__(self) -> None:
        self.made = 0
        self.refs: list[StorageWeakRef] = []

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        def make() -> list[Tensor]:
            self.made += 1
            assert not torch.is_grad_enabled()
            middle = x.sin()
            other = middle.cos()
            self.refs += [StorageWeakRef(t.untyped_storage()) for t in (middle, other)]
            return [middle, other]

        with rebuilding(make) as cheap:
            middle = cheap(x.sin())
            other = cheap(middle.cos())
            out = (middle @ w).square() + (other @ w) * middle
        self.refs += [StorageWeakRef(t.untyped_storage()) for t in (middle, other)]
        return out

    def alive(self) -> list[bool]:
        return [not ref.expired() for ref in self.refs]


def test_gradients_have_the_same_bits() -> None:
    x, w = parts()
    run = Rebuilt()
    one = torch.autograd.grad(plain(x, w).sum(), [x, w])
    two = torch.autograd.grad(run(x, w).sum(), [x, w])
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert run.made == 1


def test_named_tensors_are_freed_after_forward_and_after_backward() -> None:
    x, w = parts()
    run = Rebuilt()
    out = run(x, w)
    assert run.alive() == [False, False]
    out.sum().backward()
    assert run.alive() == [False] * 4


def test_without_the_context_they_would_be_kept() -> None:
    x, w = parts()
    middle = x.sin()
    ref = StorageWeakRef(middle.untyped_storage())
    out = middle @ w
    del middle
    assert not ref.expired()
    del out
    assert ref.expired()


def test_a_graph_can_be_used_twice() -> None:
    x, w = parts()
    run = Rebuilt()
    out = run(x, w).sum()
    one = torch.autograd.grad(out, [x, w], retain_graph=True)
    assert run.alive()[:4] == [False] * 4
    two = torch.autograd.grad(out, [x, w])
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert run.made == 2


def test_other_tensors_are_kept_as_ever() -> None:
    x, w = parts()

    def make() -> list[Tensor]:
        raise AssertionError("nothing that was named is needed")

    with rebuilding(make) as cheap:
        cheap(x.sin())
        out = (x * 3).exp() @ w
    grads = torch.autograd.grad(out.sum(), [x, w])
    torch.testing.assert_close(grads[1], (x * 3).exp().sum(0)[:, None].expand(4, 4))


def test_a_view_of_a_named_tensor_is_rebuilt_as_that_view() -> None:
    x, _ = parts()
    for view in (lambda t: t, lambda t: t.view(3, 8), lambda t: t.t(), lambda t: t[:3]):
        with rebuilding(lambda: [x.sin()]) as cheap:
            out = view(cheap(x.sin())).square()
        weight = torch.arange(1.0, 1 + out.numel()).view(out.shape)
        (found,) = torch.autograd.grad((out * weight).sum(), x)
        (wanted,) = torch.autograd.grad((view(x.sin()).square() * weight).sum(), x)
        assert torch.equal(found, wanted)


def test_nested_in_a_graph_with_other_work() -> None:
    x, w = parts()
    run = Rebuilt()
    one = torch.autograd.grad(plain(plain(x, w).tanh()[:, :4], w).sum(), [x, w])
    two = torch.autograd.grad(run(run(x, w).tanh()[:, :4], w).sum(), [x, w])
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_freed_address_is_not_taken_for_a_named_tensor() -> None:
    """The allocator gives a freed tensor's address to the next one of its size."""
    x, w = parts()
    with rebuilding(lambda: [x.sin()]) as cheap:
        cheap(x.sin())  # dropped at once
        for _ in range(4):
            out = (x * 2).cos().square() @ w
    (found,) = torch.autograd.grad(out.sum(), x)
    (wanted,) = torch.autograd.grad(((x * 2).cos().square() @ w).sum(), x)
    assert torch.equal(found, wanted)
