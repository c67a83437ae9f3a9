"""Charts as Vega-Lite specifications: one source for the terminal's HTML page and for the editor's panel.

Colours are variables of the page's style sheet (:data:`COLOURS`), so the same chart fits a light theme, a dark one, and print.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.results import Ratio

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
COLOURS = ("text", "quiet", "grid", "gain", "loss", "accent")
"""Variables that a page's style sheet sets, each with ``--chart-`` before it."""
WIDTH = 440
HEIGHT = 300
BAR = 30
"""Height of a bar with its gap."""
LONGEST_LABEL = 260
"""Pixels of a bar's label; what is longer is cut, and whole in the tooltip."""
TEXT_ROOM = 1.4
"""A bar's axis goes on by this factor beyond the longest bar, for the text behind it."""
LONGEST_NAME = 28
"""Letters of a point's name beside it; the tooltip has all of it."""
NOT_TIMED = "not timed: the bound, an estimate"
MARGIN = 3.0
"""A chart with logarithmic axes goes on by this factor beyond its points."""


def colour(name: str) -> str:
    """A colour of the page's."""
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
"""Looks of every chart: the styles of its marks and its axes."""


@dataclass(frozen=True)
class Point:
    """What one call of one version does, and how long it takes."""

    name: str
    flops: float
    """Operations of matrix products and the like; 0 where there are none."""
    bytes: float
    """Bytes read from and written to the device's memory."""
    seconds: float | None = None
    """``None`` where it was not timed: it is drawn where the bound would be, and called an estimate."""


@dataclass(frozen=True)
class Gain:
    """What one step brought: the whole version's speedup before and after it."""

    name: str
    before: float
    after: Ratio


@dataclass(frozen=True)
class Traffic:
    """The estimated bytes that a call moves before and after a step."""

    name: str
    before: float
    after: float


def waterfall(gains: Sequence[Gain], baseline: str) -> dict[str, Any]:
    """Speedup over ``baseline`` step by step: each bar begins where the one before ended, with its 95 % interval."""
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
    one = {
        "data": {"values": [{"at": 1.0}]},
        "mark": {"type": "rule", "style": "reference"},
        "encoding": {"x": _x("at")},
    }
    return _bars(rows, x, "after", "faster", tooltip, [interval, one])


def traffic(steps: Sequence[Traffic]) -> dict[str, Any]:
    """Estimated bytes per call step by step, for runs that were not timed."""
    most = max((max(step.before, step.after) for step in steps), default=1.0)
    size, unit = _unit(most, "B")
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
    x = _quantitative("before", f"{unit} moved per call, estimated", most / size)
    return _bars(rows, x, "after", "less", [_field("step"), _field("text", "moved per call, estimated")], [])


def _bars(
    rows: list[dict[str, Any]], x: dict[str, Any], end: str, good: str, tooltip: list[Any], more: list[Any]
) -> dict[str, Any]:
    """Floating bars, one below the other, each with its text behind it."""
    names = [row["step"] for row in rows]
    y: dict[str, Any] = {"field": "step", "type": "nominal", "sort": names, "title": None}
    y["axis"] = {"labelLimit": LONGEST_LABEL, "domain": False, "ticks": False, "grid": False}
    text = {
        "mark": {"type": "text", "style": "label", "align": "left", "baseline": "middle", "dx": 6},
        "encoding": {"x": _x("end"), "text": {"field": "text"}},
    }
    bars = [
        {
            "transform": [{"filter": f"datum.{good} === {verdict}"}],
            "mark": {"type": "bar", "style": style, "height": {"band": 0.55}, "minBandSize": 2},
            "encoding": {"x": x, "x2": {"field": end}, "tooltip": tooltip},
        }
        for verdict, style in (("true", "gain"), ("false", "loss"))
    ]
    layers = [*bars, *more, text]
    for layer in layers:
        if "data" not in layer:
            layer["encoding"]["y"] = y
    size = {"width": WIDTH, "height": BAR * len(rows)}
    return {"$schema": SCHEMA, "config": CONFIG, **size, "data": {"values": rows}, "layer": layers}


