"""Features of the graph, the present version and the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import is_float, is_low_precision, itemsize
from mtmc_lsp.core.graph import PRODUCTS, RECURRENT_GATES, Graph, InputKind, TensorType
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.protocols import CannotCode, State
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import VIEWS, CannotFuse
from mtmc_lsp.policies.feature_names import KERNEL_CLASSES, OPERATION_CLASSES
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.rewrites.layout_propagation import RULE as CHANNELS_LAST
from mtmc_lsp.schedule.configs import MatmulConfig, PrecisionMode, TileConfig, precision_of
from mtmc_lsp.schedule.launch_units import launches
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.tuning.cost import TORCH_EFFICIENCY, ZERO, Cost
from mtmc_lsp.tuning.schedule_cost import launch_cost

LEAST_US = 1e-3
"""Predicted times are divided by, so they are at least this long."""
UNKNOWN = Cost(math.nan, math.nan, math.nan)
REDUCTIONS = frozenset(
    "sum mean prod amax amin max min argmax argmin all any norm linalg_vector_norm var std var_mean std_mean logsumexp "
    "nll_loss nll_loss_forward mse_loss l1_loss smooth_l1_loss binary_cross_entropy".split()
)
NORMALISATIONS = frozenset("layer_norm group_norm batch_norm instance_norm rms_norm normalize".split())
SCANS = frozenset("cumsum cumprod cummax cummin logcumsumexp flip roll".split())
INDEXING = frozenset(
    "index gather embedding scatter scatter_add index_select index_add index_put take masked_fill where_index sort topk "
    "one_hot masked_select nonzero searchsorted bucketize".split()
)
RANDOM = frozenset("dropout bernoulli rand randn rand_like randn_like multinomial".split())
ATTENTIONS = ("scaled_dot_product", "flash_attention", "efficient_attention")


def operation_class(word: str) -> str:
    """The class of an ATen operation, by its name: ``product`` for ``addmm``; ``pointwise`` if no other class fits."""
    name = word.strip("_").removeprefix("native_").removesuffix("_")
    if any(part in name for part in ATTENTIONS):
        return "attention"
    if name in VIEWS or word in VIEWS:
        return "view"
    if name in RECURRENT_GATES:
        return "recurrent"
    if "conv" in name:
        return "convolution"
    if name in PRODUCTS:
        return "product"
    if "softmax" in name:
        return "softmax"
    if any(part in name for part in NORMALISATIONS):
        return "normalisation"
    if "pool" in name:
        return "pooling"
    for kind, names in (("reduction", REDUCTIONS), ("scan", SCANS), ("index", INDEXING), ("random", RANDOM)):
        if name in names:
            return kind
    return "pointwise"


@dataclass(frozen=True)
class RegionUnits:
    """What runs the nodes of a region in the present version."""

    kernels: int
    torch_calls: int
    """Without views."""
    classes: frozenset[str]
    """Classes of its operations."""

    @property
    def total(self) -> int:
        """Launches of the region, as far as they do not share one."""
        return self.kernels + self.torch_calls


@dataclass(frozen=True)
class Version:
    """The present version, as far as features use it."""

    schedule: Schedule
    classes: Mapping[str, str]
    """Class of each node of the rewritten graph, by its name."""
    predicted_us: float
    launch_costs: Sequence[tuple[frozenset[str], Cost]]
    """The nodes of each launch, and its predicted cost; empty if the cost model cannot read the version."""
    features: Mapping[str, float]

    def units_of(self, region: Collection[str]) -> RegionUnits:
        """The kernels and torch calls that compute some nodes of a region."""
        kernels = {self._kernel_of[name] for name in region if name in self._kernel_of}
        others = [name for name in region if name not in self._kernel_of and self.classes.get(name, "view") != "view"]
        return RegionUnits(len(kernels), len(others), frozenset(self.classes[n] for n in region if n in self.classes))

    def units_us(self, region: Collection[str]) -> float:
        """Predicted time of the launches that compute some nodes of a region."""
        return sum(cost.us for nodes, cost in self.launch_costs if not nodes.isdisjoint(region))

    @cached_property
    def _kernel_of(self) -> Mapping[str, str]:
        return {node: plan.key for plan in self.schedule.kernels for node in plan.nodes}


def version_of(state: State) -> Version:
    """Structure and predicted time of the state's version."""
    schedule = from_json(Schedule, state.candidate.schedule)
    ir = ir_of(state.capture.graph, schedule)
    classes = {node.name: operation_class(node.op.split(".")[1]) for node in ir.graph.nodes}
    costs = _launch_costs(ir, schedule, state.device)
    cost = sum((item for _, item in costs), ZERO) if costs or not ir.graph.nodes else UNKNOWN
    predicted_us = cost.us if math.isnan(cost.us) else max(LEAST_US, cost.us)
    in_kernels = {name for plan in schedule.kernels for name in plan.nodes}
    calls = [kind for name, kind in classes.items() if name not in in_kernels and kind != "view"]
    merged = sum(len(group) - 1 for group in schedule.launches)
    launches = len(schedule.kernels) - merged + len(calls)
    kinds = [plan.config.json_tag for plan in schedule.kernels]
    memory_us = cost.bytes / (state.device.bandwidth * TORCH_EFFICIENCY) * 1e6
    arithmetic_us = cost.flops / _peak(state.capture.graph, state.device) * 1e6
    features = {f"schedule.kernels_{kind}": float(kinds.count(kind)) for kind in KERNEL_CLASSES}
    features |= {
        "schedule.kernels": log(len(kinds)),
        "schedule.shared_launches": float(len(schedule.launches)),
        "schedule.launches": log(launches),
        "schedule.torch_calls": log(len(calls)),
        "schedule.torch_products": log(calls.count("product")),
        "schedule.torch_convolutions": log(calls.count("convolution")),
        "schedule.nodes_per_kernel": len(in_kernels) / len(kinds) if kinds else math.nan,
        "schedule.recomputed": float(sum(len(plan.recomputed) for plan in schedule.kernels)),
        "schedule.rewrites": float(len(schedule.rewrites)),
        "schedule.channels_last": float(any(rewrite.rule == CHANNELS_LAST for rewrite in schedule.rewrites)),
        "schedule.cuda_graph": float(schedule.cuda_graph),
        "schedule.split_kernels": float(sum(_is_split(plan) for plan in schedule.kernels)),
        "schedule.tensor_core_kernels": float(sum(_uses_tensor_cores(plan) for plan in schedule.kernels)),
        "schedule.persistent_kernels": float(
            sum(bool(getattr(plan.config, "persist", 0)) for plan in schedule.kernels)
        ),
        "schedule.predicted_us": math.log2(predicted_us),
        "schedule.launch_share": _share_of(launches * state.device.launch_us, predicted_us),
        "schedule.memory_share": _share_of(memory_us, predicted_us),
        "schedule.arithmetic_share": _share_of(arithmetic_us, predicted_us),
    }
    return Version(schedule, classes, predicted_us, costs, features)


