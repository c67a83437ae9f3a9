"""The state of a search as text for a language model, within a budget of tokens.

The parts are in the order in which they change: device and task stay for a whole run, the schedule changes with accepted steps,
the history and the choices with every step. So a model can reuse what it computed for the beginning of the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import short_dtype
from mtmc_lsp.core.graph import Graph, Node, TensorType
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.policies.lm.action_text import MOST_NAMES, config_text, region_text
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule

FORMAT = 2
"""Version of the texts. A model that was trained with other texts is not used."""
STATE_TOKENS = 384
"""Budget of a state, in estimated tokens."""
GRAPH_SHARE, SCHEDULE_SHARE, HISTORY_SHARE = 0.5, 0.2, 0.2
"""Shares of the budget; the rest is for the device and the headings. Each part has its share whatever the others need, so the
beginning of the text does not change during a run."""
QUESTION = "Next:"
"""The last line of a state. The action's text follows it."""
RESULTS: Mapping[Outcome, str] = {
    Outcome.NOT_LEGAL: "not legal",
    Outcome.COMPILE_ERROR: "does not compile",
    Outcome.WRONG: "wrong",
    Outcome.CORRECT: "correct",
    Outcome.SLOWER: "not faster",
    Outcome.FASTER: "faster",
    Outcome.OUT_OF_TIME: "out of time",
}
_PIECES = re.compile(r"[A-Za-z]{1,4}|\d|\n|[^\sA-Za-z\d]")


@dataclass(frozen=True)
class Tried:
    """One step of the history."""

    action: str
    """The action's text."""
    outcome: Outcome
    ratio: float | None = None
    """Speedup over the version that it changed; None if it was not timed."""

    @property
    def text(self) -> str:
        """``fuse add, gelu: faster 1.31x``."""
        speed = f" {self.ratio:.2f}x" if self.ratio is not None else ""
        return f"{self.action.rstrip('.')} -> {RESULTS[self.outcome]}{speed}"


def estimated_tokens(text: str) -> int:
    """An estimate, within about a tenth for SmolLM2: four letters, a digit, a sign or a line break are one token each."""
    return len(_PIECES.findall(text))


def state_text(
    device: str, task: str, schedule: str, tried: Sequence[Tried], choices: str, *, tokens: int = STATE_TOKENS
) -> str:
    """The complete state.

    Args:
        device: by :func:`device_text`; empty to leave it out.
        task: by :func:`task_text`.
        schedule: by :func:`schedule_text`.
        tried: the steps so far, oldest first; the last ones that fit are shown.
        choices: by :func:`mtmc_lsp.policies.lm.numbers.choices_text`.
        tokens: the budget that the other texts were made for.
    """
    lines = _fitting([step.text for step in reversed(tried)], HISTORY_SHARE * tokens)
    left_out = len(tried) - len(lines)
    shown = [f"({left_out} earlier)"] * bool(left_out) + lines[::-1]
    history = ["Tried:", *shown] if tried else ["Tried: nothing"]
    return "\n".join([*([device] if device else []), task, schedule, *history, choices, QUESTION])


def device_text(device: DeviceModel) -> str:
    """``GPU: NVIDIA H200 sm_90, 132 SMs, 4.1 TB/s, fp16 760 TFLOP/s, launch 2.1 us``."""
    parts = [f"GPU: {device.name} {device.arch}", f"{device.sm_count} SMs", f"{device.bandwidth / 1e12:.1f} TB/s"]
    if rate := device.flops.get("fp16"):
        parts.append(f"fp16 {rate / 1e12:.0f} TFLOP/s")
    return ", ".join([*parts, f"launch {device.launch_us:.1f} us"])


def task_text(graph: Graph, *, tokens: int = STATE_TOKENS) -> str:
    """The graph: inputs, then one line for each node with its shape. Of a long graph, the beginning and the end."""
    budget = GRAPH_SHARE * tokens
    inputs = [f"{item.name} {_type_text(item.type, graph.sizes)}" for item in graph.inputs]
    # Inputs take at most a third: large modules have hundreds of parameters.
    shown = _fitting(inputs, budget / 3)
    more = f", {len(inputs) - len(shown)} more" if len(shown) < len(inputs) else ""
    head = f"Task: {len(graph.nodes)} operations on {', '.join(shown)}{more}"
    lines = [_node_text(node, graph.sizes) for node in graph.nodes]
    return "\n".join([head, *_both_ends(lines, budget - estimated_tokens(head))])


def schedule_text(schedule: Schedule, *, tokens: int = STATE_TOKENS) -> str:
    """The kernels, rewrites and modes of a version; ``Kernels: none`` for the user's code."""
    lines = [_kernel_text(plan) for plan in schedule.kernels]
    lines += [f"together: {', '.join(group)}" for group in schedule.launches]
    lines += [f"rewrite: {rewrite.rule} {rewrite.node}".rstrip() for rewrite in schedule.rewrites]
    lines += ["CUDA graph"] * schedule.cuda_graph
    if not lines:
        return "Kernels: none"
    return "\n".join([f"Kernels: {len(schedule.kernels)}", *_both_ends(lines, SCHEDULE_SHARE * tokens)])


def _node_text(node: Node, sizes: Mapping[str, int]) -> str:
    names = list(dict.fromkeys(ref.name for ref in node.inputs()))
    reads = ", ".join([*names[:MOST_NAMES], *["..."] * (len(names) > MOST_NAMES)])
    types = ", ".join(_type_text(output, sizes) for output in node.outputs)
    word = "" if node.name.rstrip("_0123456789") == node.word else f" {node.word}"
    return f"{node.name}{word}({reads}) {types}".rstrip()


def _kernel_text(plan: KernelPlan) -> str:
    config = to_json(plan.config)
    assert isinstance(config, dict)
    again = f", recomputes {region_text(plan.recomputed)}" if plan.recomputed else ""
    return f"{region_text(plan.nodes)}: {config_text(config)}{again}"


def _type_text(kind: TensorType, sizes: Mapping[str, int]) -> str:
    """``f32[64,200]``, with the sizes of the workload."""
    shape = ",".join(str(_value(size, sizes)) for size in kind.shape)
    return f"{short_dtype(kind.dtype)}[{shape}]"


def _value(size: Size, sizes: Mapping[str, int]) -> object:
    return size.value(sizes) if set(size.symbols()) <= set(sizes) else size


def _fitting(lines: Sequence[str], tokens: float) -> list[str]:
    """The first lines that fit into the budget."""
    fitting = []
    for line in lines:
        tokens -= estimated_tokens(line) + 1
        if tokens < 0:
            break
        fitting.append(line)
    return fitting


def _both_ends(lines: Sequence[str], tokens: float) -> list[str]:
    """As many of the first and the last lines as fit, in turn, with the number of the others between them."""
    first: list[str] = []
    last: list[str] = []
    while len(first) + len(last) < len(lines):
        from_end = len(last) < len(first)
        line = lines[-1 - len(last)] if from_end else lines[len(first)]
        tokens -= estimated_tokens(line) + 1
        if tokens < 0:
            return [*first, f"... {len(lines) - len(first) - len(last)} more", *last[::-1]]
        (last if from_end else first).append(line)
    return [*first, *last[::-1]]
