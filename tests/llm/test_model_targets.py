"""Scripted correct answers for targets that the built-in coder cannot write, compared with manual edits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from answers import editable_text, hunk
from endpoint import Endpoint
from searching import AgreeingMeasurer, quick_settings, run_search
from targets import TARGETS, Target

from mtmc_lsp.app.backends import Backends
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import REMARK
from mtmc_lsp.core.chat import BudgetSpent
from mtmc_lsp.core.run import Author, Candidate, RunResult, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.llm.coder.coder import editable_code_of
from mtmc_lsp.llm.coder.stored_edits import recorded_edits
from mtmc_lsp.llm.endpoint.client import OpenAIModel
from mtmc_lsp.llm.endpoint.stored_answers import ReplayedModel
from mtmc_lsp.source.compose import compose

AUTO = Backends(coder="auto")
STAGED = """\
import torch


# mtmc: x=f32[8,40]
def sharp(x):
    y = torch.relu(x) * 3 + 1
    return torch.sort(y, -1).values
"""
SORTED = '''\
@triton.jit
def sorted_kernel(y_ptr, out_ptr, n_cols, BLOCK: tl.constexpr):
    """Each row, sorted in registers."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    y = tl.load(y_ptr + row * n_cols + cols, mask=cols < n_cols, other=float("inf"))
    tl.store(out_ptr + row * n_cols + cols, tl.sort(y), mask=cols < n_cols)
