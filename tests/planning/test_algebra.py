"""Each exact rewrite removes operations, keeps the results, and does not match where the caller could observe it."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.rewrites import ALGEBRA, ir_of
from tests.codegen.harness import verified
from tests.planning import programs
from tests.planning.situations import (
    act,
    fully_fused,
    matching_nodes,
    operations,
    proposed,
    schedule_of,
    start,
    with_algebra,
)

COPY = "import torch\n\n\n# mtmc: x=f32[M,N] M=8 N=48\ndef f(x):\n    return torch.exp(x.clone()) + 1\n"
CASES = {
    "sum over features": (programs.LINEAR_SUM, "hoist-feature-reduction", {"linear"}),
    "mean over features, seen through vectors": (programs.LINEAR_TERMS, "hoist-feature-reduction", {"linear", "sub"}),
    "mean over rows": (programs.LINEAR_ROWS, "hoist-row-reduction", set()),
    "constants in a row": (programs.CONSTANTS, "fold-constants", {"div", "sub"}),
    "negations and transposes": (programs.CONSTANTS, "cancel-inverses", {"neg", "t"}),
    "a copy": (COPY, "drop-no-op", {"clone"}),
    "scaled convolution": (programs.CONVOLUTION, "fold-scale-into-convolution", set()),
    "batch norm in evaluation mode": (
        programs.NORMALISED,
        "fold-batch-norm-into-convolution",
        {"_native_batch_norm_legit_no_training", "batch_norm"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rewritten_target_equals_the_users_code(name: str, captured) -> None:
    text, rule, removed = CASES[name]
    capture = captured(text, "f")
    candidate = with_algebra(capture, start(capture, text), rule)
    assert not removed & set(operations(capture, candidate))
    candidate = fully_fused(capture, candidate)
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


def test_reductions_of_one_element_are_dropped(captured) -> None:
    capture = captured(programs.LINEAR_SUM, "f")
    candidate = with_algebra(capture, start(capture, programs.LINEAR_SUM), "drop-single-element-reduction")
    remaining = operations(capture, candidate)
    assert "max" not in remaining
    assert "logsumexp" not in remaining
    assert "sum" in remaining


def test_a_rewrite_in_a_kernel_changes_that_kernel(captured) -> None:
    capture = captured(programs.CONSTANTS, "f")
    fused = fully_fused(capture, start(capture, programs.CONSTANTS))
    folded = with_algebra(capture, fused, "fold-constants")
    assert len(schedule_of(folded).kernels) == len(schedule_of(fused).kernels)
    assert "x * 3.0" in fused.source
    assert "x * 0.75 + 0.75" in folded.source
    verdict = verified(capture, folded)
    assert verdict.is_correct, verdict.reason


def test_the_planner_moves_a_sum_in_front_of_a_product_and_states_the_savings(captured) -> None:
    capture = captured(programs.LINEAR_SUM, "f")
    action = proposed(capture, start(capture, programs.LINEAR_SUM), ActionKind.ALGEBRA)[0]
    assert action.text == "Move the sum over features in front of the linear"
    assert "operations become" in action.rationale
    assert action.expected.saved_us > 0
    assert action.expected.flops_after < action.expected.flops_before


NO_MATCH = {
    "a copy that is returned": ("return x.clone()", "drop-no-op"),
    "a view of a copy that is returned": ("return x.clone().view(-1)", "drop-no-op"),
    "a doubled transpose of an input, returned": ("return x.t().t()", "cancel-inverses"),
    "a sum of what others read too": (
        "y = torch.nn.functional.linear(x, w)\n    return y.sum(-1), y * 2",
        "hoist-feature-reduction",
    ),
    "a sum over features in half precision": (
        "y = torch.nn.functional.linear(x.half(), w.half())\n    return y.sum(-1)",
        "hoist-feature-reduction",
    ),
    "a sum over features and rows": ("return torch.nn.functional.linear(x, w).sum((0, 1))", "hoist-feature-reduction"),
    "a sum over rows with a vector between": (
        "return (torch.nn.functional.linear(x, w) + w[:, 0]).sum(0)",
        "hoist-row-reduction",
    ),
    "a sum over features with a column between": (
        "return (torch.nn.functional.linear(x, w) + x[:, :1]).sum(-1)",
        "hoist-feature-reduction",
    ),
    "a factor of zero": ("return (x * 0.0) * 2.0", "fold-constants"),
    "integers": ("return (x.long() * 3) * 2", "fold-constants"),
    "constants that would overflow": ("return (x * 1e30) * 1e30", "fold-constants"),
    "a zero added to what may be -0.0": ("return (x + 0.0) * 2", "drop-no-op"),
    "sums of more than one element": ("return x.sum(-1, keepdim=True) * 2", "drop-single-element-reduction"),
    "an order of operations that matters": ("return torch.relu(x.abs().neg()) * 2", "cancel-inverses"),
}


@pytest.mark.parametrize("name", NO_MATCH)
def test_no_rewrite_where_the_result_could_differ(name: str, captured) -> None:
    body, rule = NO_MATCH[name]
    text = f"import torch\n# mtmc: x=f32[N,K] w=f32[M,K] N=6 K=8 M=5\ndef f(x, w):\n    {body}\n"
    graph = captured(text, "f").graph
    assert matching_nodes(graph, rule) == []


def test_a_rewrite_that_does_not_match_is_rejected_with_its_reason(captured) -> None:
    capture = captured(programs.CONSTANTS, "f")
    candidate = start(capture, programs.CONSTANTS)
    with pytest.raises(CannotCode, match="fold-constants does not apply to softmax"):
        act(capture, candidate, ActionKind.ALGEBRA, rule="fold-constants", node="softmax", kernels=[])
    with pytest.raises(CannotCode, match="there is no rule magic"):
        act(capture, candidate, ActionKind.ALGEBRA, rule="magic", node="softmax", kernels=[])


def test_every_rule_has_a_proof_and_a_unique_name() -> None:
    assert len({rule.name for rule in ALGEBRA}) == len(ALGEBRA)
    assert all(rule.proof.endswith(".") for rule in ALGEBRA)


def test_a_program_is_rewritten_once(captured) -> None:
    capture = captured(programs.CONSTANTS, "f")
    candidate = with_algebra(capture, start(capture, programs.CONSTANTS), "fold-constants")
    schedule = schedule_of(candidate)
    assert ir_of(capture.graph, schedule) is ir_of(capture.graph, schedule)
