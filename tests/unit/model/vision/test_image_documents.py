"""Documents with images inside packed rows: what they give alone, and what they leave alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.config import VisionConfig
from model.layout import Images
from model.transformer import DeepseekV41


def words(length: int, seed: int) -> list[int]:
    return torch.randint(4, 400, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def rig(image_config, make_rig: Callable):
    return make_rig(image_config)


@pytest.fixture(scope="module")
def steady(image_config, make_rig: Callable):
    return make_rig(image_config, steady=True)


@pytest.fixture
def documents(picture) -> list[list]:
    """Text alone; one image; two images side by side; an image first; images of equal size."""
    return [
        words(9, 1),
        [*words(3, 2), picture(4, 7, 3), *words(8, 4)],
        [*words(5, 5), picture(3, 3, 6), picture(6, 4, 7), *words(2, 8)],
        [picture(2, 14, 9), *words(4, 10)],
        [*words(1, 11), picture(7, 4, 12), *words(6, 13), picture(3, 3, 14), *words(3, 15)],
    ]


def test_packed_documents_equal_each_alone(
    steady, pack_pictures: Callable, relative: Callable, documents: list
) -> None:
    packed = pack_pictures(steady, [documents[:3], documents[3:]])
    together = steady.run(packed)
    alone = [steady.run(pack_pictures(steady, [[d]])) for d in documents]
    for place, one in zip(packed.places, alone, strict=True):
        assert relative(together.of(place), one.logits[0]) < 1e-5
    assert float(together.loss) == pytest.approx(sum(float(a.loss) for a in alone), rel=1e-5)
    wanted = {n: sum(one.grads[n].double() for one in alone) for n in together.grads}
    for name, gradient in wanted.items():
        assert isinstance(gradient, Tensor)
        assert gradient.any() or name.endswith("_weight"), name  # clamped gates learn nothing
        assert relative(together.grads[name], gradient) < 1e-4, name


def test_how_documents_are_split_changes_no_gradient(
    steady, pack_pictures: Callable, relative: Callable, documents: list
) -> None:
    whole = steady.run(pack_pictures(steady, [documents]))
    parts = [[documents[:1]], [documents[1:3], documents[3:4]], [documents[4:]]]
    split = steady.run(*(pack_pictures(steady, rows) for rows in parts))
    for name, gradient in whole.grads.items():
        assert relative(split.grads[name], gradient) < 1e-4, name


@pytest.mark.parametrize("changed", [1, 2, 4])
def test_changing_an_image_leaves_other_documents_bit_equal(
    rig, pack_pictures: Callable, picture, documents: list, changed: int
) -> None:
    before = pack_pictures(rig, [documents[:3], documents[3:]])
    other = list(documents)
    other[changed] = [p._replace(seed=99) if isinstance(p, picture) else p for p in other[changed]]
    after = pack_pictures(rig, [other[:3], other[3:]])
    row, column, length = before.places[changed]
    labels = before.labels.clone()
    labels[row, column : column + length] = -100
    one, two = rig.run(before, labels=[labels]), rig.run(after, labels=[labels])
    for i, place in enumerate(before.places):
        assert torch.equal(one.of(place), two.of(place)) == (i != changed)
    assert [n for n in one.grads if not torch.equal(one.grads[n], two.grads[n])] == []


def test_what_stands_in_the_spans(rig, pack_pictures: Callable, picture, monkeypatch) -> None:
    document = [*words(2, 1), picture(3, 6, 2), *words(3, 3)]
    packed = pack_pictures(rig, [[document]])
    streams = []
    run_layers = rig.model._run_layers

    def caught(x, *rest):
        streams.append(x)
        return run_layers(x, *rest)

    monkeypatch.setattr(rig.model, "_run_layers", caught)
    window = rig.store.open_window([packed.rows])
    rig.model(packed.inputs, engram=window.rows(0))
    (x,) = streams
    images, model = packed.inputs.images, rig.model
    cells = model.aligner(model.vision(images.patches, images.grids), images.grids)
    text = model.embed(packed.inputs.input_ids[0])
    wanted = [*text[:2], model.image_start, *cells, model.image_newline, model.image_end, *text[7:]]
    assert torch.equal(x[: len(wanted)], torch.stack(wanted))


def test_the_image_tokens_own_embedding_is_never_read(
    rig, pack_pictures: Callable, documents: list
) -> None:
    packed = pack_pictures(rig, [documents])
    one = rig.run(packed)
    ids = packed.inputs.input_ids.clone()
    ids[packed.inputs.token_types >= 0] = 17
    two = rig.run(replace(packed, inputs=replace(packed.inputs, input_ids=ids)))
    assert torch.equal(one.logits, two.logits)
    assert not one.grads["embed.weight"][3].any()


def test_text_without_images_gives_the_tower_a_gradient_of_zero(
    rig, pack_pictures: Callable, documents: list
) -> None:
    """Every rank needs the same gradients, whatever its documents hold."""
    rig.model.zero_grad(set_to_none=True)
    packed = pack_pictures(rig, [documents[:1]])
    assert packed.inputs.images is None
    window = rig.store.open_window([packed.rows])
    rig.model(packed.inputs, engram=window.rows(0), labels=packed.labels).loss_sum.backward()
    for name, parameter in rig.model.named_parameters():
        if name.startswith(("vision.", "aligner.", "image_")):
            assert parameter.grad is not None and not parameter.grad.any(), name
    rig.model.eval()
    try:
        evaluated = rig.model(packed.inputs, engram=window.rows(0)).logits
    finally:
        rig.model.train()
    assert torch.equal(evaluated, rig.model(packed.inputs, engram=window.rows(0)).logits)


def test_images_that_do_not_fit_the_spans(
    rig, pack_pictures: Callable, picture, documents: list
) -> None:
    packed = pack_pictures(rig, [documents[1:3]])
    window = rig.store.open_window([packed.rows])

    def forward(images: Images | None) -> None:
        rig.model(replace(packed.inputs, images=images), engram=window.rows(0))

    images = packed.inputs.images
    # 2 x 3, 1 x 1 and 2 x 2 cells; the last would be 2 x 1.
    with pytest.raises(ValueError, match="hold 11 image tokens, but the images make 9"):
        forward(Images(images.patches[:-9], torch.tensor([[4, 7], [3, 3], [5, 3]])))
    with pytest.raises(ValueError, match="hold 11 image tokens, but the images make 0"):
        forward(None)
    with pytest.raises(ValueError, match=r"grids .* need \[61, 48\]"):
        forward(Images(images.patches[:-1], images.grids))
    with pytest.raises(ValueError, match=r"4-pixel patches need \[61, 48\]"):
        forward(Images(images.patches[:, :27], images.grids))
    with pytest.raises(ValueError, match="leave them out"):
        forward(Images(images.patches[:0], images.grids[:0]))


def test_a_model_without_a_tower_says_so(
    rig, image_config, pack_pictures: Callable, documents: list
) -> None:
    blind = DeepseekV41(replace(image_config, vision=VisionConfig(num_hidden_layers=0)))
    assert not any(
        n.startswith(("vision", "aligner", "image_")) for n, _ in blind.named_parameters()
    )
    packed = pack_pictures(rig, [documents[1:2]])
    window = rig.store.open_window([packed.rows])
    with pytest.raises(ValueError, match=r"no vision tower: set vision\.num_hidden_layers"):
        blind(packed.inputs, engram=window.rows(0))
