"""Linear layers with losses over a vocabulary, in chunks of rows: results, gradients, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mtmc_lsp.core.protocols import CannotCode
from tests.codegen.checker import Checker
from tests.training.linear_losses import OTHER_LOSSES, PREFERENCES, SCALAR_LOSSES, SHAPES, few_cases, in_chunks
from tests.training.targets import HEAD, cases


@pytest.mark.parametrize("name", [*SCALAR_LOSSES, *OTHER_LOSSES])
def test_chunks_whose_gradients_are_computed_in_the_backward_pass(checker: Checker, name: str) -> None:
    capture = checker.capture(HEAD + {**SCALAR_LOSSES, **OTHER_LOSSES}[name])
    candidate = in_chunks(capture)
    loops = candidate.source.count("for start in range(0, ")
    assert loops >= (1 if capture.graph.backward is None else 2)
    assert checker.first_failure(capture, candidate, few_cases(capture)) == ""
    assert checker.compile_errors(capture, candidate, ("gfx942",)) == []


@pytest.mark.parametrize("name", SCALAR_LOSSES)
def test_chunks_whose_gradients_are_computed_in_the_forward_pass(checker: Checker, name: str) -> None:
    capture = checker.capture(HEAD + SCALAR_LOSSES[name])
    candidate = in_chunks(capture, early=True)
    assert "gradient.mul_(" in candidate.source
    assert checker.first_failure(capture, candidate, few_cases(capture)) == ""
    assert checker.compile_errors(capture, candidate, ("gfx942",)) == []


def test_a_second_backward_pass_of_a_call_computes_the_gradients_again(checker: Checker) -> None:
    capture = checker.capture(HEAD + SCALAR_LOSSES["a temperature at run time"])
    candidate = in_chunks(capture, early=True)
    taken = "gradients, ctx.gradients = ctx.gradients, None"
    assert taken in candidate.source
    second = replace(candidate, id="second", source=candidate.source.replace(taken, "gradients = None"))
    assert checker.first_failure(capture, second, cases(capture)) == ""


FLATTENED_TO_VIEWS: dict[str, tuple[str, dict[str, int]]] = {
    "a batch of one": (
        """def f(x, weight, target, scale):
    logp = torch.log_softmax(x @ weight.T, -1).gather(-1, target[..., None])[..., 0]
    ratio, scale = torch.exp(0.1 * logp), scale[:, :1]
    return torch.min(ratio * scale, ratio.clamp(0.3, 0.4) * scale).mean()
""",
        {"B": 1, "S": 7},
    ),
    "a length of one after the shift": (
        """def f(x, weight, target, scale):
    logp = torch.log_softmax(x @ weight.T, -1)[:, :-1].gather(-1, target[:, 1:, None])[..., 0]
    return (logp * scale[:, 1:]).mean()
""",
        {"B": 4, "S": 2},
    ),
}
"""Losses, and sizes with which torch flattens rows to a view that the workload's strides do not permit."""


@pytest.mark.parametrize("name", FLATTENED_TO_VIEWS)
@pytest.mark.parametrize("early", [True, False])
def test_rows_that_only_some_sizes_flatten_to_a_view(checker: Checker, name: str, early: bool) -> None:
    text, sizes = FLATTENED_TO_VIEWS[name]
    capture = checker.capture(f"{HEAD}# mtmc: {PREFERENCES} scale=f32[B,S] B=3 S=7 D=32 V=200 grad=x,weight\n{text}")
    tried = [replace(case, sizes={**case.sizes, **sizes}) for case in cases(capture)[:2]]
    candidate = in_chunks(capture, early=early)
    assert checker.first_failure(capture, candidate, tried) == ""
    if early:
        without = candidate.source.replace("start:stop].contiguous()", "start:stop]")
        assert "relative L2 error" in checker.first_failure(capture, replace(candidate, source=without), tried)


@pytest.mark.parametrize("rows", [1, 16, 17])
@pytest.mark.parametrize("early", [True, False])
def test_any_number_of_rows_in_a_chunk(checker: Checker, rows: int, early: bool) -> None:
    capture = checker.capture(HEAD + SCALAR_LOSSES["cross entropy"])
    assert checker.first_failure(capture, in_chunks(capture, rows=rows, early=early), cases(capture)) == ""


