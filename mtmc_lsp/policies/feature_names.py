"""The features of the ranker: a stable list of names.

A name is ``group.feature``. A change of the list or of a feature's meaning needs a new :data:`FEATURE_VERSION`, which makes older
model files unusable.
"""

from __future__ import annotations

from mtmc_lsp.core.action import GRAPH_KINDS, ActionKind

FEATURE_VERSION = 1
GRAPH, SCHEDULE, ACTION, DEVICE, HISTORY = "graph", "schedule", "action", "device", "history"
GROUPS = (GRAPH, SCHEDULE, ACTION, DEVICE, HISTORY)

OPERATION_CLASSES = (
    *("pointwise", "reduction", "normalisation", "softmax", "product", "convolution", "attention", "pooling"),
    *("recurrent", "scan", "index", "view", "random"),
)
"""Classes of ATen operations, for histograms."""
KERNEL_CLASSES = ("tile", "matmul", "attention", "recurrent")
"""Kinds of kernels of a schedule, by their configuration."""

UNLEARNED_KINDS = (
    ActionKind.CHUNK_ROWS,
    ActionKind.PARALLEL_SCAN,
    ActionKind.CHUNK_PRODUCTS,
    ActionKind.RECOMPUTE_ATTENTION,
)
LEARNED_KINDS = tuple(kind for kind in GRAPH_KINDS if kind not in UNLEARNED_KINDS)
"""Kinds of actions that the features tell apart. Transitions are of calls without gradients and have no loops over rows, and none
has a scan or chunks of time steps yet."""

GRAPH_FEATURES = (
    *(f"graph.operations_{name}" for name in OPERATION_CLASSES),
    "graph.operations",
    "graph.inputs",
    "graph.parameters",
    "graph.outputs",
    "graph.mutations",
    "graph.bytes",
    "graph.flops",
    "graph.intensity",
    "graph.largest_tensor",
    "graph.longest_row",
    "graph.shortest_row",
    "graph.share_float32",
    "graph.share_16bit",
    "graph.share_float64",
    "graph.share_integer",
    "graph.allows_tf32",
)
SCHEDULE_FEATURES = (
    *(f"schedule.kernels_{name}" for name in KERNEL_CLASSES),
    "schedule.kernels",
    "schedule.shared_launches",
    "schedule.launches",
    "schedule.torch_calls",
    "schedule.torch_products",
    "schedule.torch_convolutions",
    "schedule.nodes_per_kernel",
    "schedule.recomputed",
    "schedule.rewrites",
    "schedule.channels_last",
    "schedule.cuda_graph",
    "schedule.split_kernels",
    "schedule.tensor_core_kernels",
    "schedule.persistent_kernels",
    "schedule.predicted_us",
    "schedule.launch_share",
    "schedule.memory_share",
    "schedule.arithmetic_share",
)
ACTION_FEATURES = (
    "action.is_stop",
    *(f"action.kind_{kind.value}" for kind in LEARNED_KINDS),
    "action.rank",
    "action.saved_us",
    "action.saved_share",
    "action.saved_of_best",
    "action.best_saved_share",
    "action.bytes_saved",
    "action.bytes_ratio",
    "action.flops_ratio",
    "action.region_nodes",
    "action.region_share",
    "action.region_units",
    "action.region_kernels",
    *(f"action.region_{name}" for name in ("reduction", "product", "convolution", "attention", "view")),
    "action.sites",
    "action.variants",
    "action.changes_rounding",
)
DEVICE_FEATURES = (
    "device.bandwidth",
    "device.l2_bandwidth",
    "device.l2_bytes",
    "device.fp32",
    "device.tf32",
    "device.fp16",
    "device.fp64",
    "device.sm_count",
    "device.shared_bytes",
    "device.launch_us",
    "device.has_tma",
    "device.is_amd",
    "device.has_gpu",
)
HISTORY_FEATURES = (
    "history.steps",
    "history.faster",
    "history.slower",
    "history.failed",
    "history.since_gain",
    "history.last_outcome",
    "history.last_ratio",
    "history.total_speedup",
    "history.measured_to_predicted",
    "history.kind_tried",
    "history.kind_faster",
    "history.kind_slower",
    "history.kind_failed",
    "history.kind_last_ratio",
    "history.region_tried",
    "history.region_not_faster",
)
FEATURES = (*GRAPH_FEATURES, *SCHEDULE_FEATURES, *ACTION_FEATURES, *DEVICE_FEATURES, *HISTORY_FEATURES)
"""All features in the order of a row."""


def features_without(*groups: str) -> tuple[str, ...]:
    """The features of all but some groups, for ablations."""
    return tuple(name for name in FEATURES if name.partition(".")[0] not in groups)
