"""The roofline of a device with the versions of a target, as a Vega-Lite specification.

No point is above its ceiling. Times are measured, but bytes are an estimate of the traffic to memory, which is less if a cache
holds part of the data: memory cannot have moved more than its bandwidth in that time, so a point is drawn with at most that.
A version's ceiling is the slowest arithmetic unit that can compute at its rate, and only ceilings of versions are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.report.charts import CONFIG, SCHEMA, amount, field_of, unit_of

WIDTH, HEIGHT = 440, 300
NOT_TIMED = "not timed: estimated at the bound"
MARGIN = 3.0
"""Factor by which logarithmic axes extend beyond the points."""
LABEL_GAP = 16.0
"""Least distance of two labels in pixels; the text is 12 pixels high."""
LABEL_X = WIDTH + 26.0
"""Where the labels of the points begin: right of the plot, so that they cover nothing in it."""
LETTER_WIDTH = 6.0
"""Mean width of a letter in pixels."""
UNITS = {
    "fp32": "float32 units",
    "tf32": "TF32 tensor cores",
    "fp16x3": "float32 in three float16 products",
    "fp16": "float16 tensor cores",
    "bf16": "bfloat16 tensor cores",
    "fp8": "float8 tensor cores",
}
"""Names of arithmetic units for people."""


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

    def moved(self, bandwidth: float) -> float:
        """The bytes that memory can have moved in the measured time."""
        return self.bytes if self.seconds is None else min(self.bytes, self.seconds * bandwidth)


@dataclass(frozen=True)
class LogScale:
    """A logarithmic axis: from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def pixel(self, value: float) -> float:
        """The position of a value."""
        return self.start + (self.end - self.start) * math.log(value / self.low) / math.log(self.high / self.low)


def roofline(points: Sequence[Point], device: DeviceModel) -> dict[str, Any]:
    """The device's roofline with the versions as connected points.

    If every version has FLOPs, this is the usual plot of FLOP/s over arithmetic intensity. Otherwise (for example, if kernels
    only move data) it shows time per call over bytes moved, with the memory bound.
    """
    plotted = [point for point in points if point.bytes > 0]
    if plotted and all(point.flops > 0 for point in plotted):
        return _intensity_roofline(plotted, device)
    return _memory_roofline(plotted, device)


def ceilings(device: DeviceModel) -> list[tuple[str, float]]:
    """Compute ceilings, slowest first; units with the same ceiling are one."""
    groups: dict[float, list[str]] = {}
    for name, rate in device.flops.items():
        groups.setdefault(rate, []).append(UNITS.get(name, name))
    return [(" and ".join(names), rate) for rate, names in sorted(groups.items())]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones that are ``gap`` apart, within ``low`` and ``high`` if there is room."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    least = low
    for i in order:
        placed[i] = max(wanted[i], least)
        least = placed[i] + gap
    most = high
    for i in reversed(order):
        placed[i] = min(placed[i], most)
        most = placed[i] - gap
    return placed


def _intensity_roofline(points: Sequence[Point], device: DeviceModel) -> dict[str, Any]:
    known = ceilings(device) or [("memory", device.bandwidth)]
    top, bandwidth = known[-1][1], device.bandwidth
    rows, used = [], {}
    for number, point in enumerate(points, 1):
        moved = point.moved(bandwidth)
        intensity = point.flops / moved
        limit = min(top, bandwidth * intensity)
        rate = min(limit, point.flops / point.seconds) if point.seconds else limit
        unit, ceiling = next(item for item in known if item[1] >= rate * (1 - 1e-9))
        used[unit] = ceiling
        bound = min(ceiling, bandwidth * intensity)
        words = f"{rate / 1e12:.3g} of {bound / 1e12:.3g} TFLOP/s" if point.seconds else NOT_TIMED
        row = _row(number, point, moved, {"x": intensity, "y": rate / 1e12, "bound": bound / 1e12}, words)
        rows.append({**row, "ceiling": unit})
    drawn = sorted(used.items(), key=lambda item: item[1])
    highest = drawn[-1][1] if drawn else top
    marks = [row["x"] for row in rows] + [rate / bandwidth for _, rate in drawn]
    x = LogScale(min(marks) / MARGIN, max(marks) * MARGIN, 0, WIDTH)
    lowest = min([row["y"] for row in rows] + [bandwidth * x.low / 1e12]) / 1.5
    y = LogScale(lowest, highest / 1e12 * MARGIN, HEIGHT, 0)
    lines = [{"line": name, "x": at, "y": rate / 1e12} for name, rate in drawn for at in (rate / bandwidth, x.high)]
    lines += [{"line": "memory", "x": at, "y": bandwidth * at / 1e12} for at in (x.low, highest / bandwidth)]
    names = _ceiling_labels(drawn, bandwidth, x, y)
    axes = {"x": _logarithmic("x", "operations per byte", x), "y": _logarithmic("y", "TFLOP/s", y)}
    return _chart(rows, lines, names, axes, (x, y), device)


