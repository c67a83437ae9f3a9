"""CUDA graph: replay all launches of a call as one graph, where launch overhead exceeds compute time.

*Legal* where a call only computes its results, and updates of the module's buffers, from its arguments and the module's tensors:
it changes no argument, draws no random numbers, its arguments fill their memory without gaps, and its results do not alias
arguments. Arguments are copied into the graph's memory and results out of it. The graph reads and writes the module's tensors in
place; if they are replaced, it is captured again. Capturing runs nothing, so the first call updates buffers once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from mtmc_lsp.actions.base import IllegalAction, Situation, ir_for
from mtmc_lsp.core.action import ActionKind, Expected, MacroAction
from mtmc_lsp.core.graph import Graph, InputKind, TensorType
from mtmc_lsp.ir.primitives import PrimOp
from mtmc_lsp.ir.regions import VIEWS
from mtmc_lsp.rewrites.graph_editing import base_name
from mtmc_lsp.schedule.launch_units import launch_count
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.tuning.cost import tensor_bytes
from mtmc_lsp.tuning.schedule_cost import schedule_cost

COPY_LAUNCHES = 0.75
"""Time of a copy of a small tensor within a stream, in kernel launches (H200: 3 us)."""
LEAST_SHARE = 0.1
"""Share of a call's time that a graph must save."""
FIRST_LAUNCHES = 32
"""A call with more operations than this may begin with a graph. Fewer operations become few kernels, which are tried first."""
HOST_LAUNCHES = 3.0
"""Host time of an operation of an eager network, in kernel launches. Seven networks with batches of 8 took 33 to 47 us per
operation on the busy host of an H200 whose launches take 4 us (commit f92063fe). A third of it is assumed, an estimate for idle
hosts."""


class CudaGraph:
    """Replays the launcher as one CUDA graph; the launcher may still consist of torch calls."""

    kind = ActionKind.CUDA_GRAPH

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The same kernels, replayed from a CUDA graph."""
        ir = ir_for(graph, schedule)
        if schedule.cuda_graph:
            raise IllegalAction("cuda-graph: the call is replayed already")
        if ir.graph.backward is not None:
            raise IllegalAction("cuda-graph: autograd runs the backward pass apart from the call")
        arguments = {item.name for item in ir.graph.inputs if item.kind is InputKind.ARGUMENT}
        if any(mutation.input in arguments for mutation in ir.graph.mutations):
            raise IllegalAction("cuda-graph: the call changes its arguments")
        if any(item.name in arguments and not _is_dense(item.type, ir.graph.sizes) for item in ir.graph.inputs):
            raise IllegalAction("cuda-graph: an argument has gaps or shared elements in memory, which its copy has not")
        drawn = any(node.draws for node in ir.graph.nodes)
        if drawn or any(prim.op is PrimOp.RANDOM for prim in ir.prims.values()):
            raise IllegalAction("cuda-graph: each call draws new random numbers")
        nodes = ir.graph.named
        returned = [ref.name for ref in ir.graph.outputs if ref is not None]
        if not returned:
            raise IllegalAction("cuda-graph: the call returns no tensor")
        if any(name not in nodes or base_name(nodes[name]) in VIEWS for name in returned):
            raise IllegalAction("cuda-graph: a result may be a view of an argument")
        return replace(schedule, cuda_graph=True)

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Where replaying the present version was measured to be much faster, and as the first step of networks.

        A network of many short operations begins with the graph: that step gains most, and launch overhead then no longer
        hides the gains of later steps.
        """
        graph, schedule = situation.ir.graph, situation.schedule
        if not situation.has_gpu or graph.backward is not None or schedule.cuda_graph:
            return
        moved = [i.type for i in graph.inputs if i.kind is InputKind.ARGUMENT]
        moved += [graph.type_of(ref) for ref in graph.outputs]
        copies = sum(2.0 * tensor_bytes(kind, graph.sizes) / situation.device.bandwidth * 1e6 for kind in moved)
        copies = max(copies, COPY_LAUNCHES * situation.device.launch_us * len(moved))
        launched_us, replayed_us = _times(situation)
        saved = launched_us - replayed_us - copies
        if saved < LEAST_SHARE * launched_us or not saved:
            return
        launches = len(schedule.kernels) or launch_count(situation.ir, schedule)
        names = [name for kernel in schedule.kernels for name in kernel.nodes]
        action = MacroAction(
            kind=self.kind,
            region=tuple(names or (node.name for node in graph.nodes)),
            lines=(0, 0),
            params={"launches": launches},
            rationale="Launch overhead exceeds compute time. One CUDA graph launches all kernels at once, on "
            "copies of the arguments. The graph keeps the memory of intermediate values. While the first call "
            "captures it, other threads cannot draw random numbers on the GPU.",
            expected=Expected(saved),
            text="Replay all launches of a call as one CUDA graph",
        )
        try:
            self.apply(situation.graph, situation.schedule, action)
        except IllegalAction:
            return
        yield action


def _times(situation: Situation) -> tuple[float, float]:
    """Microseconds of a call whose operations are launched one by one, and of its replay; zeros if they are not known.

    They are measured for a version with a timing. For the code before the first step they are estimated.
    """
    timing, schedule = situation.timing, situation.schedule
    if timing is not None:
        return (timing.median_us, timing.graph_us) if timing.graph_us is not None else (0.0, 0.0)
    if any(node.loop is not None or node.row_loop is not None for node in situation.ir.graph.nodes):
        return 0.0, 0.0
    count = launch_count(situation.ir, schedule)
    if count <= FIRST_LAUNCHES:
        return 0.0, 0.0
    device_us = schedule_cost(situation.ir, schedule, situation.device).us
    return max(device_us, count * HOST_LAUNCHES * situation.device.launch_us), device_us


def _is_dense(kind: TensorType, sizes: Mapping[str, int]) -> bool:
    """Whether the elements fill their memory without gaps, each in one position. A copy then has the same strides."""
    dense = 1
    dimensions = (
        (stride.value(sizes), size.value(sizes)) for stride, size in zip(kind.stride, kind.shape, strict=True)
    )
    for stride, size in sorted((stride, size) for stride, size in dimensions if size > 1):
        if stride != dense:
            return False
        dense *= size
    return True
