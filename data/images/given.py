"""An image as a record holds it: a path, bytes, a data URI, an object of these, a PIL image."""

from __future__ import annotations

import base64
import binascii
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data.errors import DataError
from data.images.pixels import open_image, to_rgb
from data.images.sizing import NOTHING


@dataclass(frozen=True)
class GivenImage:
    """An image file that has been decoded once, so that it can be. width, height: its pixels."""

    blob: bytes
    width: int
    height: int


def read_image(value: Any, *, folder: str, where: str) -> GivenImage:
    """The image file that `value` is or names.

    A string is a path, from `folder` on if it is relative, or a data URI; an object has "bytes" or
    "path", as Hugging Face datasets have it. DataError, naming `where`, for what is none of these,
    cannot be read or decoded, or has no pixels.
    """
    blob = _blob(value, folder, where)
    width, height = open_image(blob, where=where).size
    return GivenImage(blob, width, height)


def _blob(value: Any, folder: str, where: str) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        return _data_uri(value, where) if value.startswith("data:") else _file(value, folder, where)
    if isinstance(value, Mapping):
        for name in ("bytes", "path"):
            if value.get(name) is not None:
                return _blob(value[name], folder, where)
        present = ", ".join(map(repr, list(value)[:8])) or "none"
        raise DataError(f'{where} has neither "bytes" nor "path" (fields here: {present})')
    if hasattr(value, "save") and hasattr(value, "mode"):
        return _encoded(value, where)
    raise DataError(
        f"{where} is a {type(value).__name__}; give a path, the bytes of an image file, or an "
        'object with "bytes" or "path"'
    )


def _file(path: str, folder: str, where: str) -> bytes:
    if path.startswith(("http://", "https://")):
        raise DataError(f"{where} is the address {path}; download it and give the file's path")
    path = os.path.expanduser(path)
    if not os.path.isabs(path) and not folder:
        raise DataError(
            f"{where} has the relative path {path!r}; set data.image_folder to the folder that "
            "such paths start from"
        )
    try:
        with open(os.path.join(folder, path), "rb") as file:
            return file.read()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        told = getattr(error, "strerror", None) or error
        raise DataError(
            f"{where}: {os.path.join(folder, path)} cannot be read ({told}); correct the path or "
            "remove the record"
        ) from error


def _data_uri(uri: str, where: str) -> bytes:
    head, _, body = uri.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("it does not say ;base64,")
        return base64.b64decode(body, validate=True)
    except (ValueError, binascii.Error) as error:
        raise DataError(f"{where} is no readable data URI ({error}); write it anew") from error


def _encoded(image: Any, where: str) -> bytes:
    """A PIL image as a PNG file."""
    try:
        if 0 in image.size:
            raise DataError(f"{where}: {NOTHING.format(*image.size)}")
        out = io.BytesIO()
        to_rgb(image, where=where).save(out, "PNG")
        return out.getvalue()
    except DataError:
        raise
    except Exception as error:  # an image that loads its file only now
        raise DataError(f"{where}: no readable image ({error}); replace it") from error
