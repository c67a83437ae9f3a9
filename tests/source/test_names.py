"""Variable names that the user's code assigns."""

from __future__ import annotations

from mtmc_lsp.source.assigned_names import assigned_names


def test_an_assignment_names_every_line_it_spans() -> None:
    text = b"def f(x):\n    y = (\n        x + 1\n    )\n    return y\n"
    assert assigned_names(text, 1, 5) == {2: "y", 3: "y", 4: "y"}


def test_annotated_and_augmented_assignments_name_their_lines() -> None:
    assert assigned_names(b"a: int = 1\nb += 2\nc: int\n", 1, 3) == {1: "a", 2: "b"}


def test_attributes_items_and_tuples_give_no_name() -> None:
    assert assigned_names(b"a.b = 1\nc[0] = 2\nd, e = 3, 4\n", 1, 3) == {}


def test_the_first_name_of_a_chain_and_the_last_of_a_line_count() -> None:
    assert assigned_names(b"a = b = 1\nc = 1; d = 2\n", 1, 2) == {1: "a", 2: "d"}


def test_only_statements_that_start_between_the_lines_count() -> None:
    assert assigned_names(b"a = (\n1)\nb = (\n2)\nc = 3\n", 2, 3) == {3: "b", 4: "b"}


def test_a_file_with_errors_gives_the_names_that_can_be_parsed() -> None:
    assert assigned_names(b"a = 1\nb = (\n", 1, 9)[1] == "a"
