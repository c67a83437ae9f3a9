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
from mtmc_lsp.actions.loops.launched_loops import launched_loops
from mtmc_lsp.actions.networks.first_version import is_network, with_first_version
from mtmc_lsp.core.action import ActionKind, Expected, MacroAction
from mtmc_lsp.core.graph import Graph, InputKind, TensorType
from mtmc_lsp.ir.primitives import PrimOp
from mtmc_lsp.ir.regions import VIEWS
from mtmc_lsp.rewrites.graph_editing import base_name
from mtmc_lsp.schedule.launch_units import launch_count
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.tuning.cost import tensor_bytes

COPY_LAUNCHES = 0.75
"""Time of a copy of a small tensor within a stream, in kernel launches (H200: 3 us)."""
LEAST_SHARE = 0.1
"""Share of a call's time that a graph must save."""
RATIONALE = (
    "Launch overhead exceeds compute time. One CUDA graph launches all kernels at once, on copies of the arguments. The graph "
    "keeps the memory of intermediate values. While the first call captures it, other threads cannot draw random numbers on the "
    "GPU."
)
HOST_LAUNCHES = 3.0
"""Host time of an operation of an eager network, in kernel launches. Seven networks with batches of 8 took 33 to 47 us per
operation on the busy host of an H200 whose launches take 4 us (commit f92063fe). A third of it is assumed, an estimate for idle
hosts."""


class CudaGraph:
    """Replays the launcher as one CUDA graph; the launcher may still consist of torch calls."""

    kind = ActionKind.CUDA_GRAPH

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The same kernels, or those of a network's first version, replayed from a CUDA graph."""
        schedule = with_first_version(graph, schedule, action)
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
        """Where replaying the present version was measured to be much faster, and as the first step of networks and of loops
        whose iterations are launches.

        A network of many short operations begins with the graph: that step gains most, and launch overhead then no longer
        hides the gains of later steps.
        """
        schedule = situation.schedule
        if (action := launched_loops(situation, RATIONALE)) is not None:
            if self._applies(situation, action):
                yield action
            return
        saved = saved_us(situation, schedule)
        if not saved:
            return
        names = [name for kernel in schedule.kernels for name in kernel.nodes]
        action = MacroAction(
            kind=self.kind,
            region=tuple(names or (node.name for node in situation.ir.graph.nodes)),
            lines=(0, 0),
            params={"launches": len(schedule.kernels) or launch_count(situation.ir, schedule)},
            rationale=RATIONALE,
            expected=Expected(saved),
            text="Replay all launches of a call as one CUDA graph",
        )
        if self._applies(situation, action):
            yield action

    def _applies(self, situation: Situation, action: MacroAction) -> bool:
        try:
            self.apply(situation.graph, situation.schedule, action)
        except IllegalAction:
            return False
        return True


def saved_us(situation: Situation, schedule: Schedule) -> float:
    """Microseconds that replaying a schedule saves; 0 if it saves little, or if it is not known.

    Times of the present version are measured. Those of a network before the first step are estimated.
    """
    ir = ir_for(situation.graph, schedule)
    graph = ir.graph
    if not situation.has_gpu or graph.backward is not None or schedule.cuda_graph:
        return 0.0
    moved = [i.type for i in graph.inputs if i.kind is InputKind.ARGUMENT]
    moved += [graph.type_of(ref) for ref in graph.outputs]
    copies = sum(2.0 * tensor_bytes(kind, graph.sizes) / situation.device.bandwidth * 1e6 for kind in moved)
    copies = max(copies, COPY_LAUNCHES * situation.device.launch_us * len(moved))
    launched_us, replayed_us = _times(situation, schedule)
    saved = launched_us - replayed_us - copies
    return saved if saved >= LEAST_SHARE * launched_us else 0.0


def _times(situation: Situation, schedule: Schedule) -> tuple[float, float]:
    """Microseconds of a call whose operations are launched one by one, and of its replay; zeros if they are not known."""
    timing = situation.timing
    if timing is not None:
        return (timing.median_us, timing.graph_us) if timing.graph_us is not None else (0.0, 0.0)
    if not is_network(situation):
        return 0.0, 0.0
    count = launch_count(ir_for(situation.graph, schedule), schedule)
    device_us = situation.cost(schedule).us
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