'''
CALL, RETURN = "    out, sort_1 = torch.sort(y)\n", "    return out\n"
LAUNCH = """\
    out = torch.empty_like(y)
    rows, columns = y.shape
    sorted_kernel[(rows,)](y, out, columns, BLOCK=triton.next_power_of_2(columns), num_warps=4)
    return out
"""


def staged_answer(request: dict[str, Any]) -> str:
    return hunk("", SORTED) + hunk(CALL + RETURN, LAUNCH)


def run_with_endpoint(
    endpoint: Endpoint, capture: Capture, source: str, backends: Backends, **more: Any
) -> tuple[RunResult, OpenAIModel]:
    with endpoint.serving() as environ:
        model = OpenAIModel(quick_settings().llm, environ=environ)
        return run_search(capture, source, model, backends=backends, **more), model


def before(capture: Capture, source: str) -> str:
    """The file with a launcher that contains every torch call."""
    root = BuiltinCoder().start(capture, source)
    return compose(source.encode(), capture.workload.target, editable_code_of(capture, root).code).decode()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_good_answer_matches_the_manual_edit_byte_for_byte(captured, target: Target) -> None:
    capture = captured(target.source, target.name)
    alone = run_search(capture, target.source, None, backends=Backends())
    left = [step.candidate.code.block for step in alone.steps if step.candidate is not None]
    assert all(target.operation in block for block in left), "the built-in coder leaves it to torch"
    result, _ = run_with_endpoint(Endpoint(target.answer), capture, target.source, Backends(coder="llm"))
    assert result.final.source == target.by_hand(before(capture, target.source))


@pytest.fixture
def staged(captured) -> tuple[Capture, RunResult, OpenAIModel]:
    """A run that is partly written by the built-in coder and partly by a model."""
    capture = captured(STAGED, "sharp")
    return capture, *run_with_endpoint(Endpoint(staged_answer), capture, STAGED, AUTO, steps=6)


def test_automatic_mode_uses_the_model_only_where_the_built_in_coder_cannot(captured, staged) -> None:
    capture, result, model = staged
    alone = run_search(capture, STAGED, None, backends=Backends(), steps=6)
    first = [step for step in result.steps if step.candidate.author is Author.BUILTIN]
    assert [step.candidate.source for step in first] == [step.candidate.source for step in alone.steps]
    last = result.steps[-1]
    assert (last.candidate.author, last.status) == (Author.MODEL, StepStatus.ACCEPTED), last.reason
    by_hand = alone.final.source.replace(CALL + RETURN, LAUNCH)
    for old, new in (
        (
            "def sharp_launch(x, sharp_y_kernel=_DirectLaunches(sharp_y_kernel)):",
            "def sharp_launch(\n    x, sharp_y_kernel=_DirectLaunches(sharp_y_kernel), "
            "sorted_kernel=_DirectLaunches(sorted_kernel),\n):",
        ),
        (
            "return sharp_launch(x, wrap_triton(sharp_y_kernel))",
            "return sharp_launch(x, wrap_triton(sharp_y_kernel), wrap_triton(sorted_kernel))",
        ),
    ):
        assert by_hand.count(old) == 1, old
        by_hand = by_hand.replace(old, new)
    at = by_hand.index("def _can_launch_on(")
    assert result.final.source == f"{by_hand[:at]}{SORTED}\n\n{by_hand[at:]}"
    assert model.use().requests == 1


def complete_text(request: dict[str, Any], *changes: tuple[str, str]) -> str:
    """An answer with the complete new text, including further changes."""
    text = editable_text(request).replace(CALL + RETURN, LAUNCH)
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return f"```python\n{SORTED}\n\n{text}```"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("sharp_kernel_body", "* 3.0", "* 4.0"), "sharp_y_kernel was changed, but this step does not concern it"),
        (
            ("sharp_kernel_name", "sharp_y_kernel", "other_kernel"),
            "sharp_y_kernel is missing; this step does not concern it",
        ),
    ],
    ids=lambda change: change[0] if isinstance(change, tuple) else "",
)
def test_a_step_may_not_change_unrelated_kernels(captured, change, reason) -> None:
    capture = captured(STAGED, "sharp")
    endpoint = Endpoint(lambda request: complete_text(request, change[1:]), staged_answer)
    result, _ = run_with_endpoint(endpoint, capture, STAGED, AUTO, steps=2)
    assert result.steps[-1].status is StepStatus.ACCEPTED, result.steps[-1].reason
    assert reason in str(endpoint.requests[1]["messages"][-1]["content"])
    assert "* 3.0" in result.final.source


def test_an_unrelated_kernel_keeps_its_original_formatting(captured, staged) -> None:
    capture, wanted, _ = staged
    head = "@triton.jit\ndef sharp_y_kernel("

    def answer(request: dict[str, Any]) -> str:
        return complete_text(request, (head, head.replace("\n", "\n# the same, reformatted\n")))

    result, _ = run_with_endpoint(Endpoint(answer), capture, STAGED, AUTO, steps=6)
    kernel = wanted.final.source[wanted.final.source.index(head) :].partition("\n\n\n")[0]
    assert result.final.source.count(kernel) == 1
    assert result.steps[-1].candidate is not None, [step.reason for step in result.steps]


def test_automatic_mode_without_an_endpoint_keeps_what_the_built_in_coder_wrote(captured, staged) -> None:
    capture, _, _ = staged
    gone = OpenAIModel(
        quick_settings().llm, environ={"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "MTMC_LLM_MODEL": "m"}
    )
    result = run_search(capture, STAGED, gone, backends=AUTO, steps=6)
    assert result.steps[0].status is StepStatus.ACCEPTED
    assert "127.0.0.1:9/v1 cannot be reached" in result.steps[-1].reason
    assert "sharp_y_kernel" in result.final.source


def test_a_run_is_replayed_from_its_stored_answers_alone(staged) -> None:
    capture, result, model = staged
    replayed = ReplayedModel("first", model.exchanges)
    again = run_search(capture, STAGED, replayed, backends=AUTO, steps=6)
    assert [(s.status, s.reason, s.diff) for s in again.steps] == [(s.status, s.reason, s.diff) for s in result.steps]
    assert again.final == result.final
    assert (again.model_use.replay_of, again.model_use.requests) == ("first", 0)
    with pytest.raises(BudgetSpent, match="run first, which is replayed, contains no further questions"):
        replayed.ask("code", [])


def test_steps_after_an_undone_step_are_rewritten_without_the_model(staged) -> None:
    capture, result, _ = staged
    root = BuiltinCoder().start(capture, STAGED)
    edits = recorded_edits(capture, root, result.steps)
    step = result.steps[-1]
    _, coder = AUTO.open(quick_settings(), None, capture, result.steps)
    parent = next(s.candidate for s in result.steps if s.candidate.id == step.candidate.parent)
    assert coder.write(capture, parent, step.action).source == step.candidate.source
    made: Candidate = coder.write(capture, root, step.action)
    assert SORTED in made.source
    assert "sharp_y_kernel" not in made.source
    assert hunk("", SORTED) in edits[step.action.key]


def test_a_remark_is_sent_with_the_rejected_version(staged) -> None:
    capture, result, _ = staged
    step = result.steps[-1]
    parent = next(s.candidate for s in result.steps if s.candidate.id == step.candidate.parent)
    wish = replace(step.action, params={**step.action.params, REMARK: "make it readable"})
    endpoint = Endpoint(staged_answer)
    with endpoint.serving() as environ:
        model = OpenAIModel(quick_settings().llm, environ=environ)
        _, coder = AUTO.open(quick_settings(), model, capture, result.steps)
        coder.write(capture, parent, wish)
    assert "# The user's request for this step\nmake it readable" in endpoint.prompt()
    assert hunk("", SORTED) in endpoint.prompt()


def test_a_failed_region_is_not_offered_again(captured) -> None:
    source = "import torch\n\n\n# mtmc: x=f32[8,40]\ndef soft(x):\n    return torch.softmax(x / 2.0, -1)\n"
    result, _ = run_with_endpoint(Endpoint("no code"), captured(source, "soft"), source, Backends(coder="llm"), steps=8)
    regions = [step.action.region for step in result.steps]
    assert len(regions) > 1
    assert len(set(regions)) == len(regions)


def test_only_code_of_a_model_is_repaired(captured) -> None:
    capture = captured(STAGED, "sharp")
    endpoint = Endpoint(staged_answer)
    result, _ = run_with_endpoint(
        endpoint, capture, STAGED, AUTO, measurer=AgreeingMeasurer(**{"sharp_y_kernel": "values: wrong"}), steps=1
    )
    assert result.steps[0].status is StepStatus.FAILED
    assert not endpoint.requests


def test_the_planner_prompt_contains_the_device_and_a_profile(captured) -> None:
    capture = captured(STAGED, "sharp")

    def answer(request: dict[str, Any]) -> str:
        return '{"action": 1, "reason": "r"}' if "optimisation of a PyTorch" in str(request["messages"][0]) else "no"

    endpoint = Endpoint(answer)
    run_with_endpoint(endpoint, capture, STAGED, Backends("llm", "auto"), steps=2)
    first, second = (endpoint.prompt(number) for number in (0, 1))
    assert "132 multiprocessors, 227 KiB shared memory per block, 60 MiB L2, 4.28 TB/s; TFLOP/s: fp32 51" in first
    assert "no version is faster than 0.0006 us (memory)" in first
    assert "- torch call of relu: estimated 4.0 us, 0.00256 MB, bound by launch" in first
    assert "- kernel of relu, mul and add: estimated 4.0 us" in second
    assert "- ranks_kernel on sm_90: 0 bytes shared" in second
    assert "1. Fuse relu, mul and add into one kernel" in second