REFUSED: dict[str, tuple[str, str, bool]] = {
    "a softmax over the rows": (
        "F.log_softmax(x @ weight.T, 0).gather(1, target[:, None]).sum()",
        "amax in line 8 combines several rows",
        False,
    ),
    "rows centred on their mean": (
        "F.cross_entropy((x @ weight.T) - (x @ weight.T).mean(0), target)",
        "combines several rows",
        False,
    ),
    "logits that are returned": (
        "[(z := x @ weight.T), F.cross_entropy(z, target)]",
        "mm in line 8 is needed for all rows at once",
        False,
    ),
    "logits in another order of rows": (
        "F.cross_entropy((x @ weight.T).flip(0), target)",
        "combines several rows",
        False,
    ),
    "classes of other rows": (
        "F.log_softmax(x @ weight.T, -1)[torch.arange(len(x)).flip(0), target].sum()",
        "combines several rows",
        False,
    ),
    "random numbers": (
        "F.cross_entropy(F.dropout(x @ weight.T), target)",
        "draws random numbers for all rows at once",
        False,
    ),
    "early gradients of a loss for each row": (
        "F.cross_entropy(x @ weight.T, target, reduction='none')",
        "only a single scalar loss has gradients that the forward pass can compute",
        True,
    ),
    "early gradients of preferences": (
        "-F.logsigmoid(F.cross_entropy(x @ weight.T, target, reduction='none')[:8].sum())",
        "combines several rows",
        True,
    ),
    "early gradients that depend on other rows": (
        "(F.cross_entropy(x @ weight.T, target, reduction='none') ** 2).mean().sqrt()",
        "combines several rows",
        True,
    ),
    "early gradients of two losses": (
        "[F.cross_entropy((z := x @ weight.T), target), torch.logsumexp(z, -1).mean()]",
        "only a single scalar loss has gradients that the forward pass can compute",
        True,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(checker: Checker, name: str) -> None:
    expression, reason, early = REFUSED[name]
    capture = checker.capture(f"{HEAD}# mtmc: {SHAPES}\ndef f(x, weight, target):\n    return {expression}\n")
    with pytest.raises(CannotCode, match=re.escape(reason)):
        in_chunks(capture, early=early)


# For each fault: whether gradients are early, a pattern in the generated code, and its replacement.
FAULTS: dict[str, tuple[bool, str, str]] = {
    "the last chunk is dropped": (False, r"range\(0, N, 5\)", "range(0, N - N % 5, 5)"),
    "the first chunk is dropped": (True, r"range\(0, N, 5\)", "range(5, N, 5)"),
    "every chunk has the rows of the first": (False, r"x\[start:stop\]", "x[: min(5, len(x) - start)]"),
    "a chunk is added twice": (
        False,
        r"(\w+)\.addmm_\((.*)\)",
        r"\1.addmm_(\2)\n    if len(x) == 5:\n        \1.addmm_(\2)",
    ),
    "a sum is overwritten": (False, r"(\w+)\.addmm_\((.*)\)", r"torch.mm(\2, out=\1)"),
    "a sum is overwritten in the forward pass": (True, r"(\w+)\.addmm_\((.*)\)", r"torch.mm(\2, out=\1)"),
    "gradients of the logits are read before they are written": (
        False,
        r"(torch\.mm\(mm, \w+, out=grad_x\))",
        r"mm = mm.roll(1, 0)\n    \1",
    ),
    "statistics of another row": (
        False,
        r"(?s)( {8}f_backward_chunk\(.*?)row_log\[start:stop\]",
        r"\1row_log.roll(1, 0)[start:stop]",
    ),
    "an upstream gradient that is ignored": (True, r"gradient\.mul_\(grad_out\)", "gradient"),
    "gradients that a call without them computes": (
        True,
        r"return f_forward\(x, weight, target, needs_gradients=False\)",
        "return f_forward(x, weight, target)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_loop_is_refused(checker: Checker, fault: str) -> None:
    early, pattern, replacement = FAULTS[fault]
    capture = checker.capture(HEAD + SCALAR_LOSSES["cross entropy"])
    candidate = in_chunks(capture, early=early)
    source, count = re.subn(pattern, replacement, candidate.source)
    assert count, candidate.source
    wrong = replace(candidate, id=fault, source=source)
    assert checker.first_failure(capture, wrong, cases(capture)) != ""
