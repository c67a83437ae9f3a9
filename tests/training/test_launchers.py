"""The launchers of both passes compute nothing that no kernel and no operation reads, from the first step on."""

from __future__ import annotations

import re

import pytest

from mtmc_lsp.actions.base import sites
from mtmc_lsp.capture.neutral_operations import earlier_tensor
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.codegen.module.launchers.views import View, without_views
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import Checker, start, with_kernel
from tests.training.targets import HEAD, cases, planned

TWO_LAYERS = """# mtmc: x=f32[B,24] first=f32[40,24] second=f32[16,40] B=16 grad=x,first,second
def f(x, first, second):
    return F.linear(torch.tanh(F.linear(x, first)), second)
"""

VIEW_OR_PRODUCT = r"\.(view|transpose|t|unsqueeze|expand|permute|slice|select|mm)\."
TORCH_CALL = re.compile(r" = torch\.(?!empty|sum\()")


def test_weights_and_their_gradients_are_not_transposed_twice(checker: Checker) -> None:
    capture = checker.capture(HEAD + TWO_LAYERS)
    candidate = planned(capture)
    backward = re.search(r"^def f_backward\(.*?\n\n", candidate.source, re.DOTALL | re.MULTILINE)
    assert backward is not None
    # The products for the gradients of the operands read the weights as they are.
    assert not re.findall(r"torch\.t\((first|second|mm\w*|grad_[fs]\w+)\)", backward[0])
    assert "return grad_x, grad_first, grad_second" in backward[0]
    assert checker.first_failure(capture, candidate, cases(capture)) == ""


COPIES = {
    "a copy": ("def f(x):\n    return torch.tanh(x.t().contiguous()) + 1\n", "clone"),
    "positions": (
        "def f(x):\n    return torch.where(x > 0, x, torch.arange(x.shape[1]).reshape(1, -1) * 0.5)\n",
        "arange",
    ),
}


@pytest.mark.parametrize("what", COPIES)
def test_what_a_kernel_does_not_read_is_no_launch(checker: Checker, what: str) -> None:
    text, operation = COPIES[what]
    capture = checker.capture(f"{HEAD}# mtmc: x=f32[A,B] A=20 B=24\n{text}")
    assert any(f".{operation}." in node.op for node in capture.graph.nodes)
    others = [
        node.name for node in capture.graph.nodes if not re.search(r"\.(clone|arange|view|permute|t|mul)\.", node.op)
    ]
    chosen = others if what == "a copy" else [*others, *(n.name for n in capture.graph.nodes if ".mul." in n.op)]
    candidate = with_kernel(capture, start(capture), chosen)
    launcher = candidate.source.partition("def f_launch(")[2]
    assert operation not in launcher
    assert checker.first_failure(capture, candidate, [Case(dict(capture.graph.sizes), "normal", 0)]) == ""


VIEWED = {
    "of arguments": ("return x.transpose(0, 1) * w[:, None, None].expand(8, 6, 4)", ""),
    "that start elsewhere": ("return x[:, 1:] * w[2]", "slice|select|w\\[|x\\["),
    "that are returned": ("y = x.transpose(0, 1)\n    return y * 2, y", "transpose"),
}


@pytest.mark.parametrize("what", VIEWED)
def test_views_that_only_kernels_read_are_left_out_if_they_start_where_their_tensor_does(
    checker: Checker, what: str
) -> None:
    statement, kept = VIEWED[what]
    capture = checker.capture(f"{HEAD}# mtmc: x=f32[6,8,4] w=f32[8]\ndef f(x, w):\n    {statement}\n")
    others = [node.name for node in capture.graph.nodes if not re.search(VIEW_OR_PRODUCT, node.op)]
    candidate = with_kernel(capture, start(capture), others)
    launcher = candidate.source.partition("def f_launch(")[2].partition("\n\n")[0]
    assert "_kernel[" in launcher
    views = r"\.(?:view|transpose|t|unsqueeze|expand|permute|select)\(|\.slice\.|\w+\["
    assert bool(re.findall(views, launcher.replace("_kernel[", ""))) is bool(kept), launcher
    assert not kept or re.search(kept, launcher)
    assert checker.first_failure(capture, candidate, [Case(dict(capture.graph.sizes), "normal", 0)]) == ""


