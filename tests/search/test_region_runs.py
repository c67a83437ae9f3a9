"""The searches of several regions become one run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import SOURCE, action, search

from mtmc_lsp.app.regions.runs import accepted_code, continued, joined, merged, merged_verdict, steps_of
from mtmc_lsp.core.results import Check, CheckStatus, Verdict, VerdictStatus
from mtmc_lsp.core.run import GeneratedCode, RunResult, RunStatus, Step, StepStatus
from mtmc_lsp.core.workload import CodeRegion
from mtmc_lsp.search.components import Events

ONE, TWO = (CodeRegion(number, 2 * number, 2 * number, 2, 2, ("x",), ("y",)) for number in (1, 2))


def result(*outcomes: str) -> RunResult:
    """The result of a search for one region, whose steps have these outcomes."""
    return search([action(number, outcome) for number, outcome in enumerate(outcomes)])


def test_the_steps_of_all_regions_are_numbered_in_one_sequence() -> None:
    first, second = result("better", "wrong"), result("better")
    run = merged([(TWO, first), (ONE, second)], SOURCE)
    assert [(step.index, step.region) for step in run.steps] == [(1, 2), (2, 2), (3, 1)]
    assert [step.index for step in steps_of(run.steps, 2)] == [1, 2]
    assert [step.action for step in steps_of(run.steps, 1)] == [step.action for step in second.steps]
    assert run.final.source == second.final.source
    assert run.status is RunStatus.IMPROVED


def test_the_speedup_of_a_run_is_that_of_the_sum_of_its_regions_times() -> None:
    first, second = result("better"), result("better", "better")
    run = merged([(ONE, first), (TWO, second)], SOURCE)
    before = after = 0.0
    for part in (first, second):
        eager = next(item.median_us for item in part.baselines if item.name == "eager")
        assert part.final.speedup is not None and part.final.speedup.vs_eager is not None
        before += eager
        after += eager / part.final.speedup.vs_eager.ratio
    assert run.final.speedup is not None and run.final.speedup.vs_eager is not None
    assert run.final.speedup.vs_eager.ratio == pytest.approx(before / after)
    assert run.final.speedup.vs_eager.low <= run.final.speedup.vs_eager.ratio <= run.final.speedup.vs_eager.high


def test_a_run_improves_if_one_region_does_and_is_incorrect_only_if_all_are() -> None:
    better, wrong, nothing = result("better"), result("wrong"), result("slower")
    assert merged([(ONE, wrong), (TWO, better)], SOURCE).status is RunStatus.IMPROVED
    assert merged([(ONE, wrong), (TWO, nothing)], SOURCE).status is RunStatus.NO_GAIN
    assert merged([(ONE, wrong), (TWO, wrong)], SOURCE).status is RunStatus.INCORRECT
    assert merged([(None, wrong)], SOURCE) is wrong


def test_progress_is_reported_with_the_numbers_of_the_whole_run() -> None:
    seen: list[tuple[str, int, int]] = []
    events = Events(
        on_action=lambda index, _: seen.append(("action", index, 0)),
        on_step=lambda step: seen.append(("step", step.index, step.region)),
    )
    region_events = continued(events, 2, 5)
    region_events.on_action(1, action(1, "better"))
    region_events.on_step(Step(1, action(1, "better"), StepStatus.FAILED, "why"))
    assert seen == [("action", 6, 0), ("step", 6, 2)]


def test_the_code_of_several_regions_has_each_helper_once() -> None:
    helper, tail = "def _is_plain_gpu_call(tensors):\n    return True\n", "def f_region_{}_fits(x):\n    return True\n"
    codes = [
        (
            region,
            GeneratedCode((f"import {name}", "import torch"), f"{helper}\n\n{tail.format(region.number)}", f"{name}\n"),
        )
        for region, name in ((ONE, "a"), (TWO, "b"))
    ]
    code = joined(codes)
    assert code.imports == ("import a", "import torch", "import b")
    assert code.block == f"{helper}\n\n{tail.format(1)}\n\n{tail.format(2)}"
    assert code.regions == ((ONE, "a\n"), (TWO, "b\n"))


def test_only_code_that_the_result_keeps_is_passed_on() -> None:
    better = result("better")
    code = GeneratedCode((), "", "")
    step = better.steps[0]
    assert step.candidate is not None
    kept = replace(better, steps=(replace(step, candidate=replace(step.candidate, code=code)),))
    assert accepted_code(kept, ONE) == [(ONE, code)]
    assert accepted_code(replace(kept, status=RunStatus.NO_GAIN), ONE) == []
    assert accepted_code(kept, None) == []


def test_a_file_is_correct_only_if_each_region_is() -> None:
    def verdict(status: VerdictStatus, error: float) -> Verdict:
        return Verdict(status, (Check("values", CheckStatus.PASSED),), "interpreter", error)

    correct = merged_verdict([verdict(VerdictStatus.CORRECT, 0.1), verdict(VerdictStatus.CORRECT, 0.2)])
    assert correct.is_correct and len(correct.checks) == 2 and correct.error == 0.2
    assert not merged_verdict([verdict(VerdictStatus.CORRECT, 0.1), verdict(VerdictStatus.INCORRECT, 0.2)]).is_correct
