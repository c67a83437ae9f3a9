"""The page of a run: timed, untimed, unfinished and hostile runs, without external resources."""

import builtins
import io
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mtmc_lsp.core.chat import Exchange, ModelUse
from mtmc_lsp.core.errors import EnvironmentNotAble, RequestError
from mtmc_lsp.core.results import Check, CheckStatus, Work
from mtmc_lsp.core.run import RunResult, Step
from mtmc_lsp.report.page import Page, render
from mtmc_lsp.report.phrases import peak_text, step_numbers
from mtmc_lsp.report.run_page import RunPage, stored_page
from mtmc_lsp.report.text import show_timing
from mtmc_lsp.search.store import Store
from mtmc_lsp.search.stored_run import stored_run
from tests.search.fakes import action, search


def run(*outcomes: str, has_gpu: bool = True) -> RunResult:
    found = search([action(n, outcome) for n, outcome in enumerate(outcomes, 1)], has_gpu=has_gpu)
    steps = tuple(replace(step, work=Work(1e9 / step.index, 0.0)) for step in found.steps)
    return replace(found, steps=steps, work=Work(4e9, 0.0))


def page_of(result: RunResult, **more: Any) -> Page:
    return RunPage("abc", "/p/model.py", "f", 0.0, result.steps, result.environment, result, **more).page()


def rows(page: Page, figure: str) -> list[dict[str, Any]]:
    spec = dict(page.charts[figure])
    return spec["data"]["values"] if "data" in spec else spec["layer"][2]["data"]["values"]


def test_a_timed_run_shows_each_accepted_step_with_its_interval() -> None:
    page = page_of(run("better", "slower", "better"))
    first, second = rows(page, "gains")
    assert [(row["step"], row["title"]) for row in (first, second)] == [("step 1", "action 1"), ("step 3", "action 3")]
    assert first["before"] == 1.0
    assert second["before"] == first["after"] == pytest.approx(1.25)
    assert second["low"] < second["after"] < second["high"]
    assert "traffic" not in page.charts


def test_the_times_have_the_peak_memory_of_each_version() -> None:
    result = run("better")
    step = result.steps[0]
    assert step.timing is not None
    eager = replace(step.timing.baselines[0], peak_bytes=208_000_000)
    timing = replace(step.timing, baselines=(eager,), peak_bytes=48_000_000)
    body = page_of(replace(result, steps=(replace(step, timing=timing),))).body
    times = re.search(r"<h2>Times</h2>.*?</table>", body, re.DOTALL)
    assert times is not None
    assert re.findall(r"\d+ MB|peak memory", times[0]) == ["peak memory", "208 MB", "48 MB"]


def test_the_terminal_has_the_peak_memory_of_each_step() -> None:
    step = run("better").steps[0]
    assert step.timing is not None
    eager = replace(step.timing.baselines[0], peak_bytes=208_000_000)
    step = replace(step, timing=replace(step.timing, baselines=(eager,), peak_bytes=48_000_000))
    assert step.timing is not None
    assert step_numbers(step).endswith("100 us -> 80.0 us · 160 MB less memory")
    assert peak_text(step.timing) == "48 MB, 160 MB less than your code"
    assert peak_text(replace(step.timing, peak_bytes=None)) == ""
    out = Console(width=120, file=io.StringIO())
    show_timing(out, step.timing)
    table = out.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"eager +100.0 us +1.25x .* +208 MB", table)
    assert re.search(r"this version +80.0 us +48 MB", table)


def test_the_roofline_shows_the_users_code_and_all_accepted_steps() -> None:
    points = rows(page_of(run("better", "better")), "roofline")
    assert [(p["name"], p["kind"]) for p in points] == [
        ("your code", "timed"),
        ("step 1", "timed"),
        ("step 2", "timed"),
    ]
    assert [p["y"] for p in points] == pytest.approx([100.0, 80.0, 64.0]), "microseconds"


def test_a_run_without_times_shows_estimates_and_says_so() -> None:
    page = page_of(run("better", "better", has_gpu=False))
    assert "gains" not in page.charts
    assert [(row["before"], row["after"]) for row in rows(page, "traffic")] == [(4.0, 1.0), (1.0, 0.5)]
    assert {point["kind"] for point in rows(page, "roofline")} == {"estimate"}
    text = render(page)
    assert "Nothing was timed" in text
    assert "estimate" in text
    assert not re.search(r"\d(\.\d+)?x ", text), "no speedup is claimed"


def test_a_run_without_accepted_steps_shows_steps_but_no_charts() -> None:
    page = page_of(run("wrong"))
    assert set(page.charts) <= {"roofline"}
    assert "No step was accepted" in page.body
    assert "values: relative error 0.5" in page.body
    assert "Tried and rejected" in page.body


def test_an_unfinished_run_can_be_shown() -> None:
    steps = run("better").steps
    page = RunPage("abc", "/p/model.py", "f", 0.0, steps, None).page()
    assert "This run is not finished." in page.body
    assert "action 1" in render(page)


