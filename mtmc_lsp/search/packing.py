"""Compressed documents of the store: an evolution has thousands of versions, and each has the whole file."""

from __future__ import annotations

import base64
import zlib

MOST_BYTES = 64 << 20
"""Limit for an unpacked document: an untrusted store may contain one that expands to any size."""


def pack(text: str) -> str:
    """A text, compressed, as text again."""
    return base64.b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"))).decode("ascii")


def unpack(packed: str) -> str:
    """The inverse of :func:`pack`.

    Raises:
        ValueError: ``packed`` is damaged or too large.
    """
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(packed, validate=True), MOST_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not unpacker.eof:
        raise ValueError(f"it is incomplete, or has more than {MOST_BYTES >> 20} MB")
    return data.decode("utf-8", "surrogatepass")
