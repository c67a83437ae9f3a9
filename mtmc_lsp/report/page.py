"""Self-contained HTML pages: a body, a style sheet and charts. No scripts and no network access."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from mtmc_lsp.core.errors import EnvironmentNotAble

VEGA_LITE = "6.4"
"""Vega-Lite version for drawing charts; vl-convert contains several."""


@dataclass(frozen=True)
class Page:
    """A page before its charts are drawn. The body has a ``<figure id=NAME>`` for each chart."""

    title: str
    body: str
    charts: Mapping[str, Mapping[str, Any]]
    """Vega-Lite specifications by figure name."""


def style() -> str:
    """The style sheet: uses the editor's theme colours if available, else the system's light or dark mode."""
    return resources.files("mtmc_lsp.report").joinpath("page.css").read_text(encoding="utf-8")


def escape(text: object) -> str:
    """Escape text for HTML."""
    return html.escape(str(text))


def figure(name: str, caption: str) -> str:
    """A figure element for a chart."""
    return f'<figure id="{escape(name)}"><figcaption>{escape(caption)}</figcaption></figure>'


def table(head: Sequence[str], rows: Sequence[Sequence[object]], *, classes: Sequence[str] = ()) -> str:
    """A table; ``classes`` are the CSS classes of its columns."""
    names = [*classes, *[""] * len(head)]

    def cell(tag: str, value: object, name: str) -> str:
        class_attribute = f' class="{name}"' if name else ""
        return f"<{tag}{class_attribute}>{escape(value)}</{tag}>"

    def line(tag: str, row: Sequence[object]) -> str:
        return "".join(cell(tag, value, name) for value, name in zip(row, names, strict=False))

    body = "\n".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    head_row = f"<thead><tr>{line('th', head)}</tr></thead>" if any(head) else ""
    return f'<div class="wide"><table>{head_row}<tbody>\n{body}\n</tbody></table></div>'


def folded(summary: str, body: str, *, is_open: bool = False) -> str:
    """A part of the page that opens by a click. ``body`` is HTML."""
    return f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>\n{body}\n</details>"


def diff_block(diff: str) -> str:
    """A unified diff with the added and removed lines marked."""
    return f'<pre class="diff">{"".join(map(_diff_line, diff.splitlines()))}</pre>'


def _diff_line(line: str) -> str:
    if line.startswith(("+++", "---")):
        return ""
    kind = {"+": "added", "-": "removed", "@": "hunk"}.get(line[:1], "")
    # A block for each line: no line break in the text, which would be an empty line.
    return f'<span class="{kind}">{escape(line)}</span>' if kind else f"<span>{escape(line) or ' '}</span>"


def render(page: Page) -> str:
    """The complete page with charts as inline SVG.

    Raises:
        EnvironmentNotAble: vl-convert is not installed.
    """
    body = page.body
    for name, spec in page.charts.items():
        figure_tag = f'<figure id="{escape(name)}">'
        body = body.replace(figure_tag, f"{figure_tag}\n{_picture(spec)}", 1)
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
            "drawing charts needs vl-convert-python, which is not installed",
            remedy='Install it: pip install "mtmc-lsp[report]"',
        ) from None
    svg: str = vl_convert.vegalite_to_svg(json.dumps(spec), vl_version=VEGA_LITE)
    return svg
