"""Images through a bfloat16 model: the tower's weights are rounded, its norms' are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from model.precision import is_fp32


@pytest.fixture(scope="module")
def rig(image_config, make_rig: Callable):
    return make_rig(replace(image_config, dtype="bfloat16", num_hidden_layers=3))


@contextmanager
def rounded(rig, names: set[str]) -> Iterator[None]:
    named = [p for n, p in rig.model.named_parameters() if n in names]
    before = [p.detach().clone() for p in named]
    with torch.no_grad():
        for p in named:
            p.copy_(p.bfloat16())
        yield
        for p, old in zip(named, before, strict=True):
            p.copy_(old)


def test_weights_are_rounded_where_they_are_used_and_norms_are_not(
    rig, picture, pack_pictures: Callable
) -> None:
    document = [7, 8, picture(4, 5, 1), 9, 10, 11, picture(3, 3, 2), 12]
    packed = pack_pictures(rig, [[document]])
    visual = {
        n for n, _ in rig.model.named_parameters() if n.startswith(("vision", "aligner", "image"))
    }
    wide = {n for n in visual if is_fp32(n)}
    assert {n.rpartition(".")[0].rpartition(".")[2] for n in wide} == {"norm", "norm1", "norm2"}
    plain = rig.run(packed)
    with rounded(rig, visual - wide), torch.enable_grad():
        same = rig.run(packed)
    assert torch.equal(plain.logits, same.logits)
    assert [n for n in plain.grads if not torch.equal(plain.grads[n], same.grads[n])] == []
    assert all(plain.grads[n].any() for n in visual)
    with rounded(rig, {"vision.norm.weight"}), torch.enable_grad():
        other = rig.run(packed)
    assert not torch.equal(plain.logits, other.logits)


def test_pixels_of_any_type_are_taken(rig, picture, pack_pictures: Callable) -> None:
    packed = pack_pictures(rig, [[[7, picture(4, 5, 1), 9]]])
    images = packed.inputs.images
    narrow = replace(images, patches=images.patches.bfloat16())
    assert images.patches.dtype == torch.float32
    one, two = (
        rig.run(replace(packed, inputs=replace(packed.inputs, images=kind)))
        for kind in (images, narrow)
    )
    assert torch.equal(one.logits, two.logits)
