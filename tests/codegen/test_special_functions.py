"""Functions of ``torch.special`` match PyTorch, also for special values (NaN, infinities, zeros, extremes)."""

from __future__ import annotations

import math

import pytest
import torch

from tests.codegen.checker import Checker, greedy
from tests.codegen.test_families import left_to_torch
from tests.codegen.test_special_values_of_functions import calls, check, shown, special

SPECIAL: dict[str, dict[str, str]] = {
    "gamma functions": calls("gammaln digamma", "torch.special.{}(x)"),
    "errors": calls("erfinv ndtr", "torch.special.{}(x)"),
    "modified Bessel functions": calls("i0 i0e i1 i1e", "torch.special.{}(x)"),
    "signs": calls("signbit angle isneginf isposinf positive", "torch.{}(x)"),
}
"""Functions of ``torch.special``, in float32 and float16."""
IN_FLOAT32: dict[str, dict[str, str]] = {
    "errors": calls("ndtri erfcx log_ndtr", "torch.special.{}(x)"),
    "Bessel functions": calls("bessel_j0 bessel_j1 bessel_y0 bessel_y1 spherical_bessel_j0", "torch.special.{}(x)"),
    "second kind": calls(
        "modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1",
        "torch.special.{}(x)",
    ),
    "trigamma": {"trigamma": "torch.polygamma(1, x.abs())"},
}
"""Functions that PyTorch computes in float32 and float64 only, on the CPU."""
POLYNOMIALS: dict[str, str] = {
    f"{kind} {degree}": f"torch.special.{kind}(x, {degree})"
    for kind in (
        "chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v shifted_chebyshev_polynomial_w "
        "hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p"
    ).split()
    for degree in (2, 5)
}


@pytest.mark.parametrize("short", ["f32", "f16"])
@pytest.mark.parametrize("group", SPECIAL)
def test_special_functions_of_special_values_match_pytorch(checker: Checker, group: str, short: str) -> None:
    check(checker, SPECIAL[group], {"x": special(short)}, short, {})


@pytest.mark.parametrize("group", IN_FLOAT32)
def test_rare_functions_of_special_values_match_pytorch(checker: Checker, group: str) -> None:
    check(checker, IN_FLOAT32[group], {"x": special("f32")}, "f32", {})


def test_polynomials_of_special_values_match_pytorch(checker: Checker) -> None:
    """PyTorch returns an uninitialised number for NaN."""
    x = special("f32")
    check(checker, POLYNOMIALS, {"x": x[~x.isnan()]}, "f32", {})


@pytest.mark.parametrize("table", [*SPECIAL.values(), *IN_FLOAT32.values(), POLYNOMIALS])
def test_kernels_of_special_functions_compile(checker: Checker, table: dict[str, str]) -> None:
    capture = checker.capture(shown(f"{', '.join(table.values())},", {"x": special("f32")}, "f32"))
    assert checker.compile_errors(capture, greedy(capture, {})) == []


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_samples_at_positions_beyond_all_images_match_pytorch(checker: Checker, mode: str, padding: str) -> None:
    places = torch.tensor([0.0, 1e-4, -0.3, 1.0, 1.2, -7.5, 1e6, math.inf, -math.inf, math.nan])
    grid = torch.cartesian_prod(places, places).reshape(1, 10, 10, 2)
    grid = grid if padding == "zeros" and mode == "bilinear" else grid.nan_to_num(0.0, 30.0, -30.0)
    image = torch.randn(1, 2, 4, 5, generator=torch.Generator().manual_seed(3))
    image[0, 0, 0, 0] = math.inf
    call = f"F.grid_sample(x, g, {mode!r}, {padding!r}, align_corners=False)"
    text = f"import torch\nimport torch.nn.functional as F\n\n# mtmc: x=f32[1,2,4,5] g=f32[1,N,10,2] N=10\ndef f(x, g):\n    return {call} * 2\n"
    capture = checker.capture(text)
    (result,) = checker.results(capture, greedy(capture, {}), {"x": image, "g": grid})
    expected = 2 * torch.nn.functional.grid_sample(image, grid, mode, padding, align_corners=False)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_special_functions_in_float64_stay_torch_calls(checker: Checker) -> None:
    table = {**SPECIAL["gamma functions"], **SPECIAL["modified Bessel functions"]}
    capture = checker.capture(shown(f"{', '.join(table.values())},", {"x": special("f64")}, "f64"))
    assert len(left_to_torch(capture, greedy(capture, {}))) == len(table)
