"""Removes credentials and absolute paths from prompts."""

from __future__ import annotations

import re
from pathlib import Path

KNOWN_TOKENS = re.compile(
    r"\b(?:sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_\w{20,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}"
    r"|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)
"""API keys with a recognisable format."""
ASSIGNED_SECRET = re.compile(
    r"""((?:api_?key|secret|passw(?:or)?d|token|credential|auth)\w*["']?\s*[:=]\s*)(["'])(?:(?!\2).){4,}\2""",
    re.IGNORECASE,
)
"""A string literal assigned to a name such as ``api_key`` or ``password``."""
BEARER_TOKEN = re.compile(r"(\bBearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
URL_CREDENTIALS = re.compile(r"(\b\w+://)[^\s/:@]+:[^\s/@]+@")
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])(?:/[\w.@+-]+){2,}/?|\b[A-Za-z]:\\[\w.\\ -]+")
"""An absolute path of at least two parts: a single part could be a division."""

SEPARATOR = re.compile(r"[/\\]")


def redacted(text: str, project: Path | None = None) -> str:
    """``text`` without secrets and absolute paths; paths in ``project`` become relative to it."""
    if project is not None:
        text = text.replace(f"{project}/", "")
    text = PRIVATE_KEY.sub("<secret>", text)
    text = KNOWN_TOKENS.sub("<secret>", text)
    text = BEARER_TOKEN.sub(r"\1<secret>", text)
    text = ASSIGNED_SECRET.sub(r"\1\2<secret>\2", text)
    text = URL_CREDENTIALS.sub(r"\1<secret>@", text)
    return ABSOLUTE_PATH.sub(_last_part, text)


def _last_part(match: re.Match[str]) -> str:
    return f"<path>/{re.split(SEPARATOR, match[0].rstrip('/'))[-1]}"
