"""Choices by tensors that are computed from numbers alone are part of the code; choices by data are not."""

from __future__ import annotations

import pytest
import torch

from mtmc_lsp.capture.worker.export import export_graph
from mtmc_lsp.capture.worker.graph_reader import InputTensor
from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.core.graph import INPUT_DEVICE, InputKind
from mtmc_lsp.core.workload import Target, TargetKind

HEAD = "import torch\n\n\n# mtmc: x=f32[B,N,8] B=4 N=6\ndef f(x):\n    "


def operators(captured, body: str) -> list[str]:
    lines = body.splitlines()
    return [node.op for node in captured(HEAD + "\n    ".join(lines) + "\n", "f").graph.nodes]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("return x.exp() if torch.arange(1, x.dim()).tolist() == [1, 2] else x.sin()", id="a list"),
        pytest.param("s = torch.tensor([1.5, 2.0])\nreturn x.exp() if (s > 0).all() else x.sin()", id="a truth value"),
        pytest.param("s = torch.full((2,), 3.0)\nreturn x.exp() if s.sum().item() == 6 else x.sin()", id="a number"),
        pytest.param(
            "total = 0\nfor k in torch.tensor([1, 2]):\n    total += int(k)\nreturn x.exp() if total == 3 else x.sin()",
            id="a loop",
        ),
        pytest.param(
            "s = torch.zeros(2)\nfirst = s[0]\ns.add_(1)\nreturn x.exp() if first == 1 else x.sin()",
            id="a view of a changed constant",
        ),
        pytest.param("y = x.exp()\nreturn y[:, : torch.tensor([8, 3])[1]]", id="the bound of a slice"),
    ],
)
def test_a_choice_by_constants_is_followed(captured, body: str) -> None:
    names = operators(captured, body)
    assert "aten.exp" in " ".join(names)
    assert "aten.sin" not in " ".join(names)


@pytest.mark.parametrize(
    "condition",
    [
        pytest.param("s = torch.zeros(2)\ns[0] = x.sum()\nif s[1] > 0:", id="data written into a constant"),
        pytest.param("s = torch.zeros(2)\nfirst = s[0]\ns += x[0, 0, :2]\nif first > 0:", id="a view of it"),
        pytest.param("s = torch.bernoulli(torch.full((8,), 0.5))\nif s.sum() > 4:", id="random numbers"),
        pytest.param("if (torch.ones(8) * x[0, 0]).sum() > 0:", id="a constant times data"),
    ],
)
def test_a_choice_by_data_is_refused(captured, condition: str) -> None:
    with pytest.raises(TargetUnsupported) as caught:
        operators(captured, f"{condition}\n    return x.exp()\nreturn x.sin()")
    assert "depends on the values of a tensor" in caught.value.message


def devices_of_constants(function) -> list[object]:
    """The devices on which a graph creates tensors. Inputs are on ``meta``, a device that is not the CPU."""
    inputs = [InputTensor("x", "x", InputKind.ARGUMENT, torch.empty(5, 5, device="meta"))]
    graph, _ = export_graph(function, inputs, Target(__file__, "f", TargetKind.FUNCTION, 1, 1), {}, repr, [])
    return [node.kwargs["device"] for node in graph.nodes if "device" in node.kwargs]


def test_constants_on_the_cpu_are_created_on_the_device_of_the_inputs() -> None:
    assert devices_of_constants(lambda x: x * torch.eye(x.shape[0]).to(x.device)) == [INPUT_DEVICE]


def test_random_numbers_and_results_stay_on_the_cpu() -> None:
    assert devices_of_constants(lambda x: x * torch.rand(5, 5).to(x.device)) == ["cpu"]
    assert devices_of_constants(lambda x: (x * 2, torch.arange(x.shape[0]))) == ["cpu"]
