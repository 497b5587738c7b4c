"""Small pictures of one shape each, with a caption: something to see that needs no download."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

SIZE = 48
COLOURS = {
    "red": (214, 40, 40),
    "orange": (244, 140, 20),
    "yellow": (236, 208, 20),
    "green": (40, 150, 60),
    "blue": (40, 90, 210),
    "purple": (130, 50, 170),
    "brown": (120, 75, 40),
    "black": (20, 20, 20),
}
FORMS = ("circle", "square", "triangle", "cross", "ring")
SIZES = {"small": 6, "large": 10}  # pixels from the middle to the edge
PLACES = {
    (0, 0): "at the top left",
    (0, 1): "at the top right",
    (1, 0): "at the bottom left",
    (1, 1): "at the bottom right",
}


@dataclass(frozen=True, eq=False)
class Picture:
    """pixels uint8 [48, 48, 3]; caption: a noun phrase that says all that differs on purpose."""

    pixels: np.ndarray
    caption: str


def draw(number: int) -> Picture:
    """The picture of this number, always the same: size, colour, form and place are drawn from it,
    and so are a pale background and some pixels' offset, which the caption leaves out."""
    drawn = hashlib.sha256(b"shape %d" % number).digest()
    size = sorted(SIZES)[drawn[0] % len(SIZES)]
    colour = sorted(COLOURS)[drawn[1] % len(COLOURS)]
    form = FORMS[drawn[2] % len(FORMS)]
    place = sorted(PLACES)[drawn[3] % len(PLACES)]
    y, x = (SIZE * (2 * part + 1) / 4 + drawn[4 + axis] % 5 - 2 for axis, part in enumerate(place))
    inside = _inside(form, y, x, SIZES[size])
    pale = [200 + drawn[6 + channel] % 56 for channel in range(3)]
    pixels = np.full((SIZE, SIZE, 3), pale, dtype=np.uint8)
    pixels[inside] = COLOURS[colour]
    return Picture(pixels, f"a {size} {colour} {form} {PLACES[place]}")


def _inside(form: str, y: float, x: float, radius: int) -> np.ndarray:
    """bool [48, 48]: the pixels of a form around (y, x)."""
    down, right = (np.arange(SIZE) - y)[:, None], (np.arange(SIZE) - x)[None]
    square = (abs(down) <= radius) & (abs(right) <= radius)
    distance = np.hypot(down, right)
    if form == "circle":
        return distance <= radius
    if form == "ring":
        return (distance <= radius) & (distance > radius * 0.55)
    if form == "triangle":
        return square & (2 * abs(right) <= down + radius)
    if form == "cross":
        return square & ((abs(down) <= radius / 3) | (abs(right) <= radius / 3))
    return square
