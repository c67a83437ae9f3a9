"""Trees of transitions for tests, made by hand or from a rule that a ranker can learn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from mtmc_lsp.core.action import ActionKind, Expected, MacroAction
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.learning.transitions import Outcome, Program, Transition, Version
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.training.tree import MeasuredTree
from tests.golden.pairs import FOLDER, Pair

GPU = "NVIDIA H200"
ENVIRONMENT = "torch 2.11.0, triton 3.6.0, mtmc 0.1.0 (abc1234)"
EMPTY = to_json(Schedule())
KINDS = (ActionKind.FUSE, ActionKind.AUTOTUNE, ActionKind.ALGEBRA, ActionKind.SPLIT)


def stored_capture(name: str = "recompute") -> Capture:
    """A real capture, of four operations."""
    return Pair(FOLDER / name).stored_capture()


CAPTURE = stored_capture()
NODES = tuple(node.name for node in CAPTURE.graph.nodes)


def action(
    kind: ActionKind = ActionKind.FUSE,
    region: Sequence[str] = NODES[:2],
    saved_us: float = 5.0,
    *,
    changes_rounding: bool = False,
    **params: object,
) -> MacroAction:
    """An action on some nodes of :data:`CAPTURE`."""
    return MacroAction(
        kind,
        tuple(region),
        (1, 2),
        params,
        "Because.",
        Expected(saved_us, 2e6, 1e6, 1e3, 1e3),
        "step",
        changes_rounding,
    )


def edge(
    source: str,
    item: MacroAction,
    outcome: Outcome,
    ratio: float | None = None,
    *,
    result: str = "",
    rank: int = 0,
    program: str = "p",
    seconds: float = 2.0,
    device: str = GPU,
) -> Transition:
    """One transition; timed if it has a ratio."""
    return Transition(
        program, source, to_json(item), item.key, rank, "roofline", outcome, result,
        100.0 if ratio else None, 100.0 / ratio if ratio else None, ratio, 0.01 if ratio else None,
        seconds, "" if ratio else "reason", device if ratio else "", ENVIRONMENT,
    )  # fmt: skip


def program(name: str = "p", family: str = "norm") -> Program:
    """A program with the graph of :data:`CAPTURE`."""
    return Program(name, name, family, "generated", replace(CAPTURE, bytes=CAPTURE.bytes))


def version(name: str, parent: str = "", action_key: str = "", depth: int = 0, of: str = "p") -> Version:
    """A version without kernels."""
    return Version(name, of, parent, action_key, depth, EMPTY)


def tree_of(
    edges: Sequence[Transition], programs: Sequence[Program] = (), extra: Sequence[Version] = ()
) -> MeasuredTree:
    """A tree with a version for each result of the edges. The root of program ``p`` is ``p/0``."""
    programs = programs or [program()]
    versions = {f"{item.id}/0": version(f"{item.id}/0", of=item.id) for item in programs}
    for item in edges:
        if item.result:
            depth = versions[item.version].depth + 1
            versions.setdefault(item.result, version(item.result, item.version, item.key, depth, item.program))
    return MeasuredTree.of(programs, [*versions.values(), *extra], edges)


def learnable_tree(programs: int, seed: int = 0, families: int = 10) -> MeasuredTree:
    """Trees in which exactly the actions that change rounding gain; the order of the roofline planner says nothing about it."""
    draw = random.Random(seed)
    listed, edges = [], []
    for number in range(programs):
        name = f"p{number}"
        listed.append(program(name, f"family{number % families}"))
        source = f"{name}/0"
        for depth in range(2):
            gaining = draw.randrange(6) if depth == 0 else -1
            target = f"{name}/{depth + 1}"
            for rank in range(6):
                gains = rank == gaining
                item = action(
                    draw.choice(KINDS),
                    draw.sample(NODES, 2),
                    10.0 - rank,
                    changes_rounding=gains,
                    number=rank + 10 * depth,
                )
                if gains:
                    edges.append(edge(source, item, Outcome.FASTER, 1.5, result=target, rank=rank, program=name))
                elif draw.random() < 0.5:
                    edges.append(
                        edge(source, item, Outcome.SLOWER, 0.8, result=f"{target}s{rank}", rank=rank, program=name)
                    )
                else:
                    edges.append(edge(source, item, Outcome.WRONG, rank=rank, program=name))
            source = target
    return tree_of(edges, listed)
