"""The stored pairs are what is generated now, the pages show them, and the code after each step is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from mtmc_lsp import docs
from mtmc_lsp.actions.catalogue import BY_KIND, WHEN_IT_PAYS
from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.ir.regions import RegionKind
from mtmc_lsp.kernels.actions import catalogue as edits
from tests.codegen.harness import verified
from tests.golden.pages import KERNELS, generated, page_path
from tests.golden.pairs import pairs, sibling_example

PAIRS = {pair.name: pair for pair in pairs()}
REFRESH = "out of date: run `python scripts/golden.py --write`"
IS_CAPTURING = "torch.cuda.is_current_stream_capturing()"


@cache
def files(name: str) -> dict[Path, str]:
    return generated(PAIRS[name])


@pytest.mark.parametrize("name", PAIRS)
def test_the_stored_file_is_what_the_steps_generate_now(name: str) -> None:
    path = PAIRS[name].folder / "after.py"
    assert path.read_text(encoding="utf-8") == files(name)[path], REFRESH


def test_the_stored_file_of_kernels_and_its_users_file_are_what_is_generated_now() -> None:
    for path, text in sibling_example().items():
        assert path.read_text(encoding="utf-8") == text, REFRESH


@pytest.mark.parametrize("name", PAIRS)
def test_the_page_is_up_to_date(name: str) -> None:
    path = page_path(PAIRS[name])
    assert path.is_file(), REFRESH
    assert path.read_text(encoding="utf-8") == files(name)[path], REFRESH


@pytest.mark.parametrize("name", PAIRS)
def test_no_line_of_any_step_is_longer_than_120_characters(name: str) -> None:
    pair = PAIRS[name]
    for version in pair.versions(pair.stored_capture())[1:]:
        assert [line for line in version.source.splitlines() if len(line) > 120] == []


LOOPS = {"loop": 300, "cell": 300, "block": 300, "cell-steps": 315, "chunk-products": 335, "parallel-scan": 335}
"""Lines of the whole file, with the user's code."""


@pytest.mark.parametrize("name", LOOPS)
def test_files_of_loops_are_short(name: str) -> None:
    assert len(PAIRS[name].after.splitlines()) < LOOPS[name]


@pytest.mark.parametrize("name", PAIRS)
def test_the_last_step_changes_the_file_and_is_the_action_that_the_page_is_about(name: str) -> None:
    pair = PAIRS[name]
    before, after = pair.versions(pair.stored_capture())[-2:]
    assert before.source != after.source
    if name not in KERNELS:
        assert pair.steps[-1].kind.value == name


def test_every_action_has_an_example_and_a_sentence_about_when_it_pays() -> None:
    actions = {kind.value for kind in BY_KIND}
    assert PAIRS.keys() - KERNELS.keys() == actions
    assert {kind.value for kind in WHEN_IT_PAYS} == actions


def test_every_kind_of_kernel_has_an_example() -> None:
    assert KERNELS.keys() <= PAIRS.keys()
    assert {kind.value for kind in RegionKind} <= KERNELS.keys()


def test_no_page_is_left_without_an_example() -> None:
    pages = {path for kind in ("actions", "kernels") for path in (docs.FOLDER / kind).iterdir()}
    by_hand = docs.page("actions", ActionKind.EDIT.value)
    assert pages == {by_hand} | {page_path(pair) for pair in PAIRS.values()}


def test_the_page_of_edits_names_every_kind() -> None:
    text = docs.page("actions", ActionKind.EDIT.value).read_text(encoding="utf-8")
    assert [kind for kind in edits.WHEN_IT_PAYS if f"| `{kind}` |" not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_a_new_capture_gives_the_stored_file_and_it_is_right(
    name: str, captured: Callable[[str, str], Capture]
) -> None:
    pair = PAIRS[name]
    capture = pair.captured(captured)
    candidate = pair.versions(capture)[-1]
    assert candidate.source == pair.after, REFRESH
    # Without a GPU no CUDA graph can be captured: the launches run as they do inside a capture of the user's.
    runnable = replace(candidate, source=candidate.source.replace(IS_CAPTURING, "True"))
    verdict = verified(capture, runnable)
    assert verdict.is_correct, verdict.reason
