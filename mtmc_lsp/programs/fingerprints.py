"""Fingerprints of graphs, and the programs that policies are never trained on.

A fingerprint is a hash of a graph's operators, dtypes and ranks and of how they are connected. Names, sizes and constants do not
count, nor does the order of independent nodes, so a copy of a benchmark with other sizes has the same fingerprint.

``scripts/forbidden_programs.py`` writes the fingerprints of the programs that policies are evaluated on into ``forbidden.txt``.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.core.graph import Graph, Ref, TensorType
from mtmc_lsp.core.workload import Capture

FORBIDDEN_FILE = Path(__file__).with_name("forbidden.txt")
COMMON_OPERATIONS = 3
"""Graphs of at most this many operations are common property: a softmax is a softmax in every program."""
DIGITS = 32
"""Hexadecimal digits of a fingerprint."""


@dataclass(frozen=True)
class Leak:
    """A graph that both a training program and a forbidden program have."""

    training: str
    """Title of the training program's target."""
    forbidden: str


def fingerprint(graph: Graph) -> str:
    """The hash of the graph without names, sizes and constants."""
    text = json.dumps(_Walk(graph).result(), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def is_common(graph: Graph) -> bool:
    """Whether the graph is too small to belong to a single program."""
    within = sum(len(node.loop.nodes) for node in graph.nodes if node.loop is not None)
    return len(graph.nodes) + within <= COMMON_OPERATIONS


def is_forbidden(capture: Capture) -> bool:
    """Whether a program that policies are evaluated on has the same graph, so that none may be trained on it."""
    return not is_common(capture.graph) and fingerprint(capture.graph) in forbidden_fingerprints()


def leaks(training: Iterable[Capture], forbidden: Iterable[Capture]) -> list[Leak]:
    """The training programs whose graph a forbidden program has too."""
    titles = {fingerprint(item.graph): item.workload.target.title for item in forbidden if not is_common(item.graph)}
    hashes = ((fingerprint(item.graph), item) for item in training if not is_common(item.graph))
    return [Leak(item.workload.target.title, titles[key]) for key, item in hashes if key in titles]


@functools.cache
def forbidden_fingerprints() -> frozenset[str]:
    """The fingerprints in ``forbidden.txt``."""
    lines = FORBIDDEN_FILE.read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


class _Walk:
    """Numbers nodes and inputs in the order of a walk from the outputs, which does not depend on the order of execution."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._numbers: dict[str, int] = {}
        self._entries: list[object] = []

    def result(self) -> object:
        ends = [*self._graph.outputs, *(mutation.value for mutation in self._graph.mutations)]
        roots = [self._visited(ref) if ref is not None else None for ref in ends]
        written = [self._visited(Ref(mutation.input)) for mutation in self._graph.mutations]
        return [roots, written, self._entries]

    def _visited(self, end: Ref) -> tuple[int, int]:
        pending = [end.name]
        while pending:
            name = pending[-1]
            if name in self._numbers:
                pending.pop()
                continue
            node = self._graph.named.get(name)
            unread = [ref.name for ref in node.inputs() if ref.name not in self._numbers] if node is not None else []
            if unread:
                # The first operand is visited first.
                pending += reversed(unread)
                continue
            pending.pop()
            if node is None:
                self._add(name, ["input", _description(self._graph.type_of(Ref(name)))])
            else:
                read = [(self._numbers[ref.name], ref.index) for ref in node.inputs()]
                entry: list[object] = [node.word, read, [_description(output) for output in node.outputs]]
                # The body of a loop over time steps belongs to it.
                entry += [_Walk(node.loop.body(self._graph)).result()] if node.loop is not None else []
                self._add(name, entry)
        return self._numbers[end.name], end.index

    def _add(self, name: str, entry: object) -> None:
        self._numbers[name] = len(self._numbers)
        self._entries.append(entry)


def _description(kind: TensorType) -> tuple[str, int]:
    return kind.dtype, len(kind.shape)
