"""Planner states for the tests of actions: without a GPU, on a device so slow that fusing tiny tensors pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtmc_lsp.actions.base import Situation
from mtmc_lsp.actions.catalogue import proposals
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.results import BaselineTime, Ratio, Speed, Timing
from mtmc_lsp.core.run import Candidate, Step
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import Region, analyse
from mtmc_lsp.rewrites import ALGEBRA, ir_of
from mtmc_lsp.schedule.schedule import Schedule

H200 = planning_model(("sm_90",))
SLOW = replace(
    H200, bandwidth=H200.bandwidth / 1e6, flops={name: rate / 1e6 for name, rate in H200.flops.items()}, sm_count=2
)


def schedule_of(candidate: Candidate) -> Schedule:
    return from_json(Schedule, candidate.schedule)


def situation(
    capture: Capture,
    candidate: Candidate,
    *,
    has_gpu: bool = False,
    strict: bool = True,
    device: DeviceModel = SLOW,
    history: Sequence[Step] = (),
) -> Situation:
    return Situation(capture.graph, schedule_of(candidate), device, has_gpu=has_gpu, strict=strict, history=history)


def proposed(
    capture: Capture,
    candidate: Candidate,
    kind: ActionKind,
    *,
    device: DeviceModel = SLOW,
    has_gpu: bool = False,
    history: Sequence[Step] = (),
) -> list[MacroAction]:
    actions = proposals(situation(capture, candidate, device=device, has_gpu=has_gpu, history=history))
    return [action for action in actions if action.kind is kind]


def timing(median_us: float, eager: float, graph_us: float | None) -> Timing:
    """A timing of a version; eager mode takes ``eager`` times as long."""
    same = Ratio(1.0, 0.99, 1.01)
    baselines = (BaselineTime("eager", median_us * eager, Ratio(eager, eager, eager), Speed.SLOWER),)
    return Timing(median_us, baselines, "eager", same, 100, "", 0.2, graph_us=graph_us)


def act(capture: Capture, candidate: Candidate, kind: ActionKind, *region: str, **params: object) -> Candidate:
    """``candidate`` after one action, written as in a run."""
    return BuiltinCoder().write(capture, candidate, MacroAction(kind, region, (0, 0), to_json(params)))


def region_and_program(capture: Capture) -> tuple[KernelIR, Region]:
    """The kernel IR of a graph, and all of its nodes as one region."""
    ir = ir_of(capture.graph, Schedule())
    return ir, analyse(ir, tuple(node.name for node in ir.graph.nodes))


def matching_nodes(graph: Graph, rule: str) -> list[str]:
    """The nodes that a rewrite rule matches."""
    rewrite = next(item for item in ALGEBRA if item.name == rule)
    return [node.name for node in graph.nodes if rewrite.match(graph, node)]


def start(capture: Capture, text: str) -> Candidate:
    return BuiltinCoder().start(capture, text)


def fully_fused(capture: Capture, candidate: Candidate) -> Candidate:
    """Apply the fusions that the planner proposes until there are none."""
    while actions := proposed(capture, candidate, ActionKind.FUSE):
        candidate = BuiltinCoder().write(capture, candidate, actions[0])
    return candidate


def with_algebra(capture: Capture, candidate: Candidate, rule: str) -> Candidate:
    """Apply a rewrite to every node that it matches; it must match at least one."""
    count = 0
    while True:
        graph = ir_of(capture.graph, schedule_of(candidate)).graph
        rules = [rewrite for rewrite in ALGEBRA if rewrite.name == rule]
        match = next((node.name for node in graph.nodes for rewrite in rules if rewrite.match(graph, node)), None)
        if match is None:
            assert count, f"{rule} matches nothing"
            return candidate
        candidate = act(capture, candidate, ActionKind.ALGEBRA, rule=rule, node=match, kernels=[])
        count += 1


def operations(capture: Capture, candidate: Candidate) -> list[str]:
    """The ATen operations of the rewritten graph."""
    graph = ir_of(capture.graph, schedule_of(candidate)).graph
    return [node.op.split(".")[1] for node in graph.nodes]
