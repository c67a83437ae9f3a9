"""HTML pages that hold all they need: a body, a style sheet and charts. No script, nothing from the network."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from mtmc_lsp.core.errors import EnvironmentNotAble

VEGA_LITE = "6.4"
"""The version that pages are drawn with, of those that vl-convert brings."""


@dataclass(frozen=True)
class Page:
    """A page whose charts are still to be drawn: where each goes, the body has ``<figure id=NAME>``."""

    title: str
    body: str
    charts: Mapping[str, Mapping[str, Any]]
    """Vega-Lite specifications by the name of their figure."""


def style() -> str:
    """The style sheet: the editor's theme colours where there are any, else the reader's light or dark system."""
    return resources.files("mtmc_lsp.report").joinpath("page.css").read_text(encoding="utf-8")


def escape(text: object) -> str:
    """Text as HTML shows it."""
    return html.escape(str(text))


def figure(name: str, caption: str) -> str:
    """A place for a chart."""
    return f'<figure id="{escape(name)}"><figcaption>{escape(caption)}</figcaption></figure>'


def table(head: Sequence[str], rows: Sequence[Sequence[object]], *, classes: Sequence[str] = ()) -> str:
    """A table; ``classes`` are those of its columns, where they have any."""
    names = [*classes, *[""] * len(head)]

    def cell(tag: str, value: object, name: str) -> str:
        own = f' class="{name}"' if name else ""
        return f"<{tag}{own}>{escape(value)}</{tag}>"

    def line(tag: str, row: Sequence[object]) -> str:
        return "".join(cell(tag, value, name) for value, name in zip(row, names, strict=False))

    body = "\n".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    top = f"<thead><tr>{line('th', head)}</tr></thead>" if any(head) else ""
    return f'<div class="wide"><table>{top}<tbody>\n{body}\n</tbody></table></div>'


def render(page: Page) -> str:
    """The whole page, its charts drawn as pictures in it.

    Raises:
        EnvironmentNotAble: what draws charts is not installed.
    """
    body = page.body
    for name, spec in page.charts.items():
        place = f'<figure id="{escape(name)}">'
        body = body.replace(place, f"{place}\n{_picture(spec)}", 1)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(page.title)}</title>
<style>{style()}</style></head><body>
{body}
</body></html>
"""


def _picture(spec: Mapping[str, Any]) -> str:
    try:
        import vl_convert
    except ImportError:
        raise EnvironmentNotAble(
            "charts are drawn by vl-convert-python, which is not installed",
            remedy='Install it: pip install "mtmc-lsp[report]"',
        ) from None
    drawn: str = vl_convert.vegalite_to_svg(json.dumps(spec), vl_version=VEGA_LITE)
    return drawn
