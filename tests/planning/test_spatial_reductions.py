"""Sums over output positions of a convolution, moved in front of it: the same values without the convolution."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.action import ActionKind
from tests.codegen.families import source
from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, matching_nodes, operations, proposed, start, with_algebra

RULE = "hoist-spatial-reduction"
CASES = {
    "of images": "x=F[B,3,7,6], w=F[5,3,3,2], b=F[5]: (F.conv2d(x, w, b, 2, (2, 1), (2, 1)) * 0.5).mean((2, 3)).relu()",
    "of lines, summed": "x=F[B,3,11], w=F[4,3,4], b=F[4]: F.conv1d(x, w, b, padding=3).sum(2, keepdim=True) * 2",
    "by pooling": "x=F[B,3,6,5], w=F[4,3,3,3]: F.adaptive_avg_pool2d(F.conv2d(x, w) / 3, 1).flatten(1)",
    "transposed": "x=F[B,4,5,3], w=F[4,6,3,4], b=F[6]: F.conv_transpose2d(x, w, b, 2, 1, 1).mean((2, 3), keepdim=True)",
    "transposed, dilated": "x=F[B,4,5], w=F[4,6,3], b=F[6]: F.conv_transpose1d(x, w, b, 3, 2, dilation=2).sum(-1)",
    "one dimension of volumes": "x=F[B,3,5,4,3], w=F[4,3,3,2,2], b=F[4]: F.conv3d(x, w, b, padding=1).mean(2).exp()",
    "one dimension of groups": "x=F[B,4,6,5], w=F[6,2,3,2], b=F[6]: F.conv2d(x, w, b, 2, groups=2).sum(2, keepdim=True)",
    "one dimension, transposed": "x=F[B,3,4,3,5], w=F[3,2,3,3,2], b=F[2]: F.conv_transpose3d(x, w, b, 1, 1).mean(2, keepdim=True)",
    "a transposed tensor": "x=F[B,5,6,3], w=F[4,3,3,3]: F.conv2d(x.permute(0, 3, 1, 2), w, stride=2).mean((2, 3))",
}
NO_MATCH = {
    "what others read": "x=F[B,3,7,6], w=F[5,3,3,2]: (lambda y: y.mean((2, 3)) + y[:, :, 0, 0])(F.conv2d(x, w))",
    "channels too": "x=F[B,3,7,6], w=F[5,3,3,2]: F.conv2d(x, w).mean((1, 2, 3))",
    "groups": "x=F[B,4,6,5], w=F[6,2,3,2]: F.conv2d(x, w, groups=2).sum((2, 3))",
    "named sizes": "x=F[B,3,B,6], w=F[5,3,3,2]: F.conv2d(x, w, padding=1).mean((2, 3))",
    "half precision": "x=F[B,3,7,6], w=F[5,3,3,2]: F.conv2d(x.half(), w.half()).mean((2, 3))",
    "taps that meet nothing": "x=F[B,3,1,6], w=F[5,3,3,2]: F.conv2d(x, w, padding=1).mean((2, 3))",
    "what is not linear": "x=F[B,3,7,6], w=F[5,3,3,2]: F.conv2d(x, w).relu().mean((2, 3))",
}


@pytest.mark.parametrize("name", CASES)
def test_the_input_sums_of_each_kernel_position_give_the_same_result(name: str, captured) -> None:
    text = source(CASES[name], "f32")
    capture = captured(text, "f")
    candidate = with_algebra(capture, start(capture, text), RULE)
    convolutions = [op for op in operations(capture, candidate) if "conv" in op]
    # Dimensions that are not reduced stay a convolution.
    assert len(convolutions) == name.startswith("one dimension")
    candidate = fully_fused(capture, candidate)
    assert candidate.launches
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


@pytest.mark.parametrize("name", NO_MATCH)
def test_a_convolution_stays_if_its_positions_are_needed(name: str, captured) -> None:
    graph = captured(source(NO_MATCH[name], "f32"), "f").graph
    assert matching_nodes(graph, RULE) == []


def test_the_planner_states_what_is_no_longer_computed(captured) -> None:
    text = source("x=F[8,64,32,32], w=F[256,64,3,3]: F.conv2d(x, w, padding=1).mean((2, 3))", "f32")
    capture = captured(text, "f")
    action = proposed(capture, start(capture, text), ActionKind.ALGEBRA)[0]
    assert action.text == "Move the mean over positions in front of the conv2d"
    assert action.rationale.startswith(
        "The mean over 1024 positions needs only a product with the weights of the input sums for each kernel position"
    )
    assert action.expected.flops_after < action.expected.flops_before / 100