def _launch_costs(ir: KernelIR, schedule: Schedule, device: DeviceModel) -> list[tuple[frozenset[str], Cost]]:
    """The nodes and the predicted cost of each launch; none for a version of a language model that the cost model cannot read."""
    try:
        return [
            (
                frozenset(name for unit in launch for name in unit.nodes),
                launch_cost(ir, launch, device, schedule.loop_kernels),
            )
            for launch in launches(ir, schedule)
        ]
    except (CannotCode, CannotFuse):
        return []


def graph_features(capture: Capture) -> Mapping[str, float]:
    """Features of the captured graph; the same for all versions of a program."""
    graph = capture.graph
    kinds = [operation_class(node.op.split(".")[1]) for node in graph.nodes]
    types = [kind for node in graph.nodes for kind in node.outputs]
    tensors = [item.type for item in graph.inputs] + types
    elements = [_elements(kind, graph) for kind in tensors]
    rows = [float(kind.shape[-1].value(graph.sizes)) for kind in tensors if kind.shape]
    stored = [item.kind for item in graph.inputs]
    features = {f"graph.operations_{kind}": log(kinds.count(kind)) for kind in OPERATION_CLASSES}
    return features | {
        "graph.operations": log(len(kinds)),
        "graph.inputs": float(stored.count(InputKind.ARGUMENT)),
        "graph.parameters": log(len(stored) - stored.count(InputKind.ARGUMENT)),
        "graph.outputs": float(len(graph.outputs)),
        "graph.mutations": float(len(graph.mutations)),
        "graph.bytes": log(capture.bytes),
        "graph.flops": log(capture.flops),
        "graph.intensity": log(capture.flops / capture.bytes) if capture.bytes > 0 else math.nan,
        "graph.largest_tensor": log(max(elements, default=0.0)),
        "graph.longest_row": log(max(rows, default=0.0)),
        "graph.shortest_row": log(min(rows, default=0.0)),
        "graph.share_float32": _share(types, lambda dtype: dtype == "float32"),
        "graph.share_16bit": _share(types, lambda dtype: is_low_precision(dtype) and itemsize(dtype) == 2),
        "graph.share_float64": _share(types, lambda dtype: dtype == "float64"),
        "graph.share_integer": _share(types, lambda dtype: not is_float(dtype)),
        "graph.allows_tf32": float(graph.allows_tf32),
    }


