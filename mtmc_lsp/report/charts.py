"""Charts as Vega-Lite specifications, shared by the HTML report and the editor's panel.

Colours are CSS variables of the page (:data:`COLOURS`), so a chart fits light and dark themes and print.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtmc_lsp.core.results import Ratio

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
COLOURS = ("text", "quiet", "grid", "gain", "loss", "accent")
"""Names of the CSS variables, each with the prefix ``--chart-``."""
WIDTH = 440
BAR_HEIGHT = 30
"""Height of a bar including its gap, in pixels."""
MAX_LABEL_WIDTH = 260
"""Maximum width of a bar's label in pixels. Longer labels are truncated; the tooltip shows the full text."""
TEXT_MARGIN = 1.4
"""Factor by which a bar chart's axis extends beyond the longest bar, to leave space for its text."""


def colour(name: str) -> str:
    """Reference to a colour variable of the page."""
    return f"var(--chart-{name})"


FONT = "system-ui, sans-serif"
CONFIG = {
    "background": None,
    "padding": 10,
    "font": FONT,
    "view": {"stroke": None},
    "title": {"color": colour("quiet"), "fontSize": 12},
    "axis": {
        "labelColor": colour("text"),
        "titleColor": colour("quiet"),
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titlePadding": 12,
        "gridColor": colour("grid"),
        "domainColor": colour("quiet"),
        "tickColor": colour("quiet"),
    },
    "style": {
        "gain": {"color": colour("gain")},
        "loss": {"color": colour("loss")},
        "interval": {"color": colour("text"), "strokeWidth": 2},
        "reference": {"color": colour("quiet"), "strokeDash": [4, 3]},
        "bound": {"color": colour("quiet"), "strokeWidth": 1.5},
        "path": {"color": colour("accent"), "strokeDash": [3, 3], "strokeWidth": 1.5},
        "point": {"color": colour("accent"), "opacity": 1},
        "estimate": {"color": colour("accent"), "opacity": 1},
        "leader": {"color": colour("grid"), "strokeWidth": 1},
        "label": {"color": colour("text"), "fontSize": 12},
    },
}
"""Theme of all charts: styles of marks and axes."""


@dataclass(frozen=True)
class Gain:
    """Effect of one step: speedup of the whole version before and after it."""

    name: str
    """``step 1``."""
    title: str
    before: float
    after: Ratio


@dataclass(frozen=True)
class Traffic:
    """Estimated memory traffic of a call before and after a step."""

    name: str
    """``step 1``."""
    title: str
    before: float
    after: float


def waterfall(gains: Sequence[Gain], baseline: str) -> dict[str, Any]:
    """Speedup over ``baseline`` by step. Each bar starts where the previous one ended, with its 95 % interval."""
    rows: list[dict[str, Any]] = [
        {
            "step": gain.name,
            "title": gain.title,
            "before": gain.before,
            "after": gain.after.ratio,
            "low": gain.after.low,
            "high": gain.after.high,
            "end": max(gain.before, gain.after.high),
            "text": f"{gain.after.ratio:.2f}x ({gain.after.low:.2f} to {gain.after.high:.2f})",
            "faster": gain.after.ratio >= gain.before,
        }
        for gain in gains
    ]
    x = _quantitative("before", f"speedup over {baseline}", max((row["end"] for row in rows), default=1.0))
    tooltip = [field_of("title"), field_of("text", f"speedup over {baseline}")]
    interval = {"mark": {"type": "rule", "style": "interval"}, "encoding": {"x": _x("low"), "x2": {"field": "high"}}}
    reference_line = {
        "data": {"values": [{"at": 1.0}]},
        "mark": {"type": "rule", "style": "reference"},
        "encoding": {"x": _x("at")},
    }
    return _bars(rows, x, "after", "faster", tooltip, [interval, reference_line])


def traffic(steps: Sequence[Traffic]) -> dict[str, Any]:
    """Estimated memory traffic per call by step, for runs without timing."""
    largest = max((max(step.before, step.after) for step in steps), default=1.0)
    size, unit = unit_of(largest, "B")
    rows: list[dict[str, Any]] = [
        {
            "step": step.name,
            "title": step.title,
            "before": step.before / size,
            "after": step.after / size,
            "end": max(step.before, step.after) / size,
            "text": f"{amount(step.before, 'B')} to {amount(step.after, 'B')}",
            "less": step.after <= step.before,
        }
        for step in steps
    ]
    x = _quantitative("before", f"{unit} moved per call, estimated", largest / size)
    return _bars(rows, x, "after", "less", [field_of("title"), field_of("text", "moved per call, estimated")], [])


def _bars(
    rows: list[dict[str, Any]],
    x: dict[str, Any],
    end: str,
    better_field: str,
    tooltip: list[Any],
    extra_layers: list[Any],
) -> dict[str, Any]:
    """Floating bars, one per row, each followed by its text."""
    names = [row["step"] for row in rows]
    y: dict[str, Any] = {"field": "step", "type": "nominal", "sort": names, "title": None}
    y["axis"] = {"labelLimit": MAX_LABEL_WIDTH, "domain": False, "ticks": False, "grid": False}
    text = {
        "mark": {"type": "text", "style": "label", "align": "left", "baseline": "middle", "dx": 6},
        "encoding": {"x": _x("end"), "text": {"field": "text"}},
    }
    bars = [
        {
            "transform": [{"filter": f"datum.{better_field} === {is_better}"}],
            "mark": {"type": "bar", "style": style, "height": {"band": 0.55}, "minBandSize": 2},
            "encoding": {"x": x, "x2": {"field": end}, "tooltip": tooltip},
        }
        for is_better, style in (("true", "gain"), ("false", "loss"))
    ]
    layers = [*bars, *extra_layers, text]
    for layer in layers:
        if "data" not in layer:
            layer["encoding"]["y"] = y
    size = {"width": WIDTH, "height": BAR_HEIGHT * len(rows)}
    return {"$schema": SCHEMA, "config": CONFIG, **size, "data": {"values": rows}, "layer": layers}


# Parts of encodings --------------------------------------------------------------------------------------------------


def _x(field: str) -> dict[str, Any]:
    return {"field": field, "type": "quantitative"}


def _quantitative(field: str, title: str, largest: float) -> dict[str, Any]:
    scale = {"domain": [0, largest * TEXT_MARGIN], "nice": False}
    return {**_x(field), "title": title, "scale": scale, "axis": {"tickCount": 6, "format": "~r"}}


def field_of(name: str, title: str | None = None) -> dict[str, Any]:
    """A field of a tooltip."""
    return {"field": name, "type": "nominal", "title": title or name}


def amount(value: float, unit: str) -> str:
    """A number with a unit prefix: ``2.28 GB``."""
    size, prefixed = unit_of(value, unit)
    return f"{value / size:.3g} {prefixed}"


def unit_of(value: float, unit: str) -> tuple[float, str]:
    """Size and name of the best unit prefix for a number."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return size, f"{prefix}{unit}"
    return 1.0, unit
