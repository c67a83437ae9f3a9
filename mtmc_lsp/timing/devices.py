"""Ceilings of devices: data sheets for when there is no GPU, a cache of what was measured, and the roofline bounds."""

from __future__ import annotations

import json
import os
from dataclasses import replace

from mtmc_lsp.core.dtypes import itemsize
from mtmc_lsp.core.graph import Graph, GraphInput, Ref, TensorType
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.results import Device
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import Capture, Environment
from mtmc_lsp.process.cache_files import cache_file
from mtmc_lsp.verify.cases import product_work

TERA = 1e12


def _sheet(
    name: str, arch: str, sms: int, shared: int, l2_mib: int, bandwidth: float, rates: tuple[float, float, float, float]
) -> Device:
    """A device from its data sheet; ``rates`` are fp32, tf32, half precision and split fp32, in TFLOP/s."""
    fp32, tf32, half, split = (rate * TERA for rate in rates)
    flops = {"fp32": fp32, "tf32": tf32, "fp16": half, "bf16": half, "fp16x3": split}
    return Device(f"{name} (data sheet)", arch, sms, shared, l2_mib << 20, bandwidth * TERA, flops)


DATA_SHEETS: dict[str, Device] = {
    device.arch: device
    for device in (
        _sheet("NVIDIA A100 80GB", "sm_80", 108, 166912, 40, 1.9, (19, 140, 270, 85)),
        _sheet("NVIDIA A10", "sm_86", 72, 101376, 6, 0.55, (25, 50, 100, 33)),
        _sheet("NVIDIA L40S", "sm_89", 142, 101376, 96, 0.8, (70, 150, 300, 100)),
        _sheet("NVIDIA H200", "sm_90", 132, 232448, 60, 4.28, (51, 400, 780, 220)),
        _sheet("NVIDIA RTX 5090", "sm_120", 170, 101376, 96, 1.6, (90, 95, 200, 65)),
        _sheet("AMD MI300X", "gfx942", 304, 65536, 256, 4.3, (100, 250, 600, 180)),
    )
}
"""Rates that large library calls reach in practice; plans are made for one of these where no GPU is there."""

PICKING = {"embedding", "index", "gather", "index_select", "select", "slice", "narrow", "take", "split", "unbind"}
"""Operations that read only a part of their first operand."""
CEILING_SLACK = 1.15
"""A copy's rate is a little below what reads alone reach; a time below the bound by more than this cannot be true."""


def data_sheet(archs: tuple[str, ...]) -> Device:
    """The device to plan for without a GPU: an H200 where it is among ``archs``, with what shared memory all of them have."""
    known = [arch for arch in archs if arch in DATA_SHEETS]
    sheet = DATA_SHEETS["sm_90" if "sm_90" in known or not known else known[0]]
    return replace(sheet, shared_bytes=min(DATA_SHEETS[arch].shared_bytes for arch in known or ["sm_90"]))


# Measured ceilings, kept between runs ----------------------------------------------------------------------------


def cached_device(environment: Environment) -> Device | None:
    """What was measured before on this GPU with this driver and torch."""
    file = cache_file(environment)
    try:
        return from_json(Device, json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        # Not there, or written by another version: it is measured again.
        return None


def remember_device(environment: Environment, device: Device) -> None:
    """Keep measured ceilings for later runs; where no cache can be written they are measured each time."""
    file = cache_file(environment)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_text(json.dumps(to_json(device)), encoding="utf-8")
        part.replace(file)
    except OSError:
        return


# Roofline --------------------------------------------------------------------------------------------------------


def bound_us(capture: Capture, device: Device) -> float:
    """The roofline's least time for a call: every input read once, every output written once, every product done."""
    graph = capture.graph
    traffic = (_read_bytes(graph) + _written_bytes(graph)) / device.bandwidth
    rate = device.flops.get(_product_kind(graph), 0.0)
    work = max(capture.flops, 2 * product_work(graph, graph.sizes))
    return max(traffic, work / rate if rate else 0.0) * 1e6


def least_us(capture: Capture, device: Device) -> float:
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
