"""What a run of statements reads and sets, and what cuts it."""

from __future__ import annotations

import ast

import pytest

from mtmc_lsp.capture.regions.liveness import definitely_set
from mtmc_lsp.capture.regions.runs import Run, Runs
from mtmc_lsp.core.workload import CodeRegion
from mtmc_lsp.source.targets import find_target


def runs_of(body: str, parameters: str = "x, w") -> Runs:
    """The runs of a function with this body."""
    text = f"def f({parameters}):\n" + "".join(f"    {line}\n" for line in body.splitlines())
    return Runs(find_target(text.encode(), "m.py", "f"), text)


def region(runs: Runs, first: int, last: int) -> CodeRegion:
    body = runs.function.body
    return runs.region(Run(tuple(body[first:last]), last == len(body)))


@pytest.mark.parametrize(
    ("body", "span", "inputs", "outputs"),
    [
        ("h = x @ w\ny = h + 1\nprint(y)\nreturn y", (0, 2), ("x", "w"), ("y",)),
        ("h = x @ w\ny = h + 1\nprint(y)\nreturn y * h", (0, 2), ("x", "w"), ("h", "y")),
        ("h = x @ w\nprint(h)\nh = h + 1\nreturn h", (2, 4), ("h",), ()),
        # A variable that only one way sets keeps its value on the other.
        ("y = x\nif w:\n    y = y + 1\nprint(y)\nreturn y", (1, 2), ("w", "y"), ("y",)),
        # The next turn of a loop reads what this one sets.
        ("for i in range(3):\n    x = x * w\nprint(x)\nreturn x", (0, 1), ("x", "w"), ("x",)),
        # Variables of comprehensions are their own.
        ("y = [i * x for i in range(3)]\nprint(y)\nreturn y", (0, 1), ("x",), ("y",)),
        ("y = x + 1\ng = lambda t: t + y\nprint(y)\nreturn g(x)", (0, 1), ("x",), ("y",)),
        ("x += w\nprint(x)\nreturn x", (0, 1), ("x", "w"), ("x",)),
        ("x[0] = w\nprint(x)\nreturn x", (0, 1), ("x", "w"), ()),
        ("try:\n    y = x / w\nexcept ValueError as e:\n    y = w\nprint(y)\nreturn y", (0, 1), ("x", "w"), ("y",)),
        ("with c():\n    y = x + 1\nprint(y)\nreturn y", (0, 1), ("x",), ("y",)),
    ],
)
def test_a_run_has_the_variables_that_cross_its_ends(
    body: str, span: tuple[int, int], inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> None:
    found = region(runs_of(body), *span)
    assert (found.inputs, found.outputs) == (inputs, outputs)


def test_a_variable_is_live_in_a_loop_that_reads_it_again() -> None:
    runs = runs_of("for i in range(3):\n    y = x * w\n    print(y)\n    x = y + 1\nreturn w")
    inner = runs.function.body[0].body
    assert runs.region(Run(tuple(inner[2:3]), False)).outputs == ("x",)
    assert runs.region(Run(tuple(inner[0:1]), False)).outputs == ("y",)


def test_sizes_of_arguments_are_read_again_instead_of_being_constants() -> None:
    runs = runs_of("B, T, D = x.shape\nn = B * T\nprint(B)\ny = (x + 1).view(n, D)\nreturn y * T")
    found = region(runs, 3, 5)
    assert found.inputs == ("x",)
    assert found.repeated == (0, 1)


@pytest.mark.parametrize(
    "body",
    [
        "B = x.shape[0]\nx = x[1:]\nprint(B)\nreturn (x + 1).view(B)",
        "B = x.shape[0]\nB = B + int(w)\nprint(B)\nreturn (x + 1).view(B)",
    ],
)
def test_sizes_that_may_differ_later_are_inputs(body: str) -> None:
    assert "B" in region(runs_of(body), 3, 4).inputs


def test_a_variable_that_may_be_unset_before_a_run_cuts_it() -> None:
    runs = runs_of("if w:\n    y = x + 1\nprint(x)\nz = x * 2\nreturn y + z")
    run = Run(tuple(runs.function.body[2:4]), True)
    cut = runs.unset_input(run, runs.region(run))
    assert cut is not None
    assert (cut.line, cut.reason) == (6, "reads a variable that is set only under a condition")


def test_a_branch_that_ends_the_function_does_not_unset_a_variable() -> None:
    function = ast.parse("def f(x, w):\n    if w:\n        return x\n    else:\n        y = 1\n    return y").body[0]
    assert "y" in definitely_set(function)[function.body[1]]


@pytest.mark.parametrize(
    ("body", "line", "reason"),
    [
        ("y = x + 1\nprint(y)\nreturn y", 3, "prints"),
        ("y = x + 1\nz = y.sum().item()\nreturn y * z", 3, "reads values of a tensor by .item()"),
        ("y = x + 1\nyield y", 3, "contains yield"),
        ("y = x + 1\ndel x\nreturn y", 3, "contains delete"),
    ],
)
def test_a_statement_that_no_kernel_can_hold_is_cut(body: str, line: int, reason: str) -> None:
    runs = runs_of(body)
    cut = runs.obvious_cut(runs.whole())
    assert cut is not None
    assert (cut.line, cut.reason) == (line, reason)


def test_an_early_return_cuts_a_run_unless_the_run_ends_the_function() -> None:
    runs = runs_of("y = x + 1\nif w is None:\n    return y\nprint(y)\nreturn y * w")
    body = runs.function.body
    assert runs.obvious_cut(Run(tuple(body[:2]), False)).reason == "leaves the statements around it early"
    assert runs.obvious_cut(Run((*body[:2], body[3]), True)) is None


def test_a_loop_may_break_and_continue_inside_a_run() -> None:
    runs = runs_of("for i in range(3):\n    if i:\n        continue\n    x = x * w\n    break\nprint(x)\nreturn x")
    assert runs.obvious_cut(Run(tuple(runs.function.body[:1]), False)) is None
    inner = Run(tuple(runs.function.body[0].body), False)
    assert runs.obvious_cut(inner).reason == "leaves the statements around it early"


@pytest.mark.parametrize(
    ("later", "writes"),
    [("y.add_(1)", True), ("y[0] = 1", True), ("y += 1", True), ("torch.add(y, 1, out=y)", True), ("y = y + 1", False)],
)
def test_writes_elsewhere_in_the_target_are_known(later: str, writes: bool) -> None:
    assert region(runs_of(f"y = x.t()\nprint(y)\n{later}\nreturn y"), 0, 1).writes_follow is writes


def test_statements_that_share_a_line_with_others_are_no_region() -> None:
    runs = runs_of("y = x + 1; z = y * 2\nprint(z)\nif w: z = z + 1\nreturn z * 2  # the end")
    body = runs.function.body
    assert not runs.is_worthwhile(Run(tuple(body[:1]), False))
    assert not runs.is_worthwhile(Run(tuple(body[1:2]), False))
    assert runs.is_worthwhile(Run(tuple(body[:2]), False))
    assert not runs.is_worthwhile(Run(tuple(body[3].body), False))
    assert runs.is_worthwhile(Run(tuple(body[4:]), True))


def test_statements_that_compute_nothing_are_no_region() -> None:
    runs = runs_of("y = x\nreturn y")
    assert not runs.is_worthwhile(runs.whole())


def test_numbers_at_the_ends_of_a_run_stay_outside_and_new_lists_do_not() -> None:
    runs = runs_of("step = 0\nparts = []\ny = x + 1\nn = step + 1\nprint(y)\nreturn y, n, parts")
    run = Run(tuple(runs.function.body[:4]), False)
    trimmed = runs.trimmed(run, lambda statement, name: name in ("step", "n"))
    assert trimmed is not None
    assert [item.lineno for item in trimmed.statements] == [3, 4]
    assert runs.trimmed(Run(tuple(runs.function.body[:1]), False), lambda statement, name: True) is None


def test_the_variables_that_a_loop_around_a_run_changes_are_known() -> None:
    runs = runs_of("for i in range(3):\n    k = i + 1\n    x = x * k\nreturn x")
    inner = Run(tuple(runs.function.body[0].body[1:]), False)
    assert runs.changes_in_loop(inner) == {"i", "k", "x"}
    assert runs.changes_in_loop(Run(tuple(runs.function.body[:1]), False)) == frozenset()