def _memory_roofline(points: Sequence[Point], device: DeviceModel) -> dict[str, Any]:
    size, unit = unit_of(max((point.bytes for point in points), default=1.0), "B")
    rows = []
    for number, point in enumerate(points, 1):
        moved = point.moved(device.bandwidth)
        bound = moved / device.bandwidth
        seconds = point.seconds or bound
        words = f"{bound / seconds:.0%} of the roofline" if point.seconds else NOT_TIMED
        rows.append(_row(number, point, moved, {"x": moved / size, "y": seconds * 1e6, "bound": bound * 1e6}, words))
    xs = [row["x"] for row in rows] or [1.0]
    x = LogScale(min(xs) / MARGIN, max(xs) * MARGIN, 0, WIDTH)
    microseconds = [at * size * 1e6 / device.bandwidth for at in (x.low, x.high)]
    lines = [{"line": "memory", "x": at, "y": us} for at, us in zip((x.low, x.high), microseconds, strict=True)]
    ys = [row["y"] for row in rows] + microseconds
    y = LogScale(min(ys) / 1.5, max(ys) * 1.5, HEIGHT, 0)
    axes = {"x": _logarithmic("x", f"{unit} moved per call", x), "y": _logarithmic("y", "us per call", y)}
    return _chart(rows, lines, [], axes, (x, y), device)


def _ceiling_labels(
    drawn: Sequence[tuple[str, float]], bandwidth: float, x: LogScale, y: LogScale
) -> list[dict[str, Any]]:
    """The name of each ceiling above its line, which begins where the memory bound ends."""
    heights = spread([y.pixel(rate / 1e12) - 7 for _, rate in drawn], LABEL_GAP, 0, HEIGHT)
    return [
        {
            "text": f"{name}: {rate / 1e12:.3g} TFLOP/s",
            "px": min(x.pixel(rate / bandwidth) + 14, WIDTH - LETTER_WIDTH * len(f"{name}: 1234 TFLOP/s")),
            "py": height,
        }
        for (name, rate), height in zip(drawn, heights, strict=True)
    ]


def _row(number: int, point: Point, moved: float, coordinates: Mapping[str, float], description: str) -> dict[str, Any]:
    kind = "timed" if point.seconds else "estimate"
    time = f"{point.seconds * 1e6:.4g} us" if point.seconds else "not timed"
    labels = {"name": point.name, "order": number, "kind": kind, "time": time, "words": description}
    traffic = amount(point.bytes, "B")
    if moved < point.bytes:
        traffic = f"at most {amount(moved, 'B')} of {traffic} estimated, the rest is in the cache"
    return {**labels, "moved": traffic, "work": amount(point.flops, "FLOP"), **coordinates}


def _chart(
    rows: list[dict[str, Any]],
    lines: list[dict[str, Any]],
    names: list[dict[str, Any]],
    axes: dict[str, Any],
    scales: tuple[LogScale, LogScale],
    device: DeviceModel,
) -> dict[str, Any]:
    """Layers for the bounds, the path between versions, the versions, and the labels right of the plot."""
    x, y = scales
    tooltip = [field_of(name) for name in ("name", "time", "moved", "work")] + [field_of("words", "reaches")]
    heights = spread([y.pixel(row["y"]) for row in rows], LABEL_GAP, 0, HEIGHT)
    labels = [
        {"text": f"{row['name']}: {row['words']}", "px": LABEL_X, "py": at}
        for row, at in zip(rows, heights, strict=True)
    ]
    leaders = [
        {"line": row["name"], "px": px, "py": py}
        for row, at in zip(rows, heights, strict=True)
        for px, py in ((x.pixel(row["x"]) + 6, y.pixel(row["y"])), (LABEL_X - 4, at))
    ]

    def marks(kind: str, style: str) -> dict[str, Any]:
        mark = {"type": "point", "style": style, "size": 90, "filled": kind == "timed"}
        chosen = {"transform": [{"filter": f"datum.kind === '{kind}'"}], "mark": mark}
        return {**chosen, "encoding": {**axes, "tooltip": tooltip}}

    order = {"field": "order", "type": "quantitative"}
    bounds = {"mark": {"type": "line", "style": "bound"}, "encoding": {**axes, "detail": {"field": "line"}}}
    path = {"mark": {"type": "line", "style": "path"}, "encoding": {**axes, "order": order}}
    text = {"type": "text", "align": "left", "baseline": "middle"}
    return {
        "$schema": SCHEMA,
        "config": CONFIG,
        "title": {
            "text": f"{device.title}: memory {device.bandwidth / 1e12:.3g} TB/s",
            "anchor": "start",
            "fontWeight": "normal",
        },
        "width": WIDTH,
        "height": HEIGHT,
        "layer": [
            {"data": {"values": lines}, "layer": [bounds]},
            {
                "data": {"values": leaders},
                "mark": {"type": "line", "style": "leader"},
                "encoding": {**_pixels(), "detail": {"field": "line"}},
            },
            {"data": {"values": rows}, "layer": [path, marks("timed", "point"), marks("estimate", "estimate")]},
            _texts(names, {**text, "style": "reference"}),
            _texts(labels, {**text, "style": "label"}),
        ],
    }


def _texts(values: list[dict[str, Any]], mark: dict[str, Any]) -> dict[str, Any]:
    return {
        "data": {"values": values},
        "mark": mark,
        "encoding": {**_pixels(), "text": {"field": "text", "type": "nominal"}},
    }


def _pixels() -> dict[str, Any]:
    """Positions that are pixels already."""
    return {axis: {"field": f"p{axis}", "type": "quantitative", "scale": None, "axis": None} for axis in ("x", "y")}


def _logarithmic(field: str, title: str, scale: LogScale) -> dict[str, Any]:
    kind = {"type": "log", "domain": [scale.low, scale.high], "nice": False}
    axis = {"format": "~g", "tickCount": 6, "grid": False}
    return {"field": field, "type": "quantitative", "title": title, "scale": kind, "axis": axis}
