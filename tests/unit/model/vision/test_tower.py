"""The tower and the aligner against a plain computation, packed and alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.config import VisionConfig
from model.vision.packing import cell_patches
from model.vision.tower import VisionTower


@pytest.fixture(scope="module")
def model(image_config, make_rig: Callable):
    return make_rig(image_config).model


def seen(model, pictures: list) -> Tensor:
    """Every image's tokens, through one pass of the tower."""
    grids = torch.tensor([[p.rows, p.cols] for p in pictures])
    patches = torch.cat([p.patches() for p in pictures])
    return model.aligner(model.vision(patches, grids), grids)


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(grids=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=4))
@example(grids=[(1, 1)])
@example(grids=[(6, 2), (1, 9), (3, 4), (2, 6), (9, 1), (12, 1)])  # some of equal patch count
def test_images_in_one_pass_equal_a_plain_computation_of_each(
    model, picture, plain_tower: Callable, relative: Callable, grids: list[tuple[int, int]]
) -> None:
    pictures = [picture(rows, cols, seed) for seed, (rows, cols) in enumerate(grids)]
    wanted = [plain_tower(model, p.patches(), p.rows, p.cols) for p in pictures]
    assert relative(seen(model, pictures), torch.cat(wanted)) < 1e-5


def test_the_norms_epsilon_is_one_millionth(
    model, picture, plain_tower: Callable, relative: Callable
) -> None:
    """Of small activations it is half of the mean square: another epsilon would show."""
    proj = model.vision.patch_embed.proj
    before = proj.weight.clone(), proj.bias.clone()
    try:
        with torch.no_grad():
            proj.weight *= 1e-3
            proj.bias *= 1e-3
        size = seen_norm(model, picture(3, 3, 1))
        assert 1e-7 < size < 1e-5
        wanted = plain_tower(model, picture(3, 3, 1).patches(), 3, 3)
        assert relative(seen(model, [picture(3, 3, 1)]), wanted) < 1e-5
    finally:
        with torch.no_grad():
            proj.weight.copy_(before[0])
            proj.bias.copy_(before[1])


def seen_norm(model, one) -> float:
    """Mean square of what the first norm gets."""
    return model.vision.patch_embed(one.patches()).square().mean().item()


def test_changing_one_image_changes_no_bit_of_another(model, picture) -> None:
    pictures = [picture(3, 4, 1), picture(6, 2, 2), picture(5, 5, 3)]
    one = seen(model, pictures)
    two = seen(model, [pictures[0], picture(6, 2, 9), pictures[2]])
    cells = [2, 2, 4]
    first, second, third = (
        torch.equal(a, b) for a, b in zip(one.split(cells), two.split(cells), strict=True)
    )
    assert (first, second, third) == (True, False, True)


def test_cells_reach_over_the_edge_with_nothing() -> None:
    grids = torch.tensor([[2, 3], [1, 1]])
    assert cell_patches(grids, 2).tolist() == [[0, 1, 3, 4], [2, 7, 5, 7], [6, 7, 7, 7]]


class Largest(TorchDispatchMode):
    """The most numbers in any tensor that an operation gave back."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            self.numel = max(self.numel, t.numel() if isinstance(t, Tensor) else 0)
        return out


def test_memory_grows_with_the_patches_of_all_images_not_their_square() -> None:
    vision = VisionConfig(
        num_hidden_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=8,
        patch_size=2,
    )
    tower, grids = VisionTower(vision), torch.tensor([[20, 25], [20, 25], [10, 10]])
    for parameter in tower.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    with Largest() as mode:
        tower(torch.ones(1100, 12), grids).sum().backward()
    assert mode.numel <= 1100 * 3 * 16
    assert mode.numel < 500 * 500


def test_dtype_of_the_patches(image_config, make_rig: Callable, picture) -> None:
    tower = make_rig(
        replace(image_config, num_hidden_layers=1, engram_layer_ids=(), engram_num_embeddings=())
    ).model.vision
    patches, grids = picture(5, 4, 1).patches(), torch.tensor([[5, 4]])
    exact = tower(patches, grids)
    rounded = tower(patches.bfloat16(), grids)
    assert rounded.dtype == torch.bfloat16
    error = (rounded.float() - exact).norm() / exact.norm()
    assert 1e-4 < error < 3e-2


def kept_bytes(run: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Bytes that a forward keeps for backward, each storage once, and its result."""
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    return sum(kept.values()), out


def test_recomputation_keeps_less_and_changes_no_bit(model, picture) -> None:
    pictures = [picture(6, 5, 1), picture(3, 10, 2), picture(2, 2, 3)]
    grids = torch.tensor([[p.rows, p.cols] for p in pictures])
    patches = torch.cat([p.patches() for p in pictures])
    plain = model.vision
    twice = VisionTower(model.config.vision, recompute="full")
    twice.load_state_dict(plain.state_dict())
    kept, grads = [], []
    for tower in (plain, twice):
        size, out = kept_bytes(lambda tower=tower: tower(patches, grids))
        kept.append(size)
        names, parameters = zip(*tower.named_parameters(), strict=True)
        found = torch.autograd.grad((out * out.detach().cos()).sum(), parameters)
        grads.append(dict(zip(names, found, strict=True)))
    assert kept[1] < 0.5 * kept[0]
    assert [n for n in grads[0] if not torch.equal(grads[0][n], grads[1][n])] == []
    with torch.no_grad():
        assert torch.equal(plain(patches, grids), twice(patches, grids))
