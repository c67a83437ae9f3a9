"""An analytic model of time: bytes over bandwidth, operations over peak, and launches. Estimates, never measurements."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from mtmc_lsp.core.device_model import DeviceModel, TensorCores
from mtmc_lsp.core.dtypes import ITEMSIZE, itemsize
from mtmc_lsp.core.graph import RECURRENT_GATES, Graph, Node, TensorType
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.attention_mask import limited_attention_band
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.dense_windows import are_contiguous_windows
from mtmc_lsp.ir.memory_order import contiguous_axes, transposed_axis, windows_along_columns
from mtmc_lsp.ir.primitives import CENTRED, KernelIR, Prim, PrimOp, ProductDims, ProductSizes, has_split_operands
from mtmc_lsp.ir.recurrence import library_us, recurrence_in, recurrence_of, steps_and_batch, weight_bytes
from mtmc_lsp.ir.regions import VIEWS, Region, RegionKind, product_in
from mtmc_lsp.schedule.configs import (
    SPLIT_PRECISION_MODES,
    KernelConfig,
    MatmulConfig,
    PrecisionMode,
    RecurrentConfig,
    TileConfig,
    precision_of,
)
from mtmc_lsp.schedule.split_on_load import LEAST_CHANNELS, is_dense_along_sum, split_programs
from mtmc_lsp.tuning.load_cost import loads_apart_us
from mtmc_lsp.tuning.waves import Waves, parts_bytes

PASSES = {
    "layer_norm": 2, "group_norm": 3, "batch_norm": 3, "instance_norm": 3, "softmax": 2, "log_softmax": 2,
    "max_pool1d": 8, "max_pool2d": 8, "max_pool3d": 4, "avg_pool1d": 6, "avg_pool3d": 4,
}  # fmt: skip
"""How many times PyTorch's own kernel reads or writes the tensor, where it is more than once each.

Of pooling, whose kernels read every window: about what the H200 took of the time of one pass (level 1 of KernelBench).
"""
CHANNEL_BYTES_PER_CLOCK = 11.5 / 1.7
"""Bytes per clock that PyTorch's batch norm reads of each channel in training: one block of threads computes the statistics of a
channel. An H200, at 1.7 GHz: 0.74 TB/s with 64 channels, 0.18 with 16."""
HELD_BY_SOFTMAX, PASSES_OF_LONG_SOFTMAX = 1024, 4
"""PyTorch's softmax holds rows up to that long; longer ones it reads three times."""
DEPTHWISE_PASSES = 10
"""Likewise of a convolution with one channel per group."""
GATHERED, SCATTERED = 0.5, 0.25
"""Shares of the peak that a product of windows reaches whose channels lie densest, or do not: guesses, not measured yet."""
MOVED, MOVED_BY_ROWS = 0.95, 0.85
"""Shares of the peak that a product in half precision reaches whose tiles the hardware moves, where neighbouring columns of the
right operand are neighbours in memory, or neighbours along K are (180 and 206 us on an H200; cuBLAS: 177)."""
TF32_BY_REGISTERS = 0.21
"""Likewise of a float32 product in TF32 where tensor cores read shared memory: its operands pass through registers to be rounded
(86 of 403 TFLOP/s on an H200). With ``mma`` all operands do."""
FROM_SHARED = (TensorCores.WGMMA, TensorCores.TCGEN05)
"""Tensor cores that read their operands from shared memory."""
TRANSPOSED_VOLUMES = 0.1
"""Share that the library reaches for transposed convolutions of volumes in 32 bits (an H200 took 8 times fp16's time)."""
WINDOWS_SPLIT_ON_LOAD = 0.65
"""Likewise of windows that are split as they are read, beside the time of their loads (times :data:`SPLIT_ON_LOAD_SHARE`)."""
LIBRARY_SHARE, LIBRARY_BLOCK = 0.85, 32
"""Share of the peak that the library's convolutions reach on tensor cores, and the channels of a block at one place of a window:
what few channels leave of it empty is multiplied all the same (an H200 took about 1.3 ms for what this gives 0.9 ms: float16, 3
channels to 96, 11 x 11, with a step of 4)."""
FEW_CHANNELS, FEW_CHANNELS_WIDTH = 0.4, 48
"""Share of the peak of fp32 units that the library reaches with few channels in, and how many channels out it takes for that
(an H200: 7, 16, 21 and 25 of 60 TFLOP/s with 16, 24, 64 and 64)."""
SPLIT_ON_LOAD_SHARE = 0.6
"""Of the rate of split operands, where one of them is split as it is read (an H200: 131 of 263 TFLOP/s, of which a product
reaches 0.8); a guess where both are."""
NO_CALL = 10.0
"""How many times as long as fp32 units would take what cannot be a call is said to take, so that it becomes a kernel."""
L1_BYTES_PER_CLOCK = 32.0
"""Bytes per clock that one multiprocessor is expected to read from its own cache, of windows that overlap. An H200 took 0.85 to
1.0 of the time that this gives for lines and images, four columns to a thread, and 1.8 times as long for strided volumes."""

