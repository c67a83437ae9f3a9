"""Charts, drawn by the page's renderer."""

import itertools
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import vl_convert
from hypothesis import given
from hypothesis import strategies as st

from mtmc_lsp.core.results import Ratio
from mtmc_lsp.device.choice import model_of_arch
from mtmc_lsp.report import charts
from mtmc_lsp.report.charts import Gain, Traffic, traffic, waterfall
from mtmc_lsp.report.roofline_chart import LABEL_GAP, Point, ceilings, roofline, spread

DEVICE = replace(model_of_arch("sm_90"), bandwidth=4e12, flops={"fp32": 5e13, "fp16": 8e14, "bf16": 8e14})


def parts(spec: Any) -> Iterator[dict[str, Any]]:
    if isinstance(spec, dict):
        yield spec
        for value in spec.values():
            yield from parts(value)
    elif isinstance(spec, list):
        for item in spec:
            yield from parts(item)


def row(spec: dict[str, Any], name: str) -> dict[str, Any]:
    return next(part for part in parts(spec) if part.get("name") == name or part.get("step") == name)


def drawn(spec: dict[str, Any]) -> str:
    return vl_convert.vegalite_to_svg(json.dumps(spec), vl_version="6.4")


GAINS = [Gain("1. fuse", "fuse", 1.0, Ratio(0.9, 0.88, 0.95)), Gain("2. tile", "tile", 0.9, Ratio(1.8, 1.6, 1.9))]
TIMED = [Point("eager", 2e12, 8e9, 9e-3), Point("step 1", 2e12, 4e9, 6e-3)]
CHARTS = {
    "waterfall": waterfall(GAINS, "compile"),
    "no steps": waterfall([], "compile"),
    "traffic": traffic([Traffic("1. fuse", "fuse", 5e9, 2e9)]),
    "intensity": roofline(TIMED, DEVICE),
    "memory": roofline([Point("eager", 0.0, 8e9, 9e-3), Point("step 1", 0.0, 4e9)], DEVICE),
    "no points": roofline([], DEVICE),
    "no products on the device": roofline(TIMED, replace(DEVICE, flops={})),
}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_can_be_drawn_and_uses_only_known_styles(name: str) -> None:
    spec = CHARTS[name]
    assert "NaN" not in drawn(spec)
    styles = {part["style"] for part in parts(spec) if isinstance(part.get("style"), str)}
    assert styles and styles <= set(charts.CONFIG["style"])
    colours = set(re.findall(r"var\(--chart-(\w+)\)", drawn(spec)))
    assert colours & {"text", "quiet"} and colours <= set(charts.COLOURS), "colours are the page's"
    assert "http" not in json.dumps(spec).replace(charts.SCHEMA, ""), "no network access"


def test_each_waterfall_step_starts_where_the_previous_one_ended() -> None:
    spec = waterfall(GAINS, "compile")
    first, second = row(spec, "1. fuse"), row(spec, "2. tile")
    assert (first["before"], first["after"], first["faster"]) == (1.0, 0.9, False)
    assert (second["before"], second["after"], second["faster"]) == (0.9, 1.8, True)
    assert (second["low"], second["high"]) == (1.6, 1.9)
    svg = drawn(spec)
    assert "1.80x (1.60 to 1.90)" in svg
    assert "speedup over compile" in svg


def test_a_timed_point_is_at_its_measured_rate_below_the_bound() -> None:
    found = row(roofline(TIMED, DEVICE), "step 1")
    assert found["x"] == pytest.approx(500.0), "operations per byte"
    assert found["y"] == pytest.approx(2.0 / 6e-3), "TFLOP/s"
    assert (found["kind"], found["time"]) == ("timed", "6000 us")


def test_a_point_without_a_time_is_at_the_bound_and_marked_as_an_estimate() -> None:
    spec = roofline([Point("a", 1e9, 1e9), Point("b", 1e12, 1e9)], DEVICE)
    assert row(spec, "a")["y"] == pytest.approx(4.0), "one operation per byte at 4 TB/s"
    assert row(spec, "b")["y"] == pytest.approx(800.0), "the fastest unit"
    for name in "ab":
        assert row(spec, name)["kind"] == "estimate"
        assert "estimated" in row(spec, name)["words"]
        assert row(spec, name)["time"] == "not timed"


