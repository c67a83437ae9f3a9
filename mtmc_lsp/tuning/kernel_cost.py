"""Cost of generated kernels by a roofline: bytes over bandwidth, operations over peak rate, and launches."""

from __future__ import annotations

from collections.abc import Set

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import ITEMSIZE, itemsize
from mtmc_lsp.core.graph import Graph, TensorType
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.attention_mask import limited_attention_band
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.dense_windows import are_contiguous_windows
from mtmc_lsp.ir.loops.blocks import BlockForm
from mtmc_lsp.ir.loops.cells import CellForm
from mtmc_lsp.ir.loops.form import independent_elements, moved_bytes
from mtmc_lsp.ir.loops.fusion import loop_in
from mtmc_lsp.ir.memory_order import contiguous_axes, transposed_axis, windows_along_columns
from mtmc_lsp.ir.primitives import CENTRED, KernelIR, Prim, PrimOp, ProductSizes, has_split_operands
from mtmc_lsp.ir.recurrence import recurrence_in, recurrence_of, steps_and_batch, weight_bytes
from mtmc_lsp.ir.region_values import is_in_memory
from mtmc_lsp.ir.regions import Region, RegionKind, product_in
from mtmc_lsp.schedule.attention_configs import programs_of_attention
from mtmc_lsp.schedule.configs import (
    SPLIT_PRECISION_MODES,
    AttentionConfig,
    KernelConfig,
    LoopConfig,
    MatmulConfig,
    PrecisionMode,
    RecurrentConfig,
    TileConfig,
    precision_of,
)
from mtmc_lsp.schedule.device_limits import PRODUCT_SHARE, tf32_share
from mtmc_lsp.schedule.reductions.column_sum_configs import partial_bytes
from mtmc_lsp.schedule.split_on_load import is_dense_along_sum, split_programs
from mtmc_lsp.tuning.block_cost import SCHEDULERS, block_us
from mtmc_lsp.tuning.cell_cost import products_us, step_us
from mtmc_lsp.tuning.chunk_cost import chunk_cost
from mtmc_lsp.tuning.cost import (
    TORCH_EFFICIENCY,
    TRITON_EFFICIENCY,
    Cost,
    matmul_flops,
    peak,
    roofline_us,
    tensor_bytes,
)
from mtmc_lsp.tuning.load_cost import loads_apart_us
from mtmc_lsp.tuning.scan_cost import ISSUE_US, LOAD_US, scan_cost
from mtmc_lsp.tuning.waves import Waves, parts_bytes

GATHERED, SCATTERED = 0.5, 0.25
"""Shares of the peak that a convolution kernel reaches with channels last, and otherwise. Estimates, not measured."""

MOVED, MOVED_BY_ROWS = 0.95, 0.85
"""Shares of the peak that a 16-bit product with TMA reaches, where the right operand is contiguous along its columns, or along K.
Measured on an H200: 180 and 206 us; cuBLAS 177."""

WINDOWS_SPLIT_ON_LOAD = 0.65
"""Share of the peak for windows that are split on load, without their load time (times :data:`SPLIT_ON_LOAD_SHARE`)."""

SPLIT_ON_LOAD_SHARE = 0.6
"""Share of the rate of split operands where one is split on load (H200: 131 of 263 TFLOP/s, times the usual 0.8). An estimate
where both are."""

L1_SHARE = 0.25
"""Share of the L1's bandwidth that loads of overlapping windows reach. Fitted on an H200, which took 0.85 to 1.0
of the predicted time in 1D and 2D with four columns per thread, and 1.8 times as long in 3D with strides."""

REUSE_GAIN = 2.5 * 4.28 / 8.85
"""Speed of reading data that other programs have just read, relative to the L2: part of it is in an L1. Fitted on an H200: 2.5
times the copy bandwidth (4.28 TB/s), where reads from L2 reach 8.85 TB/s."""

PREPARING = 8
"""Launches that prepare a recurrent kernel: packing the weights, first states, the first product."""

CACHED_SHARE = 0.5
"""Share of the last-level cache up to which data stays there until it is read again: other data passes through it too."""

PROGRAMS_PER_SM = 2.0
"""Programs of a reduction per multiprocessor from which on it uses the whole bandwidth."""

RESIDENT_ELEMENTS = 4096
"""Elements of the tiles that a multiprocessor holds at once from which on a kernel that walks rows uses the whole bandwidth. An
estimate, not measured."""

ROWS_PER_SM = 4
"""Rows per multiprocessor whose programs run at once and read them again: each is in the cache until then."""

