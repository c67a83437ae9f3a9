"""Charts as Vega-Lite specifications, shared by the HTML report and the editor's panel.

Colours are CSS variables of the page (:data:`COLOURS`), so a chart fits light and dark themes and print.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.results import Ratio

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
COLOURS = ("text", "quiet", "grid", "gain", "loss", "accent")
"""Names of the CSS variables, each with the prefix ``--chart-``."""
WIDTH = 440
HEIGHT = 300
BAR_HEIGHT = 30
"""Height of a bar including its gap, in pixels."""
MAX_LABEL_WIDTH = 260
"""Maximum width of a bar's label in pixels. Longer labels are truncated; the tooltip shows the full text."""
TEXT_MARGIN = 1.4
"""Factor by which a bar chart's axis extends beyond the longest bar, to leave space for its text."""
MAX_NAME_LENGTH = 28
"""Maximum length of the name next to a point; the tooltip shows the full name."""
NOT_TIMED = "not timed: estimated at the bound"
MARGIN = 3.0
"""Factor by which logarithmic axes extend beyond the points."""


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
        "label": {"color": colour("text"), "fontSize": 12},
    },
}
"""Theme of all charts: styles of marks and axes."""


@dataclass(frozen=True)
class Point:
    """Work and time of one call of one version."""

    name: str
    flops: float
    """FLOPs of matmuls and similar operations; 0 if there are none."""
    bytes: float
    """Bytes read from and written to device memory."""
    seconds: float | None = None
    """``None`` if not timed. The point is then drawn at the bound and labelled as an estimate."""


@dataclass(frozen=True)
class Gain:
    """Effect of one step: speedup of the whole version before and after it."""

    name: str
    before: float
    after: Ratio


@dataclass(frozen=True)
class Traffic:
    """Estimated memory traffic of a call before and after a step."""

    name: str
    before: float
    after: float


