"""Roofline bounds of a call on a device."""

from __future__ import annotations

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import itemsize
from mtmc_lsp.core.graph import Graph, GraphInput, Ref, TensorType
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.sizes.interpreter_limits import product_work

PARTIAL_READS = {"embedding", "index", "gather", "index_select", "select", "slice", "narrow", "take", "split", "unbind"}
"""ATen operations that read only part of their first operand."""
BANDWIDTH_SLACK = 1.15
"""Reads alone are slightly faster than copies; a time below the bound by more than this factor is a measurement error."""


def bound_us(capture: Capture, device: DeviceModel) -> float:
    """The roofline bound of a call in microseconds: every input loaded once, every output stored once, all products computed."""
    graph = capture.graph
    traffic = (_read_bytes(graph) + _written_bytes(graph)) / device.bandwidth
    rate = device.flops.get(_precision_mode(graph), 0.0)
    work = max(capture.flops, 2 * product_work(graph, graph.sizes))
    return max(traffic, work / rate if rate else 0.0) * 1e6


def least_us(capture: Capture, device: DeviceModel) -> float:
    """The time in microseconds below which a measurement must be wrong.

    Only mandatory memory traffic counts: results may still be in the L2 cache when the clock stops, and an exact rewrite may
    need fewer operations.
    """
    graph = capture.graph
    written = max(0.0, _written_bytes(graph) - device.l2_bytes)
    ceiling = max(BANDWIDTH_SLACK * device.bandwidth, device.peak_bandwidth)
    return (_read_bytes(graph) + written) / ceiling * 1e6


def _read_bytes(graph: Graph) -> float:
    return sum(_input_bytes(graph, item) for item in graph.inputs)


def _input_bytes(graph: Graph, item: GraphInput) -> float:
    """Bytes of an input that the operations need."""
    readers = [node for node in graph.nodes if any(ref.name == item.name for ref in node.inputs())]
    all_bytes = _bytes(item.type, graph)
    selected_bytes = 0.0
    for node in readers:
        first = next((argument for argument in node.args if isinstance(argument, Ref)), None)
        if node.op.split(".")[1] not in PARTIAL_READS or first is None or first.name != item.name:
            return all_bytes
        selected_bytes += sum(_bytes(kind, graph) for kind in node.outputs)
    return min(all_bytes, selected_bytes)


def _written_bytes(graph: Graph) -> float:
    names = {item.name for item in graph.inputs}
    written = {ref for ref in graph.outputs if ref.name not in names}
    written |= {mutation.value for mutation in graph.mutations}
    return sum(_bytes(graph.type_of(ref), graph) for ref in written)


def _bytes(kind: TensorType, graph: Graph) -> float:
    """Bytes in memory; expanded dimensions (stride 0) count once."""
    count = 1
    for size, stride in zip(kind.shape, kind.stride, strict=True):
        count *= 1 if stride == Size.of(0) else size.value(graph.sizes)
    return float(count * itemsize(kind.dtype))


def _precision_mode(graph: Graph) -> str:
    """The fastest precision mode with the accuracy of the user's products."""
    dtypes = {item.type.dtype for item in graph.inputs}
    if "float32" not in dtypes:
        return "bf16" if "bfloat16" in dtypes else "fp16"
    if graph.fp32_matmul == "tf32" or any(
        node.op.startswith("aten.conv") and graph.convolution_mode(node.name) == "tf32" for node in graph.nodes
    ):
        # Scaled float16 operands have as many significand bits as TF32.
        return "fp16"
    return "fp16x3"
