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
    assert len(loops) == 1
    assert "unrolled" not in " ".join(capture.workload.assumed)
    candidate = fully_fused(capture, start(capture, NESTS))
    assert len(re.findall(r"in tl\.range\(0, ", candidate.code.block)) == 1
    assert verified(capture, candidate).reason == ""
    assert compile_errors(capture, candidate, ["sm_90"]) == []


@pytest.mark.parametrize("name", ["soft_minimum", "transducer", "seam", "through_all"])
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
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("all_of_it", "it reads all of a table that it writes cell by cell"),
        ("whole_rows", "it reads a whole row of a table that it writes cell by cell"),
        ("from_the_last_column", "it reads outside a tensor, or from its end in the first iterations alone"),
    ],
)
def test_other_nests_are_refused_with_their_lines_and_the_reason(name: str, why: str, captured) -> None:
    with pytest.raises(TargetUnsupported) as raised:
        captured(REFUSED, name)
    lines = REFUSED.splitlines()
    first = next(i for i, line in enumerate(lines[lines.index(f"def {name}(x):") :]) if line.startswith("    for"))
    line = lines.index(f"def {name}(x):") + first + 1
    assert raised.value.message == (
        f"the loops of lines {line} and {line + 1} are nested and have too many iterations to unroll, "
        f"and it is not one kernel, because {why}"
    )
    assert raised.value.where is not None and raised.value.where.line == line
    assert raised.value.remedy == "docs/loops.md lists the forms that are one kernel."
