"""Images among the reference cases: plans, patches, and a model that sees."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

Verify = Callable[..., tuple[int, list[str]]]
Spoilt = Callable[..., Path]


def test_sizes_and_patches_pass(verify: Verify, golden: Path) -> None:
    code, (line,) = verify(golden / "image_sizing")
    assert code == 0
    for part in ("sizes 72/72", "grid 2/2", "patches 9408/9408"):
        assert part in line


def test_one_other_pixel_or_size_fails(verify: Verify, spoilt: Spoilt) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["patches"][3, 1, 2, 5] += 0.5

    folder = spoilt("image_sizing", "image.safetensors", change)
    document = json.loads((folder / "case.json").read_text())
    document["table"][4]["llm"][1] += 1
    (folder / "case.json").write_text(json.dumps(document))
    code, (line,) = verify(folder)
    assert code == 1
    assert "sizes 1920 x 1080: 1 of 6 differ" in line
    assert "patches patches: 1 of 9408 differ" in line


@pytest.mark.parametrize(
    "entry",
    [
        {"table": [{"width": 0, "height": 3, "pixels": [1, 1], "vit": [1, 1], "llm": [1, 1]}]},
        {"table": [{"width": 3}]},
        {"table": 7},
        {"vision_config": {"patches": 14}},
        {"vision_config": {"patch_size": 0}},
        {"vision_config": {"max_image_tokens": 3}},
    ],
)
def test_unsound_cases_are_bad_data(
    verify: Verify, golden: Path, tmp_path: Path, entry: dict
) -> None:
    folder = tmp_path / "image_sizing"
    shutil.copytree(golden / "image_sizing", folder)
    document = json.loads((folder / "case.json").read_text())
    (folder / "case.json").write_text(json.dumps(document | entry))
    code, (line,) = verify(folder)
    assert code == 65, line
    assert "error" in line


def test_the_model_that_sees_passes(verify_json: Callable[..., dict], golden: Path) -> None:
    found = verify_json(golden / "tiny_image")
    (report,) = found["cases"]
    assert found["exit_code"] == 0, report["failed"]
    compared = {c["subject"] for c in report["checks"]}
    for name in ("vision.patch_embed.proj.bias", "aligner.w2.weight", "image_newline"):
        assert name in compared


def swap_first_rows(tensors: dict[str, Tensor]) -> None:
    pixels = tensors["pixel_values"]
    pixels[[0, 1]] = pixels[[1, 0]]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("inputs.safetensors", swap_first_rows),
        ("model.safetensors", lambda t: t["vision.blocks.1.norm2.weight"].mul_(1.2)),
        ("model.safetensors", lambda t: t["image_end"].add_(0.05)),
    ],
)
def test_what_it_sees_counts(
    verify: Verify, spoilt: Spoilt, file: str, change: Callable[[dict[str, Tensor]], object]
) -> None:
    code, (line,) = verify(spoilt("tiny_image", file, change))
    assert code == 1
    assert "failed: logits logits" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("pixel_values"), "no tensor 'pixel_values'"),
        (lambda t: t.update({"pixel_values": torch.ones(60, 3, 4, 4)}), "patches have shape"),
        (lambda t: t.update({"pixel_values": torch.ones(61, 48)}), "do not fit input_ids"),
        (lambda t: t["vision_token_types"][0, 6].fill_(-1), "image tokens"),
    ],
)
def test_images_that_do_not_fit_are_bad_data(
    verify: Verify, spoilt: Spoilt, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    code, (line,) = verify(spoilt("tiny_image", "inputs.safetensors", change))
    assert code == 65
    assert message in line
