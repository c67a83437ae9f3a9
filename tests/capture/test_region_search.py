"""The search for regions cuts out the statement that fails and tries what is left."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from mtmc_lsp.capture.messages import LocalValue, LocalValues
from mtmc_lsp.capture.regions.runs import Runs
from mtmc_lsp.capture.regions.search import Regions, RegionSearch, no_region
from mtmc_lsp.core.errors import (
    FailureKind,
    Location,
    MtmcError,
    OutOfMemory,
    TargetRaises,
    TargetUnsupported,
    WorkerFailed,
)
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import ArgumentSpec, Capture, Environment, TensorSpec, Workload, WorkloadSource
from mtmc_lsp.source.targets import find_target

TENSOR = TensorSpec((Size.of(8),), "float32")
PATH = "m.py"


def search(
    body: str,
    refuse: Callable[[str, int], MtmcError | None],
    *,
    other: str = "",
    number: str = "",
    seconds: float = 60,
) -> tuple[Regions, list[str]]:
    """Search a function with this body.

    Args:
        refuse: the error for a statement, from its text and line; the first one in a region decides.
        other: a variable that is neither a tensor nor a constant.
        number: a variable that is a number.
        seconds: time for the search.

    Returns:
        The regions, and the lines of each region that was tried.
    """
    text = "def f(x, w):\n" + "".join(f"    {line}\n" for line in body.splitlines())
    target = find_target(text.encode(), PATH, "f")
    runs = Runs(target, text)
    names = {"x", "w", "y", "z", "layer", "i"}
    values = tuple(
        LocalValue(name, None, "Linear")
        if name == other
        else LocalValue(name, ArgumentSpec(name, None, 0) if name == number else ArgumentSpec(name, TENSOR))
        for name in sorted(names)
    )
    known = LocalValues(dict.fromkeys(range(len(runs.statements.all)), values), {})
    workload = Workload(target, WorkloadSource.DIRECTIVE)
    tried = []

    def capture(region: Workload) -> Capture:
        assert region.target.region is not None
        first, last = region.target.region.start_line, region.target.region.end_line
        tried.append(region.target.region.lines)
        for number in range(first, last + 1):
            error = refuse(text.splitlines()[number - 1].strip(), number)
            if error is not None:
                raise error
        graph = Graph((), (), (), "tensor", {})
        return Capture(region, graph, (), Environment("", "", ""), 0.0, 0.0, "m")

    return RegionSearch(workload, runs, known, capture, time.monotonic() + seconds).find(), tried


def refused(line: int) -> MtmcError:
    return TargetUnsupported("f depends on values", where=Location(PATH, line))


def lines_of(regions: Regions) -> list[str]:
    return [item.workload.target.region.lines for item in regions.captures]


BODY = "y = x + 1\ny = y * 2\ny = bad(y)\nz = y @ w\nz = z + y\nreturn z * 2"


def test_the_statement_that_fails_is_cut_and_both_sides_are_regions() -> None:
    regions, tried = search(BODY, lambda text, line: refused(line) if "bad" in text else None)
    assert lines_of(regions) == ["lines 2 to 3", "lines 5 to 7"]
    assert [item.workload.target.region.number for item in regions.captures] == [1, 2]
    assert [(cut.line, cut.reason) for cut in regions.cuts] == [(4, "depends on values")]
    assert tried[0] == "lines 2 to 7"


def test_a_failure_in_a_function_that_a_statement_calls_is_found_by_bisection() -> None:
    def refuse(text: str, line: int) -> MtmcError | None:
        return TargetUnsupported("f depends on values", where=Location(PATH, 99)) if "bad" in text else None

    regions, _ = search(BODY, refuse)
    assert lines_of(regions) == ["lines 2 to 3", "lines 5 to 7"]
    assert [cut.line for cut in regions.cuts] == [4]


def test_a_statement_that_raises_alone_is_cut_and_the_reason_says_so() -> None:
    def refuse(text: str, line: int) -> MtmcError | None:
        return TargetRaises("f raises AttributeError", where=Location(PATH, line)) if "bad" in text else None

    regions, _ = search(BODY, refuse)
    assert [(cut.line, cut.reason) for cut in regions.cuts] == [
        (4, "without the lines before it raises AttributeError"),
    ]


def test_a_worker_that_crashes_cuts_the_statement_too() -> None:
    def refuse(text: str, line: int) -> MtmcError | None:
        return WorkerFailed("the process crashed") if "bad" in text else None

    regions, _ = search(BODY, refuse)
    assert lines_of(regions) == ["lines 2 to 3", "lines 5 to 7"]


@pytest.mark.parametrize("error", [OutOfMemory("no memory"), WorkerFailed("cancelled", kind=FailureKind.CANCELLED)])
def test_what_is_not_the_codes_fault_ends_the_search(error: MtmcError) -> None:
    with pytest.raises(type(error)):
        search(BODY, lambda text, line: error)


def test_a_run_without_tensor_operations_is_neither_a_region_nor_a_cut() -> None:
    regions, _ = search(
        BODY, lambda text, line: TargetUnsupported("f has no tensor operations", kind=FailureKind.NO_TENSORS)
    )
    assert regions == Regions((), ())


def test_the_suites_inside_a_statement_that_fails_are_tried() -> None:
    body = "y = x + 1\nfor i in range(3):\n    z = y + i\n    bad(z)\n    y = z * 2\nreturn y + 1"
    regions, _ = search(body, lambda text, line: refused(line) if "bad" in text else None)
    assert lines_of(regions) == ["line 2", "line 4", "line 6", "line 7"]


def test_a_variable_that_cannot_be_created_again_cuts_its_reader() -> None:
    regions, _ = search("y = x + 1\ny = layer(y)\nreturn y * w", lambda text, line: None, other="layer")
    # `layer` is a global here, so nothing is cut.
    assert lines_of(regions) == ["lines 2 to 4"]
    body = "layer = make()\nprint(1)\ny = x + 1\ny = layer(y)\nreturn y * w"
    regions, _ = search(body, lambda text, line: None, other="layer")
    assert "lines 4 to 4" not in lines_of(regions)
    assert (5, "uses layer, a Linear") in [(cut.line, cut.reason) for cut in regions.cuts]
    assert lines_of(regions) == ["line 2", "line 4", "line 6"]


def test_a_number_that_a_loop_changes_cuts_its_reader() -> None:
    body = "y = x + 1\nfor i in range(3):\n    bad(y)\n    y = y * 2\n    y = y + i\nreturn y + 1"
    regions, _ = search(body, lambda text, line: refused(line) if "bad" in text else None, number="i")
    assert lines_of(regions) == ["line 2", "line 5", "line 7"]
    assert (6, "uses i, a number that the loop changes") in [(cut.line, cut.reason) for cut in regions.cuts]


def test_the_error_of_the_whole_target_stays_if_one_line_explains_it() -> None:
    error = refused(3)
    regions, _ = search("y = x[x > 0]\nreturn y", lambda text, line: refused(line))
    workload = Workload(find_target(b"def f(x):\n    return x\n", PATH, "f"), WorkloadSource.DIRECTIVE)
    assert no_region(workload, regions, error) is error


def test_a_search_without_time_blames_no_line_and_says_how_to_give_more_time() -> None:
    error = refused(3)
    regions, tried = search(BODY, lambda text, line: None, seconds=-1)
    assert (tried, regions.cuts, regions.is_complete) == ([], (), False)
    workload = Workload(find_target(b"def f(x):\n    return x\n", PATH, "f"), WorkloadSource.DIRECTIVE)
    assert str(no_region(workload, regions, error)) == (
        "m.py:1: the time ended before the parts of f were captured; it cannot be captured as a whole: f depends on values\n"
        "  Give more time, for example with --budget 300."
    )


def test_a_capture_that_takes_all_the_time_that_is_left_cuts_nothing() -> None:
    def refuse(text: str, line: int) -> MtmcError | None:
        time.sleep(0.3)
        return WorkerFailed("capture took longer than 0 s", kind=FailureKind.TIMEOUT)

    regions, _ = search(BODY, refuse, seconds=0.2)
    assert (regions.captures, regions.cuts, regions.is_complete) == ((), (), False)


def test_a_statement_that_reads_sizes_does_not_begin_a_region() -> None:
    regions, _ = search("n, d = x.shape\ny = x * d\nprint(y)\nreturn y / n", lambda text, line: None)
    assert lines_of(regions) == ["line 3", "line 5"]