ATTENTION_SHARE = 0.5
"""Share of the peak that an attention reaches, whose two products depend on each other."""

COMPUTED_KEYS = 0.6
"""Factor on that share where keys or values are computed in the loop over keys, such as by rotary embeddings: their loads do not
overlap with the products, and each block of queries repeats them. An estimate, not measured."""

RECURRENT_SHARE = 0.5
"""Share of the peak that the products of a recurrent step reach. An estimate, not measured."""


OPERATION_US, LOOP_PROGRAMS_PER_SM = 0.004, 16
"""Microseconds for an operation that waits for the one before; programs per multiprocessor that hide each other's latency.
Estimates for the iterations of a loop, not measured."""

ROW_SUM_US = 0.2
"""Microseconds for a sum over the columns in an iteration. Derived from 512 iterations of linear attention with one sum, which
took 191 us on an H100."""


def kernel_cost(
    ir: KernelIR, region: Region, config: KernelConfig, device: DeviceModel, *, waves: bool = False
) -> Cost:
    """The cost of a region as one kernel (or as several, where it is split).

    Args:
        waves: whether idle time in a product's last wave of tiles counts, to compare configurations of one product.
    """
    if isinstance(config, RecurrentConfig):
        return _recurrent_cost(ir, region, config, device)
    if isinstance(config, LoopConfig):
        return _loop_cost(ir, region, config, device)
    graph = ir.graph
    values = ir.value_of
    reads = 0.0
    parts = config.split if isinstance(config, TileConfig) else 1
    in_pieces = isinstance(config, TileConfig) and (config.loop or config.is_split)
    matmul = config if isinstance(config, MatmulConfig) else None
    mode = precision_of(config)
    again = in_pieces and region.kind is RegionKind.REDUCE and _walks_again(ir, region)
    passes = 2 if again and parts == 1 and not _fits_in_l2(region, graph, device) else 1
    for name in region.inputs:
        if name in values:
            kind = graph.type_of(values[name])
            reads += tensor_bytes(kind, graph.sizes) * _sectors(ir, region, name, kind, config, device)
    if parts > 1 and _varies_along_columns(ir, region) and reads > CACHED_SHARE * device.l2_bytes:
        passes = 2
    written = 0.0
    # All parts of an output have the same axes; the first one represents them.
    for ref, prim in dict(reversed(region.stored(ir))).items():
        kind = graph.type_of(ref)
        if any(part.index for part in region.parts.get(ref, ())):
            # Each element is read, added to and written; an earlier kernel wrote it.
            added = ir.prims[prim]
            written += 2.0 * itemsize(added.dtype) * product(added.shape).value(graph.sizes)
        written += tensor_bytes(kind, graph.sizes) * _sectors(ir, region, prim, kind, config, device)
    computed = dict.fromkeys(ir.prims[name].origin for name in region.prims)
    flops = sum(matmul_flops(ir, node) for node in computed) * _share_of_pairs(ir, region)
    dtype = ir.of(region.outputs[0]).dtype
    for name in region.prims:
        if ir.prims[name].op is PrimOp.MATMUL:
            dtype = ir.prims[ir.prims[name].inputs[0]].dtype
    share = PRODUCT_SHARE
    if region.kind in (RegionKind.ATTENTION, RegionKind.ATTENTION_GRADIENT):
        share = ATTENTION_SHARE
        if region.kind is RegionKind.ATTENTION and _computes_keys(ir, region):
            share *= COMPUTED_KEYS
    if matmul is not None and matmul.tma and mode is PrecisionMode.FP16_SCALED:
        share = MOVED_BY_ROWS
    elif matmul is not None and matmul.tma and mode is PrecisionMode.NATIVE:
        share = MOVED_BY_ROWS if is_dense_along_sum(ir, product_in(ir, region), 1) else MOVED
    windows = any(ir.prims[name].op is PrimOp.WINDOW for name in region.prims)
    if windows and not (region.kind is RegionKind.MATMUL and are_contiguous_windows(ir, product_in(ir, region))):
        types = [graph.type_of(values[name]) for name in region.inputs if name in values]
        # A factor per sample or channel has the same layout either way.
        images = [kind for kind in types if len(kind.shape) > 3 and Size.of(1) not in kind.shape[:2]]
        share = GATHERED if all(kind.is_channels_last for kind in images) else SCATTERED
        share = WINDOWS_SPLIT_ON_LOAD if matmul is not None and matmul.split_on_load else share
    if dtype == "float32" and mode is PrecisionMode.TF32:
        share = min(share, tf32_share(device))
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
    elif isinstance(config, AttentionConfig):
        rate *= busy
        if config.is_split:
            launches += 1
            moved += 2.0 * config.split * ITEMSIZE["float32"] * region.rows.value(graph.sizes)
    elif isinstance(config, TileConfig) and region.sums:
        launches += 1
        moved += partial_bytes(ir, region, config)
    elif parts > 1:
        launches += 1 + _varies_along_columns(ir, region)
    time = roofline_us(moved, flops, device, rate, TRITON_EFFICIENCY * busy)
    # Each pass recomputes folded windows; a program only uses the L1 cache of its multiprocessor.
    l1_rate = device.per_sm(L1_SHARE * device.l1_bytes_per_clock) * min(1.0, PROGRAMS_PER_SM * busy)
    time = max(time, (1 + again) * _folded_bytes(ir, region, device) / l1_rate * 1e6)
    if matmul is not None:
        time += loads_apart_us(ir, region, matmul, device)
        time += roofline_us(stream, 0.0, device, rate, TRITON_EFFICIENCY)
    # Operands are split before the product starts.
    time += roofline_us(split, 0.0, device, rate, TRITON_EFFICIENCY * split_share)
    return Cost(moved + stream + split, flops, time + device.launch_us * launches)


