"""Nested loops over a table become one loop over rows, columns or diagonals, and one kernel."""

from __future__ import annotations

import re

import pytest

from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import NOT_LAUNCHED
from tests.codegen.harness import _checker, compile_errors, verified
from tests.loops.nest_examples import NAMES, NESTS
from tests.planning.situations import fully_fused, start


@pytest.mark.parametrize("name", NAMES)
def test_a_table_is_one_loop_and_one_kernel_with_the_results_of_the_users_code(name: str, captured) -> None:
    capture = captured(NESTS, name)
    loops = [node.loop for node in capture.graph.nodes if node.loop is not None]
    # What the outer loop writes in the first column is a loop of its own.
    assert len(loops) == (2 if name in ("first_column", "two_rows") else 1)
    assert "unrolled" not in " ".join(capture.workload.assumed)
    candidate = fully_fused(capture, start(capture, NESTS))
    assert len(re.findall(r"in tl\.range\(0, ", candidate.code.block)) == len(loops)
    assert verified(capture, candidate).reason == ""
    assert compile_errors(capture, candidate, ["sm_90"]) == []


@pytest.mark.parametrize("name", ["soft_minimum", "transducer", "seam", "through_all", "two_rows"])
def test_a_table_is_right_for_other_numbers_of_rows_and_columns(name: str, captured) -> None:
    """The numbers of rows and columns are sizes; only the lanes of a diagonal are limited by the block."""
    capture = captured(NESTS, name)
    candidate = fully_fused(capture, start(capture, NESTS))
    rows, columns = ("T", "U") if name == "transducer" else ("N", "M")
    for sizes in ((2, 32), (32, 2), (3, 3), (31, 32)):
        case = Case({**capture.graph.sizes, rows: sizes[0], columns: sizes[1]}, "normal", 3)
        assert _checker().failures(capture, [candidate], case) == [""], case
    wide = Case({**capture.graph.sizes, rows: 40, columns: 40}, "normal", 3)
    expected = "" if name == "through_all" else NOT_LAUNCHED
    assert _checker().failures(capture, [candidate], wide) == [expected], "a block has no more lanes"


@pytest.mark.parametrize("name", ["warping", "affine_gaps"])
def test_a_table_propagates_infinities_and_nan_as_the_users_code(name: str, captured) -> None:
    capture = captured(NESTS, name)
    candidate = fully_fused(capture, start(capture, NESTS))
    for distribution in ("mixed", "large"):
        (failure,) = _checker().failures(capture, [candidate], Case(dict(capture.graph.sizes), distribution, 5))
        assert failure == ""


def test_diagonals_take_as_many_iterations_as_rows_and_columns(captured) -> None:
    (loop,) = [node.loop for node in captured(NESTS, "warping").graph.nodes if node.loop is not None]
    assert str(loop.count) == "M + N - 1"
    (loop,) = [node.loop for node in captured(NESTS, "seam").graph.nodes if node.loop is not None]
    assert str(loop.count) == "N - 1", "no cell reads another one of its row"
    (loop,) = [node.loop for node in captured(NESTS, "rows").graph.nodes if node.loop is not None]
    assert str(loop.count) == "M", "no cell reads another row"
    (loop,) = [node.loop for node in captured(NESTS, "through_all").graph.nodes if node.loop is not None]
    assert str(loop.count) == "M * N", "each cell reads the one before"


