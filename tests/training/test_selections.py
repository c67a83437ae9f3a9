"""Selected elements (``x[mask]``) that a sum or a mean follows: both passes are kernels over all elements."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.errors import TargetUnsupported
from tests.codegen.checker import Checker
from tests.training.targets import HEAD, cases, planned

TARGETS = {
    "errors of valid elements": """# mtmc: x=f32[B,S] y=f32[B,S] mask=bool[B,S] B=4 S=12 grad=x,y
def f(x, y, mask):
    return F.mse_loss(x[mask], y[mask]), (x[mask] - y[mask]).abs().sum()
""",
    "labels of masked tokens": """# mtmc: x=f32[B,S,V] t=i64[B,S]@0..V-1 mask=bool[B,S] B=3 S=8 V=20 grad=x
def f(x, t, mask):
    return F.cross_entropy(x[mask], t[mask], label_smoothing=0.1), F.cross_entropy(x[mask], t[mask], reduction="sum")
""",
    # The gradient of a logarithm must not be infinite at elements that are left out.
    "logarithms with a weight": """# mtmc: x=f32[B,S]@0.1..0.9 w=f32[1] mask=bool[B,S] B=4 S=12 grad=x,w
def f(x, w, mask):
    p = torch.masked_select(torch.where(mask, x, 0.0), mask)
    return -(torch.log(p) * w).sum() / mask.sum().clamp(min=1)
""",
    "rows of boxes": """# mtmc: x=bf16[B,S,4] y=bf16[B,S,4] mask=bool[B,S] B=2 S=9 grad=x
def f(x, y, mask):
    return F.smooth_l1_loss(x[mask], y[mask], reduction="sum") / mask.sum().clamp(min=1)
""",
    "distributions of rows": """# mtmc: x=f32[B,S,D] y=f32[B,S,D] mask=bool[B,S] B=2 S=9 D=12 grad=x,y
def f(x, y, mask):
    p, q = x[mask], y[mask]
    return (F.softmax(p, dim=1) * (F.log_softmax(p, dim=-1) - q.log_softmax(1))).sum(-1).mean()
""",
    "elements beside the diagonal": """# mtmc: x=f32[B,D] B=16 D=12 grad=x
def f(x):
    covariance = x.T @ x
    others = ~torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    return covariance[others].pow_(2).sum() / x.shape[1]
""",
    "changed elements": """# mtmc: x=f32[B,D] B=8 D=20 grad=x
def f(x):
    y = x * 2
    large = y > 0.5
    y[large] = torch.sin(y[large]) * 3
    return y
""",
}


@pytest.mark.parametrize("name", TARGETS)
def test_results_and_gradients_are_those_of_the_selected_elements(checker: Checker, name: str) -> None:
    capture = checker.capture(HEAD + TARGETS[name])
    assert capture.graph.backward is not None, capture.workload.assumed
    assert checker.first_failure(capture, planned(capture), cases(capture)) == ""


def test_an_element_that_is_left_out_has_no_gradient_where_a_function_has_none(checker: Checker) -> None:
    """The square root of 0 outside the mask."""
    text = "# mtmc: x=f32[B] mask=bool[B] B=16 grad=x\ndef f(x, mask):\n    y = torch.relu(x)\n    return y[mask & (x > 0)].sqrt().sum()\n"
    capture = checker.capture(HEAD + text)
    assert checker.first_failure(capture, planned(capture), cases(capture)) == ""


@pytest.mark.parametrize(
    "result", ["x[mask]", "x[mask].cumsum(0).sum()", "x[mask].sum() / x[mask].shape[0]", "x[mask][0]"]
)
def test_what_needs_the_selected_elements_alone_is_refused(checker: Checker, result: str) -> None:
    text = f"# mtmc: x=f32[B,8] mask=bool[B] w=f32[8] B=16 grad=x\ndef f(x, mask, w):\n    return {result}\n"
    with pytest.raises(TargetUnsupported, match="size depends on the values") as raised:
        checker.capture(HEAD + text)
    assert "Keep the shape with torch.where(mask, x, 0.0)" in raised.value.remedy
