"""Targets with a backward pass: results and gradients of the kernels equal those of the user's code."""

from __future__ import annotations

import re

import pytest

from mtmc_lsp.ir.run_time_numbers import numbers_of
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.rewrites.saved_values import split
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.verify.cases import ALIASED, FORWARD, STRIDED, VALUES, version_cases
from tests.codegen.checker import Checker, start
from tests.training.targets import HEAD, MODULES, TARGETS, cases, planned

ALL = {**TARGETS, **MODULES}
TORCH_CALL = re.compile(r" = torch\.(?!empty|sum\()")
"""A statement that computes with torch, but for the sums of gradients over the batch."""


@pytest.mark.parametrize("name", ALL)
def test_results_and_gradients_are_those_of_the_users_code(checker: Checker, name: str) -> None:
    capture = checker.capture(HEAD + ALL[name])
    assert capture.graph.backward is not None, capture.workload.assumed
    candidate = planned(capture)
    assert "torch.autograd.Function" in candidate.source
    assert checker.first_failure(capture, candidate, cases(capture)) == ""
    assert checker.compile_errors(capture, candidate, ("sm_80", "gfx942")) == []


@pytest.mark.parametrize("name", ["mean squares", "smooth absolute values", "deviations", "deviation with its mean"])
def test_sizes_vary_though_gradients_divide_by_them(checker: Checker, name: str) -> None:
    capture = checker.capture(HEAD + TARGETS[name])
    assert capture.variable_sizes == tuple(capture.graph.sizes)


def test_the_gradient_of_the_deviation_of_equal_values_is_0(checker: Checker) -> None:
    equal = (
        "# mtmc: x=f32[B] B=16 grad=x\ndef f(x):\n    y = torch.relu(-x.abs())\n    return y.std(), y.var(), x * 2\n"
    )
    capture = checker.capture(HEAD + equal)
    assert checker.first_failure(capture, planned(capture), cases(capture)) == ""


def test_both_passes_of_a_group_norm_are_kernels_for_all_image_sizes(checker: Checker) -> None:
    capture = checker.capture(HEAD + ALL["module with a group norm"])
    assert capture.variable_sizes == ("B", "H", "W")
    assert not TORCH_CALL.search(planned(capture).source.partition("def f_forward(")[2])


def test_kernels_write_no_intermediate_value_that_the_backward_pass_can_compute_again(checker: Checker) -> None:
    candidate = planned(checker.capture(HEAD + TARGETS["rms norm"]))
    assert "ctx.save_for_backward(x, weight, rstd)" in candidate.source
    candidate = planned(checker.capture(HEAD + TARGETS["gelu"]))
    assert "ctx.save_for_backward(x, bias)" in candidate.source
    # Of a softmax over a large vocabulary, two numbers a row are kept.
    capture = checker.capture(HEAD + TARGETS["cross entropy"])
    saved = re.search(r"ctx.save_for_backward\((.*)\)", planned(capture).source)
    assert saved is not None
    assert saved[1].split(", ")[:2] == ["x", "t"]
    written = re.search(r"def f_forward.*?\n\n", planned(capture).source, re.DOTALL)
    assert written is not None
    assert "empty_like(x)" not in written[0]


def test_tables_are_kept_by_each_pass_and_not_saved_in_each_call(checker: Checker) -> None:
    source = planned(checker.capture(HEAD + TARGETS["contrastive"])).source
    assert "def f_tables(" in source and "def f_backward_tables(" in source
    functions = re.findall(r"^def f_(?:forward|backward)\(.*?\n\n", source, re.DOTALL | re.MULTILINE)
    assert len(functions) == 2 and not any("arange" in function for function in functions)
    saved = re.search(r"ctx.save_for_backward\((.*?)\)", source, re.DOTALL)
    assert saved is not None and not {"labels", "to_copy", "ne"} & set(re.findall(r"\w+", saved[1]))


def test_two_softmaxes_of_one_product_save_the_product_instead_of_both(checker: Checker) -> None:
    capture = checker.capture(HEAD + TARGETS["contrastive"].replace("B=16", "B=48"))
    passes = split(ir_of(capture.graph, Schedule()).graph)
    squares = [ref for ref in passes.saved if passes.whole.type_of(ref).numel.value({"B": 47, "D": 31}) == 47 * 47]
    assert [passes.whole.node(ref.name).word for ref in squares] == ["mm"]
    assert checker.first_failure(capture, planned(capture), cases(capture)) == ""


def test_a_result_that_eager_mode_does_not_save_may_be_changed_in_place(checker: Checker) -> None:
    text = "# mtmc: x=f32[B,D] B=16 D=96 grad=x\ndef f(x):\n    y = x * 2\n    return y, torch.sin(y + 1)\n"
    assert "ctx.save_for_backward(x)\n" in planned(checker.capture(HEAD + text)).source


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_both_passes_of_a_log_sigmoid_are_kernels(checker: Checker, dtype: str) -> None:
    text = (
        f"# mtmc: x={dtype}[B,D] B=16 D=24 grad=x\ndef f(x, beta=0.3):\n    return F.logsigmoid(beta * x).sum(-1) * 2\n"
    )
    capture = checker.capture(HEAD + text)
    candidate = planned(capture)
    assert "torch.ops.aten" not in candidate.source
    assert checker.first_failure(capture, candidate, cases(capture)) == ""


