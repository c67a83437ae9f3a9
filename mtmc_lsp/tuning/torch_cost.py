"""Cost of PyTorch's own kernels by a roofline: bytes over bandwidth, operations over peak rate, and launches."""

from __future__ import annotations

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import is_low_precision
from mtmc_lsp.core.graph import RECURRENT_GATES, Graph, Node, RowLoop
from mtmc_lsp.core.sizes import product
from mtmc_lsp.ir.loops.cells import product_flops
from mtmc_lsp.ir.loops.form import moved_bytes, working_nodes
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.primitives import KernelIR, ProductDims, ProductSizes
from mtmc_lsp.ir.recurrence import library_us
from mtmc_lsp.ir.regions import VIEWS
from mtmc_lsp.schedule.configs import (
    PrecisionMode,
)
from mtmc_lsp.schedule.split_on_load import LEAST_CHANNELS
from mtmc_lsp.tuning.cost import (
    TORCH_EFFICIENCY,
    ZERO,
    Cost,
    matmul_flops,
    peak,
    roofline_us,
    tensor_bytes,
)

PASSES = {
    "layer_norm": 2, "group_norm": 3, "batch_norm": 3, "instance_norm": 3, "softmax": 2, "log_softmax": 2,
    "max_pool1d": 8, "max_pool2d": 8, "max_pool3d": 4, "avg_pool1d": 6, "avg_pool3d": 4,
}  # fmt: skip
"""How many times PyTorch's kernel reads or writes the tensor, where that is more than once each.

Pooling kernels read every window: their time on an H200 relative to one pass (KernelBench level 1).
"""

CHANNEL_BYTES_PER_CLOCK = 11.5 / 1.7
"""Bytes per clock and channel that PyTorch's batch norm reads in training: one thread block computes the statistics of a channel.
Measured on an H200 at 1.7 GHz: 0.74 TB/s with 64 channels, 0.18 with 16."""

HELD_BY_SOFTMAX, PASSES_OF_LONG_SOFTMAX = 1024, 4
"""PyTorch's softmax keeps rows of up to 1024 elements in registers, and reads longer rows three times."""

DEPTHWISE_PASSES = 10
"""As :data:`PASSES`, for depthwise convolutions."""

TRANSPOSED_VOLUMES = 0.1
"""Share of the peak that the library reaches for transposed 3D convolutions in float32 (H200: 8 times the time of fp16)."""

LIBRARY_SHARE, LIBRARY_BLOCK = 0.85, 32
"""Share of the peak that the library's convolutions reach on tensor cores, and the channels of a block at one kernel position:
fewer channels are padded. An H200 took 1.3 ms where this predicts 0.9 ms (float16, 3 channels to 96, 11 x 11, stride 4)."""

FEW_CHANNELS, FEW_CHANNELS_WIDTH = 0.4, 48
"""Share of the peak of fp32 units that the library reaches with few input channels, and the output channels that this needs.
Measured on an H200: 7, 16, 21 and 25 of 60 TFLOP/s with 16, 24, 64 and 64."""

FLASH_SHARE, MASKED_SHARE, MASKED_ROWS = 0.6, 0.3, 64
"""Shares of the peak that PyTorch's 16-bit attention reaches without and with a mask, and the queries of a program of the latter.
With a mask, PyTorch's flash kernels refuse the call, and the kernel that remains neither skips masked keys nor splits a long
cache among programs. Estimates, not measured."""

NO_CALL = 10.0
"""Factor on the time of operations without a torch call, so that they become kernels."""


def torch_cost(ir: KernelIR, node: Node, device: DeviceModel) -> Cost:
    """The cost of one ATen node in PyTorch."""
    graph = ir.graph
    name = node.op.split(".")[1]
    if name in VIEWS:
        return ZERO
    if node.row_loop is not None:
        return _row_loop_cost(node.row_loop, device)
    if node.loop is not None:
        return _loop_cost(node, graph, device)
    read = sum(tensor_bytes(graph.type_of(ref), graph.sizes) for ref in dict.fromkeys(node.inputs()))
    written = sum(tensor_bytes(kind, graph.sizes) for kind in node.outputs)
    flops = matmul_flops(ir, node.name)
    moved = read * max(1, _passes(graph, node) - 1) + written
    launches = 1 if name not in ("cross_entropy_loss", "nll_loss_nd") else 3
    if not node.op.startswith("aten."):
        # No torch call computes this operation; it must become a kernel.
        return Cost(
            moved, flops, roofline_us(moved, flops, device, peak(device, "float32", PrecisionMode.IEEE), 1.0) * NO_CALL
        )
    if name in RECURRENT_GATES and node.outputs[1:]:
        return Cost(moved, flops, library_us(node, graph, device))
    if name.startswith("_native_batch_norm_legit") and "no_training" not in name:
        return _training_cost(graph, node, device)
    if "conv" in name:
        return _convolution_cost(ir, node, device, read, written, flops)
    if name == "scaled_dot_product_attention" and is_low_precision(node.type.dtype):
        return _attention_cost(graph, node, device, moved, flops)
    rate = peak(device, node.outputs[0].dtype, PrecisionMode(graph.fp32_matmul))
    if name == "_scaled_mm":
        rate = device.fp8_flops or peak(device, "float16", PrecisionMode.NATIVE)
    busy = 1.0
    if name == "layer_norm":
        # One thread block per row.
        width = node.args[1]
        outer = node.type.shape[: len(node.type.shape) - (len(width) if isinstance(width, tuple) else 1)]
        busy = min(1.0, product(outer).value(graph.sizes) / device.sm_count)
    return Cost(
        moved, flops, roofline_us(moved, flops, device, rate, TORCH_EFFICIENCY * busy) + device.launch_us * launches
    )


