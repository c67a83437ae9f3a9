"""Turns stored transitions into the trees of texts that the trainer reads."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.learning.transitions import Program, Transition, Version
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.device.choice import model_of_gpu, planning_model
from mtmc_lsp.policies.lm.action_text import action_texts
from mtmc_lsp.policies.lm.brief import brief_action_texts, brief_schedule, brief_task
from mtmc_lsp.policies.lm.numbers import action_numbers, version_text
from mtmc_lsp.policies.lm.prompt import STATE_TOKENS, device_text, schedule_text, task_text
from mtmc_lsp.policies.state_features import version_of
from mtmc_lsp.programs.splits import Split
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.training.lm.tree import DecisionTree, Edge, Node

DEFAULT_ARCH = "sm_90"
"""The architecture that untimed programs were compiled for, as the state tells it."""
VARIANT = "variant"
"""``chosen_by`` of single configurations of an action that measures several: no planner proposes them."""


def build_trees(
    programs: Iterable[Program],
    versions: Iterable[Version],
    transitions: Iterable[Transition],
    part_of: Callable[[Program], Split],
    *,
    tokens: int = STATE_TOKENS,
    names: bool = True,
) -> list[DecisionTree]:
    """One tree for each program with transitions, in the order of the programs' ids.

    Args:
        part_of: the part of a program, by its family: train, validation or test. Test programs are left out.
        tokens: budget of a state.
        names: whether texts name operations, shapes and configurations.
    """
    by_program: defaultdict[str, list[Transition]] = defaultdict(list)
    for transition in transitions:
        if transition.chosen_by == VARIANT:
            continue
        by_program[transition.program].append(transition)
    versions_of: defaultdict[str, dict[str, Version]] = defaultdict(dict)
    for version in versions:
        versions_of[version.program][version.id] = version
    trees = []
    for program in sorted(programs, key=lambda each: each.id):
        if part_of(program) is Split.TEST:
            continue
        tree = _tree(
            program,
            versions_of[program.id],
            by_program[program.id],
            part_of(program) is Split.VALIDATION,
            tokens,
            names,
        )
        if tree is not None:
            trees.append(tree)
    return trees


def _tree(
    program: Program,
    versions: Mapping[str, Version],
    transitions: Sequence[Transition],
    is_held_out: bool,
    tokens: int,
    names: bool,
) -> DecisionTree | None:
    roots = [version.id for version in versions.values() if not version.parent]
    # Times of two GPUs do not compare, so a tree holds those of the GPU with the most.
    timed = Counter(transition.device for transition in transitions if transition.ratio is not None)
    gpu = timed.most_common(1)[0][0] if timed else ""
    tried: defaultdict[str, dict[str, Transition]] = defaultdict(dict)
    for transition in sorted(transitions, key=lambda each: each.ratio is None):
        if transition.device in ("", gpu) and transition.version in versions:
            tried[transition.version].setdefault(transition.key, transition)
    if not roots or roots[0] not in tried:
        return None
    arch = program.capture.environment.capability or DEFAULT_ARCH
    device = model_of_gpu(gpu, arch) if gpu else planning_model((arch,))
    nodes = {}
    for name, version in versions.items():
        several = sorted(tried.get(name, {}).values(), key=lambda each: (each.rank < 0, each.rank, each.key))
        known = from_json(Schedule, version.schedule)
        schedule = schedule_text(known, tokens=tokens) if names else brief_schedule(known)
        node = Node(schedule, (), _path(version, versions))
        state = State(program.capture, Candidate(name, None, None, "", None, version.schedule), (), device, bool(gpu))
        nodes[name] = _with_edges(node, several, versions, state, names) if several else node
    graph = task_text(program.capture.graph, tokens=tokens) if names else brief_task(program.capture)
    return DecisionTree(program.id, is_held_out, device_text(device), gpu, graph, roots[0], nodes)


def _with_edges(
    node: Node, transitions: Sequence[Transition], versions: Mapping[str, Version], state: State, names: bool
) -> Node:
    """The node with its actions and with the predictions of the cost model, by the functions that a run uses."""
    version = version_of(state)
    actions = [from_json(MacroAction, each.action) for each in transitions]
    texts = action_texts(actions) if names else brief_action_texts(actions)
    edges = tuple(
        Edge(
            each.key,
            text,
            each.outcome,
            each.ratio,
            each.result if each.result in versions else "",
            action_numbers(action, version),
        )
        for each, action, text in zip(transitions, actions, texts, strict=True)
    )
    predicted_us = version.predicted_us if math.isfinite(version.predicted_us) else 0.0
    return replace(node, schedule=f"{node.schedule}\n{version_text(version)}", edges=edges, predicted_us=predicted_us)


def _path(version: Version, versions: Mapping[str, Version]) -> tuple[tuple[str, str], ...]:
    steps: list[tuple[str, str]] = []
    current = version
    while current.parent in versions and len(steps) < len(versions):
        steps.append((current.parent, current.action))
        current = versions[current.parent]
    return tuple(steps[::-1])