REUSE_GAIN = 2.5 * 4.28 / 8.85
"""Speed of data that other programs have just read, relative to reads from the L2: part of it is still in an L1. Fitted on an
H200, where it is 2.5 times the copy bandwidth (4.28 TB/s); reads from its L2 reach 8.85 TB/s."""

PREPARING = 8
"""About how many launches go before a recurrent kernel's own: weights side by side, first states, the first product."""

TRITON_EFFICIENCY = 0.9
"""Share of the copy bandwidth that a fused kernel is expected to reach."""


@dataclass(frozen=True)
class Cost:
    """Predicted cost of one unit of work."""

    bytes: float
    flops: float
    us: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops, self.us + other.us)


ZERO = Cost(0.0, 0.0, 0.0)


def tensor_bytes(kind: TensorType, sizes: Mapping[str, int]) -> float:
    """Bytes of a tensor, broadcast (stride 0) dimensions counted once."""
    total = itemsize(kind.dtype)
    for size, stride in zip(kind.shape, kind.stride, strict=True):
        if stride.terms:
            total *= size.value(sizes)
    return float(total)


def matmul_flops(ir: KernelIR, node: str) -> float:
    """Operations of the matrix products (and attentions) that an ATen node holds."""
    sizes = ir.graph.sizes
    total = 0.0
    for prim in ir.of_node(node):
        if prim.op is PrimOp.MATMUL:
            total += 2.0 * (product(prim.shape) * ProductSizes.of(ir.prims, prim).k).value(sizes)
    return total


def peak(device: DeviceModel, dtype: str, mode: PrecisionMode | None) -> float:
    """Operations per second for products of ``dtype`` in a precision mode; None is that of float32 units."""
    if mode in SPLIT_PRECISION_MODES:
        return device.flops[PrecisionMode.FP16X3.value]
    if dtype in ("float16", "bfloat16"):
        return device.flops["bf16" if dtype == "bfloat16" else "fp16"]
    if dtype == "float32":
        # Other modes emulate float32 by several products of fewer bits: about as fast as the units for float32.
        known = "fp32" if mode is None or mode is PrecisionMode.IEEE else mode.value
        return device.flops.get(known, device.flops["fp32"])
    return device.fp64_flops


def _time(bytes_moved: float, flops: float, device: DeviceModel, rate: float, efficiency: float) -> float:
    memory = bytes_moved / (device.bandwidth * efficiency)
    return (max(memory, flops / rate if flops else 0.0)) * 1e6


def torch_cost(ir: KernelIR, node: Node, device: DeviceModel) -> Cost:
    """One ATen node as PyTorch's own kernel runs it."""
    graph = ir.graph
    name = node.op.split(".")[1]
    if name in VIEWS:
        return ZERO
    read = sum(tensor_bytes(graph.type_of(ref), graph.sizes) for ref in dict.fromkeys(node.inputs()))
    written = sum(tensor_bytes(kind, graph.sizes) for kind in node.outputs)
    flops = matmul_flops(ir, node.name)
    moved = read * max(1, _passes(graph, node) - 1) + written
    launches = 1 if name not in ("cross_entropy_loss", "nll_loss_nd") else 3
    if not node.op.startswith("aten."):
        # The library has no such operation: a kernel of ours must run it.
        return Cost(
            moved, flops, _time(moved, flops, device, peak(device, "float32", PrecisionMode.IEEE), 1.0) * NO_CALL
        )
    if name in RECURRENT_GATES and node.outputs[1:]:
        return Cost(moved, flops, library_us(node, graph))
    if name.startswith("_native_batch_norm_legit") and "no_training" not in name:
        return _training_cost(graph, node, device)
    if "conv" in name:
        return _convolution_cost(ir, node, device, read, written, flops)
    rate = peak(device, node.outputs[0].dtype, PrecisionMode(graph.fp32_matmul))
    busy = 1.0
    if name == "layer_norm":
        # One block of threads per row.
        width = node.args[1]
        kept = node.type.shape[: len(node.type.shape) - (len(width) if isinstance(width, tuple) else 1)]
        busy = min(1.0, product(kept).value(graph.sizes) / device.sm_count)
    return Cost(moved, flops, _time(moved, flops, device, rate, 0.85 * busy) + device.launch_us * launches)