def test_versions_without_flops_are_compared_with_the_memory_bound() -> None:
    spec = roofline([Point("eager", 0.0, 8e9, 8e-3), Point("step 1", 2e9, 4e9)], DEVICE)
    assert row(spec, "eager")["x"] == pytest.approx(8.0), "GB"
    assert row(spec, "eager")["y"] == pytest.approx(8000.0), "us"
    assert row(spec, "eager")["words"] == "25% of the roofline"
    assert row(spec, "step 1")["y"] == pytest.approx(1000.0), "4 GB at 4 TB/s"
    assert "us per call" in drawn(spec)


def test_equal_ceilings_are_grouped() -> None:
    assert ceilings(DEVICE) == [("float32 units", 5e13), ("float16 tensor cores and bfloat16 tensor cores", 8e14)]


VERSIONS = st.lists(
    st.builds(
        Point,
        st.just("step 1"),
        st.floats(1e6, 1e14) | st.just(0.0),
        st.floats(1e3, 1e12),
        st.none() | st.floats(1e-7, 1e-1),
    ),
    min_size=1,
    max_size=9,
)


@given(VERSIONS)
def test_no_point_is_above_its_ceiling_whatever_was_measured(points: list[Point]) -> None:
    spec = roofline(points, DEVICE)
    rows = next(part["values"] for part in parts(spec) if part.get("values") and "bound" in part["values"][0])
    is_memory = all("us" in str(part) for part in (spec["layer"][2]["layer"][0]["encoding"]["y"]["title"],))
    for each in rows:
        if is_memory:
            assert each["y"] >= each["bound"] * (1 - 1e-9), "no call is faster than its bytes can be moved"
        else:
            assert each["y"] <= each["bound"] * (1 + 1e-9)
            assert each["y"] * 1e12 <= 4e12 * each["x"] * (1 + 1e-9), "below the memory bound too"


@given(st.lists(st.floats(0, 300), max_size=12))
def test_labels_are_apart_and_near_their_points(wanted: list[float]) -> None:
    placed = sorted(spread(wanted, LABEL_GAP, 0, 300))
    assert all(later - earlier >= LABEL_GAP - 1e-6 for earlier, later in itertools.pairwise(placed))
    for alone in [at for at in wanted if all(abs(at - other) >= 2 * LABEL_GAP for other in wanted if other is not at)]:
        assert any(abs(alone - at) < 12 * LABEL_GAP for at in placed)


def boxes(svg: str) -> list[tuple[str, float, float, float, float]]:
    """Each text of a picture with the rectangle that it covers; letters are about half as wide as high."""
    found = []

    def visit(element: ET.Element, x: float, y: float) -> None:
        moved = re.match(r"translate\(([-\d.]+),\s*([-\d.]+)\)(.*)", element.get("transform", ""))
        if moved is not None:
            x, y = x + float(moved[1]), y + float(moved[2])
        if element.tag.endswith("text") and element.text and element.get("opacity") != "0":
            size = float(str(element.get("font-size", "11")).removesuffix("px"))
            width = 0.52 * size * len(element.text)
            is_turned = moved is not None and "rotate" in moved[3]
            start = {"middle": width / 2, "end": width}.get(element.get("text-anchor", ""), 0.0)
            if not is_turned:
                found.append((element.text, x - start, y - 0.75 * size, x - start + width, y + 0.15 * size))
        for child in element:
            visit(child, x, y)

    visit(ET.fromstring(svg), 0.0, 0.0)
    return found


CROWDED = [
    Point(name, 70e9, 350e6, 1e-6 * us) for name, us in (("your code", 2200), ("step 1", 2190), ("step 2", 1250))
]
PICTURES = {
    **CHARTS,
    "crowded": roofline([*CROWDED, Point("step 3", 70e9, 352e6, 1.24e-3)], DEVICE),
    "near ceilings": roofline(
        [Point("your code", 7e9, 1e6, 1.5e-4), Point("step 1", 7e9, 1e6, 1.3e-4)],
        replace(DEVICE, flops={"fp32": 5e13, "tf32": 5.2e13, "fp16": 5.4e13}),
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_of_a_picture_covers_another(name: str) -> None:
    for (text, *one), (other_text, *other) in itertools.combinations(boxes(drawn(PICTURES[name])), 2):
        overlaps = one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
        assert not overlaps, f"{text!r} covers {other_text!r}"


@pytest.mark.parametrize(("value", "words"), [(2.28e9, "2.28 GB"), (512.0, "512 B"), (0.0, "0 B"), (3e12, "3 TB")])
def test_amounts_have_unit_prefixes(value: float, words: str) -> None:
    assert charts.amount(value, "B") == words
