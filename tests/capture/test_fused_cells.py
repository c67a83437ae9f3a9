"""GRU and LSTM cells, which are single operations on a GPU, and bilinear layers are captured as parts that kernels can compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mtmc_lsp.capture.worker.passes.decompositions import decompositions, fused_gru_cell, fused_lstm_cell

BATCH, WIDTH, HIDDEN = 5, 6, 4


def gates(cell: nn.RNNCellBase, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The arguments of the fused operations: products without biases, and the biases."""
    return x @ cell.weight_ih.T, h @ cell.weight_hh.T


@pytest.mark.parametrize("bias", [True, False])
def test_a_fused_gru_cell_computes_what_the_cell_computes(bias: bool) -> None:
    torch.manual_seed(0)
    cell, x, h = nn.GRUCell(WIDTH, HIDDEN, bias), torch.randn(BATCH, WIDTH), torch.randn(BATCH, HIDDEN)
    from_input, recurrent = gates(cell, x, h)
    after, _ = fused_gru_cell(from_input, recurrent, h, cell.bias_ih, cell.bias_hh)
    torch.testing.assert_close(after, cell(x, h))


@pytest.mark.parametrize("bias", [True, False])
def test_a_fused_lstm_cell_computes_what_the_cell_computes(bias: bool) -> None:
    torch.manual_seed(0)
    cell, x, h, c = (
        nn.LSTMCell(WIDTH, HIDDEN, bias),
        torch.randn(BATCH, WIDTH),
        torch.randn(BATCH, HIDDEN),
        torch.randn(BATCH, HIDDEN),
    )
    from_input, recurrent = gates(cell, x, h)
    state, memory, _ = fused_lstm_cell(from_input, recurrent, c, cell.bias_ih, cell.bias_hh)
    expected = cell(x, (h, c))
    torch.testing.assert_close(state, expected[0])
    torch.testing.assert_close(memory, expected[1])


@pytest.mark.parametrize("infinite", ["x", "y", "weight"])
def test_a_bilinear_layer_is_infinite_and_nan_where_pytorchs_is(infinite: str) -> None:
    torch.manual_seed(0)
    tensors = {"x": torch.randn(BATCH, WIDTH), "weight": torch.randn(3, WIDTH, HIDDEN), "y": torch.randn(BATCH, HIDDEN)}
    tensors[infinite].view(-1)[2] = float("inf")
    x, weight, y = tensors.values()
    parts = decompositions()[torch.ops.aten._trilinear.default]
    torch.testing.assert_close(
        parts(x, weight, y, [1, 3], [0], [1, 2], [2, 3]), nn.functional.bilinear(x, y, weight), equal_nan=True
    )


@pytest.mark.gpu
def test_cells_on_a_gpu_are_captured_as_parts() -> None:
    device = "cuda"
    for cell, state in ((nn.GRUCell(WIDTH, HIDDEN), 1), (nn.LSTMCell(WIDTH, HIDDEN), 2)):
        states = tuple(torch.randn(BATCH, HIDDEN, device=device) for _ in range(state))
        arguments = (torch.randn(BATCH, WIDTH, device=device), states if state > 1 else states[0])
        with torch.no_grad():
            program = torch.export.export(cell.to(device), arguments).run_decompositions(decompositions())
            results = program.module()(*arguments)
        names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert not any("thnn" in name for name in names), names
        torch.testing.assert_close(results, cell(*arguments))
