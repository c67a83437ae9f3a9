"""The memory layouts that a foreign candidate's arguments come in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from handwritten import ADD_IN_PLACE, RMS

from benchmarks.adversarial.bases import BASES
from benchmarks.adversarial.conditions import CONDITIONS
from mtmc_lsp.core.results import Verdict, VerdictStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.adapters import ForeignCandidate
from mtmc_lsp.verify.cases import ALIASED, EXPANDED, SLICED, TRANSPOSED, Case
from mtmc_lsp.verify.trials import Trial
from mtmc_lsp.verify.worker.values.layouts import other_layout, stated_values

WRONG = {condition.name: condition.candidates()[0] for condition in CONDITIONS if condition.kind == "layouts"}


@pytest.mark.parametrize("name", ["packed", "column_slice", "transposed", "expanded_rows", "expanded_columns"])
def test_a_candidate_that_is_wrong_for_one_layout_alone_is_incorrect(judge: Callable[..., Verdict], name: str) -> None:
    wrong = WRONG[name]
    verdict = judge(wrong.reference, wrong.target, wrong.text, wrong.target)
    assert verdict.status is VerdictStatus.INCORRECT, verdict.reason


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "row_sum"])
def test_a_candidate_that_follows_the_strides_of_its_argument_is_correct(
    judge: Callable[..., Verdict], name: str
) -> None:
    verdict = judge(BASES[name].reference(), name, BASES[name].honest(), name)
    assert verdict.is_correct, verdict.reason


def cases_of(capture: Capture) -> tuple[Case, ...]:
    """The cases of a foreign candidate."""
    candidate = ForeignCandidate(capture, capture.workload.target, "")
    return candidate.cases(Trial(capture), interpreted=True, seed=1)


def test_arguments_that_the_reference_writes_are_never_expanded(capture_of) -> None:
    own = ADD_IN_PLACE.own.replace("accumulate", "accumulate_rows").replace("f32[N]", "f32[N,4]")
    writing = replace(ADD_IN_PLACE, name="accumulate_rows", own=own)
    layouts = [{case.layout for case in cases_of(capture_of(text))} for text in (RMS, writing)]
    assert EXPANDED in layouts[0] and EXPANDED not in layouts[1]
    assert {SLICED, TRANSPOSED} <= layouts[1]


def test_no_two_cases_of_a_candidate_have_the_same_seed(capture_of) -> None:
    cases = cases_of(capture_of(RMS))
    assert len({case.seed for case in cases}) == len(cases)


def test_images_are_tried_in_channels_last() -> None:
    image = torch.arange(120.0).view(2, 3, 4, 5)
    other = other_layout({"x": image}, ["x"], TRANSPOSED)["x"]
    assert other.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(other, image)


def test_a_sliced_argument_has_its_values_in_unaligned_columns_of_wider_rows() -> None:
    rows = torch.arange(12.0).view(3, 4)
    other = other_layout({"x": rows}, ["x"], SLICED)["x"]
    assert (other.stride(), other.storage_offset()) == ((7, 1), 1)
    assert torch.equal(other, rows)


def test_arguments_with_different_ranges_share_no_memory(captured) -> None:
    """A delta rule with keys of the queries' size would overflow, and rounding would decide where."""
    names = ["q", "k", "v", "w"]
    text = (
        "import torch\n\n# mtmc: q=f32[N,8] k=f32[N,8]@-0.1..0.1 v=f32[N,8]@-0.1..0.1 w=f32[N,8]@0.0..1.0 N=16\n"
        "def f(q, k, v, w):\n    return (q * k + v).exp() * w\n"
    )
    capture = captured(text, "f")
    by_name = {leaf.name: leaf.input for leaf in capture.leaves}
    inputs = {by_name[name]: torch.randn(16, 8) for name in names}
    shared = other_layout(inputs, list(inputs), ALIASED, stated_values(capture))
    q, k, v, w = (shared[by_name[name]] for name in names)
    assert q is k and k is v and w is not k
    assert torch.equal(q, inputs[by_name["k"]]) and torch.equal(w, inputs[by_name["w"]])
    # The candidate's process gets the values in separate tensors, and shares the same ones.
    again = other_layout({name: value.clone() for name, value in shared.items()}, list(inputs), ALIASED)
    assert again[by_name["q"]] is again[by_name["k"]] is again[by_name["v"]] is not again[by_name["w"]]