def _training_cost(graph: Graph, node: Node, device: DeviceModel) -> Cost:
    """A batch norm in training mode: the statistics of each channel, then the values."""
    own = tensor_bytes(node.type, graph.sizes)
    channels = node.type.shape[1].value(graph.sizes)
    reading = 0.85 * device.bandwidth
    # In channels-last order several blocks share a channel.
    by_block = CHANNEL_BYTES_PER_CLOCK * device.clock_hz * channels
    statistics = own / (reading if node.type.is_channels_last else min(reading, by_block)) * 1e6
    values = _time(2.0 * own, 0.0, device, 1.0, 0.85)
    return Cost(3.0 * own, 0.0, statistics + values + 2.0 * device.launch_us)


def _passes(graph: Graph, node: Node) -> int:
    name = node.op.split(".")[1]
    dim = node.args[1] if len(node.args) > 1 else None
    if "softmax" in name and isinstance(dim, int) and node.type.shape:
        row = node.type.shape[dim].value(graph.sizes)
        return PASSES_OF_LONG_SOFTMAX if row > HELD_BY_SOFTMAX else PASSES.get(name, 2)
    return PASSES.get(name, 2)


def _convolution_cost(ir: KernelIR, node: Node, device: DeviceModel, read: float, written: float, flops: float) -> Cost:
    """A convolution as the library runs it: in channels-last order, into and out of which it brings other tensors itself."""
    graph = ir.graph
    if not flops:
        moved = read * (DEPTHWISE_PASSES - 1) + written
        return Cost(moved, flops, _time(moved, flops, device, 1.0, 0.85) + device.launch_us)
    layouts = 0.0 if node.type.is_channels_last else 2.0 * (read + written)
    rate = _library_share(ir, node) * peak(device, node.type.dtype, PrecisionMode(graph.convolution_mode(node.name)))
    apart = _time(layouts, 0.0, device, rate, 0.85)
    product_us = _time(read + written, flops, device, rate, 0.85)
    return Cost(read + written + layouts, flops, apart + product_us + device.launch_us * (3 if layouts else 1))


def _library_share(ir: KernelIR, node: Node) -> float:
    """Share of the peak that the library's convolution reaches."""
    graph = ir.graph
    if node.type.dtype == "float32" and "conv_transpose3d" in node.op:
        return TRANSPOSED_VOLUMES
    own = ir.product_of_node(node.name)
    if own is None:
        return LIBRARY_SHARE
    sized = ProductSizes.of(ir.prims, own)
    channels = sized.channels.value(graph.sizes)
    if channels >= LEAST_CHANNELS or not ProductDims.of(own).kernel_positions:
        return LIBRARY_SHARE
    if node.type.dtype != "float32" or graph.convolution_mode(node.name) != "ieee":
        return LIBRARY_SHARE * channels / LIBRARY_BLOCK
    return FEW_CHANNELS * min(1.0, sized.n.value(graph.sizes) / FEW_CHANNELS_WIDTH)


