"""Bytes of a file, plain or compressed, told apart by their first bytes, not by the name."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Protocol

from data.errors import DataError

CHUNK = 2**20
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class _Decoder(Protocol):
    """What zlib's and zstandard's decompressors of one stream have in common."""

    def decompress(self, data: bytes, /) -> bytes: ...

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...


def chunks(file: BinaryIO, path: str) -> Iterator[bytes]:
    """The contents of an open file from its start. DataError for a damaged compressed one.

    A file that ends inside a compressed stream is damaged too: libraries often pass over that.
    """
    head = file.read(4)
    file.seek(0)
    if head.startswith(GZIP):
        return _decompressed(file, path, "gzip")
    if head.startswith(ZSTD):
        return _decompressed(file, path, "zstd")
    return _plain(file)


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while data := file.read(CHUNK):
        yield data


def _decompressed(file: BinaryIO, path: str, form: str) -> Iterator[bytes]:
    decoder = _decoder(form)
    done = 0
    fresh = True  # between two streams of one file
    while data := file.read(CHUNK // 8):
        while data := data.lstrip(b"\0") if fresh else data:  # some writers pad with zeros
            try:
                out = decoder.decompress(data)
            except Exception as error:  # zlib.error, zstandard.ZstdError
                raise DataError(
                    f"{path}: damaged {form} data after {done:,} bytes ({error}); "
                    "copy or compress the file again"
                ) from error
            done += len(out)
            yield from (out[at : at + CHUNK] for at in range(0, len(out), CHUNK))
            fresh = decoder.eof
            data = b""
            if fresh:
                data = decoder.unused_data
                decoder = _decoder(form)
    if not fresh:
        raise DataError(
            f"{path}: the {form} data ends too early, after {done:,} bytes; "
            "copy or compress the file again"
        )


def _decoder(form: str) -> _Decoder:
    if form == "gzip":
        return zlib.decompressobj(wbits=31)
    import zstandard

    decoder: Any = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
    return decoder