def _attention_cost(graph: Graph, node: Node, device: DeviceModel, moved: float, flops: float) -> Cost:
    """The cost of the library's attention, which depends on the kernel that PyTorch can choose."""
    values = dict(zip(("attn_mask", "dropout_p", "is_causal"), node.args[3:], strict=False)) | dict(node.kwargs)
    is_masked, sizes = values.get("attn_mask") is not None, graph.sizes
    pairs, busy = 0.5 if values.get("is_causal") else 1.0, 1.0
    if is_masked:
        queries = -(-node.type.shape[-2].value(sizes) // MASKED_ROWS)
        busy = min(1.0, product(node.type.shape[:-2]).value(sizes) * queries / device.sm_count)
    rate = busy * (MASKED_SHARE if is_masked else FLASH_SHARE) * peak(device, node.type.dtype, PrecisionMode.NATIVE)
    time = roofline_us(moved, pairs * flops, device, rate, TORCH_EFFICIENCY * busy)
    return Cost(moved, pairs * flops, time + device.launch_us)


def _row_loop_cost(loop: RowLoop, device: DeviceModel) -> Cost:
    """The cost of all chunks of a loop over rows without kernels."""
    body, chunk = lower(loop.body), ZERO
    for node in loop.body.nodes:
        chunk = chunk + torch_cost(body, node, device)
    return Cost(loop.chunks * chunk.bytes, loop.chunks * chunk.flops, loop.chunks * chunk.us)


def _loop_cost(node: Node, graph: Graph, device: DeviceModel) -> Cost:
    """The cost of a loop over time steps in PyTorch: each operation of each iteration is a launch."""
    assert node.loop is not None
    calls = len(list(working_nodes(node.loop))) + sum(item.position is not None for item in node.loop.outputs)
    moved, count = moved_bytes(node, graph), node.loop.count.value(graph.sizes)
    flops = count * product_flops(node.loop, graph)
    rate = peak(device, node.outputs[0].dtype, PrecisionMode(graph.fp32_matmul))
    busy = roofline_us(moved, flops, device, rate, TORCH_EFFICIENCY)
    return Cost(moved, flops, max(busy, count * calls * device.launch_us))


def _training_cost(graph: Graph, node: Node, device: DeviceModel) -> Cost:
    """The cost of a batch norm in training mode: statistics of each channel, then the values."""
    size = tensor_bytes(node.type, graph.sizes)
    channels = node.type.shape[1].value(graph.sizes)
    reading = TORCH_EFFICIENCY * device.bandwidth
    # With channels last, several blocks share a channel.
    by_block = CHANNEL_BYTES_PER_CLOCK * device.clock_hz * channels
    statistics = size / (reading if node.type.is_channels_last else min(reading, by_block)) * 1e6
    values = roofline_us(2.0 * size, 0.0, device, 1.0, TORCH_EFFICIENCY)
    return Cost(3.0 * size, 0.0, statistics + values + 2.0 * device.launch_us)


def _passes(graph: Graph, node: Node) -> int:
    name = node.op.split(".")[1]
    dim = node.args[1] if len(node.args) > 1 else None
    if "softmax" in name and isinstance(dim, int) and node.type.shape:
        row = node.type.shape[dim].value(graph.sizes)
        return PASSES_OF_LONG_SOFTMAX if row > HELD_BY_SOFTMAX else PASSES.get(name, 2)
    return PASSES.get(name, 2)


def _convolution_cost(ir: KernelIR, node: Node, device: DeviceModel, read: float, written: float, flops: float) -> Cost:
    """The cost of a library convolution: it runs with channels last, and converts other tensors before and after."""
    graph = ir.graph
    if not flops:
        moved = read * (DEPTHWISE_PASSES - 1) + written
        return Cost(moved, flops, roofline_us(moved, flops, device, 1.0, TORCH_EFFICIENCY) + device.launch_us)
    layouts = 0.0 if node.type.is_channels_last else 2.0 * (read + written)
    rate = _library_share(ir, node) * peak(device, node.type.dtype, PrecisionMode(graph.convolution_mode(node.name)))
    conversion_us = roofline_us(layouts, 0.0, device, rate, TORCH_EFFICIENCY)
    product_us = roofline_us(read + written, flops, device, rate, TORCH_EFFICIENCY)
    return Cost(read + written + layouts, flops, conversion_us + product_us + device.launch_us * (3 if layouts else 1))


def _library_share(ir: KernelIR, node: Node) -> float:
    """Share of the peak that the library's convolution reaches."""
    graph = ir.graph
    if node.type.dtype == "float32" and "conv_transpose3d" in node.op:
        return TRANSPOSED_VOLUMES
    prim = ir.product_of_node(node.name)
    if prim is None:
        return LIBRARY_SHARE
    sized = ProductSizes.of(ir.prims, prim)
    channels = sized.channels.value(graph.sizes)
    if channels >= LEAST_CHANNELS or not ProductDims.of(prim).kernel_positions:
        return LIBRARY_SHARE
    if node.type.dtype != "float32" or graph.convolution_mode(node.name) != "ieee":
        return LIBRARY_SHARE * channels / LIBRARY_BLOCK
    return FEW_CHANNELS * min(1.0, sized.n.value(graph.sizes) / FEW_CHANNELS_WIDTH)
