"""Capture measures for each float32 convolution whether the library runs it in TF32."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtmc_lsp.capture.worker.convolution_modes import convolution_modes
from mtmc_lsp.core.graph import Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.sizes import Size

MIN_CHANNELS = 4
"""Number of channels from which the simulated library uses TF32."""


class Library(TorchDispatchMode):
    """A simulated library that rounds operands like TF32 if it is allowed and the convolution has enough channels."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ == "convolution":
            uses_tf32 = torch.backends.cudnn.allow_tf32 and args[0].shape[1] >= MIN_CHANNELS
            if uses_tf32:
                args = (*(_round_to_tf32(t) for t in args[:2]), *args[2:])
        return function(*args, **(kwargs or {}))


def _round_to_tf32(t: torch.Tensor) -> torch.Tensor:
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


def test_each_convolution_is_measured() -> None:
    before = torch.backends.cudnn.allow_tf32
    with Library():
        modes = convolution_modes(two_convolutions, graph_of(*SHAPES))
    assert modes == {"conv0": "ieee", "conv1": "tf32"}
    assert torch.backends.cudnn.allow_tf32 is before


def test_a_sample_without_a_batch_dimension_matches_its_node() -> None:
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
def test_there_are_no_modes_if_the_calls_do_not_match_the_graph(graph: Graph) -> None:
    with Library():
        assert convolution_modes(two_convolutions, graph) == {}


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_there_are_no_modes_if_the_values_hide_rounding(value: float) -> None:
    def run() -> None:
        torch.nn.functional.conv2d(torch.full((2, 8, 6, 6), value), torch.randn(5, 8, 3, 3))

    with Library():
        assert convolution_modes(run, graph_of((2, 5, 4, 4))) == {}


def test_there_are_no_modes_after_an_error() -> None:
    def run() -> None:
        two_convolutions()
        raise torch.OutOfMemoryError

    with Library():
        assert convolution_modes(run, graph_of(*SHAPES, (1,))) == {}
    assert torch.backends.cudnn.allow_tf32
