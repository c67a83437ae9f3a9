"""CUDA's casts of autocast on CPU tensors, and regions of ``torch.autocast`` where a CPU stands in for a GPU."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from mtmc_lsp.capture.worker.autocast import gpu_rules
from mtmc_lsp.capture.worker.autocast.dtypes import IN_AUTOCASTS_DTYPE, IN_FLOAT32, result_dtype
from mtmc_lsp.capture.worker.autocast.regions import current_dtype, gpu_autocast_on_cpu
from tests.versions import OLDEST_TORCH

HALF, FULL = torch.float16, torch.float32
X, H = torch.rand(2, 4, 4) + 0.5, (torch.rand(2, 4, 4) + 0.5).half()
RESULTS = {
    "a product": (lambda: X @ X, HALF),
    "a linear layer with a float32 bias": (lambda: F.linear(H, X[0], X[0, 0]), HALF),
    "attention": (lambda: F.scaled_dot_product_attention(X, X, X), HALF),
    "a convolution": (lambda: F.conv1d(X, X[:, :, :1].expand(2, 4, 1)), HALF),
    "a product in float64": (lambda: X.double() @ X.double(), torch.float64),
    "a norm": (lambda: F.layer_norm(H, (4,)), FULL),
    "an exponential": (lambda: torch.exp(H), FULL),
    "a power": (lambda: H**2, FULL),
    "a softmax": (lambda: torch.softmax(H, -1), FULL),
    "a softmax with a dtype": (lambda: torch.softmax(H, -1, dtype=HALF), HALF),
    "a sum": (lambda: H.sum(), FULL),
    "a sum over a dimension": (lambda: H.sum(-1), FULL),
    "a sum of float64": (lambda: X.double().sum(-1), torch.float64),
    "a mean": (lambda: H.mean(-1), HALF),
    "a vector norm": (lambda: H.norm(dim=-1), FULL),
    "a matrix norm": (lambda: H.norm(), FULL),
    "a loss": (lambda: F.mse_loss(H, H), FULL),
    "operands of two dtypes": (lambda: torch.addcmul(H, X, H), FULL),
    "operands of one dtype": (lambda: torch.addcmul(H, H, H), HALF),
    "an activation": (lambda: F.gelu(H), HALF),
    "a concatenation, which a CPU's autocast casts": (lambda: torch.cat([H, H]), HALF),
    "an addition": (lambda: H + X, FULL),
}


def test_the_lists_are_those_of_the_installed_torch() -> None:
    names = {name for name in gpu_rules._registered("AutocastCUDA") if "cudnn_" not in name}
    listed = gpu_rules.listed()
    if OLDEST_TORCH:
        # It has overloads for named dimensions, and does not cast for RMS norms.
        names = {name for name in names if not re.search("[dD]imname|names_", name)}
        listed -= {"rms_norm"}
    assert names == listed


@pytest.mark.parametrize("name", RESULTS)
def test_results_have_the_dtypes_of_a_gpu(name: str) -> None:
    compute, dtype = RESULTS[name]
    with gpu_autocast_on_cpu(), torch.autocast("cuda", HALF):
        assert compute().dtype == dtype


def test_the_loss_that_autocast_refuses_is_refused() -> None:
    with gpu_autocast_on_cpu(), torch.autocast("cuda", HALF), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(torch.sigmoid(X), X.round())


def test_regions_nest_and_leave_the_state_as_it_was() -> None:
    before = torch.is_autocast_enabled(), torch.is_autocast_enabled("cpu")
    with gpu_autocast_on_cpu():
        assert current_dtype() == ""
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.is_autocast_enabled() and current_dtype() == "bfloat16"
            with torch.autocast(X.device.type, enabled=False):
                assert not torch.is_autocast_enabled() and (X @ X).dtype == FULL
            # A region for the CPU has no effect on a GPU's tensors.
            with torch.autocast("cpu", enabled=False):
                assert (X @ X).dtype == torch.bfloat16
            with torch.amp.autocast("cuda", HALF):
                assert (X @ X).dtype == HALF
            assert current_dtype() == "bfloat16"
        # Without a dtype, a region for a GPU computes in float16.
        with torch.autocast("cuda"):
            assert (X @ X).dtype == HALF
    assert (torch.is_autocast_enabled(), torch.is_autocast_enabled("cpu")) == before


def test_a_custom_function_casts_its_inputs_as_on_a_gpu() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            assert not torch.is_autocast_enabled()
            return x * 2

    with gpu_autocast_on_cpu(), torch.autocast("cuda", HALF):
        assert Twice.apply(H).dtype == FULL


def test_gradients_of_float32_weights_are_float32() -> None:
    weight = X[0].clone().requires_grad_()
    with gpu_autocast_on_cpu(), torch.autocast("cuda", HALF):
        loss = F.linear(X, weight).float().sum()
    loss.backward()
    assert weight.grad is not None and weight.grad.dtype == FULL
    rounded = X.half().float().sum((0, 1))
    assert torch.allclose(weight.grad, rounded.half().float().expand(4, 4), rtol=2e-3)


def test_the_oracle_knows_the_dtypes_of_functions() -> None:
    assert not IN_AUTOCASTS_DTYPE & IN_FLOAT32
    with gpu_autocast_on_cpu(), torch.autocast("cuda", HALF):
        assert result_dtype("matmul", "cpu") == HALF and result_dtype("layer_norm", "cpu") == FULL
        assert result_dtype("add", "cpu") is None
    assert result_dtype("matmul", "cpu") is None


def test_nothing_stays_replaced() -> None:
    created = torch.autocast.__init__
    with gpu_autocast_on_cpu():
        assert torch.autocast.__init__ is not created
        with gpu_autocast_on_cpu():
            pass
        assert torch.autocast.__init__ is not created
    assert torch.autocast.__init__ is created