REFUSED = """
import torch


# mtmc: x=f32[B,N,M] B=2 N=20 M=20
def all_of_it(x):
    d = torch.zeros_like(x)
    for i in range(x.shape[1]):
        for j in range(x.shape[2]):
            d[:, i, j] = d.sum((1, 2)) + x[:, i, j]
    return d


# mtmc: x=f32[B,N,M] B=2 N=20 M=20
def whole_rows(x):
    d = torch.zeros_like(x)
    for i in range(1, x.shape[1]):
        for j in range(x.shape[2]):
            d[:, i, j] = d[:, i - 1].sum(1) * x[:, i, j]
    return d


# mtmc: x=f32[B,N,M] B=2 N=20 M=20
def from_the_last_column(x):
    d = torch.zeros_like(x)
    for i in range(1, x.shape[1]):
        for j in range(x.shape[2]):
            d[:, i, j] = d[:, i, j - 1] + x[:, i, j]
    return d


# mtmc: x=f32[B,N,M] B=2 N=20 M=20
def after_the_cells(x):
    last = torch.zeros_like(x[:, :, 0])
    for i in range(x.shape[1]):
        h = torch.zeros_like(x[:, 0, 0])
        for j in range(x.shape[2]):
            h = torch.tanh(h + x[:, i, j])
        last[:, i] = h
    return last


# mtmc: x=f32[B,N,M] B=2 N=20 M=20
def inside_of_the_cells(x):
    d = torch.zeros_like(x)
    for i in range(1, x.shape[1]):
        d[:, i, 3] = 1.0
        for j in range(1, x.shape[2]):
            d[:, i, j] = d[:, i - 1, j] + x[:, i, j]
    return d
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("all_of_it", "it reads all of a table that it writes cell by cell"),
        ("whole_rows", "it reads a whole row of a table that it writes cell by cell"),
        ("after_the_cells", "it writes a tensor after its inner loop"),
        ("inside_of_the_cells", "its inner loop writes what it writes before it"),
        ("from_the_last_column", "it reads outside a tensor, or from its end in the first iterations alone"),
    ],
)
def test_other_nests_are_refused_with_their_lines_and_the_reason(name: str, why: str, captured) -> None:
    with pytest.raises(TargetUnsupported) as raised:
        captured(REFUSED, name)
    lines = REFUSED.splitlines()
    first = next(i for i, line in enumerate(lines[lines.index(f"def {name}(x):") :]) if line.startswith("    for"))
    line = lines.index(f"def {name}(x):") + first + 1
    inner = next(i for i, text in enumerate(lines[line:]) if text.startswith("        for")) + line + 1
    assert raised.value.message == (
        f"the loops of lines {line} and {inner} are nested and have too many iterations to unroll, "
        f"and it is not one kernel, because {why}"
    )
    assert raised.value.where is not None and raised.value.where.line == line
    assert raised.value.remedy == "docs/loops.md lists the forms that are one kernel."


SHORT = """
import torch


# mtmc: x=f32[B,N,M] w=f32[B,N,M] B=2 N=3 M=18
def separate_rows(x, w):
    out = torch.zeros_like(x)
    for i in range(3):
        h = torch.zeros_like(x[:, 0, 0])
        for j in range(x.shape[2]):
            h = torch.tanh(h * w[:, i, j] + x[:, i, j])
            out[:, i, j] = h
    return out


# mtmc: x=f32[B,N] y=f32[B,M] B=2 N=3 M=18
def row_after_row(x, y):
    before = torch.full((x.shape[0], y.shape[1] + 1), 9.0, device=x.device)
    for i in range(3):
        row = torch.full_like(before, 9.0)
        for j in range(y.shape[1]):
            best = torch.minimum(torch.minimum(before[:, j + 1], row[:, j]), before[:, j])
            row[:, j + 1] = best + (x[:, i] - y[:, j]).abs()
        before = row
    return before[:, -1]
"""


@pytest.mark.parametrize("name", ["separate_rows", "row_after_row"])
def test_a_short_outer_loop_is_unrolled_and_each_inner_loop_can_be_a_kernel(name: str, captured) -> None:
    """They read a part of a row, along no axis of the kernel, and change a state that they do not read."""
    capture = captured(SHORT, name)
    assert sum(node.loop is not None for node in capture.graph.nodes) == 3
    candidate = fully_fused(capture, start(capture, SHORT))
    assert verified(capture, candidate).reason == ""


def test_a_table_gets_no_backward_pass_and_a_note_says_why(captured) -> None:
    capture = captured(NESTS.replace("# mtmc: gain=f32[B,N,M]", "# mtmc: grad=gain gain=f32[B,N,M]"), "from_the_end")
    (note,) = [note for note in capture.workload.assumed if "backward pass" in note]
    assert "it is not one kernel, because its gradient is computed" in note
    assert sum(node.loop is not None for node in capture.graph.nodes) == 1
