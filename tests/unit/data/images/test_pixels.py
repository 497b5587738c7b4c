"""Patches: the reference's values, order inside and between patches, stretching, bad files."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from data.errors import DataError
from data.images.pixels import open_image, patches
from data.images.sizing import ImagePlan, plan_image
from model.config import VisionConfig

GOLDEN = Path(__file__).parents[3] / "golden/image_sizing/image.safetensors"


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def noise(width: int, height: int) -> Image.Image:
    generator = np.random.default_rng(width * 1000 + height)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_reference_patches_after_a_round_trip_through_png() -> None:
    case = load_file(GOLDEN)
    image = open_image(encoded(Image.fromarray(case["image"].numpy())), where="here")
    plan = plan_image(image.width, image.height, VisionConfig())
    found = patches(image, plan, patch_size=14)
    assert [plan.patch_rows, plan.patch_cols] == case["grid"].tolist()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found[::97], case["patches"].flatten(1))


def test_order_of_patches_and_of_channels_inside_one() -> None:
    image = noise(12, 8)
    plan = ImagePlan(width=12, height=8, patch_rows=2, patch_cols=3, rows=1, cols=1)
    found = patches(image, plan, patch_size=4)
    assert found.shape == (6, 48)
    pixels = np.asarray(image).astype(np.float64)
    for row in range(2):
        for col in range(3):
            for channel in range(3):
                for y in range(4):
                    for x in range(4):
                        value = pixels[row * 4 + y, col * 4 + x, channel] / 127.5 - 1
                        got = found[row * 3 + col, channel * 16 + y * 4 + x]
                        assert got == torch.tensor(value).to(torch.bfloat16)


def test_other_proportions_are_centred_on_gray_and_stretching_fills() -> None:
    image = Image.new("RGB", (20, 10), (255, 0, 0))
    plan = ImagePlan(width=16, height=16, patch_rows=4, patch_cols=4, rows=2, cols=2)
    red = patches(image, plan, patch_size=4)[:, :16].float().unflatten(0, (4, 4))
    gray = torch.tensor(127 / 127.5 - 1).bfloat16().float()
    assert (red[0] == gray).all() and (red[3] == gray).all()
    assert (red[1:3] == 1).all()
    stretched = ImagePlan(16, 16, 4, 4, 2, 2, stretch=True)
    assert (patches(image, stretched, patch_size=4)[:, :16] == 1).all()
    assert (patches(image, stretched, patch_size=4)[:, 16:] == -1).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_other_modes_become_rgb(mode: str) -> None:
    kind = "TIFF" if mode == "CMYK" else "PNG"
    blob = encoded(noise(9, 5).convert(mode), kind)
    image = open_image(blob, where="here")
    assert (image.mode, image.size) == ("RGB", (9, 5))


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header states any size; its pixels are missing."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)

    def chunk(name: bytes, data: bytes) -> bytes:
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    end = chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + end


@pytest.mark.parametrize(
    ("blob", "words"),
    [
        (b"", "no readable image"),
        (b"no image at all", "no readable image"),
        (encoded(noise(64, 64))[:3000], "no readable image"),
        (encoded(noise(64, 64), "JPEG")[:700], "no readable image"),
        (png_of(0, 0), ""),
        (png_of(100_000, 100_000), "make the image smaller"),
        (encoded(Image.new("I;16", (4, 4))), "more than 8 bits"),
        (encoded(Image.new("F", (4, 4)), "TIFF"), "more than 8 bits"),
    ],
    ids=["empty", "text", "cut png", "cut jpeg", "0x0", "bomb", "16 bit", "float"],
)
def test_bad_files_name_the_place(blob: bytes, words: str) -> None:
    with pytest.raises(DataError, match=r"^shelf\.jsonl:7: .*" + words):
        open_image(blob, where="shelf.jsonl:7")
