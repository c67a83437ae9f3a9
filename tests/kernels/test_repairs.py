"""Candidate repairs: small edits of the author's text."""

from __future__ import annotations

import pytest

from benchmarks.kernel_faults.faults import FAULTS, TABLES, Planted, planted
from benchmarks.kernel_faults.kernels import KERNELS, source
from mtmc_lsp.kernels.messages import Fault, FaultKind
from mtmc_lsp.kernels.repairs.catalogue import repairs_for
from mtmc_lsp.kernels.repairs.site import sites_of, with_helpers
from mtmc_lsp.kernels.repairs.static import static_findings, static_repairs
from mtmc_lsp.kernels.search import changed_lines
from mtmc_lsp.source.syntax import first_error, parse

COMPUTATIONS = {
    "mean over the block",
    "row offset of 1",
    "wrong axis",
    "maximum of signed values",
    "no subtraction of the maximum",
}
ALL = [Fault(kind, 0) for kind in FaultKind]
ANOTHER_WAY = {
    "store without mask", "load without mask", "padding in a variance", "last block of K is left out",
    "padded scores enter the softmax", "running maximum starts at 0", "load of values without mask", "gather without mask",
    "block is no power of two", "load without other before a reduction", "accumulator of 16 bits", "grid by another constant",
    "counts without atomic operation", "padding of 0 in a maximum and a sum", "squares added up in 16 bits",
    "mask without one dimension", "strides in the wrong order", "running maximum starts with zeros", "grid rounded down",
    "product without accumulator", "padding in squared differences",
}  # fmt: skip
"""Faults whose repair is another text than the sound kernel's."""


FIRST_FIFTY = (*TABLES["first"], *TABLES["second"])


def test_a_table_of_faults_has_texts_and_replacements_in_turn() -> None:
    assert planted([("both", "add", "a", "b", "c", "d")]) == (Planted("both", "add", (("a", "b"), ("c", "d"))),)
    with pytest.raises(ValueError, match="shorter"):
        planted([("half", "add", "a")])


def test_the_faults_of_all_tables_have_different_names_and_texts() -> None:
    assert [len(table) for table in TABLES.values()] == [30, 20, 31, 16]
    assert len({fault.text for fault in FAULTS}) == len(FAULTS)


def texts(path: str, text: str) -> set[str]:
    """The file with each candidate repair."""
    sites = sites_of(path, text.encode())
    names = [site.kernel.name for site in sites]
    static = static_repairs(sites, static_findings(path, text.encode(), names))
    return {item.applied(text.encode()).decode() for item in [*static, *repairs_for(sites, ALL)]}


@pytest.mark.parametrize(
    "fault", [item for item in FIRST_FIFTY if item.name not in ANOTHER_WAY], ids=lambda item: item.name
)
def test_one_of_the_candidates_is_the_sound_kernel(fault: Planted) -> None:
    assert source(fault.kernel) in texts("model.py", fault.text)


@pytest.mark.parametrize("fault", [f for f in TABLES["third"] if f.name in COMPUTATIONS], ids=lambda item: item.name)
def test_a_repaired_computation_is_that_of_the_sound_kernel(fault: Planted) -> None:
    assert source(fault.kernel) in texts("model.py", fault.text)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda item: item.name)
def test_each_fault_changes_at_most_five_lines(fault: Planted) -> None:
    assert first_error(parse(fault.text.encode())) is None
    assert changed_lines(source(fault.kernel).encode(), fault.text.encode()) <= 5


@pytest.mark.parametrize("name", KERNELS)
def test_candidates_parse_and_change_at_most_five_lines(name: str) -> None:
    text = source(name).encode()
    sites = sites_of("model.py", text)
    candidates = repairs_for(sites, ALL)
    assert len(candidates) > 5
    for item in candidates:
        after = item.applied(text)
        assert after != text, item
        assert first_error(parse(after)) is None, item
        assert changed_lines(text, after) <= 5, item


def test_a_candidate_keeps_every_other_line_with_its_comments() -> None:
    text = source("softmax").replace(', other=-float("inf"))', ")  # the row")
    (candidate, *_) = [
        item
        for item in repairs_for(sites_of("model.py", text.encode()), [Fault(FaultKind.UNDEFINED_LANES, 12)])
        if "-inf" in item.title
    ]
    after = candidate.applied(text.encode()).decode().splitlines()
    different = [(a, b) for a, b in zip(text.splitlines(), after, strict=True) if a != b]
    assert len(different) == 1
    assert different[0][1].endswith('mask=mask, other=float("-inf"))  # the row')


def test_the_line_of_a_fault_comes_first() -> None:
    text = source("matmul")
    line = next(i for i, row in enumerate(text.splitlines(), 1) if "b = tl.load" in row)
    first = repairs_for(sites_of("model.py", text.encode()), [Fault(FaultKind.READ_OUTSIDE, line)])[0]
    assert first.line == line


def test_a_sum_that_is_loaded_and_stored_becomes_an_atomic_addition() -> None:
    text = source("column_sum").replace(
        "    tl.atomic_add(out_ptr + cols, tl.sum(x, axis=0), mask=cols < N)",
        "    old = tl.load(out_ptr + cols, mask=cols < N)\n    tl.store(out_ptr + cols, old + tl.sum(x, axis=0), mask=cols < N)",
    )
    assert source("column_sum") in texts("model.py", text)


def test_functions_that_a_kernel_calls_are_repaired_as_well() -> None:
    text = source("row_max").replace("        best = tl.maximum(best, x)", "        best = larger(best, x)")
    text = text.replace(
        "@triton.jit\ndef row_max_kernel",
        "@triton.jit\ndef larger(a, b):\n    return tl.maximum(a, b)\n\n\n@triton.jit\ndef row_max_kernel",
    )
    sites = sites_of("model.py", text.encode())
    assert with_helpers(sites, ["row_max_kernel"]) == ("larger", "row_max_kernel")
    assert with_helpers(sites, ["larger"]) == ("larger",)


NEED_THE_ALGORITHM = {"epsilon outside the root", "maximum instead of a sum", "weight and bias exchanged"}
"""Faults whose repair is another text, or that no rule knows."""


@pytest.mark.parametrize(
    "fault",
    [item for item in TABLES["fourth"] if item.name not in NEED_THE_ALGORITHM],
    ids=lambda item: item.name,
)
def test_what_is_written_in_place_of_its_counterpart_is_replaced(fault: Planted) -> None:
    assert source(fault.kernel) in texts("model.py", fault.text)


def test_operators_of_offsets_and_masks_stay() -> None:
    text = source("add")
    for found in texts("model.py", text):
        assert "pid / BLOCK_SIZE" not in found and "BLOCK_SIZE - tl.arange" not in found