def kernel_cost(
    ir: KernelIR, region: Region, config: KernelConfig, device: DeviceModel, *, waves: bool = False
) -> Cost:
    """A region as one kernel (or as few kernels, where it is split).

    Args:
        ir: what the region is a part of.
        region: what is computed.
        config: how it runs.
        device: what it runs on.
        waves: whether what idles in a product's last wave of tiles counts, as it does between configurations of one product.
    """
    if isinstance(config, RecurrentConfig):
        return _recurrent_cost(ir, region, config, device)
    graph = ir.graph
    values = ir.value_of
    reads = 0.0
    parts = config.split if isinstance(config, TileConfig) else 1
    in_pieces = isinstance(config, TileConfig) and (config.loop or config.is_split)
    matmul = config if isinstance(config, MatmulConfig) else None
    mode = precision_of(config)
    again = in_pieces and region.kind is RegionKind.REDUCE and _walks_again(ir, region)
    passes = 2 if again and parts == 1 and not _fits_in_l2(region, graph, device) else 1
    for prim in region.inputs:
        if prim in values:
            kind = graph.type_of(values[prim])
            reads += tensor_bytes(kind, graph.sizes) * _sectors(ir, region, prim, kind, config, device)
    if parts > 1 and _varies_along_columns(ir, region) and reads > 0.5 * device.l2_bytes:
        passes = 2
    written = 0.0
    # Of several parts the first stands for all: they have the same axes.
    for ref, own in dict(reversed(region.stored(ir))).items():
        kind = graph.type_of(ref)
        if any(part.index for part in region.parts.get(ref, ())):
            # Each element is read, added to and written; what it is added to is made before.
            added = ir.prims[own]
            written += 2.0 * itemsize(added.dtype) * product(added.shape).value(graph.sizes)
        written += tensor_bytes(kind, graph.sizes) * _sectors(ir, region, own, kind, config, device)
    flops = sum(matmul_flops(ir, node) for node in region.nodes) * _share_of_pairs(ir, region)
    dtype = ir.of(region.outputs[0]).dtype
    for prim in region.prims:
        if ir.prims[prim].op is PrimOp.MATMUL:
            dtype = ir.prims[ir.prims[prim].inputs[0]].dtype
    # The two products of an attention wait for each other; a plain product runs near the library's rate.
    share = 0.5 if region.kind is RegionKind.ATTENTION else 0.8
    if matmul is not None and matmul.tma and mode is PrecisionMode.NATIVE:
        share = MOVED_BY_ROWS if is_dense_along_sum(ir, product_in(ir, region), 1) else MOVED
    windows = any(ir.prims[name].op is PrimOp.WINDOW for name in region.prims)
    if windows and not (region.kind is RegionKind.MATMUL and are_contiguous_windows(ir, product_in(ir, region))):
        types = [graph.type_of(values[name]) for name in region.inputs if name in values]
        # A factor per sample or channel lies the same either way.
        walked = [kind for kind in types if len(kind.shape) > 3 and Size.of(1) not in kind.shape[:2]]
        share = GATHERED if all(kind.is_channels_last for kind in walked) else SCATTERED
        share = WINDOWS_SPLIT_ON_LOAD if matmul is not None and matmul.split_on_load else share
    if dtype == "float32" and mode is PrecisionMode.TF32 and device.tensor_cores in FROM_SHARED:
        share = min(share, TF32_BY_REGISTERS)
    busy = _parallelism(ir, region, config, device)
    rate = peak(device, dtype, mode) * share
    launches = 1
    stream = 0.0
    split, split_share = 0.0, 1.0
    moved = reads * passes + written
    if matmul is not None:
        rate *= Waves.of(ir, region, matmul).busy(matmul, device) if waves else busy
        rate *= SPLIT_ON_LOAD_SHARE if matmul.split_on_load else 1.0
        split, split_share = _split_pass(ir, region, matmul, device)
        launches += split > 0
        if matmul.split_k > 1:
            launches += 1
            moved += (
                2.0
                * matmul.split_k
                * ITEMSIZE["float32"]
                * product(tuple(a.size for a in region.parallel_axes)).value(graph.sizes)
            )
        stream = parts_bytes(ir, region, matmul)
        launches += stream > 0
    elif parts > 1:
        launches += 1 + _varies_along_columns(ir, region)
    time = _time(moved, flops, device, rate, TRITON_EFFICIENCY * busy)
    # Each walk computes anew what it reduces or writes; a program has the cache of its own multiprocessor alone.
    l1_rate = device.per_sm(L1_BYTES_PER_CLOCK) * min(1.0, 2.0 * busy)
    time = max(time, (1 + again) * _folded_bytes(ir, region, device) / l1_rate * 1e6)
    if matmul is not None:
        time += loads_apart_us(ir, region, matmul, device)
        time += _time(stream, 0.0, device, rate, TRITON_EFFICIENCY)
    # What is split is split before the product begins.
    time += _time(split, 0.0, device, rate, TRITON_EFFICIENCY * split_share)
    return Cost(moved + stream + split, flops, time + device.launch_us * launches)


