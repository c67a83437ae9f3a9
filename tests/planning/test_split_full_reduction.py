"""Full sums split into row sums first, so that operations on rows and their sum become one kernel."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.action import ActionKind
from tests.codegen.families import source
from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, matching_nodes, proposed, schedule_of, start, with_algebra

RULE = "reduce-rows-first"
CASES = {
    "a divergence of distributions": "x=F[B,33], y=F[B,33]: F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction='batchmean')",
    "a mean loss of normalised rows": "x=F[B,19], y=F[B,19]: F.mse_loss(F.layer_norm(x, (19,)), y)",
    "a loss by its default reduction": "x=F[B,21], y=F[B,21]: F.smooth_l1_loss(x / x.norm(dim=-1, keepdim=True), y)",
    "a sum of probabilities of channels": "x=F[B,5,7,3], y=F[B,5,7,3]: (F.softmax(x, 1) * y).sum()",
    "a mean over several dimensions at once": "x=F[B,4,6,5]: (x - x.mean((2, 3), keepdim=True)).square().mean()",
    "a loss with weights": (
        "x=F[B,17], w=F[17]: F.binary_cross_entropy_with_logits(x - x.amax(-1, keepdim=True), F.softmax(x, -1), w)"
    ),
}
NO_MATCH = {
    "no rows": "x=F[B,9], y=F[B,9]: ((x - y) ** 2).mean()",
    "half precision": "x=F[B,9]: F.softmax(x.half(), -1).sum()",
    "every dimension a row": "x=F[B,9]: (x - x.mean()).square().sum()",
    "rows of another shape": "x=F[B,9]: F.softmax(x, -1).sum(-1).exp().sum()",
    "not everything": "x=F[B,9,4]: F.softmax(x, -1).sum((1, 2))",
    "each element's loss": "x=F[B,9], y=F[B,9]: F.mse_loss(F.softmax(x, -1), y, reduction='none')",
}


@pytest.mark.parametrize("name", CASES)
def test_row_sums_and_their_sum_give_the_same_result(name: str, captured) -> None:
    # Many rows, so that fusing pays; the interpreter runs fewer.
    text = source(CASES[name], "f32").replace(" B=5", " B=4096")
    capture = captured(text, "f")
    candidate = fully_fused(capture, with_algebra(capture, start(capture, text), RULE))
    rows = [plan.nodes for plan in schedule_of(candidate).kernels if any(name.endswith("_rows") for name in plan.nodes)]
    assert len(rows) == 1
    assert len(rows[0]) > 2, "what works on a row and the row's sum are one kernel"
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


@pytest.mark.parametrize("name", NO_MATCH)
def test_a_sum_does_not_change_if_row_sums_do_not_help(name: str, captured) -> None:
    graph = captured(source(NO_MATCH[name], "f32"), "f").graph
    assert matching_nodes(graph, RULE) == []


def test_the_planner_states_that_it_sums_rows_first(captured) -> None:
    text = source(
        "x=F[8192,1000], y=F[8192,1000]: F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction='sum')", "f32"
    )
    capture = captured(text, "f")
    action = proposed(capture, start(capture, text), ActionKind.ALGEBRA)[0]
    assert action.text == "Compute the sum of the kl_div along rows first"
    assert (
        action.rationale
        == "The sum of all elements is the sum of the sums of its rows; the result is the same by algebra."
    )
    assert action.expected.saved_us > 0