def _split_pass(ir: KernelIR, region: Region, config: MatmulConfig, device: DeviceModel) -> tuple[float, float]:
    """Bytes that the splitting kernel before the product moves, and the share of the device that it uses.

    It reads four bytes per element, writes four (two where it only scales and rounds), and has one program per few rows.
    Without such a kernel the bytes are 0.
    """
    prim = product_in(ir, region)
    is_scaled = config.precision is PrecisionMode.FP16_SCALED
    if not is_scaled and (config.precision not in SPLIT_PRECISION_MODES or has_split_operands(prim)):
        return 0.0, 1.0
    sized, sizes = ProductSizes.of(ir.prims, prim), ir.graph.sizes
    moved, programs = 0.0, 0
    for side in (0, 1):
        if config.split_on_load is None or not config.split_on_load.includes(side):
            rows = (sized.batch * (sized.m, sized.n)[side]).value(sizes)
            programs += split_programs(rows, sized.k, sizes, device)
            moved += (6.0 if is_scaled else 8.0) * rows * sized.k.value(sizes)
    return moved, min(1.0, max(1, programs) / (PROGRAMS_PER_SM * device.sm_count))


def _recurrent_cost(ir: KernelIR, region: Region, config: RecurrentConfig, device: DeviceModel) -> Cost:
    """The cost of recurrent layers: the product of the whole sequence, then a launch per group of steps with weights in L2."""
    graph, prim = ir.graph, recurrence_in(ir, region)
    form = recurrence_of(prim)
    steps, batch = (size.value(graph.sizes) for size in steps_and_batch(ir, prim))
    width = ir.prims[prim.inputs[0]].shape[-1].value(graph.sizes)
    weights, itemsize = weight_bytes(ir, prim), ITEMSIZE[prim.dtype]
    # One multiply-add per weight and row of the batch.
    flops = 2.0 * batch * weights / itemsize
    speed = REUSE_GAIN * device.l2_speedup if weights < CACHED_SHARE * device.l2_bytes else 1.0
    rate = peak(device, prim.dtype, config.precision) * RECURRENT_SHARE
    each = roofline_us(weights, flops, device, rate, TRITON_EFFICIENCY * speed) + device.launch_us
    rows = form.gates * form.hidden * form.directions
    widths = [width] if form.directions == 1 else [width, *[form.directions * form.hidden] * (form.layers - 1)]
    first = sum(
        roofline_us(
            itemsize * steps * batch * (k + rows), 2.0 * steps * batch * k * rows, device, rate, TORCH_EFFICIENCY
        )
        for k in widths
    )
    launches = form.launches(steps)
    moved = sum(tensor_bytes(graph.type_of(ref), graph.sizes) for ref in graph.node(region.nodes[0]).inputs())
    return Cost(moved, flops * launches, first + each * launches + device.launch_us * PREPARING)