def _split_pass(ir: KernelIR, region: Region, config: MatmulConfig, device: DeviceModel) -> tuple[float, float]:
    """Bytes that the kernel moves which splits operands before the product, and the share of the device that it keeps busy.

    It reads four bytes and writes four, and has a program for each few rows. Without such a kernel there are no bytes.
    """
    prim = product_in(ir, region)
    if config.precision not in SPLIT_PRECISION_MODES or has_split_operands(prim):
        return 0.0, 1.0
    own, sizes = ProductSizes.of(ir.prims, prim), ir.graph.sizes
    moved, programs = 0.0, 0
    for side in (0, 1):
        if config.split_on_load is None or not config.split_on_load.includes(side):
            rows = (own.batch * (own.m, own.n)[side]).value(sizes)
            programs += split_programs(rows, own.k, sizes)
            moved += 8.0 * rows * own.k.value(sizes)
    return moved, min(1.0, max(1, programs) / (2.0 * device.sm_count))


def _recurrent_cost(ir: KernelIR, region: Region, config: RecurrentConfig, device: DeviceModel) -> Cost:
    """A launch for each group of steps, which finds all weights in the L2 cache, after the product of the whole sequence."""
    graph, prim = ir.graph, recurrence_in(ir, region)
    form = recurrence_of(prim)
    steps, batch = (size.value(graph.sizes) for size in steps_and_batch(ir, prim))
    width = ir.prims[prim.inputs[0]].shape[-1].value(graph.sizes)
    weights, itemsize = weight_bytes(ir, prim), ITEMSIZE[prim.dtype]
    # Each multiply-add is of one weight and one row of the batch.
    flops = 2.0 * batch * weights / itemsize
    speed = REUSE_GAIN * device.l2_speedup if weights < 0.5 * device.l2_bytes else 1.0
    rate = peak(device, prim.dtype, config.precision) * 0.5
    each = _time(weights, flops, device, rate, TRITON_EFFICIENCY * speed) + device.launch_us
    rows = form.gates * form.hidden * form.directions
    widths = [width] if form.directions == 1 else [width, *[form.directions * form.hidden] * (form.layers - 1)]
    first = sum(
        _time(itemsize * steps * batch * (k + rows), 2.0 * steps * batch * k * rows, device, rate, 0.85) for k in widths
    )
    launches = form.launches(steps)
    moved = sum(tensor_bytes(graph.type_of(ref), graph.sizes) for ref in graph.node(region.nodes[0]).inputs())
    return Cost(moved, flops * launches, first + each * launches + device.launch_us * PREPARING)


def _sectors(
    ir: KernelIR, region: Region, prim: str, kind: TensorType, config: KernelConfig, device: DeviceModel
) -> float:
    """How many times over a tensor is read or written whose elements lie apart along the columns of a tile.

    Memory gives whole sectors, of 32 bytes on NVIDIA GPUs (CUDA C++ Best Practices Guide, 10.2.1); a tile uses of each what its
    rows reach.
    """
    if region.kind not in (RegionKind.REDUCE, RegionKind.MAP) or not isinstance(config, TileConfig):
        return 1.0
    graph = ir.graph
    along = set(region.reduced_axes) if region.reduced_axes else set(region.parallel_axes[-1:])
    inner = contiguous_axes(region, prim, kind)
    dense = {axis for dim, axis in inner.items() if kind.shape[dim].value(graph.sizes) > 1}
    own = set(region.table.all_axes(prim))
    if not dense or not own & along:
        return 1.0
    if dense & along:
        reached = _columns_reached(region, dense, config, graph, device)
    else:
        turned = transposed_axis(ir, region)
        neighbours = (
            (turned,)
            if turned is not None
            else (region.parallel_axes[-1:] if region.reduced_axes else region.parallel_axes[-2:-1])
        )
        reached = config.rows if dense & set(neighbours) else 1
    times = max(1.0, device.sector_bytes / ITEMSIZE[kind.dtype] / max(1, reached))
    if tensor_bytes(kind, graph.sizes) < 0.5 * device.l2_bytes:
        # The other programs that need the rest of a sector find it in the L2 cache.
        times = 1.0 + (times - 1.0) / (REUSE_GAIN * device.l2_speedup)
    return times


def _columns_reached(region: Region, dense: Set[Axis], config: TileConfig, graph: Graph, device: DeviceModel) -> int:
    """How many neighbours of a dense axis a tile's columns reach, where that axis may lie outside others among the columns."""
    if not region.reduced_axes or not config.loop:
        return device.sector_bytes
    inside = next(i for i, axis in enumerate(region.reduced_axes) if axis in dense) + 1
    steps = product([axis.size for axis in region.reduced_axes[inside:]]).value(graph.sizes)
    return device.sector_bytes if steps == 1 else config.block // steps


