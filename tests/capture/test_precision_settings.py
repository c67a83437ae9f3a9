"""The precision of the user's process belongs to the capture, and plans follow it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from mtmc_lsp.core.dtypes import PrecisionSettings
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.verify.worker.oracle import Tf32Products
from tests.codegen.checker import Checker
from tests.codegen.conftest import checker

__all__ = ["checker"]
# A worker captures several files, and keeps the settings of earlier ones.
RESTORED = """import torch

torch.use_deterministic_algorithms(False)
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
"""
PRODUCT = "\n\n# mtmc: x=f32[N,32] w=f32[32,32] N=16\ndef f(x, w):\n    return torch.relu(x @ w)\n"
ADDED = """

# mtmc: x=f32[N,32] i=i64[N]@0..7 out=f32[8,32] N=16
def f(x, i, out):
    return out.index_add(0, i, x * 2)
"""


@pytest.fixture(autouse=True)
def restored(checker: Checker) -> Iterator[None]:
    """Later captures of the worker find torch's defaults."""
    yield
    checker.capture(RESTORED + PRODUCT)


def test_settings_are_recorded_and_told(checker: Checker) -> None:
    capture = checker.capture(RESTORED + PRODUCT)
    assert not capture.settings.deterministic and not any("sums" in word for word in capture.settings.words)
    changed = """torch.use_deterministic_algorithms(True)
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
"""
    capture = checker.capture(RESTORED + changed + PRODUCT.replace("N=16", "N=16 autocast=bf16"))
    settings = capture.settings
    assert settings.deterministic and not settings.reduced_float16_sums and settings.reduced_bfloat16_sums
    assert settings.autocast == "bfloat16" and settings.autocast_cache
    words = [word for word in settings.words if "TF32" not in word]
    assert words == ["autocast bf16", "f16 products with float32 sums", "deterministic algorithms"]
    assert capture.workload.assumed[-1].startswith("the process computes with autocast bf16, ")


def test_torchs_defaults_are_not_told() -> None:
    assert [*PrecisionSettings().words] == []
    assert [*PrecisionSettings(float32_products="tf32", float32_convolutions="ieee").words] == [
        "TF32 products",
        "convolutions without TF32",
    ]


def test_deterministic_algorithms_exclude_atomic_adds(checker: Checker) -> None:
    allowed = checker.capture(RESTORED + ADDED).graph
    refused = checker.capture(f"{RESTORED}torch.use_deterministic_algorithms(True)\n{ADDED}").graph
    assert not allowed.deterministic and refused.deterministic
    scatter = next(node.name for node in allowed.nodes if "index" in node.op)
    assert scatter not in lower(allowed).opaque
    assert scatter in lower(refused).opaque


def test_the_oracle_rounds_the_operands_of_recurrent_layers_to_tf32() -> None:
    """On a GPU, a layer of cuDNN is one operation, whose precision the library chooses by size."""
    rounding = Tf32Products(convolutions=True, products=False)
    x, weight, hidden = torch.full((2, 3), 1 / 3).double(), torch.full((4, 3), 1 / 3).double(), torch.zeros(4).double()
    seen = []

    class Layer:
        overloadpacket = SimpleNamespace(__name__="_cudnn_rnn")

        def __call__(self, *args: object) -> None:
            seen.extend(args)

    rounding.__torch_dispatch__(Layer(), (), (x, [weight, hidden], 4, torch.ones(1), hidden, None))
    (rounded, weights, _, packed, *_) = seen
    bits = int(rounded.view(torch.int64)[0, 0])
    assert bits % (1 << 42) == 0 and abs(float(rounded[0, 0]) - 1 / 3) < 2**-11 / 3
    assert torch.equal(weights[0][0], rounded[0]) and weights[1] is hidden and packed is None
