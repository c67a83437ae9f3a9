"""Predicted device memory of a call: what its launchers allocate. Estimates, not measurements.

A launcher keeps its small tensors until it returns, and drops large ones after their last use. After the forward pass, results
and saved values remain.
"""

from __future__ import annotations

from collections.abc import Sequence

from mtmc_lsp.core.dtypes import ITEMSIZE
from mtmc_lsp.core.graph import Graph, Node, Ref
from mtmc_lsp.core.sizes import product
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.output_aliasing import replaced_product
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import VIEWS, Region
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.rewrites.saved_values import split
from mtmc_lsp.schedule.configs import KernelConfig, MatmulConfig, TileConfig
from mtmc_lsp.schedule.launch_units import Unit, units
from mtmc_lsp.schedule.reductions.column_sum_configs import partial_bytes
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.tuning.cost import tensor_bytes
from mtmc_lsp.tuning.lifetimes import Lifetime, peak, released
from mtmc_lsp.tuning.waves import parts_bytes


def peak_bytes(graph: Graph, schedule: Schedule) -> float:
    """The most memory that a call allocates, results included.

    Args:
        graph: as captured.

    Raises:
        CannotCode: the schedule cannot be executed.
        CannotRewrite: a rewrite of the schedule does not apply.
    """
    rewritten = ir_of(graph, schedule).graph
    if rewritten.backward is None or rewritten.backward.in_forward:
        return _allocated(rewritten, schedule.kernels, schedule.loop_kernels)
    both = split(rewritten)
    forward = _allocated(both.forward, schedule.kernels, schedule.loop_kernels)
    kept = sum(_bytes(both.forward, ref) for ref in both.forward.outputs if ref.name in both.forward.named)
    return max(forward, kept + _allocated(both.backward, schedule.kernels, schedule.loop_kernels))


def _allocated(graph: Graph, kernels: Sequence[KernelPlan], loop_kernels: Sequence[KernelPlan]) -> float:
    """The most bytes that the launcher of a graph allocates at once."""
    ir = lower(graph)
    plans = tuple(plan for plan in kernels if plan.key in graph.named)
    tensors = _Tensors(graph)
    for position, unit in enumerate(units(ir, Schedule(kernels=plans))):
        tensors.use(unit, position)
        if unit.region is not None:
            for ref in unit.region.outputs:
                tensors.add(ref, position)
            tensors.add_parts(partial_sums_bytes(ir, unit.region, unit.plan.config if unit.plan else None), position)
            continue
        node = graph.node(unit.nodes[0])
        if node.op.split(".")[1] in VIEWS:
            tensors.add_view(node)
            continue
        for i in range(len(node.outputs)):
            tensors.add(Ref(node.name, i), position)
        if node.row_loop is not None:
            tensors.add_parts(_allocated_by_chunk(node.row_loop.body, loop_kernels), position)
    return tensors.peak()


class _Tensors:
    """The tensors of a launcher, while its statements are walked."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._lifetimes: dict[Ref, Lifetime] = {}
        self._parts: list[Lifetime] = []
        self._bases: dict[Ref, Ref] = {}
        self._returned = set(graph.outputs)

    def add(self, ref: Ref, position: int) -> None:
        """Note a tensor that a statement creates."""
        self._lifetimes[ref] = Lifetime(_bytes(self._graph, ref), position, position, ref in self._returned)

    def add_parts(self, size: float, position: int) -> None:
        """Note memory that only one statement uses."""
        if size:
            self._parts.append(Lifetime(size, position, position))

    def add_view(self, node: Node) -> None:
        """Note that the results of a node share the memory of what it reads."""
        base = next(iter(node.inputs()))
        base = self._bases.get(base, base)
        for i in range(len(node.outputs)):
            ref = Ref(node.name, i)
            self._bases[ref] = base
            if ref in self._returned and base in self._lifetimes:
                self._lifetimes[base].is_kept = True

    def add_replacement(self, ref: Ref, replaced: Ref) -> None:
        """Note that a value overwrites another one."""
        self._bases[ref] = self._bases.get(replaced, replaced)

    def use(self, unit: Unit, position: int) -> None:
        """Note that a statement reads its operands."""
        for name in unit.computed:
            for ref in self._graph.node(name).inputs():
                if (tensor := self._lifetimes.get(self._bases.get(ref, ref))) is not None:
                    tensor.last = position

    def peak(self) -> float:
        """The most bytes that are in memory at once."""
        tensors = [*self._lifetimes.values(), *self._parts]
        return peak(tensors, released(tensors))


def partial_sums_bytes(ir: KernelIR, region: Region, config: KernelConfig | None) -> float:
    """Bytes of the partial results that the programs of a kernel write for a second kernel."""
    if isinstance(config, MatmulConfig):
        if config.split_k > 1:
            elements = product(tuple(axis.size for axis in region.parallel_axes)).value(ir.graph.sizes)
            return float(config.split_k * ITEMSIZE["float32"] * elements)
        return parts_bytes(ir, region, config) / 2
    if isinstance(config, TileConfig) and region.sums:
        return partial_bytes(ir, region, config) / 2
    return 0.0


def _allocated_by_chunk(body: Graph, kernels: Sequence[KernelPlan]) -> float:
    """Bytes of the values of a chunk. Results are the loop's, and gradients overwrite products where that is possible."""
    ir = lower(body)
    plans = tuple(plan for plan in kernels if plan.key in body.named)
    tensors, done = _Tensors(body), set[str]()
    for position, unit in enumerate(units(ir, Schedule(kernels=plans))):
        region = unit.region
        tensors.use(unit, position)
        if region is None and body.node(unit.nodes[0]).op.split(".")[1] in VIEWS:
            tensors.add_view(body.node(unit.nodes[0]))
        for ref in region.outputs if region is not None else [Ref(unit.nodes[0])]:
            is_view = region is None and body.node(ref.name).op.split(".")[1] in VIEWS
            replaced = replaced_product(ir, region, ref, done) if region is not None else None
            if replaced is not None:
                tensors.add_replacement(ref, replaced)
            elif not is_view and ref not in body.outputs:
                tensors.add(ref, position)
        done |= set(unit.nodes)
    return tensors.peak()


def _bytes(graph: Graph, ref: Ref) -> float:
    return tensor_bytes(graph.type_of(ref), graph.sizes)
