"""Running products over a wide range of magnitudes are finite wherever PyTorch's are."""

from __future__ import annotations

import pytest

from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import Checker
from tests.codegen.harness import compile_errors, fused

TEXT = "import torch\n\n\n# mtmc: x={dtype}[N,D]@{range} N=5 D=200\ndef f(x):\n    return {body}\n"
BODIES = {
    "along rows": "torch.cumprod(torch.exp(x), 1)",
    "from the end": "torch.cumprod(torch.exp(x).flip(1), 1).flip(1)",
    "along columns": "torch.cumprod(torch.exp(x), 0)",
    "with zeros": "torch.cumprod(torch.exp(x) * (x < 35), 1)",
    "of both signs": "torch.cumprod(torch.sinh(x), 1)",
}
FORMS = {"a row": {"rows": 1, "block": 32}, "rows": {"rows": 2, "block": 64}, "long blocks": {"rows": 1, "block": 1024}}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BODIES)
def test_an_overflow_within_a_block_does_not_reach_the_result(checker: Checker, name: str, form: str) -> None:
    text = TEXT.format(dtype="f32", range="-40..40", body=BODIES[name])
    capture = checker.capture(text)
    candidate = fused(capture, text, {**FORMS[form], "loop": True, "warps": 1})
    for seed in range(4):
        assert checker.failures(capture, [candidate], Case({"N": 5, "D": 200}, "normal", seed)) == [""]


@pytest.mark.parametrize("factor", ["1.49", "1.51", "0.74", "0.76"])
def test_many_similar_factors_stay_in_range(checker: Checker, factor: str) -> None:
    """The product of a block's significands is between 0.75 and 1.5 to the power of 1024."""
    body = f"torch.cumprod(torch.full_like(x, {factor}), 1) * x"
    text = TEXT.format(dtype="f32", range="1..2", body=body)
    capture = checker.capture(text)
    candidate = fused(capture, text, {"rows": 1, "block": 1024, "loop": True, "warps": 1})
    assert checker.failures(capture, [candidate], Case({"N": 2, "D": 1500}, "normal", 1)) == [""]


@pytest.mark.parametrize("dtype", ["f32", "f16", "f64"])
def test_the_kernel_compiles_for_gpus(checker: Checker, dtype: str) -> None:
    text = TEXT.format(dtype=dtype, range="0..1", body="torch.cumprod(x, 1)")
    capture = checker.capture(text)
    candidate = fused(capture, text, {"rows": 1, "block": 256, "loop": True, "warps": 4})
    assert "_significand(" in candidate.source
    assert not compile_errors(capture, candidate, ("sm_80", "sm_90"))


def test_exponents_of_a_long_row_do_not_overflow(checker: Checker) -> None:
    """Two million exponents of about -1000 exceed 32 bits and would wrap around."""
    body = "torch.cumprod(torch.full_like(x, 1e-300), 1) + x"
    text = TEXT.format(dtype="f64", range="1..2", body=body)
    capture = checker.capture(text)
    candidate = fused(capture, text, {"rows": 1, "block": 1024, "loop": True, "warps": 1})
    assert checker.failures(capture, [candidate], Case({"N": 1, "D": 2_200_000}, "normal", 1)) == [""]