def test_steps_are_kept_or_pending_if_the_review_state_is_known() -> None:
    result = run("better", "better", "wrong elsewhere")
    body = page_of(result, kept_steps=frozenset({1})).body
    assert re.findall(r'<span class="state">(\w+)</span>', body) == ["kept", "pending"]
    assert "2 steps, 1 of them in the file" in body


def test_a_page_in_the_editor_names_the_editors_commands_and_others_those_of_the_terminal() -> None:
    result = run("better", "better")
    body = page_of(result, kept_steps=frozenset({1})).body
    assert "<b>Keep</b> writes" in body and "<b>Undo</b> takes a kept step out" in body
    assert "mtmc apply" not in body
    assert "mtmc apply abc" in page_of(result).body and "<b>Keep</b>" not in page_of(result).body


def test_the_page_answers_in_the_order_of_a_readers_questions() -> None:
    body = page_of(run("better", "slower", "better")).body
    titles = re.findall(r"<h[12]>(.*?)</h[12]>", body)
    assert titles == [
        "f",
        "What to do next",
        "Steps",
        "Times",
        "Speedup step by step",
        "Roofline",
        "Memory traffic",
        "Tried and rejected",
        "Verification",
        "Environment",
    ]
    head = body[: body.index("What to do next")]
    for words in ("improved: 1.56x", "Fake GPU", "100 us -&gt; 64.0 us per call", "2 steps kept, 1 not faster"):
        assert words in head


def test_each_step_has_its_diff_folded_and_marked() -> None:
    body = page_of(run("better")).body
    assert "<details><summary>Diff: 1 lines added, 0 removed</summary>" in body
    assert '<span class="added">+# n1 better</span>' in body


def test_a_step_that_raises_the_traffic_says_why_it_was_accepted() -> None:
    result = run("better", "better")
    steps = tuple(replace(step, work=Work(5e9 + step.index * 1e9, 0.0)) for step in result.steps)
    assert "Steps 1, 2 move more memory than the version before" in page_of(replace(result, steps=steps)).body
    assert "more memory" not in page_of(result).body


def test_checks_are_grouped_to_one_line_per_name() -> None:
    result = run("better")
    checks = [Check("values", CheckStatus.PASSED, f"case {n}") for n in range(200)]
    checks.append(Check("values", CheckStatus.FAILED, "case 200", "off by one"))
    step = result.steps[0]
    assert step.verdict is not None
    changed = replace(step, verdict=replace(step.verdict, checks=tuple(checks)))
    body = page_of(replace(result, steps=(changed,))).body
    assert "200 passed, 1 failed" in body
    assert "off by one (on case 200)" in body
    assert body.count('<td class="word">values</td>') == 1


def test_model_requests_are_listed_with_their_tokens() -> None:
    asked = Exchange("code", (), "x", "some-model", 120, 30, 1.5, counted=False)
    result = replace(run("better"), model_use=ModelUse("some-model", 1, 120, 30, None))
    body = page_of(result, exchanges=(asked,)).body
    for words in ("some-model: 1 requests, 120 tokens sent", "about 120", "about 30", "1.5 s"):
        assert words in body
    assert "Language model" not in page_of(result).body


def test_the_page_is_self_contained_and_has_no_scripts() -> None:
    text = render(page_of(run("better", "better")))
    asked: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "link", "img", "iframe")
            asked.extend(str(v) for name, v in attrs if name in ("src", "href", "xlink:href") or name.startswith("on"))

    Reader().feed(text)
    assert asked == []
    assert "url(" not in text
    for picture in re.findall(r"<svg.*?</svg>", text, re.S):
        ET.fromstring(picture)
    assert text.count("<svg") == 2


def test_text_from_user_code_is_escaped() -> None:
    result = run("better")
    evil = "<img src=x onerror=alert(1)>"
    step: Step = replace(
        result.steps[0], action=replace(result.steps[0].action, text=evil, rationale=evil), reason=evil
    )
    text = render(page_of(replace(result, steps=(step,))))
    assert "<img" not in text
    assert "&lt;img" in text


def test_a_missing_renderer_gives_an_error_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name == "vl_convert":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EnvironmentNotAble) as found:
        render(page_of(run("better")))
    assert 'pip install "mtmc-lsp[report]"' in str(found.value)


def test_a_stored_run_is_found_by_id_prefix_and_the_newest_by_default(tmp_path: Path) -> None:
    result = run("better")
    with Store(tmp_path) as store:
        ids = [store.begin("/p/model.py", name, "hash", result.environment) for name in "gh"]
        store.add_step(ids[0], result.steps[0])
        store.finish(replace(result, id=ids[1]))
        assert stored_run(store).record.qualname == "h"
        first = stored_run(store, ids[0][:9])
        assert first.result is None
        assert "action 1" in stored_page(first).body
        with pytest.raises(RequestError, match="no run 'zz'"):
            stored_run(store, "zz")