def device_features(state: State) -> Mapping[str, float]:
    """Features of the device, and whether steps are timed on it."""
    device = state.device
    return {
        "device.bandwidth": device.bandwidth / 1e12,
        "device.l2_bandwidth": device.l2_bandwidth / 1e12,
        "device.l2_bytes": device.l2_bytes / 2**20,
        "device.fp32": device.flops.get("fp32", math.nan) / 1e12,
        "device.tf32": device.flops.get("tf32", math.nan) / 1e12,
        "device.fp16": device.flops.get("fp16", math.nan) / 1e12,
        "device.fp64": device.fp64_flops / 1e12,
        "device.sm_count": float(device.sm_count),
        "device.shared_bytes": device.shared_bytes / 1024,
        "device.launch_us": device.launch_us,
        "device.has_tma": float(device.has_tma),
        "device.is_amd": float(device.vendor == "amd"),
        "device.has_gpu": float(state.has_gpu),
    }


def log(value: float) -> float:
    """Logarithm to base 2 of a count or size; 0 stays 0."""
    return math.log2(1.0 + max(0.0, value))


def _share_of(part_us: float, total_us: float) -> float:
    share = part_us / total_us
    return share if math.isnan(share) else min(1.0, share)


def _elements(kind: TensorType, graph: Graph) -> float:
    return float(kind.numel.value(graph.sizes))


def _share(types: Collection[TensorType], holds: Callable[[str], bool]) -> float:
    return sum(holds(kind.dtype) for kind in types) / len(types) if types else math.nan


def _peak(graph: Graph, device: DeviceModel) -> float:
    """Operations per second of most of the graph's products."""
    dtypes = [kind.dtype for node in graph.nodes for kind in node.outputs]
    if sum(is_low_precision(dtype) for dtype in dtypes) * 2 > len(dtypes):
        return device.flops["fp16"]
    return device.flops["tf32" if graph.allows_tf32 else "fp32"]


def _is_split(plan: KernelPlan) -> bool:
    return isinstance(plan.config, (TileConfig, MatmulConfig)) and plan.config.is_split


def _uses_tensor_cores(plan: KernelPlan) -> bool:
    return precision_of(plan.config) not in (None, PrecisionMode.IEEE)
