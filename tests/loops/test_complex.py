"""Loops with complex states: kernels compute the real and the imaginary part of each."""

from __future__ import annotations

import pytest
import torch

from mtmc_lsp.verify.error_limits import FACTORS
from mtmc_lsp.verify.worker.comparison.compare import Comparison
from tests.codegen.harness import compile_errors, verified
from tests.loops.complex_examples import COMPLEX, REFUSED
from tests.loops.test_capture import loop_of
from tests.planning.situations import fully_fused, start
from tests.versions import OLDEST_TORCH

NAMES = "s4d lru discretised rotations turned normalised masked returned spectrum S4D".split()


@pytest.mark.parametrize("name", NAMES)
def test_results_are_those_of_the_users_code(name: str, captured) -> None:
    if name == "lru" and OLDEST_TORCH:
        pytest.skip("torch 2.11 traces no products of complex matrices")
    capture = captured(COMPLEX, name)
    loop = loop_of(capture)
    assert all(not output.dtype.startswith("complex") for node in loop.nodes for output in node.outputs)
    assert [note.split(":")[0] for note in capture.workload.assumed] == ["infinite and NaN inputs are not compared"]
    candidate = fully_fused(capture, start(capture, COMPLEX))
    assert verified(capture, candidate).reason == ""
    assert compile_errors(capture, candidate, ["sm_90"]) == []


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("s4d", "u,a_re,a_im,b_im,c_im"),
        ("lru", "u,nu,theta,b,c"),
        ("discretised", "u,log_dt,a_im,C"),
        ("turned", "u,r"),
    ],
)
def test_gradients_are_those_of_the_users_code(name: str, inputs: str, captured) -> None:
    if name == "lru" and OLDEST_TORCH:
        pytest.skip("torch 2.11 traces no products of complex matrices")
    lines = COMPLEX.splitlines()
    at = lines.index(next(line for line in lines if line.startswith(f"def {name}("))) - 1
    lines[at] += f" grad={inputs}"
    text = "\n".join(lines)
    capture = captured(text, name)
    assert [node.name in capture.graph.backward_nodes for node in capture.graph.nodes if node.loop] == [False, True]
    assert verified(capture, fully_fused(capture, start(capture, text))).reason == ""


def test_the_parts_of_a_state_have_the_name_of_its_variable(captured) -> None:
    loop = loop_of(captured(COMPLEX, "s4d"))
    assert [item.name for item in loop.states] == ["x_re", "x_im"]
    assert {"A_re", "A_im"} <= {item.name for item in loop.inputs}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("squashed", "its body contains tanh of complex numbers, which no kernel computes"),
        ("transposed", "the target returns a view of a complex tensor"),
    ],
)
def test_other_loops_are_unrolled_with_a_note_that_says_why(name: str, why: str, captured) -> None:
    capture = captured(REFUSED, name)
    assert all(node.loop is None for node in capture.graph.nodes)
    assert why in " ".join(capture.workload.assumed)


@pytest.mark.parametrize(("error", "is_equal"), [(1e-8, True), (1e-3, False)])
def test_complex_results_are_compared_by_their_parts(error: float, is_equal: bool) -> None:
    oracle = torch.randn(50, 7, dtype=torch.complex128)
    reference = (oracle + 1e-8 * torch.randn_like(oracle)).to(torch.complex64)
    candidate = (oracle + error * torch.randn_like(oracle)).to(torch.complex64)
    comparison = Comparison(next(iter(FACTORS)))
    comparison.tensor("result 0", candidate, reference, oracle, 0.0, None)
    checks, _ = comparison.finish()
    assert all(check["status"] == "passed" for check in checks) is is_equal
