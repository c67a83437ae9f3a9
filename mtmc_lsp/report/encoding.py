"""Output on terminals that cannot show every character. Imports the standard library alone: each command runs this first."""

from __future__ import annotations

import codecs
import sys
from typing import TextIO

ASCII = {"✓": "+", "✗": "x", "·": "-"}
"""What replaces our symbols."""
ERROR_HANDLER = "mtmc-ascii"


def prepare_streams() -> None:
    """Make the standard streams replace what their encoding cannot express instead of failing."""
    codecs.register_error(ERROR_HANDLER, _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        _prepare(stream)


def _prepare(stream: TextIO) -> None:
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None and not is_unicode(stream.encoding):
        reconfigure(errors=ERROR_HANDLER)


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(ASCII.get(character, "?") for character in text), error.end


def is_unicode(encoding: str | None) -> bool:
    """Whether an encoding can express our symbols."""
    return (encoding or "").lower().startswith("utf")
