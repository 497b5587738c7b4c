"""Captioned pictures, no download: drawn shapes, and a photograph that matplotlib ships."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.images.shapes import draw
from data.kinds.image_chat import PLACEHOLDER
from data.sources.base import IMAGE_BLOCK_RECORDS, Block, Record

COUNT = 1200
EVERY = 12  # one conversation in so many has two pictures
PHOTOGRAPH = "grace_hopper.jpg"
CAPTION = "A photograph of Grace Hopper in uniform, before the flag of the United States."


@dataclass(frozen=True)
class PicturesSource:
    """Conversations in which the user shows a picture, or two, and the answer is the caption.

    The first shows the photograph, the others show drawn shapes. messages, role, content and images
    are the names of the fields.
    """

    messages: str
    role: str
    content: str
    images: str

    @property
    def files(self) -> Sequence[str]:
        return [f"pictures[{number}]" for number in range(COUNT)]

    @property
    def size(self) -> int:
        return COUNT

    def identity(self) -> list[Any]:
        digest = hashlib.sha256(_photograph())
        for number in range(0, COUNT, 100):  # drawing all of them would take a second
            picture = draw(number)
            digest.update(picture.pixels.tobytes() + picture.caption.encode())
        return ["pictures", COUNT, EVERY, CAPTION, digest.hexdigest()]

    def stamp(self) -> list[Any]:
        return self.identity()

    def blocks(self, position: Any = None) -> Iterator[Block]:
        """position: conversations that lie behind it."""
        for first in range(position or 0, COUNT, IMAGE_BLOCK_RECORDS):
            end = min(first + IMAGE_BLOCK_RECORDS, COUNT)
            yield Block((first, end), end, end)

    def behind(self, file: int) -> Any:
        return file + 1

    def read(self, block: Block) -> Iterator[Record]:
        for number in range(*block.payload):
            yield Record(self._conversation(number), number, 0)

    def _conversation(self, number: int) -> dict[str, Any]:
        if number == 0:
            return self._record([_photograph()], CAPTION)
        if number % EVERY:
            picture = draw(number)
            return self._record([_png(picture.pixels)], f"{picture.caption.capitalize()}.")
        first, second = draw(number), draw(number + COUNT)
        answer = f"First {first.caption}, then {second.caption}."
        return self._record([_png(first.pixels), _png(second.pixels)], answer)

    def _record(self, images: list[bytes], answer: str) -> dict[str, Any]:
        messages = [
            {self.role: "user", self.content: PLACEHOLDER * len(images)},
            {self.role: "assistant", self.content: answer},
        ]
        return {self.messages: messages, self.images: images}


def _png(pixels: Any) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@functools.cache
def _photograph() -> bytes:
    """The file's bytes; matplotlib is located, not imported."""
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        raise DataError("data.source=pictures needs the package matplotlib; pip install matplotlib")
    path = Path(spec.origin).parent / "mpl-data" / "sample_data" / PHOTOGRAPH
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}); install matplotlib anew"
        ) from error