def test_a_view_is_left_out_with_those_that_it_is_based_on() -> None:
    views = {
        "a": View("a = x.view(4, 6)", "x"),
        "b": View("b = a.t()", "a"),
        "c": View("c = x.expand(2, 4)", "x"),
    }
    lines = [*(view.statement for view in views.values()), "kernel[(1,)](b, c, out)", "total = torch.sum(c)"]
    left = without_views(lines, views, {"b": 1, "c": 1, "out": 1}, "")
    assert left == ["c = x.expand(2, 4)", "kernel[(1,)](x, c, out)", "total = torch.sum(c)"]
    assert without_views(lines, views, {"b": 1, "c": 1}, "return b") == lines


def test_only_a_transposition_back_and_views_that_change_nothing_are_an_earlier_tensor(checker: Checker) -> None:
    text = """# mtmc: x=f32[A,B,C] A=4 B=6 C=8
def f(x):
    y = torch.exp(x)
    back = y.permute(2, 0, 1).permute(1, 2, 0)
    turned = y.permute(2, 0, 1).permute(2, 0, 1)
    square = y.transpose(0, 1).transpose(1, 0).reshape(y.shape)
    return torch.sin(back), torch.sin(turned), torch.sin(square), y
"""
    graph = checker.capture(HEAD + text).graph
    sines = [node for node in graph.nodes if node.op.startswith("aten.sin.")]
    names = [earlier_tensor(graph, next(node.inputs())).name for node in sines]
    exponential = next(node.name for node in graph.nodes if node.op.startswith("aten.exp."))
    assert [name == exponential for name in names] == [True, False, True]


def test_a_result_stays_a_view_of_another_result(checker: Checker) -> None:
    text = "# mtmc: x=f32[A,B] A=20 B=24\ndef f(x):\n    y = torch.exp(x)\n    return y, y.t().t()\n"
    capture = checker.capture(HEAD + text)
    exponential = next(node.name for node in capture.graph.nodes if node.op.startswith("aten.exp."))
    candidate = with_kernel(capture, start(capture), [exponential])
    assert candidate.source.count("torch.t(") == 2


DPO = """# mtmc: chosen=f32[B,S,V] rejected=f32[B,S,V] ids=i64[B,S]@0..V-1 others=i64[B,S]@0..V-1
# mtmc: B=4 S=24 V=512 grad=chosen,rejected
def f(chosen, rejected, ids, others, beta=0.1):
    first = F.log_softmax(chosen, -1).gather(-1, ids[..., None]).squeeze(-1).sum(-1)
    second = F.log_softmax(rejected, -1).gather(-1, others[..., None]).squeeze(-1).sum(-1)
    return -F.logsigmoid(beta * (first - second)).mean()
"""


def test_the_first_step_has_all_kernels_of_both_passes(checker: Checker) -> None:
    capture = checker.capture(HEAD + DPO)
    device, first = planning_model(("sm_90",)), start(capture)
    action = RooflinePlanner().propose(State(capture, first, (), device, False))
    assert isinstance(action, MacroAction)
    candidate = BuiltinCoder(device).write(capture, first, action)
    for passed in ("forward", "backward"):
        function = re.search(rf"^def f_{passed}\(.*?\n\n", candidate.source, re.DOTALL | re.MULTILINE)
        assert function is not None
        assert "_kernel[" in function[0]
        assert not TORCH_CALL.search(function[0])
    assert checker.first_failure(capture, candidate, cases(capture)) == ""


def test_kernels_that_failed_as_one_step_are_tried_one_by_one(checker: Checker) -> None:
    capture = checker.capture(HEAD + DPO)
    device, first = planning_model(("sm_90",)), start(capture)
    planner = RooflinePlanner()
    together = planner.propose(State(capture, first, (), device, False))
    assert isinstance(together, MacroAction)
    failed = Step(1, together, StepStatus.FAILED, "", candidate=None)
    alone = planner.propose(State(capture, first, (failed,), device, False))
    assert isinstance(alone, MacroAction)
    assert len(sites(together)) > 2
    assert len(sites(alone)) <= 2
    assert set(sites(alone)) < set(sites(together))
