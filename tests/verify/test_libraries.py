"""Processes of a network's run load the libraries that it uses when they start, while the first step is planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.messages import Libraries
from mtmc_lsp.process.worker import start
from mtmc_lsp.verify.sizes import libraries
from mtmc_lsp.verify.sizes.libraries import libraries_of

SOURCE = """
import torch
from torch.nn import functional as F

# mtmc: x=f16[B,3,8,8] w=f16[4,3,3,3] v=f16[4,5] ids=i64[B,B] B=2
def f(x, w, v, ids):
    y = F.conv2d(x, w).mean((2, 3))
    return (y @ v).float() @ torch.ones(5, 2), ids @ ids
"""


def test_a_network_s_libraries_are_those_of_its_floating_point_products(
    captured: Callable[[str, str], Capture], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = captured(SOURCE, "f").graph
    assert libraries_of(graph) == Libraries(), "kernels may replace the products of a small graph"
    monkeypatch.setattr(libraries, "is_network", lambda graph: True)
    assert libraries_of(graph) == Libraries(("float16", "float32"), ("float16",))
    assert libraries_of(graph, has_oracle=True) == Libraries(("float16", "float32", "float64"), ("float16", "float64"))


def test_each_library_is_loaded_once_by_a_small_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, torch.dtype]] = []

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(first: torch.Tensor, *rest: Any) -> Any:
            made.append((name, first.dtype))
            return original(first, *rest)

        return noted

    monkeypatch.setattr(start, "_loaded", set())
    monkeypatch.setattr(torch.Tensor, "__matmul__", noting("product", torch.Tensor.__matmul__))
    monkeypatch.setattr(torch.nn.functional, "conv2d", noting("convolution", torch.nn.functional.conv2d))
    wanted = Libraries(("float32", "no such dtype", "float64"), ("float32",))
    before = torch.initial_seed(), torch.random.get_rng_state()
    for _ in range(2):
        start.load_libraries(wanted, "cpu")
    assert made == [("product", torch.float32), ("product", torch.float64), ("convolution", torch.float32)]
    assert before[0] == torch.initial_seed() and torch.equal(before[1], torch.random.get_rng_state())
