"""What `verify` says of honest and of wrong candidates, through real worker processes and Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
from handwritten import ADD_IN_PLACE, CANCELLED, DROP, PICK, RESIDUE, RMS, SCALE_MODULE, Handwritten

from mtmc_lsp.core.errors import FailureKind
from mtmc_lsp.core.results import CheckStatus, VerdictStatus
from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import Checker
from tests.codegen.harness import fused

INCORRECT, RAISED = VerdictStatus.INCORRECT, VerdictStatus.RUNTIME_ERROR


@pytest.mark.parametrize(
    "target", [RMS, ADD_IN_PLACE, DROP, PICK, SCALE_MODULE, RESIDUE], ids=lambda target: target.name
)
def test_an_honest_candidate_is_correct(target: Handwritten, measurer_of) -> None:
    verdict = measurer_of(target).verify(target.candidate())
    assert verdict.status is VerdictStatus.CORRECT, verdict.reason
    assert verdict.mode == "interpreter"
    assert verdict.reason == ""
    names = {check.name for check in verdict.checks if check.status is CheckStatus.PASSED}
    assert {
        "result 0 values",
        "result 0 stride",
        "result 0 shares memory with",
        "determinism",
        "kernel launched",
    } <= names


WRONG_RMS = {
    "leaves a tail unwritten": (
        ("mask = cols < columns", "mask = cols < columns // 16 * 16"),
        INCORRECT,
        "never written",
    ),
    "uses another epsilon": (("+ eps)\n    w =", "+ 2 * eps)\n    w ="), INCORRECT, "relative L2 error"),
    "sums in half precision": (
        ("tl.sum(x * x, axis=0)", "tl.sum((x * x).to(tl.float16), axis=0)"),
        INCORRECT,
        "result 0",
    ),
    "forgets the weight": (("x * scale * w, mask", "x * scale, mask"), INCORRECT, "relative L2 error"),
    "writes into its input": (
        ("    return out\n", "    x.mul_(1.0)\n    x[0, 0] = 7.0\n    return out\n"),
        INCORRECT,
        "input x",
    ),
    "returns another dtype": (("    return out\n", "    return out.double()\n"), INCORRECT, "dtype"),
    "returns another shape": (("    return out\n", "    return out[None]\n"), INCORRECT, "shape"),
    "returns another layout": (("    return out\n", "    return out.t().contiguous().t()\n"), INCORRECT, "stride"),
    "returns a tensor subclass": (
        ("    return out\n", "    return torch.nn.Parameter(out, requires_grad=False)\n"),
        INCORRECT,
        "type",
    ),
    "returns its input's memory": (("    return out\n", "    return x.copy_(out)\n"), INCORRECT, "shares memory"),
    "returns two results": (("    return out\n", "    return out, out\n"), INCORRECT, "number of results"),
    "returns nothing": (("    return out\n", "    return None\n"), INCORRECT, "result 0"),
    "answers the second call from the first": (
        (
            "    out = torch.empty_like(x)\n",
            "    out = torch.empty_like(x)\n    eps += _calls.append(0) or len(_calls) % 2\n",
        ),
        INCORRECT,
        "",
    ),
    "ignores the dtype in its guard": ((" and t.dtype == torch.float32", ""), INCORRECT, "float64"),
    "ignores gradients in its guard": (
        ("not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))", "True"),
        INCORRECT,
        "autograd",
    ),
    "launches no kernel": (("    if rms_fits(x, w):\n", "    if False:\n"), RAISED, "no Triton kernel was launched"),
    "raises": (("    return out\n", "    raise ValueError('too wide')\n"), RAISED, "ValueError: too wide"),
    "launches what does not compile": (("tl.sum(x * x, axis=0)", "tl.total(x)"), RAISED, "total"),
    "does not import": (("@triton.jit", "@triton.jitt"), VerdictStatus.COMPILE_ERROR, "jitt"),
    "is no Python": (("def rms_fits(", "def rms_fits(("), VerdictStatus.COMPILE_ERROR, "SyntaxError"),
    "hangs": (("    return out\n", "    while True:\n        pass\n"), VerdictStatus.TIMEOUT, "took longer than"),
    "ends the process": (
        ("    return out\n", "    import os\n    os._exit(3)\n"),
        VerdictStatus.CRASHED,
        "exit code 3",
    ),
    "crashes": (
        ("    return out\n", "    import os\n    os.abort()\n"),
        VerdictStatus.CRASHED,
        "SIGABRT",
    ),
}


@pytest.mark.parametrize("what", WRONG_RMS)
def test_a_candidate_that_is_wrong_is_told_from_an_honest_one(what: str, measurer_of, monkeypatch) -> None:
    """Each kind of mistake has its own status, and the reason names what is wrong and on which inputs."""
    change, status, said = WRONG_RMS[what]
    candidate = RMS.candidate(change, ("def rms_fits", "_calls = []\n\n\ndef rms_fits"))
    measurer = measurer_of(RMS)
    if what == "hangs":
        monkeypatch.setattr(measurer._reference, "run_seconds", 2.0)
    verdict = measurer.verify(candidate)
    assert verdict.status is status, verdict.reason
    assert said in verdict.reason
    assert "seed" in verdict.reason, "the inputs it happened on are named"


def test_a_rewrite_without_kernels_is_judged_by_its_results(measurer_of) -> None:
    """The first step of a run may only rewrite the formula; a later step writes the kernels."""
    line = "    return torch.nn.functional.rms_norm(x, (x.shape[1],), w, eps)\n"
    rewritten = replace(RMS, block="", dispatch=line)
    verdict = measurer_of(RMS).verify(rewritten.candidate())
    assert verdict.is_correct, verdict.reason
    verdict = measurer_of(RMS).verify(rewritten.candidate((", eps)", ", 2 * eps)")))
    assert verdict.status is INCORRECT
    assert "relative L2 error" in verdict.reason


def test_a_candidate_that_runs_out_of_memory_is_told_from_one_that_raises(measurer_of) -> None:
    """Another attempt with more memory may succeed, so callers need the kind of the failure."""
    candidate = RMS.candidate(("    return out\n", "    raise MemoryError\n"))
    assert measurer_of(RMS).verify(candidate).failure is FailureKind.OUT_OF_MEMORY
    candidate = RMS.candidate(("    return out\n", "    raise ValueError\n"))
    assert measurer_of(RMS).verify(candidate).failure is FailureKind.EXCEPTION


def test_after_a_crash_the_next_candidate_is_judged_as_ever(measurer_of) -> None:
    measurer = measurer_of(RMS)
    crash = ("    return out\n", "    import os\n    os._exit(3)\n")
    assert measurer.verify(RMS.candidate(crash)).status is VerdictStatus.CRASHED
    assert measurer.verify(RMS.candidate()).is_correct


def test_an_input_must_be_overwritten_exactly_as_the_original_overwrites_it(measurer_of) -> None:
    measurer = measurer_of(ADD_IN_PLACE)
    lost = measurer.verify(
        ADD_IN_PLACE.candidate(("tl.load(x_ptr + at, mask=mask) + y", "tl.load(x_ptr + at, mask=mask)"))
    )
    assert lost.status is INCORRECT
    assert "input x afterwards" in lost.reason
    extra = measurer.verify(ADD_IN_PLACE.candidate(("    return out\n", "    y.zero_()\n    return out\n")))
    assert "input y unchanged" in extra.reason


def test_dropout_with_another_mask_is_wrong(measurer_of) -> None:
    """Masks are compared bit by bit: as many kept elements at other places are not the same."""
    measurer = measurer_of(DROP)
    shifted = measurer.verify(DROP.candidate(("(at // 4).to", "(at // 4 + 1).to")))
    assert shifted.status is INCORRECT
    unscaled = measurer.verify(DROP.candidate(("x / (1 - p)", "x")))
    assert unscaled.status is INCORRECT


def test_an_index_that_ties_is_right_and_one_that_does_not_is_wrong(measurer_of) -> None:
    """Rows of equal values have no one argmax; the honest candidate takes the last, eager the first."""
    assert measurer_of(PICK).verify(PICK.candidate()).is_correct
    wrong = measurer_of(PICK).verify(PICK.candidate(("tl.max(x, axis=0)", "tl.min(x, axis=0)")))
    assert wrong.status is INCORRECT
    assert "elements differ" in wrong.reason


def test_parameters_that_start_as_ones_do_not_hide_a_mistake(measurer_of) -> None:
    measurer = measurer_of(SCALE_MODULE)
    assert measurer.verify(SCALE_MODULE.candidate()).is_correct
    assert measurer.verify(SCALE_MODULE.candidate(("x * gain * tl.rsqrt", "x * tl.rsqrt"))).status is INCORRECT
    assert measurer.verify(SCALE_MODULE.candidate(("* tl.rsqrt(var)", ""))).status is INCORRECT


STORED = "x - x.to(tl.float16).to(tl.float32), mask"


@pytest.mark.parametrize(
    "stored", ["x - x", "x", "x - x.to(tl.float32)", "x.to(tl.float16).to(tl.float32)", "x * 2e-4"]
)
def test_of_what_the_users_rounding_loses_nothing_else_is_right(stored: str, measurer_of) -> None:
    """An oracle without that rounding gives zeros, and the user's own error would be as large as the result."""
    verdict = measurer_of(RESIDUE).verify(RESIDUE.candidate((STORED, f"{stored}, mask")))
    assert verdict.status is INCORRECT
    assert "relative L2 error" in verdict.reason


def test_a_function_that_is_nothing_but_rounding_errors_is_not_certified(measurer_of) -> None:
    """Whatever is as small passes on every input: the verdict says so instead of calling it correct."""
    verdict = measurer_of(CANCELLED).verify(CANCELLED.candidate())
    assert verdict.status is VerdictStatus.UNCERTIFIABLE
    assert "zeros would pass" in verdict.reason


UNREAD = """import torch


# mtmc: x=f32[N,M] y=f32[N,M]{1,N} N=64 M=8
def f(x, y):
    assert y.stride(0) == 1 and not y.is_contiguous()
    return torch.relu(x) * 2 + 1
"""


def test_an_argument_that_the_graph_does_not_use_is_as_the_workload_makes_it(tmp_path) -> None:
    """The code may check its strides."""
    checker = Checker(tmp_path)
    try:
        capture = checker.capture(UNREAD)
        candidate = fused(capture, UNREAD, {"rows": 8, "block": 8, "warps": 1, "stages": 1})
        assert checker.failures(capture, [candidate], Case({"N": 64, "M": 8}, "normal", 5)) == [""]
    finally:
        checker.close()
