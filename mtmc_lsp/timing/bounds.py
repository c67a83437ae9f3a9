"""The roofline bounds of a call on a device."""

from __future__ import annotations

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import itemsize
from mtmc_lsp.core.graph import Graph, GraphInput, Ref, TensorType
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import product_work

PICKING = {"embedding", "index", "gather", "index_select", "select", "slice", "narrow", "take", "split", "unbind"}
"""Operations that read only a part of their first operand."""
CEILING_SLACK = 1.15
"""A copy's rate is a little below what reads alone reach; a time below the bound by more than this cannot be true."""


def bound_us(capture: Capture, device: DeviceModel) -> float:
    """The roofline's least time for a call: every input read once, every output written once, every product done."""
    graph = capture.graph
    traffic = (_read_bytes(graph) + _written_bytes(graph)) / device.bandwidth
    rate = device.flops.get(_product_kind(graph), 0.0)
    work = max(capture.flops, 2 * product_work(graph, graph.sizes))
    return max(traffic, work / rate if rate else 0.0) * 1e6


def least_us(capture: Capture, device: DeviceModel) -> float:
    """The time below which a measurement cannot be true.

    Only what must come from memory counts: results may still lie in the L2 cache when the clock stops, and an exact
    rewriting may do with fewer operations.
    """
    graph = capture.graph
    written = max(0.0, _written_bytes(graph) - device.l2_bytes)
    ceiling = max(CEILING_SLACK * device.bandwidth, device.peak_bandwidth)
    return (_read_bytes(graph) + written) / ceiling * 1e6


def _read_bytes(graph: Graph) -> float:
    return sum(_read(graph, item) for item in graph.inputs)


def _read(graph: Graph, item: GraphInput) -> float:
    """Bytes of an input that some operation needs."""
    used = [node for node in graph.nodes if any(ref.name == item.name for ref in node.inputs())]
    whole = _bytes(item.type, graph)
    picked = 0.0
    for node in used:
        first = next((argument for argument in node.args if isinstance(argument, Ref)), None)
        if node.op.split(".")[1] not in PICKING or first is None or first.name != item.name:
            return whole
        picked += sum(_bytes(kind, graph) for kind in node.outputs)
    return min(whole, picked)


def _written_bytes(graph: Graph) -> float:
    names = {item.name for item in graph.inputs}
    made = {ref for ref in graph.outputs if ref.name not in names}
    made |= {mutation.value for mutation in graph.mutations}
    return sum(_bytes(graph.type_of(ref), graph) for ref in made)


def _bytes(kind: TensorType, graph: Graph) -> float:
    """Bytes in memory: expanded dimensions, of stride 0, are there once."""
    count = 1
    for size, stride in zip(kind.shape, kind.stride, strict=True):
        count *= 1 if stride == Size.of(0) else size.value(graph.sizes)
    return float(count * itemsize(kind.dtype))


def _product_kind(graph: Graph) -> str:
    """The fastest unit that keeps the precision of the user's own products."""
    dtypes = {item.type.dtype for item in graph.inputs}
    if "float32" not in dtypes:
        return "bf16" if "bfloat16" in dtypes else "fp16"
    if any(node.op.startswith("aten.conv") and graph.convolution_mode(node.name) == "tf32" for node in graph.nodes):
        # Scaled float16 operands keep as many bits as TF32 does.
        return "fp16"
    return "tf32" if graph.fp32_matmul == "tf32" else "fp16x3"
