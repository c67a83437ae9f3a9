"""If the reference runs TF32 on the workload, candidates may be as imprecise on small sizes; otherwise not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import AUTOGRAD, VALUES, Case
from mtmc_lsp.verify.worker import expectations
from mtmc_lsp.verify.worker.oracle import Tf32Products
from mtmc_lsp.verify.worker.oracle_runs import runs, tf32

SOURCE = "# mtmc: a=f32[M,K] b=f32[K,N] M=40 K=64 N=24\ndef f(a, b):\n    return a @ b\n"
TF32 = 2.0**-11


def both() -> Tf32Products:
    return Tf32Products(convolutions=True, products=True)


def distance(result: torch.Tensor, other: torch.Tensor) -> float:
    return float((result - other).norm() / other.norm())


PRODUCTS = {
    "a product": lambda x, w: x @ w,
    "a layer": lambda x, w: F.linear(x, w.t(), torch.ones(8, dtype=x.dtype)),
    "a batch": lambda x, w: torch.bmm(x.expand(2, -1, -1), w.expand(2, -1, -1)),
    "a convolution": lambda x, w: F.conv1d(x[None], w.t()[:, :, None], padding=0),
    "a gradient": lambda x, w: torch.autograd.grad((x.requires_grad_() @ w).square().sum(), x)[0],
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_operands_are_rounded_as_tensor_cores_take_them(name: str) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(16, 16, dtype=torch.float64), torch.randn(16, 8, dtype=torch.float64)
    exact = PRODUCTS[name](x, w)
    with both():
        narrow = PRODUCTS[name](x, w)
    assert 0.1 * TF32 < distance(narrow, exact) < 3 * TF32
    small = torch.arange(256, dtype=torch.float64).reshape(16, 16) - 128
    with both():
        found = PRODUCTS[name](small, small[:, :8])
    if name != "a gradient":
        assert torch.equal(found, PRODUCTS[name](small, small[:, :8])), "what fits into ten bits stays what it is"


def test_only_what_may_run_in_tf32_is_rounded() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(16, 16, dtype=torch.float64), torch.randn(16, 8, dtype=torch.float64)
    with Tf32Products(convolutions=True, products=False):
        assert torch.equal(x @ w, x @ w)
        assert torch.equal(PRODUCTS["a product"](x, w), torch.einsum("ik,kj->ij", x, w))
    ends = torch.tensor([[float("inf"), 1.0], [float("nan"), 2.0]], dtype=torch.float64)
    with both():
        product = ends @ torch.eye(2, dtype=torch.float64)
    assert product.isnan()[1].all() and not product.isfinite()[0, 0]


def expected(capture: Capture, rows: int, *, is_first: bool, own: object, kind: str = VALUES) -> float:
    case = Case(sizes={}, distribution="normal", seed=3, kind=kind)
    torch.manual_seed(rows)
    inputs = {"a": torch.randn(rows, 64), "b": torch.randn(64, 24)}
    return float(expectations.expected_of(own, capture, inputs, "cpu", case, is_first=is_first)["sensitivity"][0])


def in_tf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.element_size() == 8 or len(a) < 40:
        return a @ b
    with both():
        return (a.double() @ b.double()).float()


@pytest.mark.parametrize("runs_narrow", [True, False])
def test_small_sizes_are_judged_by_what_the_workload_itself_runs(
    runs_narrow: bool, captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tf32, "_state", {})
    monkeypatch.setattr(tf32, "runs_products_in_tf32", lambda graph, device: False)
    capture = captured(f"import torch\n{SOURCE}", "f")
    capture = replace(capture, graph=replace(capture.graph, fp32_matmul="tf32"))
    monkeypatch.setattr(runs, "run_case", lambda module, capture, inputs, *rest, **more: {
        "results": [(in_tf32 if runs_narrow else torch.matmul)(inputs["a"], inputs["b"])], "after": {}, "facts": [{}]
    })  # fmt: skip
    assert expected(capture, 40, is_first=True, own=None) < 1e-6, "of the workload itself its own error is asked for"
    sensitivity = expected(capture, 5, is_first=False, own=None)
    assert (sensitivity > 0.1 * TF32) is runs_narrow, sensitivity


def test_without_a_gpu_products_are_judged_as_the_users_gpu_runs_them(captured) -> None:
    """A CPU runs full float32, so its own error does not show TF32."""
    capture = captured(f"import torch\n{SOURCE}", "f")
    in_tf32, in_full = (replace(capture, graph=replace(capture.graph, fp32_matmul=mode)) for mode in ("tf32", "ieee"))
    module = SimpleNamespace(f=lambda a, b: a @ b)
    assert expected(in_tf32, 40, is_first=True, own=module) > 0.1 * TF32
    assert expected(in_full, 40, is_first=True, own=module) < 1e-6


def test_gradients_choose_for_themselves(captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library may run them in TF32 where it does not run the results so."""
    monkeypatch.setattr(tf32, "_state", {"observed": False})
    capture = captured(f"import torch\n{SOURCE}", "f")
    monkeypatch.setattr(runs, "run_case", lambda module, capture, inputs, *rest, **more: {
        "results": [inputs["a"] @ inputs["b"]], "after": {}, "facts": [{}]
    })  # fmt: skip
    for mode, is_imprecise in (("tf32", True), ("ieee", False)):
        there = replace(capture, graph=replace(capture.graph, fp32_matmul=mode))
        sensitivity = expected(there, 5, is_first=False, own=None, kind=AUTOGRAD)
        assert (sensitivity > 0.1 * TF32) is is_imprecise
