"""What never leaves the machine in a prompt: credentials, and where things lie on the disk."""

from __future__ import annotations

import re
from pathlib import Path

TOKENS = re.compile(
    r"\b(?:sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_\w{20,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}"
    r"|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)
"""Keys that are known by their form."""
ASSIGNED = re.compile(
    r"""((?:api_?key|secret|passw(?:or)?d|token|credential|auth)\w*["']?\s*[:=]\s*)(["'])(?:(?!\2).){4,}\2""",
    re.IGNORECASE,
)
"""Text given to a name that speaks of a secret."""
BEARER = re.compile(r"(\bBearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
PRIVATE = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
IN_ADDRESS = re.compile(r"(\b\w+://)[^\s/:@]+:[^\s/@]+@")
ABSOLUTE = re.compile(r"(?<![\w.:/])(?:/[\w.@+-]+){2,}/?|\b[A-Za-z]:\\[\w.\\ -]+")
"""A path from the root with at least two parts; one part alone is as often a division."""

SEPARATOR = re.compile(r"[/\\]")


def redacted(text: str, project: Path | None = None) -> str:
    """``text`` without secrets and absolute paths; paths in ``project`` become relative to it."""
    if project is not None:
        text = text.replace(f"{project}/", "")
    text = PRIVATE.sub("<secret>", text)
    text = TOKENS.sub("<secret>", text)
    text = BEARER.sub(r"\1<secret>", text)
    text = ASSIGNED.sub(r"\1\2<secret>\2", text)
    text = IN_ADDRESS.sub(r"\1<secret>@", text)
    return ABSOLUTE.sub(_last_part, text)


def _last_part(found: re.Match[str]) -> str:
    return f"<path>/{re.split(SEPARATOR, found[0].rstrip('/'))[-1]}"
