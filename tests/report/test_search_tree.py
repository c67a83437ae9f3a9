"""The tree of a search with branches: in the terminal and as a picture of the page."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from mtmc_lsp.core.run import RunResult
from mtmc_lsp.report.encoding import ERROR_HANDLER, prepare_streams
from mtmc_lsp.report.page import render
from mtmc_lsp.report.run_page import RunPage
from mtmc_lsp.report.run_text import RunText
from mtmc_lsp.report.search_tree import show_tree, tree_picture
from tests.search.fakes import action, search

sys.path.insert(0, str(Path(__file__).parents[1] / "search"))
from landscapes import Landscape, explore

LANDSCAPE = Landscape(
    {"0": 80.0, "1": 90.0, "0+1": 95.0, "1+2": 60.0, "0+2": 70.0, "1+2+3": 40.0, "2": 300.0},
    {"0+2": "wrong"},
    savings={0: 20.0, 1: 18.0, 2: 10.0, 3: 5.0},
)


@pytest.fixture(scope="module")
def result() -> RunResult:
    return explore("mcts", LANDSCAPE)


def console(encoding: str = "utf-8") -> Console:
    prepare_streams()
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=ERROR_HANDLER)
    return Console(file=file, width=100, highlight=False)


def text_of(out: Console) -> str:
    out.file.flush()
    return out.file.buffer.getvalue().decode(out.file.encoding)


def test_the_terminal_shows_each_trial_below_the_version_that_it_changed(result: RunResult) -> None:
    out = console()
    show_tree(out, result.steps)
    assert text_of(out).splitlines() == [
        "  Search tree",
        "  your code",
        "  ├─ - 1  1.25x, on another branch: action 0",
        "  │  ├─ - 2  0.84x, not faster: action 1",
        "  │  └─ ✗ 3  failed: action 2",
        "  ├─ ✓ 4  1.11x, kept: action 1, attempt 2",
        "  │  └─ ✓ 5  1.50x, kept: action 2, attempt 2",
        "  │     └─ ✓ 6  1.50x, kept: action 3",
        "  └─ - 7  0.33x, not faster: action 2, attempt 3",
    ]


def test_a_terminal_without_unicode_shows_the_tree_in_ascii(result: RunResult) -> None:
    out = console("ascii")
    show_tree(out, result.steps[:3])
    assert text_of(out).splitlines()[2:] == [
        "  `- - 1  1.25x, on another branch: action 0",
        "     |- - 2  0.84x, not faster: action 1",
        "     `- x 3  failed: action 2",
    ]


def test_a_greedy_run_has_no_tree() -> None:
    steps = search([action(0, "better"), action(1, "slower")]).steps
    out = console()
    show_tree(out, steps)
    assert (text_of(out), tree_picture(steps)) == ("", "")


def test_a_run_shows_the_tree_only_with_its_details(result: RunResult) -> None:
    shown = {}
    for verbose in (False, True):
        out = console()
        RunText(out, verbose=verbose).result(result)
        shown[verbose] = text_of(out)
    assert "Search tree" in shown[True] and "Search tree" not in shown[False]
    assert "3 steps kept, 1 on other branches, 2 not faster, 1 failed" in shown[False]
    assert "The search ended: every branch ended; on the fastest version, no action is left" in shown[False]


class Outline(HTMLParser):
    """The tree of list items: classes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._depth = 0
        self.feed(text)
        assert self._depth == 0, "every item is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "li":
            self.lines.append(f"{'  ' * self._depth}{dict(attrs)['class']}: ")
            self._depth += 1

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag == "li"

    def handle_data(self, data: str) -> None:
        if self.lines and self._depth:
            self.lines[-1] += data


def test_the_page_has_a_picture_of_the_tree_with_the_reasons(result: RunResult) -> None:
    body = RunPage("abc", "/p/model.py", "f", 0.0, result.steps, result.environment, result).page().body
    section = body[body.index("<h2>Search tree</h2>") : body.index("<h2>Tried and rejected</h2>")]
    assert Outline(section).lines == [
        "accepted: your code",
        "  alternative: 1.25x 1. action 0: another branch is faster: "
        "1.25x the speed of your code (1.24 to 1.26), 80.0 us",
        "    rejected: 0.84x 2. action 1: not faster: 0.84x the speed of the step before (0.84 to 0.85), 95.0 us",
        "    failed: 3. action 2 failed: incorrect on the GPU: values: relative error 0.5",
        "  accepted: 1.11x 4. action 1, attempt 2 kept",
        "    accepted: 1.50x 5. action 2, attempt 2 kept",
        "      accepted: 1.50x 6. action 3 kept",
        "  rejected: 0.33x 7. action 2, attempt 3: not faster: 0.33x the speed of your code (0.33 to 0.33), 300.0 us",
    ]


def test_titles_and_reasons_are_text(result: RunResult) -> None:
    bad = '<script>alert("1")</script>'
    steps = [replace(s, reason=bad, action=replace(s.action, text=bad)) for s in result.steps]
    assert "<script" not in tree_picture(steps)


def test_without_a_gpu_the_picture_shows_predicted_savings_and_says_so() -> None:
    result = explore("beam", LANDSCAPE, has_gpu=False)
    page = RunPage("abc", "/p/model.py", "f", 0.0, result.steps, result.environment, result).page()
    assert "-20 us, estimated" in page.body
    assert "versions were ranked by predicted time" in page.body
    assert not re.search(r"\d(\.\d+)?x ", render(page)), "no speedup is claimed"


def test_each_region_of_a_run_has_a_tree(result: RunResult) -> None:
    moved = [replace(step, region=2, index=step.index + 6) for step in result.steps]
    out = console()
    show_tree(out, [*(replace(step, region=1) for step in result.steps), *moved])
    lines = text_of(out).splitlines()
    assert [line.strip() for line in lines if "your code" in line] == ["your code, region 1", "your code, region 2"]