def _folded_bytes(ir: KernelIR, region: Region, device: DeviceModel) -> float:
    """Bytes of all windows that are folded: each is read from a cache, whatever comes from memory.

    What a fold is made of is computed anew for each of its elements; and where windows step over memory, so do its loads.
    """
    asked: dict[str, float] = {}
    total = 0.0
    for name in reversed(region.prims):
        prim = ir.prims[name]
        times = asked.get(name) or float(product(prim.shape).value(ir.graph.sizes))
        if prim.op is PrimOp.REDUCE:
            # Once for each row, whoever reads it: of each of its elements.
            times = float(product(_source(ir, prim)).value(ir.graph.sizes))
        if prim.op is PrimOp.UNROLLED_REDUCE:
            whole, kept = (product(shape).value(ir.graph.sizes) for shape in (_source(ir, prim), prim.shape))
            times *= whole / max(1, kept)
            total += times * ITEMSIZE[prim.dtype]
        for source in prim.inputs:
            asked[source] = max(asked.get(source, 0.0), times)
    windows = windows_along_columns(ir, region)
    step = int(str(windows.attrs["step"])) if windows is not None else 1
    return total * min(step, device.sector_bytes // ITEMSIZE["float32"])


def _source(ir: KernelIR, prim: Prim) -> tuple[Size, ...]:
    return ir.prims[prim.inputs[0]].shape


def _share_of_pairs(ir: KernelIR, region: Region) -> float:
    """Share of an attention's pairs of a query and a key that its mask leaves; 1 for all else."""
    banded = limited_attention_band(ir, region)
    if banded is None:
        return 1.0
    form, band = banded
    sizes = ir.graph.sizes
    queries, keys = (size.value(sizes) for size in form.scores.shape[-2:])
    return band.share(queries, keys, sizes)


def _varies_along_columns(ir: KernelIR, region: Region) -> bool:
    """Whether a result has an element per column, so that the columns are walked again after the reductions."""
    table, reduced = region.table, set(region.reduced_axes)
    return any(reduced & set(table.all_axes(name)) for _, name in region.stored(ir))


def _walks_again(ir: KernelIR, region: Region) -> bool:
    """Whether the columns are walked more than once: for what varies along them, or for reductions that need others."""
    own = [ir.prims[name] for name in region.prims]
    reductions = {prim.name for prim in own if prim.op is PrimOp.REDUCE}
    later: set[str] = set()
    for prim in own:
        # A sum of exponentials is found together with its maximum, one of squared deviations with its mean.
        alone = prim.fn != "sum_exp" and prim.attrs.get(CENTRED) not in reductions
        if prim.op is PrimOp.REDUCE and alone and later & set(prim.inputs):
            return True
        if prim.name in reductions or later & set(prim.inputs):
            later.add(prim.name)
    return _varies_along_columns(ir, region)


def _fits_in_l2(region: Region, graph: Graph, device: DeviceModel) -> bool:
    """Whether the rows in flight stay in the L2 cache between the passes over them."""
    row = 4.0 * region.columns.value(graph.sizes)
    in_flight = min(region.rows.value(graph.sizes), 4 * device.sm_count)
    return row * in_flight < 0.5 * device.l2_bytes


def programs_of(ir: KernelIR, region: Region, config: KernelConfig) -> int:
    """How many programs the kernel's grid has."""
    sizes = ir.graph.sizes
    if isinstance(config, MatmulConfig):
        return config.stream_k or Waves.of(ir, region, config).tiles * config.split_k
    if not isinstance(config, TileConfig):
        return region.rows.value(sizes)
    if region.kind is RegionKind.MAP:
        columns = region.parallel_axes[-1].size.value(sizes) if region.parallel_axes else 1
        rows = region.rows.value(sizes) // max(1, columns)
        return -(-rows // config.rows) * -(-columns // config.block)
    return -(-region.rows.value(sizes) // config.rows) * config.split


def _parallelism(ir: KernelIR, region: Region, config: KernelConfig, device: DeviceModel) -> float:
    """Share of the device that the grid keeps busy: a reduction has one program per group of rows, a product one per tile."""
    if region.kind in (RegionKind.REDUCE, RegionKind.SCAN):
        return min(1.0, programs_of(ir, region, config) / (2.0 * device.sm_count))
    if region.kind is RegionKind.MATMUL:
        return min(1.0, programs_of(ir, region, config) / device.sm_count)
    return 1.0