def _loop_cost(ir: KernelIR, region: Region, config: LoopConfig, device: DeviceModel) -> Cost:
    """The cost of a loop over time steps: its traffic, or the latency of its iterations, which run one after another."""
    graph, form = ir.graph, loop_in(ir, region)
    moved = moved_bytes(form.node, graph)
    if config.is_scan:
        return scan_cost(form, moved, config, device)
    if config.is_chunked:
        return chunk_cost(form, moved, config, device)
    if isinstance(form, CellForm) and config.is_stepwise:
        return Cost(moved, 0.0, form.loop.count.value(graph.sizes) * step_us(form, config, device))
    has_whole_rows = isinstance(form, (CellForm, BlockForm))
    elements = config.rows * (1 if has_whole_rows else config.block)
    per_sm = LOOP_PROGRAMS_PER_SM
    if has_whole_rows:
        per_sm = max(1, SCHEDULERS // config.warps) if isinstance(form, BlockForm) else 1
    waves = -(-independent_elements(form) // elements) / (per_sm * device.sm_count)
    memory = roofline_us(moved, 0.0, device, 1.0, TRITON_EFFICIENCY)
    chain = len(form.chain())
    others = len(form.region.prims) - chain
    per_step = LOAD_US / config.stages + OPERATION_US * chain + ISSUE_US * others
    if form.region.kind is RegionKind.REDUCE:
        per_step += ROW_SUM_US * sum(form.ir.prims[name].op is PrimOp.REDUCE for name in form.region.prims)
    if isinstance(form, CellForm):
        per_step += products_us(form, config, device)
    if isinstance(form, BlockForm):
        per_step += block_us(form, config, device)
    latency = form.loop.count.value(graph.sizes) * per_step * max(1.0, waves)
    return Cost(moved, 0.0, max(memory, latency) + device.launch_us)


def _sectors(
    ir: KernelIR, region: Region, prim: str, kind: TensorType, config: KernelConfig, device: DeviceModel
) -> float:
    """Memory traffic of a tensor relative to its size, where its elements are strided along the columns of a tile.

    Memory transfers whole sectors, of 32 bytes on NVIDIA GPUs (CUDA C++ Best Practices Guide, 10.2.1); a tile uses the part of a
    sector that its rows cover.
    """
    if region.kind not in (RegionKind.REDUCE, RegionKind.MAP) or not isinstance(config, TileConfig):
        return 1.0
    graph = ir.graph
    along = set(region.reduced_axes) if region.reduced_axes else set(region.parallel_axes[-1:])
    inner = contiguous_axes(region, prim, kind)
    dense = {axis for dim, axis in inner.items() if kind.shape[dim].value(graph.sizes) > 1}
    tensor_axes = set(region.table.all_axes(prim))
    if not dense or not tensor_axes & along:
        return 1.0
    if dense & along:
        reached = _columns_reached(region, dense, config, graph, device)
    else:
        transposed = transposed_axis(ir, region)
        neighbours = (
            (transposed,)
            if transposed is not None
            else (region.parallel_axes[-1:] if region.reduced_axes else region.parallel_axes[-2:-1])
        )
        reached = config.rows if dense & set(neighbours) else 1
    times = max(1.0, device.sector_bytes / ITEMSIZE[kind.dtype] / max(1, reached))
    if tensor_bytes(kind, graph.sizes) < CACHED_SHARE * device.l2_bytes:
        # Other programs read the rest of a sector from the L2 cache.
        times = 1.0 + (times - 1.0) / (REUSE_GAIN * device.l2_speedup)
    return times


def _columns_reached(region: Region, dense: Set[Axis], config: TileConfig, graph: Graph, device: DeviceModel) -> int:
    """How many elements of a contiguous axis a tile's columns cover; that axis need not be the innermost column axis."""
    if not region.reduced_axes or not config.loop:
        return device.sector_bytes
    inside = next(i for i, axis in enumerate(region.reduced_axes) if axis in dense) + 1
    steps = product([axis.size for axis in region.reduced_axes[inside:]]).value(graph.sizes)
    return device.sector_bytes if steps == 1 else config.block // steps


def _folded_bytes(ir: KernelIR, region: Region, device: DeviceModel) -> float:
    """Bytes that folds over windows read from a cache.

    The operands of a fold are recomputed for each of its elements. Strided windows have strided loads.
    """
    uses: dict[str, float] = {}
    total = 0.0
    for name in reversed(region.prims):
        prim = ir.prims[name]
        times = uses.get(name) or float(product(prim.shape).value(ir.graph.sizes))
        if prim.op is PrimOp.REDUCE:
            # Computed once per row, from each element of the row.
            times = float(product(_source(ir, prim)).value(ir.graph.sizes))
        if prim.op is PrimOp.UNROLLED_REDUCE:
            whole, outer = (product(shape).value(ir.graph.sizes) for shape in (_source(ir, prim), prim.shape))
            times *= whole / max(1, outer)
            total += times * ITEMSIZE[prim.dtype]
        for source in prim.inputs:
            uses[source] = max(uses.get(source, 0.0), times)
    windows = windows_along_columns(ir, region)
    step = int(str(windows.attrs["step"])) if windows is not None else 1
    return total * min(step, device.sector_bytes // ITEMSIZE["float32"])


def _source(ir: KernelIR, prim: Prim) -> tuple[Size, ...]:
    return ir.prims[prim.inputs[0]].shape


def _share_of_pairs(ir: KernelIR, region: Region) -> float:
    """Share of (query, key) pairs that an attention's mask keeps; 1 for other regions."""
    banded = limited_attention_band(ir, region)
    if banded is None:
        return 1.0
    form, band = banded
    sizes = ir.graph.sizes
    queries, keys = (size.value(sizes) for size in form.scores.shape[-2:])
    return band.share(queries, keys, sizes)


def _computes_keys(ir: KernelIR, region: Region) -> bool:
    """Whether an attention computes its keys or values, rather than read them from memory."""
    products = [ir.prims[name] for name in region.prims if ir.prims[name].op is PrimOp.MATMUL]
    return not all(is_in_memory(ir.prims, each.inputs[1], region.inputs) for each in products)


def _varies_along_columns(ir: KernelIR, region: Region) -> bool:
    """Whether a result has an element per column, which needs another pass over the columns after the reductions."""
    table, reduced = region.table, set(region.reduced_axes)
    return any(reduced & set(table.all_axes(name)) for _, name in region.stored(ir))


def _walks_again(ir: KernelIR, region: Region) -> bool:
    """Whether the kernel passes over the columns more than once: for results per column, or for dependent reductions."""
    prims = [ir.prims[name] for name in region.prims]
    reductions = {prim.name for prim in prims if prim.op is PrimOp.REDUCE}
    later: set[str] = set()
    for prim in prims:
        # One pass computes a sum of exponentials with its maximum, and a sum of squared deviations with its mean.
        needs_pass = prim.fn != "sum_exp" and prim.attrs.get(CENTRED) not in reductions
        if prim.op is PrimOp.REDUCE and needs_pass and later & set(prim.inputs):
            return True
        if prim.name in reductions or later & set(prim.inputs):
            later.add(prim.name)
    return _varies_along_columns(ir, region)


def _fits_in_l2(region: Region, graph: Graph, device: DeviceModel) -> bool:
    """Whether the rows of all resident programs stay in the L2 cache between passes."""
    row = 4.0 * region.columns.value(graph.sizes)
    in_flight = min(region.rows.value(graph.sizes), ROWS_PER_SM * device.sm_count)
    return row * in_flight < CACHED_SHARE * device.l2_bytes


def programs_of(ir: KernelIR, region: Region, config: KernelConfig) -> int:
    """Number of programs in the kernel's grid."""
    sizes = ir.graph.sizes
    if isinstance(config, MatmulConfig):
        return config.stream_k or Waves.of(ir, region, config).tiles * config.split_k
    if isinstance(config, AttentionConfig) and region.kind is RegionKind.ATTENTION:
        return programs_of_attention(ir, region, config)
    if not isinstance(config, TileConfig):
        return region.rows.value(sizes)
    if region.kind is RegionKind.MAP:
        columns = region.parallel_axes[-1].size.value(sizes) if region.parallel_axes else 1
        rows = region.rows.value(sizes) // max(1, columns)
        return -(-rows // config.rows) * -(-columns // config.block)
    if region.sums:
        return config.persist
    return -(-region.rows.value(sizes) // config.rows) * config.split


def _parallelism(ir: KernelIR, region: Region, config: KernelConfig, device: DeviceModel) -> float:
    """Share of the device that the grid uses: a reduction has one program per group of rows, a product one per tile.

    An empty result has no program; it counts as one, so that rates are not 0.
    """
    if region.sums and isinstance(config, TileConfig):
        resident = max(1, min(config.persist * config.elements, region.rows.value(ir.graph.sizes) * config.block))
        return min(1.0, resident / (RESIDENT_ELEMENTS * device.sm_count))
    if region.kind in (RegionKind.REDUCE, RegionKind.SCAN):
        return min(1.0, max(1, programs_of(ir, region, config)) / (PROGRAMS_PER_SM * device.sm_count))
    if region.kind in (RegionKind.MATMUL, RegionKind.ATTENTION):
        return min(1.0, max(1, programs_of(ir, region, config)) / device.sm_count)
    return 1.0
