"""Charts of several curves."""

from __future__ import annotations

from mtmc_lsp.report.line_chart import STROKES, lines


def test_each_curve_has_its_points_and_a_stroke_of_its_own() -> None:
    spec = lines({"a": [(0, 1.0), (1, 2.0)], "b": [(0, 1.5)]}, "candidates", "speedup", reference=2.5)
    reference, curves = spec["layer"]
    assert reference["data"]["values"] == [{"y": 2.5}]
    assert curves["data"]["values"] == [
        {"curve": "a", "x": 0, "y": 1.0},
        {"curve": "a", "x": 1, "y": 2.0},
        {"curve": "b", "x": 0, "y": 1.5},
    ]
    assert curves["encoding"]["color"]["scale"]["domain"] == ["a", "b"]
    assert (curves["encoding"]["x"]["title"], curves["encoding"]["y"]["title"]) == ("candidates", "speedup")


def test_the_first_curves_differ_in_their_dashes_too() -> None:
    assert len({str(stroke) for stroke in STROKES}) == len(STROKES)
    assert len({str(dashes) for _, dashes in STROKES[:4]}) == 4
