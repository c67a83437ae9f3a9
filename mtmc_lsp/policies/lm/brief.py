"""Texts without names, shapes and tiles, for a model that has only the measured programs to learn from.

They tell classes of operations and kernels instead. Names differ from program to program: a small model remembers them, and
learns nothing for programs that it has not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.dtypes import short_dtype
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.policies.lm.action_text import VERBS, numbered
from mtmc_lsp.policies.lm.numbers import power_of_two
from mtmc_lsp.policies.state_features import operation_class
from mtmc_lsp.schedule.schedule import Schedule

MOST_DTYPES = 2
LISTS: Mapping[str, str] = {"sites": "sites", "variants": "variants"}
"""Parameters that are lists, and the word for their number."""
TOLD = ("kind", "precision")
"""Fields of a configuration that are told."""


def brief_task(capture: Capture) -> str:
    """``Task: 6 operations, pointwise 4, reduction 1, view 1; f32; 64 MB, 2 GFLOP``."""
    nodes = capture.graph.nodes
    kinds = _counts(operation_class(node.op.split(".")[1]) for node in nodes)
    dtypes = Counter(short_dtype(kind.dtype) for node in nodes for kind in node.outputs).most_common(MOST_DTYPES)
    work = f"{power_of_two(capture.bytes / 1e6)} MB, {power_of_two(capture.flops / 1e9)} GFLOP"
    return f"Task: {'; '.join([f'{len(nodes)} operations, {kinds}', ', '.join(name for name, _ in dtypes), work])}"


def brief_schedule(schedule: Schedule) -> str:
    """``Kernels: 2, matmul 1, tile 1; together 2; CUDA graph; hoist``."""
    if not schedule.kernels and not schedule.rewrites and not schedule.cuda_graph:
        return "Kernels: none"
    kinds = _counts(plan.config.json_tag for plan in schedule.kernels)
    parts = [f"Kernels: {len(schedule.kernels)}{', ' if kinds else ''}{kinds}"]
    parts += [f"together {len(group)}" for group in schedule.launches]
    parts += ["CUDA graph"] * schedule.cuda_graph
    return "; ".join([*parts, *sorted({rewrite.rule for rewrite in schedule.rewrites})])


def brief_action_texts(actions: Sequence[MacroAction]) -> list[str]:
    """One sentence for each action; equal ones get a number in the order of the actions' keys."""
    return numbered(actions, [brief_action(action) for action in actions])


def brief_action(action: MacroAction) -> str:
    """``fuse pointwise 3, reduction 1: tile.``."""
    kinds = _counts(operation_class(name.rstrip("_0123456789")) for name in action.region)
    details = [
        f"{len(items)} {word}"
        for name, word in LISTS.items()
        if isinstance(items := action.params.get(name), (list, tuple))
    ]
    config = action.params.get("config")
    if isinstance(config, Mapping):
        details += [str(config[name]) for name in TOLD if config.get(name)]
    if "rule" in action.params:
        details.append(str(action.params["rule"]))
    return f"{VERBS[action.kind]} {kinds or 'all'}{': ' if details else ''}{', '.join(details)}."


def _counts(kinds: Iterable[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(Counter(kinds).items()))
