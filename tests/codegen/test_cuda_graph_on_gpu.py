"""CUDA graphs on a real GPU: capture during other work, on several streams and in several threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from mtmc_lsp.codegen.module.cuda_graph import GRAPHS, RUN_CUDA_GRAPH

pytestmark = pytest.mark.gpu


def replayed() -> Any:
    namespace: dict[str, Any] = {"torch": torch}
    exec(GRAPHS + RUN_CUDA_GRAPH, namespace)
    return namespace["_run_cuda_graph"]


def launch(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = torch.relu(x @ w)
    return h.softmax(-1), h.sum(-1)


def agree(function: Any, x: torch.Tensor, w: torch.Tensor) -> bool:
    own, expected = function(launch, (x,), (w,)), launch(x, w)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(own, expected, strict=True))


def test_each_call_returns_its_results() -> None:
    function, w = replayed(), torch.randn(64, 32, device="cuda")
    inputs = [torch.randn(16, 64, device="cuda") for _ in range(5)]
    results = [function(launch, (x,), (w,)) for x in inputs]
    for x, (weights, totals) in zip(inputs, results, strict=True):
        expected = launch(x, w)
        assert torch.allclose(weights, expected[0], rtol=1e-3, atol=1e-5)
        assert torch.allclose(totals, expected[1], rtol=1e-3, atol=1e-4)
    w.mul_(0.5)
    assert agree(function, inputs[0], w)
    for rows in (1, 3, 100, 16, 7, 1):
        assert agree(function, torch.randn(rows, 64, device="cuda"), w)
    with torch.inference_mode():
        assert agree(function, torch.randn(9, 64, device="cuda"), w)
    assert agree(function, torch.randn(9, 64, device="cuda"), w)


def test_threads_and_streams_do_not_disturb_each_other() -> None:
    function, w = replayed(), torch.randn(64, 32, device="cuda")
    # During a capture, other threads cannot use the default random generator.
    inputs = torch.randn(4, 30, 16, 64, device="cuda")
    wrong: list[str] = []

    def work(number: int) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream() if number % 2 else torch.cuda.default_stream()):
            for x in inputs[number]:
                try:
                    if not agree(function, x, w):
                        wrong.append("other results")
                except RuntimeError as error:
                    wrong.append(str(error))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
