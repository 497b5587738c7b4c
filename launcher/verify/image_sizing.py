"""Kind `image_sizing`: the planned size of images of many shapes, and one image's patches, exactly.

`table` in case.json holds sizes in pixels with the planned `pixels` (width, height) and the grids
of patches (`vit`) and tokens (`llm`), rows first. image.safetensors holds an `image` [H, W, 3], its
patch `grid`, and every 97th of its `patches`.
"""

from __future__ import annotations

from dataclasses import fields

import torch

from data.images.pixels import patches
from data.images.sizing import plan_image
from launcher.verify.case import Case, CaseError
from launcher.verify.gates import Check, exact
from model.config import VisionConfig

STRIDE = 97


def check(case: Case) -> list[Check]:
    """Compare every plan of the table and the patches of the image."""
    vision = _vision(case)
    try:
        return [*_plans(case, vision), *_patches(case, vision)]
    except (ValueError, TypeError, KeyError) as error:
        raise CaseError(f"{case.folder}: {error!r}") from None


def _vision(case: Case) -> VisionConfig:
    entries = case.entry("vision_config")
    known = {field.name for field in fields(VisionConfig)}
    if not isinstance(entries, dict) or set(entries) - known:
        raise CaseError(f"{case.folder / 'case.json'}: vision_config holds entries unknown here")
    vision = VisionConfig(**entries)
    if min(vision.patch_size, vision.downsample_ratio, vision.max_image_tokens - 3) < 1:
        raise CaseError(f"{case.folder / 'case.json'}: vision_config leaves no room for an image")
    return vision


def _plans(case: Case, vision: VisionConfig) -> list[Check]:
    checks = []
    for row in case.entry("table"):
        plan = plan_image(row["width"], row["height"], vision)
        ours = [plan.width, plan.height, plan.patch_rows, plan.patch_cols, plan.rows, plan.cols]
        theirs = [*row["pixels"], *row["vit"], *row["llm"]]
        subject = f"{row['width']} x {row['height']}"
        checks.append(exact("sizes", subject, torch.tensor(ours), torch.tensor(theirs)))
    return checks


def _patches(case: Case, vision: VisionConfig) -> list[Check]:
    from PIL import Image

    tensors = case.tensors("image.safetensors")
    image = Image.fromarray(tensors["image"].numpy())
    plan = plan_image(image.width, image.height, vision)
    ours = patches(image, plan, patch_size=vision.patch_size)
    kept = ours[::STRIDE].unflatten(1, (3, vision.patch_size, vision.patch_size))
    grid = torch.tensor([plan.patch_rows, plan.patch_cols])
    return [
        exact("grid", "grid", grid, tensors["grid"]),
        exact("patches", "patches", kept, tensors["patches"]),
    ]
