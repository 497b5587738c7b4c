"""From an encoded image to the patches that the tower takes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from data.errors import DataError
from data.images.sizing import ImagePlan

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

GRAY = (127, 127, 127)
# Modes that PIL turns into RGB without loss of meaning; wider ones (I;16, I, F) it would clip.
EIGHT_BIT = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB"}


def open_image(blob: bytes, *, where: str) -> Image:
    """Decode an image file (PNG, JPEG, ... whatever PIL reads) to RGB; no alpha, first frame.

    DataError, naming `where`, for what is no image, cut short, larger than PIL's limit against
    decompression bombs, or deeper than 8 bits a channel.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(blob)) as image:
            return to_rgb(image, where=where)
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise DataError(f"{where}: {error}; make the image smaller") from error
    except Exception as error:  # decoders raise whatever they like on broken files
        raise DataError(
            f"{where}: no readable image ({error}); replace the file or remove the document"
        ) from error


def to_rgb(image: Image, *, where: str) -> Image:
    """The image in RGB, without alpha. DataError for more than 8 bits a channel."""
    if image.mode not in EIGHT_BIT:
        raise DataError(
            f"{where}: an image of mode {image.mode}, which has more than 8 bits a channel; "
            "convert it to 8-bit RGB"
        )
    return image.convert("RGB")


def patches(image: Image, plan: ImagePlan, *, patch_size: int) -> Tensor:
    """The image as the tower sees it: bf16 [patch_rows * patch_cols, 3 * patch_size^2].

    Brought to the planned size by bicubic resampling that keeps its proportions, centred on gray
    127 (or stretched to it, where the plan says so); bytes x become x / 127.5 - 1; cut into patches
    in row-major order, channel first inside a patch.
    """
    import torch  # not above: the processes that look at images when data is prepared need none
    from PIL import Image, ImageOps

    size = plan.width, plan.height
    if plan.stretch:
        image = image.resize(size, Image.Resampling.BICUBIC)
    else:
        image = ImageOps.pad(image, size, method=Image.Resampling.BICUBIC, color=GRAY)
    pixels = torch.from_numpy(np.array(image, dtype=np.float32)).div_(127.5).sub_(1)
    grid = pixels.unflatten(0, (plan.patch_rows, patch_size))
    grid = grid.unflatten(2, (plan.patch_cols, patch_size))
    # rows, y, columns, x, channel -> rows, columns, channel, y, x
    return grid.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1).to(torch.bfloat16)