def roofline(points: Sequence[Point], device: DeviceModel) -> dict[str, Any]:
    """The device's roofline, and the versions on it in their order, joined by a line.

    Where every version has operations to count, it is the usual plot of operations per second over arithmetic intensity.
    Else, as with kernels that only move data, it is time per call over bytes moved, with the memory's bound.
    """
    drawn = [point for point in points if point.bytes > 0]
    if drawn and all(point.flops > 0 for point in drawn):
        return _intensity_roofline(drawn, device)
    return _memory_roofline(drawn, device)


def peak_names(device: DeviceModel) -> list[tuple[str, float]]:
    """The ceilings of operations, slowest first; those that are the same stand together."""
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
        facts = {"x": intensity, "y": rate / 1e12, "bound": bound}
        words = f"{rate / 1e12:.3g} TFLOP/s of {bound / 1e12:.3g}" if point.seconds else NOT_TIMED
        rows.append(_row(number, point, facts, words))
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
        words = f"{bound / seconds:.0%} of the roofline" if point.seconds else NOT_TIMED
        rows.append(_row(number, point, {"x": point.bytes / size, "y": seconds * 1e6, "bound": bound}, words))
    xs = [row["x"] for row in rows] or [1.0]
    low, high = min(xs) / MARGIN, max(xs) * MARGIN
    microseconds = [x * size * 1e6 / device.bandwidth for x in (low, high)]
    lines = [{"line": "memory", "x": x, "y": y, "text": ""} for x, y in zip((low, high), microseconds, strict=True)]
    ys = [row["y"] for row in rows] + microseconds
    y_axis = _logarithmic("y", "us per call", [min(ys) / 1.5, max(ys) * 1.5])
    x_axis = _logarithmic("x", f"{unit} moved per call", [low, high])
    return _roofs(rows, lines, x_axis, y_axis, f"{device.title}: {device.bandwidth / 1e12:.3g} TB/s")


def _row(number: int, point: Point, facts: Mapping[str, float], words: str) -> dict[str, Any]:
    kind = "timed" if point.seconds else "estimate"
    time = f"{point.seconds * 1e6:.4g} us" if point.seconds else "not timed"
    label = point.name if len(point.name) <= LONGEST_NAME else f"{point.name[: LONGEST_NAME - 1]}…"
    own = {"name": point.name, "label": label, "order": number, "kind": kind, "time": time, "words": words}
    return {**own, "moved": amount(point.bytes, "B"), "work": amount(point.flops, "FLOP"), **facts}


def _roofs(
    rows: list[dict[str, Any]], lines: list[dict[str, Any]], x: dict[str, Any], y: dict[str, Any], memory: str
) -> dict[str, Any]:
    """Bounds, the way that the versions take, and the versions."""
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
    way = {
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
            {"data": {"values": rows}, "layer": [way, marks("timed", "point"), marks("estimate", "estimate"), labels]},
        ],
    }


# Parts of encodings --------------------------------------------------------------------------------------------------


def _x(field: str) -> dict[str, Any]:
    return {"field": field, "type": "quantitative"}


def _quantitative(field: str, title: str, most: float) -> dict[str, Any]:
    scale = {"domain": [0, most * TEXT_ROOM], "nice": False}
    return {**_x(field), "title": title, "scale": scale, "axis": {"tickCount": 6, "format": "~r"}}


def _logarithmic(field: str, title: str, domain: list[float]) -> dict[str, Any]:
    scale = {"type": "log", "domain": domain, "nice": False}
    return {**_x(field), "title": title, "scale": scale, "axis": {"format": "~g", "tickCount": 6, "grid": False}}


def _field(name: str, title: str | None = None) -> dict[str, Any]:
    return {"field": name, "type": "nominal", "title": title or name}


def amount(value: float, unit: str) -> str:
    """A number with a prefix: ``2.28 GB``."""
    size, prefixed = _unit(value, unit)
    return f"{value / size:.3g} {prefixed}"


def _unit(value: float, unit: str) -> tuple[float, str]:
    """The size and the name of the unit that a number reads best in."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return size, f"{prefix}{unit}"
    return 1.0, unit
