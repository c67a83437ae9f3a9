"""Loops over chunks of rows as an action: when it is proposed, with how many rows, and when a step of it is accepted."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from mtmc_lsp.actions.base import Situation
from mtmc_lsp.actions.catalogue import proposals
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind, Expected, MacroAction
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.results import BaselineTime, CompileReport, Ratio, Speed, Timing
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.search.acceptance import BASE_RATIO, Judge
from mtmc_lsp.tuning.memory import peak_bytes
from tests.codegen.checker import Checker, start, with_kernel
from tests.training.linear_losses import OTHER_LOSSES, SCALAR_LOSSES, in_chunks, product_of
from tests.training.targets import HEAD, cases

H100_LIKE = planning_model(("sm_90",))


def of_size(capture: Capture, **sizes: int) -> Capture:
    """The capture as if its workload had these sizes."""
    return replace(capture, graph=replace(capture.graph, sizes={**capture.graph.sizes, **sizes}))


def proposed(capture: Capture, schedule: Schedule | None = None) -> list[MacroAction]:
    """The actions in the order in which the planner tries them."""
    return proposals(Situation(capture.graph, schedule or Schedule(), H100_LIKE))


@pytest.mark.parametrize(("n", "rows", "most_bytes"), [(8192, 1024, 1.4e9), (32768, 4096, 2.5e9)])
def test_large_vocabularies_are_computed_in_chunks_first(
    checker: Checker, n: int, rows: int, most_bytes: float
) -> None:
    capture = of_size(checker.capture(HEAD + SCALAR_LOSSES["cross entropy in bfloat16"]), N=n, D=4096, V=128256)
    first = proposed(capture)[0]
    assert first.kind is ActionKind.CHUNK_ROWS
    assert (first.params["rows"], first.params["early"]) == (rows, True)
    assert first.text == f"Compute the product and its gradients in chunks of {rows} rows"
    # The logits and their gradient in bfloat16, but for one chunk.
    assert first.expected.saved_memory == 2 * 2 * (n - rows) * 128256
    assert f"saves at least {first.expected.saved_memory / 1e6:.1f} MB" in first.rationale
    candidate = BuiltinCoder(H100_LIKE).write(capture, start(capture), first)
    assert checker.compile_errors(capture, candidate) == []
    # The gradient of the logits overwrites them: besides gradients, one chunk of logits is in memory.
    gradients = 2 * 4096 * (n + 128256)
    needed = peak_bytes(capture.graph, from_json(Schedule, candidate.schedule))
    assert gradients + 2 * rows * 128256 <= needed < most_bytes


def test_a_loss_with_more_upstream_gradients_computes_the_logits_again(checker: Checker) -> None:
    text = OTHER_LOSSES["preferences"].replace("x=f32", "x=bf16").replace("weight=f32", "weight=bf16")
    capture = of_size(checker.capture(HEAD + text), S=2048, D=4096, V=128256)
    first = proposed(capture)[0]
    assert first.kind is ActionKind.CHUNK_ROWS
    assert "computes them again" in first.rationale


def test_chunks_without_gradients_only_have_to_fill_the_device(checker: Checker) -> None:
    capture = of_size(checker.capture(HEAD + OTHER_LOSSES["no gradients"]), N=32768, D=4096, V=128256)
    action = next(action for action in proposed(capture) if action.kind is ActionKind.CHUNK_ROWS)
    assert action.params["rows"] == 1024
    assert action.text == "Compute the product and what follows in chunks of 1024 rows"


@pytest.mark.parametrize(("n", "d", "v"), [(8192, 4096, 4096), (64, 4096, 128256), (512, 64, 2000)])
def test_products_of_few_columns_or_rows_are_computed_at_once(checker: Checker, n: int, d: int, v: int) -> None:
    capture = of_size(checker.capture(HEAD + SCALAR_LOSSES["cross entropy in bfloat16"]), N=n, D=d, V=v)
    assert ActionKind.CHUNK_ROWS not in {action.kind for action in proposed(capture)}


def test_a_loop_is_proposed_once(checker: Checker) -> None:
    capture = of_size(checker.capture(HEAD + SCALAR_LOSSES["cross entropy in bfloat16"]), N=8192, D=4096, V=128256)
    first = proposed(capture)[0]
    coder = BuiltinCoder(H100_LIKE)
    candidate = coder.write(capture, start(capture), first)
    schedule = from_json(Schedule, candidate.schedule)
    further = proposed(capture, schedule)
    assert ActionKind.CHUNK_ROWS not in {action.kind for action in further}
    with pytest.raises(CannotCode, match="the graph has no product mm"):
        coder.write(capture, candidate, first)
    # What is left outside the loop still becomes kernels.
    assert ActionKind.FUSE in {action.kind for action in further}


def test_kernels_of_operations_in_the_loop_are_replaced(checker: Checker) -> None:
    capture = checker.capture(HEAD + OTHER_LOSSES["no gradients"])
    nodes = [node.name for node in capture.graph.nodes if node.word != "matmul" and "permute" not in node.word]
    before = with_kernel(capture, start(capture), nodes[:1])
    action = MacroAction(ActionKind.CHUNK_ROWS, (), (0, 0), {"node": product_of(capture), "rows": 7})
    after = BuiltinCoder().write(capture, before, action)
    assert checker.first_failure(capture, after, cases(capture)) == ""


@pytest.mark.parametrize("rows", [0, -1, True, "7", None])
def test_a_number_of_rows_that_is_none(checker: Checker, rows: Any) -> None:
    capture = checker.capture(HEAD + OTHER_LOSSES["no gradients"])
    action = MacroAction(ActionKind.CHUNK_ROWS, (), (0, 0), {"node": product_of(capture), "rows": rows})
    with pytest.raises(CannotCode, match="a chunk has at least one row"):
        BuiltinCoder().write(capture, start(capture), action)


def test_logits_that_a_kernel_gathers_from_are_not_overwritten(checker: Checker) -> None:
    capture = checker.capture(HEAD + SCALAR_LOSSES["cross entropy"])
    both = in_chunks(capture, early=True).source
    assert "# sub replaces mm, which nothing reads afterwards.\n" in both
    kernel = re.search(r"f_sub_kernel\[.*?\]\(\n(.*?)\n", both, re.DOTALL)
    assert kernel is not None
    # The product is the kernel's operand and its result; the kernel that gathers writes other tensors.
    assert kernel[1].count("mm,") == 2
    gathering = re.search(r"f_row_gather_kernel\[.*?\]\(\n(.*?)\n", both, re.DOTALL)
    assert gathering is not None
    assert gathering[1].count("mm,") == 1


def timing(ratio: float, peak: int, peak_before: int) -> Timing:
    """A step that is ``ratio`` times as fast as the version before."""
    before = BaselineTime(
        "previous", 100.0 * ratio, Ratio(ratio, ratio - 0.01, ratio + 0.01), Speed.SAME, peak_bytes=peak_before
    )
    return Timing(100.0, (before,), "previous", Ratio(1.0, 0.99, 1.01), 100, "", 0.5, peak_bytes=peak)


@pytest.mark.parametrize(
    ("ratio", "peak", "is_accepted"),
    [(1.0, 100, True), (0.995, 100, True), (0.9, 100, False), (1.0, 950, False), (1.2, 2000, True)],
)
def test_a_step_that_is_as_fast_with_less_memory_is_accepted(ratio: float, peak: int, is_accepted: bool) -> None:
    step = Step(1, MacroAction(ActionKind.CHUNK_ROWS, ("mm",), (0, 0)), StepStatus.FAILED, "")
    judged = Judge().timed(step, timing(ratio, peak * 10**6, 1000 * 10**6), base=BASE_RATIO)
    assert (judged.status is StepStatus.ACCEPTED) is is_accepted
    assert ("accepted for its memory: 900.0 MB less" in judged.reason) is (is_accepted and ratio <= 1.0)


@pytest.mark.parametrize(("peak", "says_more"), [(1030, True), (1019, False), (500, False)])
def test_a_step_says_that_it_needs_more_memory_than_the_users_code(peak: int, says_more: bool) -> None:
    step = Step(1, MacroAction(ActionKind.FUSE, ("mm",), (0, 0)), StepStatus.FAILED, "")
    eager = BaselineTime("eager", 150.0, Ratio(1.5, 1.4, 1.6), Speed.FASTER, peak_bytes=1000 * 10**6)
    timed = Timing(100.0, (eager,), "eager", Ratio(1.0, 0.99, 1.01), 100, "", 0.5, peak_bytes=peak * 10**6)
    judged = Judge().timed(step, timed, base=BASE_RATIO)
    text = "1.50x the speed of your code (1.40 to 1.60), 100.0 us"
    assert judged.reason == (f"{text}; it needs 30.0 MB more memory than your code" if says_more else text)


def test_without_a_gpu_predicted_memory_counts(checker: Checker) -> None:
    action = MacroAction(ActionKind.CHUNK_ROWS, ("mm",), (0, 0), expected=Expected(-1.0, saved_memory=1e9))
    step = Step(1, action, StepStatus.FAILED, "")
    assert Judge().unmeasured(step, CompileReport(())).status is StepStatus.ACCEPTED
    slower = replace(step, action=replace(action, expected=Expected(-1.0)))
    assert Judge().unmeasured(slower, CompileReport(())).status is StepStatus.REJECTED
