"""Sizes of images of every shape: the reference table, hand-worked extremes, what always holds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.errors import DataError
from data.images.sizing import plan_image
from data.images.spans import span_types
from model.config import VisionConfig

RELEASED = VisionConfig(num_hidden_layers=32)
CASE = json.loads((Path(__file__).parents[3] / "golden/image_sizing/case.json").read_text())


@pytest.mark.parametrize("row", CASE["table"], ids=lambda r: f"{r['width']}x{r['height']}")
def test_reference_table(row: dict) -> None:
    plan = plan_image(row["width"], row["height"], RELEASED)
    assert [plan.width, plan.height] == row["pixels"]
    assert [plan.patch_rows, plan.patch_cols] == row["vit"]
    assert [plan.rows, plan.cols] == row["llm"]


def test_very_tall_images_become_one_column() -> None:
    # One column of n cells costs 2 n + 2 tokens: (1024 - 2) // 2 = 511 cells of 42 pixels.
    plan = plan_image(30, 40_000, RELEASED)
    assert (plan.width, plan.height) == (42, 511 * 42)
    assert (plan.rows, plan.cols, plan.tokens) == (511, 1, 1024)


def test_very_wide_images_become_one_row() -> None:
    # One row of n cells costs n + 3 tokens.
    plan = plan_image(60_000, 30, RELEASED)
    assert (plan.width, plan.height) == (1021 * 42, 42)
    assert (plan.rows, plan.cols, plan.tokens) == (1, 1021, 1024)


def test_small_images_grow_to_min_pixels_first() -> None:
    small = VisionConfig(patch_size=4, downsample_ratio=3, max_image_tokens=64, min_pixels=900)
    # 10 x 40 has 400 pixels: both sides grow 1.5 times to 15 x 60, then up to whole patches.
    plan = plan_image(10, 40, small)
    assert (plan.width, plan.height) == (16, 60)
    assert (plan.patch_rows, plan.patch_cols, plan.rows, plan.cols) == (15, 4, 5, 2)
    # From 900 on only the rounding up to patches is left.
    assert (plan_image(30, 30, small).width, plan_image(29, 30, small).width) == (32, 32)


def test_a_width_beyond_the_ratio_is_capped_and_stretched() -> None:
    capped = VisionConfig(max_wh_ratio=8.0, min_pixels=1)
    wide, at, below = (plan_image(w, 100, capped) for w in (5000, 800, 799))
    assert (wide.width, wide.height) == (at.width, at.height) == (812, 112)
    assert (wide.stretch, at.stretch, below.stretch) == (True, True, False)
    # Heights have no such cap, and without a ratio nothing is stretched.
    tall = plan_image(100, 5000, capped)
    assert (tall.width, tall.height, tall.stretch) == (112, 5012, False)
    assert not plan_image(5000, 100, RELEASED).stretch
    # The cap comes before the growth to min_pixels.
    grown = plan_image(80, 5, VisionConfig(max_wh_ratio=8.0, min_pixels=80 * 1600))
    assert (grown.width, grown.height) == (1022, 126)  # 40 x 5 -> 1011 x 126


@pytest.mark.parametrize(("width", "height"), [(0, 0), (0, 7), (7, 0), (-3, 4)])
def test_no_pixels(width: int, height: int) -> None:
    with pytest.raises(DataError, match=f"{width} x {height} pixels"):
        plan_image(width, height, RELEASED)


side = st.one_of(st.integers(1, 3000), st.integers(1, 200_000))
sizes = st.builds(
    VisionConfig,
    patch_size=st.integers(1, 16),
    downsample_ratio=st.integers(1, 4),
    max_image_tokens=st.integers(4, 1500),
    min_pixels=st.integers(1, 400_000),
    max_wh_ratio=st.one_of(st.none(), st.floats(0.1, 300)),
)


@given(width=side, height=side, vision=sizes)
def test_what_holds_for_every_shape(width: int, height: int, vision: VisionConfig) -> None:
    plan = plan_image(width, height, vision)
    p, d = vision.patch_size, vision.downsample_ratio
    assert (plan.height, plan.width) == (plan.patch_rows * p, plan.patch_cols * p)
    assert (plan.rows, plan.cols) == (
        math.ceil(plan.patch_rows / d),
        math.ceil(plan.patch_cols / d),
    )
    assert min(plan.rows, plan.cols) >= 1
    assert plan.tokens <= vision.max_image_tokens
    assert plan.tokens == len(span_types(plan.rows, plan.cols))


@given(width=st.integers(20, 5000), height=st.integers(20, 5000))
def test_shrinking_keeps_the_proportions(width: int, height: int) -> None:
    vision = VisionConfig(max_image_tokens=300, min_pixels=1)
    plan = plan_image(width, height, vision)
    if plan.width >= width or min(plan.rows, plan.cols) < 2:
        return
    # To within the patch that each side loses at most.
    assert abs(plan.width / width - plan.height / height) <= 14 / min(width, height)


def test_span_types() -> None:
    assert span_types(2, 3).tolist() == [0, 1, 1, 1, 2, 1, 1, 1, 2, 3]
    assert span_types(1, 1).tolist() == [0, 1, 2, 3]
    assert span_types(3, 1).tolist() == [0, 1, 2, 1, 2, 1, 2, 3]
    assert span_types(4, 5).dtype == np.int8
