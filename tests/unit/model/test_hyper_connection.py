"""mHC: coefficients, Sinkhorn iterations, read and expand against slow float64 code."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model.hyper_connection import HyperConnection, Mix, _Sinkhorn, expand, read


def sinkhorn(logits: Tensor, m: int, iterations: int, eps: float) -> Tensor:
    """One token's [m * m] logits -> [m, m], differentiable, sums written out."""
    rows = []
    for i in range(m):
        powers = [torch.exp(logits[i * m + j]) for j in range(m)]
        rows.append([p / sum(powers) + eps for p in powers])
    comb = rows

    def columns(c: list) -> list:
        sums = [sum(c[i][j] for i in range(m)) + eps for j in range(m)]
        return [[c[i][j] / sums[j] for j in range(m)] for i in range(m)]

    comb = columns(comb)
    for _ in range(iterations - 1):
        comb = [[v / (sum(row) + eps) for v in row] for row in comb]
        comb = columns(comb)
    return torch.stack([torch.stack(row) for row in comb])


def slow_mix(streams: Tensor, own: HyperConnection) -> Mix:
    fn, base, scale = (p.double() for p in (own.fn, own.base, own.scale))
    m, out = streams.shape[1], []
    for x in streams.flatten(1):
        z = (fn @ x) / torch.sqrt(x.square().mean() + own.norm_eps)
        pre = torch.sigmoid(base[:m] + z[:m] * scale[0]) + own.eps
        post = 2 * torch.sigmoid(base[m : 2 * m] + z[m : 2 * m] * scale[1])
        comb = sinkhorn(base[2 * m :] + z[2 * m :] * scale[2], m, own.iterations, own.eps)
        out.append((pre, post, comb))
    return Mix(*(torch.stack(part) for part in zip(*out, strict=True)))


def mix_of(own: HyperConnection, streams: Tensor) -> Mix:
    return own(streams, torch.ones(streams.shape[:2]), read).mix


def filled(config, seed: int = 0) -> HyperConnection:
    own = HyperConnection(config)
    generator = torch.Generator().manual_seed(seed)
    for p in own.parameters():
        p.data = torch.randn(p.shape, generator=generator) * 0.5
    return own


@pytest.mark.parametrize("width", [6, 16])
@pytest.mark.parametrize(("streams", "iterations"), [(4, 20), (4, 1), (2, 3), (1, 2)])
def test_coefficients_and_their_gradients(
    make_config: Callable, relative: Callable, streams: int, iterations: int, width: int
) -> None:
    config = make_config(
        hc_mult=streams, hc_sinkhorn_iters=iterations, hidden_size=width, hc_eps=1e-3
    )
    own = filled(config)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, streams, width, generator=generator, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    found, wanted = mix_of(own, x), slow_mix(wide, own)
    weights = [torch.randn(part.shape, generator=generator) for part in found]
    for one, other in zip(found, wanted, strict=True):
        assert relative(one, other) < 2e-6
    inputs = [x, own.fn, own.base, own.scale]
    got = torch.autograd.grad(tuple(found), inputs, weights)
    slow = torch.autograd.grad(tuple(wanted), [wide, *inputs[1:]], [w.double() for w in weights])
    for one, other in zip(got, slow, strict=True):
        assert relative(one, other) < 1e-5


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_sinkhorn_backward_in_float64(iterations: int) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 9, generator=generator, dtype=torch.float64, requires_grad=True)

    def run(v: Tensor) -> Tensor:
        return _Sinkhorn.apply(v, 3, iterations, 1e-2)  # type: ignore[return-value]

    wanted = torch.stack([sinkhorn(row, 3, iterations, 1e-2) for row in logits.detach()])
    torch.testing.assert_close(run(logits), wanted, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(run, (logits,))


def test_comb_is_nearly_doubly_stochastic(make_config: Callable) -> None:
    own = filled(make_config(hidden_size=6))
    comb = mix_of(own, torch.randn(40, 4, 6, generator=torch.Generator().manual_seed(3))).comb
    torch.testing.assert_close(comb.sum(1), torch.ones(40, 4), rtol=0, atol=1e-4)
    torch.testing.assert_close(comb.sum(2), torch.ones(40, 4), rtol=0, atol=2e-2)


def test_coefficients_without_any_signal(make_config: Callable) -> None:
    own = filled(make_config(hidden_size=6))
    own.base.data.zero_()
    own.scale.data.zero_()
    mix = mix_of(own, torch.randn(2, 4, 6))
    torch.testing.assert_close(mix.pre, torch.full((2, 4), 0.5 + 1e-6))
    torch.testing.assert_close(mix.post, torch.ones(2, 4))
    assert mix.comb.flatten().tolist() == pytest.approx([0.25] * 32, rel=1e-5)


def test_read_and_expand_follow_their_sums(relative: Callable) -> None:
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(5, 4, 6, generator=generator), torch.randn(5, 6, generator=generator)
    mix = Mix(*(torch.rand(s, generator=generator) for s in ((5, 4), (5, 4), (5, 4, 4))))
    seen, out = read(x, mix.pre), expand(y, x, mix.post, mix.comb)
    for t in range(5):
        for d in range(6):
            terms = [mix.pre[t, m].item() * x[t, m, d].item() for m in range(4)]
            assert seen[t, d].item() == pytest.approx(math.fsum(terms), abs=1e-5)
            for k in range(4):
                carried = [mix.comb[t, j, k].item() * x[t, j, d].item() for j in range(4)]
                wanted = math.fsum([mix.post[t, k].item() * y[t, d].item(), *carried])
                assert out[t, k, d].item() == pytest.approx(wanted, abs=1e-5)


def test_read_and_expand_gradients(relative: Callable) -> None:
    generator = torch.Generator().manual_seed(5)
    shapes = [(5, 4, 6), (5, 6), (5, 4), (5, 4), (5, 4, 4)]
    parts = [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]
    wide = [p.detach().double().requires_grad_() for p in parts]
    weight = torch.randn(5, 4, 6, generator=generator)
    x, y, pre, post, comb = parts
    loss = (read(x, pre) * weight[:, 0]).sum() + (expand(y, x, post, comb) * weight).sum()
    got = torch.autograd.grad(loss, parts)
    x, y, pre, post, comb = wide
    seen = torch.einsum("tm,tmd->td", pre, x)
    out = post[:, :, None] * y[:, None] + torch.einsum("tjk,tjd->tkd", comb, x)
    slow = torch.autograd.grad(
        (seen * weight[:, 0].double()).sum() + (out * weight.double()).sum(), wide
    )
    for one, other in zip(got, slow, strict=True):
        assert relative(one, other) < 2e-6


def test_narrow_streams_are_mixed_in_fp32() -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(50, 4, 6, generator=generator).bfloat16()
    y = torch.randn(50, 6, generator=generator).bfloat16()
    mix = Mix(*(torch.rand(s, generator=generator) for s in ((50, 4), (50, 4), (50, 4, 4))))
    assert torch.equal(read(x, mix.pre), read(x.float(), mix.pre).bfloat16())
    mixing = mix.post, mix.comb
    assert torch.equal(expand(y, x, *mixing), expand(y.float(), x.float(), *mixing).bfloat16())
