"""Whether float32 convolutions really run in TF32 is asked of the library, for each of them."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtmc_lsp.capture.worker.convolution_modes import convolution_modes
from mtmc_lsp.core.graph import Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.sizes import Size

FEWEST = 4
"""Channels from which on the library below takes tensor cores."""


class Library(TorchDispatchMode):
    """A library that rounds operands where it may, of convolutions with enough channels."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ == "convolution":
            may = torch.backends.cudnn.allow_tf32 and args[0].shape[1] >= FEWEST
            if may:
                args = (*(_in_ten_bits(t) for t in args[:2]), *args[2:])
        return function(*args, **(kwargs or {}))


def _in_ten_bits(t: torch.Tensor) -> torch.Tensor:
    return ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) if t.dtype == torch.float32 else t


def graph_of(*shapes: tuple[int, ...], allowed: str = "tf32", dtype: str = "float32") -> Graph:
    kinds = [tuple(Size.of(size) for size in shape) for shape in shapes]
    nodes = tuple(
        Node(f"conv{i}", "aten.conv2d.default", (), {}, (TensorType(k, dtype, contiguous_stride(k)),), 1)
        for i, k in enumerate(kinds)
    )
    return Graph((), nodes, (Ref(nodes[-1].name),), "tensor", {}, fp32_convolution=allowed)


def two_convolutions() -> None:
    x = torch.randn(2, 3, 8, 8)
    y = torch.nn.functional.conv2d(x, torch.randn(8, 3, 3, 3))
    torch.nn.functional.conv2d(y, torch.randn(5, 8, 3, 3), torch.randn(5))


SHAPES = ((2, 8, 6, 6), (2, 5, 4, 4))


def test_each_convolution_is_asked() -> None:
    before = torch.backends.cudnn.allow_tf32
    with Library():
        modes = convolution_modes(two_convolutions, graph_of(*SHAPES))
    assert modes == {"conv0": "ieee", "conv1": "tf32"}
    assert torch.backends.cudnn.allow_tf32 is before


def test_a_sample_without_a_batch_is_the_graphs_own() -> None:
    def run() -> None:
        torch.nn.functional.conv2d(torch.randn(8, 6, 6), torch.randn(5, 8, 3, 3))

    with Library():
        assert convolution_modes(run, graph_of((5, 4, 4))) == {"conv0": "tf32"}


@pytest.mark.parametrize(
    "graph",
    [
        graph_of(*SHAPES[:1]),
        graph_of(SHAPES[1], SHAPES[0]),
        graph_of(*SHAPES, allowed="ieee"),
        graph_of(*SHAPES, dtype="float16"),
    ],
    ids=["fewer", "another order", "not allowed", "half precision"],
)
def test_nothing_is_said_of_what_cannot_be_told(graph: Graph) -> None:
    with Library():
        assert convolution_modes(two_convolutions, graph) == {}


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_results_that_hide_rounding_say_nothing(value: float) -> None:
    def run() -> None:
        torch.nn.functional.conv2d(torch.full((2, 8, 6, 6), value), torch.randn(5, 8, 3, 3))

    with Library():
        assert convolution_modes(run, graph_of((2, 5, 4, 4))) == {}


def test_an_error_on_the_way_is_no_answer() -> None:
    def run() -> None:
        two_convolutions()
        raise torch.OutOfMemoryError

    with Library():
        assert convolution_modes(run, graph_of(*SHAPES, (1,))) == {}
    assert torch.backends.cudnn.allow_tf32