def waterfall(gains: Sequence[Gain], baseline: str) -> dict[str, Any]:
    """Speedup over ``baseline`` by step. Each bar starts where the previous one ended, with its 95 % interval."""
    rows: list[dict[str, Any]] = [
        {
            "step": gain.name,
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
    tooltip = [_field("step"), _field("text", f"speedup over {baseline}")]
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
    size, unit = _unit(largest, "B")
    rows: list[dict[str, Any]] = [
        {
            "step": step.name,
            "before": step.before / size,
            "after": step.after / size,
            "end": max(step.before, step.after) / size,
            "text": f"{amount(step.before, 'B')} to {amount(step.after, 'B')}",
            "less": step.after <= step.before,
        }
        for step in steps
    ]
    x = _quantitative("before", f"{unit} moved per call, estimated", largest / size)
    return _bars(rows, x, "after", "less", [_field("step"), _field("text", "moved per call, estimated")], [])


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


def roofline(points: Sequence[Point], device: DeviceModel) -> dict[str, Any]:
    """The device's roofline with the versions as connected points.

    If every version has FLOPs, this is the usual plot of FLOP/s over arithmetic intensity. Otherwise (for example, if kernels
    only move data) it shows time per call over bytes moved, with the memory bound.
    """
    plotted = [point for point in points if point.bytes > 0]
    if plotted and all(point.flops > 0 for point in plotted):
        return _intensity_roofline(plotted, device)
    return _memory_roofline(plotted, device)


def peak_names(device: DeviceModel) -> list[tuple[str, float]]:
    """Compute ceilings, slowest first; dtypes with the same ceiling are grouped."""
    groups: dict[float, list[str]] = {}
    for name, rate in device.flops.items():
        groups.setdefault(rate, []).append(name)
    return [(", ".join(names), rate) for rate, names in sorted(groups.items())]


def _intensity_roofline(points: Sequence[Point], device: DeviceModel) -> dict[str, Any]:
    ceilings = peak_names(device)
    top = max((rate for _, rate in ceilings), default=device.bandwidth)
    intensities = [point.flops / point.bytes for point in points]
    ridges = [rate / device.bandwidth for _, rate in ceilings]
    low, high = min(intensities + ridges) / MARGIN, max(intensities + ridges) * MARGIN
    rows = []
    for number, (point, intensity) in enumerate(zip(points, intensities, strict=True), 1):
        bound = min(top, device.bandwidth * intensity)
        rate = point.flops / point.seconds if point.seconds else bound
        coordinates = {"x": intensity, "y": rate / 1e12, "bound": bound}
        description = f"{rate / 1e12:.3g} TFLOP/s of {bound / 1e12:.3g}" if point.seconds else NOT_TIMED
        rows.append(_row(number, point, coordinates, description))
    lines = [
        {"line": name, "x": x, "y": rate / 1e12, "text": f"{name} {rate / 1e12:.3g} TFLOP/s" if x == high else ""}
        for name, rate in ceilings
        for x in (rate / device.bandwidth, high)
    ]
    lines += [
        {"line": "memory", "x": x, "y": device.bandwidth * x / 1e12, "text": ""} for x in (low, top / device.bandwidth)
    ]
    y_low = min([row["y"] for row in rows] + [device.bandwidth * low / 1e12]) / 1.5
    x_axis = _logarithmic("x", "operations per byte", [low, high])
    y_axis = _logarithmic("y", "TFLOP/s", [y_low, top / 1e12 * MARGIN])
    return _roofs(rows, lines, x_axis, y_axis, f"{device.title}: {device.bandwidth / 1e12:.3g} TB/s")


def _memory_roofline(points: Sequence[Point], device: DeviceModel) -> dict[str, Any]:
    size, unit = _unit(max((point.bytes for point in points), default=1.0), "B")
    rows = []
    for number, point in enumerate(points, 1):
        bound = point.bytes / device.bandwidth
        seconds = point.seconds or bound
        description = f"{bound / seconds:.0%} of the roofline" if point.seconds else NOT_TIMED
        rows.append(_row(number, point, {"x": point.bytes / size, "y": seconds * 1e6, "bound": bound}, description))
    xs = [row["x"] for row in rows] or [1.0]
    low, high = min(xs) / MARGIN, max(xs) * MARGIN
    microseconds = [x * size * 1e6 / device.bandwidth for x in (low, high)]
    lines = [{"line": "memory", "x": x, "y": y, "text": ""} for x, y in zip((low, high), microseconds, strict=True)]
    ys = [row["y"] for row in rows] + microseconds
    y_axis = _logarithmic("y", "us per call", [min(ys) / 1.5, max(ys) * 1.5])
    x_axis = _logarithmic("x", f"{unit} moved per call", [low, high])
    return _roofs(rows, lines, x_axis, y_axis, f"{device.title}: {device.bandwidth / 1e12:.3g} TB/s")


def _row(number: int, point: Point, coordinates: Mapping[str, float], description: str) -> dict[str, Any]:
    kind = "timed" if point.seconds else "estimate"
    time = f"{point.seconds * 1e6:.4g} us" if point.seconds else "not timed"
    label = point.name if len(point.name) <= MAX_NAME_LENGTH else f"{point.name[: MAX_NAME_LENGTH - 1]}…"
    labels = {"name": point.name, "label": label, "order": number, "kind": kind, "time": time, "words": description}
    return {**labels, "moved": amount(point.bytes, "B"), "work": amount(point.flops, "FLOP"), **coordinates}


def _roofs(
    rows: list[dict[str, Any]], lines: list[dict[str, Any]], x: dict[str, Any], y: dict[str, Any], memory: str
) -> dict[str, Any]:
    """Layers for the bounds, the path between versions, and the versions."""
    axes = {"x": x, "y": y}
    tooltip = [_field("name"), _field("time"), _field("moved"), _field("work"), _field("words", "reaches")]

    def marks(kind: str, style: str) -> dict[str, Any]:
        mark = {"type": "point", "style": style, "size": 90, "filled": kind == "timed"}
        return {
            "transform": [{"filter": f"datum.kind === '{kind}'"}],
            "mark": mark,
            "encoding": {**axes, "tooltip": tooltip},
        }

    bounds = {"mark": {"type": "line", "style": "bound"}, "encoding": {**axes, "detail": {"field": "line"}}}
    names = {
        "mark": {"type": "text", "style": "reference", "align": "right", "dy": -6},
        "encoding": {**axes, "text": {"field": "text"}},
    }
    path = {
        "mark": {"type": "line", "style": "path"},
        "encoding": {**axes, "order": {"field": "order", "type": "quantitative"}},
    }
    labels = {
        "mark": {"type": "text", "style": "label", "align": "left", "dx": 9, "dy": 9},
        "encoding": {**axes, "text": {"field": "label"}},
    }
    return {
        "$schema": SCHEMA,
        "config": CONFIG,
        "title": {"text": memory, "anchor": "end", "fontWeight": "normal"},
        "width": WIDTH,
        "height": HEIGHT,
        "layer": [
            {"data": {"values": lines}, "layer": [bounds, names]},
            {"data": {"values": rows}, "layer": [path, marks("timed", "point"), marks("estimate", "estimate"), labels]},
        ],
    }


# Parts of encodings --------------------------------------------------------------------------------------------------


def _x(field: str) -> dict[str, Any]:
    return {"field": field, "type": "quantitative"}


def _quantitative(field: str, title: str, largest: float) -> dict[str, Any]:
    scale = {"domain": [0, largest * TEXT_MARGIN], "nice": False}
    return {**_x(field), "title": title, "scale": scale, "axis": {"tickCount": 6, "format": "~r"}}


def _logarithmic(field: str, title: str, domain: list[float]) -> dict[str, Any]:
    scale = {"type": "log", "domain": domain, "nice": False}
    return {**_x(field), "title": title, "scale": scale, "axis": {"format": "~g", "tickCount": 6, "grid": False}}


def _field(name: str, title: str | None = None) -> dict[str, Any]:
    return {"field": name, "type": "nominal", "title": title or name}


def amount(value: float, unit: str) -> str:
    """A number with a unit prefix: ``2.28 GB``."""
    size, prefixed = _unit(value, unit)
    return f"{value / size:.3g} {prefixed}"


def _unit(value: float, unit: str) -> tuple[float, str]:
    """Size and name of the best unit prefix for a number."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return size, f"{prefix}{unit}"
    return 1.0, unit
