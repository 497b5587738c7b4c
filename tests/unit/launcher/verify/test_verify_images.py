"""Images among the reference cases: plans and patches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
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
