"""Tests and benchmarks of a file that call its kernels, and edits carried over to a changed file."""

from __future__ import annotations

import pytest

from mtmc_lsp.app.revisions.rebase import contains, rebase
from mtmc_lsp.source.triton.drivers import find_driver, without_driver_calls

FILE = b"""\
def launch(x):
    kernel[(1,)](x)


class Function:
    def forward(x):
        launch(x)


apply = Function.forward


def sizes(n=3):
    return n


def test_apply(n=4):
    return apply(n)


def main():
    test_apply()


result = test_apply()
test_apply(
    n=8,
)
print(result)
"""


def test_the_test_of_a_file_is_found_through_classes_and_names() -> None:
    driver = find_driver(FILE, "model.py", ["kernel"])
    assert driver is not None
    assert driver.qualname == "test_apply"


def test_a_function_that_needs_arguments_is_no_driver() -> None:
    assert (
        find_driver(FILE.replace(b"n=4", b"n").replace(b"test_apply()", b"test_apply(1)"), "model.py", ["kernel"])
        is not None
    )
    assert find_driver(b"def launch(x):\n    kernel[(1,)](x)\n", "model.py", ["kernel"]) is None


def test_top_level_calls_are_left_out_and_lines_keep_their_numbers() -> None:
    text = without_driver_calls(FILE, ["kernel"])
    assert text.count(b"\n") == FILE.count(b"\n")
    assert text.endswith(b"result = None\npass\n\n\nprint(result)\n")


BEFORE = "a\n" * 3 + "one\n" + "b\n" * 9 + "two\n" + "c\n" * 3
AFTER = BEFORE.replace("one", "first").replace("two", "second\nthird")


def test_an_edit_is_carried_over_to_a_file_that_changed_elsewhere() -> None:
    current = f"new line\n{BEFORE}end\n"
    assert rebase(BEFORE, AFTER, current) == f"new line\n{AFTER}end\n"
    assert rebase(AFTER, BEFORE, f"new line\n{AFTER}end\n") == current


@pytest.mark.parametrize("current", [BEFORE.replace("one", "another"), AFTER, ""])
def test_an_edit_of_changed_lines_is_refused(current: str) -> None:
    assert rebase(BEFORE, AFTER, current) is None


def test_a_text_contains_an_edit_if_it_can_be_taken_back() -> None:
    assert contains(BEFORE, AFTER, f"x\n{AFTER}")
    assert not contains(BEFORE, AFTER, BEFORE)
    assert not contains(BEFORE, BEFORE, BEFORE)
