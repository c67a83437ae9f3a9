"""Line charts: several curves over one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtmc_lsp.report.charts import CONFIG, SCHEMA, WIDTH, colour

HEIGHT = 240
STROKES: tuple[tuple[str, list[int]], ...] = (
    ("accent", []),
    ("gain", []),
    ("loss", []),
    ("text", [6, 3]),
    ("quiet", [2, 3]),
    ("accent", [6, 3]),
    ("gain", [2, 3]),
)
"""Colour and dashes of each curve, in their order; curves also have different dashes because colours alone are not enough."""


def lines(
    curves: Mapping[str, Sequence[tuple[float, float]]], x_title: str, y_title: str, *, reference: float | None = None
) -> dict[str, Any]:
    """A chart of curves, each a name with its points.

    Args:
        reference: a value of the vertical axis that is marked by a line.
    """
    rows = [{"curve": name, "x": x, "y": y} for name, points in curves.items() for x, y in points]
    names = list(curves)
    strokes = [STROKES[index % len(STROKES)] for index in range(len(names))]
    colours = {"domain": names, "range": [colour(name) for name, _ in strokes]}
    dashes = {"domain": names, "range": [dash or [1, 0] for _, dash in strokes]}
    encoding = {
        "x": {"field": "x", "type": "quantitative", "title": x_title, "scale": {"nice": False}},
        "y": {"field": "y", "type": "quantitative", "title": y_title, "scale": {"zero": False}},
        "color": {"field": "curve", "type": "nominal", "scale": colours, "title": None},
        "strokeDash": {"field": "curve", "type": "nominal", "scale": dashes, "title": None},
    }
    layers: list[dict[str, Any]] = [
        {"data": {"values": rows}, "mark": {"type": "line", "strokeWidth": 2}, "encoding": encoding}
    ]
    if reference is not None:
        layers.insert(
            0,
            {
                "data": {"values": [{"y": reference}]},
                "mark": {"type": "rule", "style": "reference"},
                "encoding": {"y": {"field": "y", "type": "quantitative"}},
            },
        )
    config = {**CONFIG, "legend": {"labelColor": colour("text"), "labelFontSize": 12, "symbolType": "stroke"}}
    return {"$schema": SCHEMA, "config": config, "width": WIDTH, "height": HEIGHT, "layer": layers}