def test_operations_of_the_backward_pass_have_the_lines_of_the_forward_pass(checker: Checker) -> None:
    capture = checker.capture(HEAD + TARGETS["rms norm"])
    lines = {node.line for node in capture.graph.nodes if node.name in capture.graph.backward_nodes}
    assert lines == {8, 9}


def test_numbers_that_gradients_compute_with_may_change_from_call_to_call(checker: Checker) -> None:
    capture = checker.capture(HEAD + TARGETS["numbers in gradients"])
    texts = {number.text for number in numbers_of(capture.graph)}
    assert texts == {"gamma", "gamma - 1", "weight", "1 - weight"}
    # The gradient of a power with a fixed base contains the base's logarithm, which is not recognised.
    text = "# mtmc: x=f32[B,D] B=16 D=64 grad=x\ndef f(x, base=1.7, factor=1.3):\n    return base**x * factor\n"
    assert numbers_of(checker.capture(HEAD + text).graph) == ()


def test_what_autograd_needs_no_gradient_of_gets_none(checker: Checker) -> None:
    capture = checker.capture(HEAD + MODULES["parameters alone"])
    assert capture.graph.backward is not None
    assert capture.graph.backward.gradients == ("norm_weight", "norm_bias")
    source = planned(capture).source
    assert "return None, None, grad_norm_weight, grad_norm_bias, None\n" in source
    # If the frozen parameter is trained later, the user's code runs.
    assert "not (torch.is_grad_enabled() and (x.requires_grad or frozen.requires_grad))" in source


NOT_TRAINABLE = {
    "the code changes s in place": """# mtmc: x=f32[B,D] s=f32[D] B=16 D=96 grad=x
def f(x, s):
    s.add_(x.mean(0).detach())
    return x * 2
""",
    "the gradients of a recurrent layer of torch (line 13) stay the library's": """class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 12, batch_first=True), nn.Linear(12, 3)

    # mtmc: x=f32[B,S,8] B=2 S=6 grad=x
    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])
""",
    "a result is an input or a view of one": """# mtmc: x=f32[B,D] B=16 D=96 grad=x
def f(x):
    return x * 2, x.view(-1)
""",
    "no result depends on these tensors by differentiable operations": """# mtmc: x=f32[B,D] B=16 D=96 grad=x
def f(x):
    return (x * 2).detach()
""",
}


@pytest.mark.parametrize("reason", NOT_TRAINABLE)
def test_where_no_backward_pass_is_possible_the_kernels_serve_calls_without_gradients(
    checker: Checker, reason: str
) -> None:
    capture = checker.capture(HEAD + NOT_TRAINABLE[reason])
    assert capture.graph.backward is None
    note = f"the kernels get no backward pass, so calls that record gradients run your code: {reason}"
    assert capture.workload.assumed[-1] == note


def test_without_code_generated_the_file_is_the_users(checker: Checker) -> None:
    capture = checker.capture(HEAD + TARGETS["gelu"])
    assert "autograd.Function" not in start(capture).source


def test_gradients_that_rounding_decides_are_not_compared(checker: Checker) -> None:
    """Of a tensor that is passed twice, and at values that are not finite."""
    text = "# mtmc: a=f32[B,D] b=f32[B,D] B=16 D=64 grad=a,b\ndef f(a, b):\n    return (a.exp() - b.exp()).sum(-1)\n"
    every = version_cases(checker.capture(HEAD + text), interpreted=True, seed=1)
    kinds = {case.kind for case in every if case.layout == ALIASED or case.distribution in ("infinite", "nan")}
    assert kinds == {FORWARD}
    assert any(case.kind == VALUES and case.layout == STRIDED for case in every)


@pytest.mark.parametrize(("name", "kernels"), [("gated", 1), ("layer norm", 2)], ids=["gated", "layer norm"])
def test_gradients_that_read_the_same_tensors_share_a_kernel(checker: Checker, name: str, kernels: int) -> None:
    """The backward pass of a layer norm has two kernels: the first computes gradients and partial sums, the second adds these."""
    text = re.sub(r"\bD=\d+", "D=4096", re.sub(r"\bB=\d+", "B=4096", TARGETS[name])).replace("f32", "bf16")
    source = planned(checker.capture(HEAD + text)).source
    backward = re.search(r"^def f_backward\(.*?\n(?=\n\nclass )", source, re.DOTALL | re.MULTILINE)
    assert backward is not None
    assert len(re.findall(r"_kernel(?:_parts)?\[", backward[0])) == kernels
    assert not TORCH_CALL.search(backward[0])


@pytest.mark.parametrize(
    ("call", "name"),
    [("torch.linalg.cholesky(s)", "torch.linalg.cholesky"), ("torch.linalg.lu_factor(s)[0]", "torch.linalg.lu_factor")],
)
def test_a_library_call_that_raises_for_some_values_is_named(checker: Checker, call: str, name: str) -> None:
    text = "# mtmc: a=f32[B,N,N] B=2 N=8 grad=a\ndef f(a):\n    s = a @ a.transpose(-1, -2)\n    return torch.relu({} * 2)\n"
    refused = checker.capture(HEAD + text.format(call))
    assert refused.graph.backward is None
    assert any(
        f"f calls {name}, which raises for some values of its tensor; {name}_ex does not" in note
        for note in refused.workload.assumed
    )
    accepted = checker.capture(HEAD + text.format(call.replace("(s)[0]", "(s)").replace("(s)", "_ex(s)[0]")))
    assert accepted.graph.backward is not None
