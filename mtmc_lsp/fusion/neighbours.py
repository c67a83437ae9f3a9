"""Neighbours of a set of nodes: which nodes a region may add next, and which nodes that requires."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Set

from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import VIEWS
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.tuning.cost import matmul_flops

COPIES = frozenset({"clone", "contiguous"})
"""Operations that copy a view into contiguous memory."""


class Neighbourhood:
    """Neighbours of nodes in a graph; each kernel of the schedule is one unit."""

    def __init__(self, ir: KernelIR, schedule: Schedule) -> None:
        """Index readers and sources of all nodes."""
        graph = ir.graph
        self._graph, self._schedule = graph, schedule
        self.returned = {ref.name for ref in graph.escaping}
        written = {name for kernel in schedule.kernels for name in kernel.nodes}
        self.inlined = {name for kernel in schedule.kernels for name in kernel.recomputed} - written
        """Nodes that every kernel which reads them computes again: they are part of these kernels."""
        self.opaque = ir.opaque | self.inlined
        """Nodes that no region adds."""
        self._nodes = graph.named
        self.order = graph.positions
        self.readers = {name: frozenset(node.name for node in graph.readers(name)) for name in self._nodes}
        self.sources = {
            name: tuple(ref.name for ref in node.inputs() if ref.name in self._nodes)
            for name, node in self._nodes.items()
        }
        self._units = {name: frozenset(kernel.nodes) for kernel in schedule.kernels for name in kernel.nodes}
        self._products = {name for name in self._nodes if matmul_flops(ir, name)}

    def is_view(self, name: str) -> bool:
        """Whether a node only creates a view of a tensor."""
        return self._nodes[name].op.split(".")[1] in VIEWS

    def seeds(self) -> list[frozenset[str]]:
        """Start sets of fusions: each kernel of the schedule, and each other node that computes something."""
        seeds = [frozenset(kernel.nodes) for kernel in self._schedule.kernels]
        seeded = {name for seed in seeds for name in seed}
        for name, node in self._nodes.items():
            if name not in seeded and name not in self.opaque and not self.is_view(name):
                # A copy is fused with the views before it, so that the kernel reads the original tensor.
                views = self._views_of([name]) - seeded if node.op.split(".")[1] in COPIES else frozenset()
                seeds.append(frozenset({name}) | views)
        return seeds

    def unit_of(self, name: str) -> frozenset[str]:
        """The nodes of the kernel that computes a node; the node alone where none does."""
        return self._units.get(name) or frozenset({name})

    def recomputed_in(self, nodes: frozenset[str]) -> set[str]:
        """Further nodes that the kernels among ``nodes`` compute again."""
        inside = (kernel for kernel in self._schedule.kernels if nodes.issuperset(kernel.nodes))
        return {name for kernel in inside for name in kernel.recomputed} - nodes

    def additions(self, nodes: frozenset[str]) -> list[frozenset[str]]:
        """Sets that may be added at once: one neighbour, the products on both sides of a softmax with their views, or all
        readers of parts of a value.

        With a single part, the value would still be written for the other parts.
        """
        near = self._neighbours(nodes)
        behind_views = self._behind_views(nodes, near)
        products = [name for name in behind_views if name in self._products]
        both = [frozenset(products) | self._views_of(products)] if len(products) == 2 else []
        # A view alone may cost more than it saves, while the view and the value behind it do not.
        behind = [self.unit_of(name) for name in behind_views if name not in near and name not in self.opaque]
        additions = [self.unit_of(name) for name in near] + both + behind + self._parts_of(nodes)
        if self._graph.backward is not None:
            return additions + self._siblings_of(nodes)
        return additions + (self._siblings_of(nodes, self._products) if nodes & self._products else [])

    def _siblings_of(self, nodes: frozenset[str], among: Set[str] | None = None) -> list[frozenset[str]]:
        """Other readers of what the nodes read: they may share its loads, as two gradients or products do.

        Views are followed, and nodes that the readers compute again.

        Args:
            among: the readers that may be added; None for all.
        """
        inside = nodes | self.recomputed_in(nodes)
        pending = [ref.name for name in inside for ref in self._nodes[name].inputs() if ref.name not in nodes]
        followed, found = set(pending), set[str]()
        while pending:
            for reader in (node.name for node in self._graph.readers(pending.pop())):
                if reader in self.inlined or self.is_view(reader):
                    if reader not in followed:
                        followed.add(reader)
                        pending.append(reader)
                elif reader not in nodes and reader not in self.opaque and (among is None or reader in among):
                    found.add(reader)
        return [self.unit_of(name) for name in sorted(found, key=self.order.__getitem__)]

    def _parts_of(self, nodes: frozenset[str]) -> list[frozenset[str]]:
        """For each value that others read through several views: these views and their readers."""
        sets = []
        for name in sorted(nodes, key=self.order.__getitem__):
            outside = self.readers[name] - nodes
            if name in self.returned or len(outside) < 2 or not all(map(self.is_view, outside)):
                continue
            views = self.with_views_behind(name, self.readers.keys() - nodes) - {name}
            readers = set[str]().union(*(self.readers[view] for view in views)) - views - nodes
            if not readers & self.opaque:
                sets.append(views.union(*map(self.unit_of, readers)))
        return sets

    def _neighbours(self, nodes: Collection[str]) -> list[str]:
        near: set[str] = set()
        for name in nodes:
            near.update(self.sources[name])
            near |= self.readers[name]
        return sorted(near.difference(nodes) - self.opaque, key=self.order.__getitem__)

    def _behind_views(self, nodes: frozenset[str], near: Collection[str]) -> list[str]:
        visited = set(nodes)
        behind: list[str] = []
        pending = list(near)
        while pending:
            name = pending.pop()
            if name in visited:
                continue
            visited.add(name)
            if self.is_view(name):
                pending += self._neighbours({name})
            else:
                behind.append(name)
        return sorted(behind, key=self.order.__getitem__)

    def _views_of(self, names: Collection[str]) -> frozenset[str]:
        """Views that the nodes read, directly or through other views."""
        views: set[str] = set()
        pending = [source for name in names for source in self.sources[name]]
        while pending:
            name = pending.pop()
            if name not in views and self.is_view(name):
                views.add(name)
                pending += self.sources[name]
        return frozenset(views)

    def with_views_behind(self, name: str, among: Set[str]) -> frozenset[str]:
        """A node and those views of it, direct or indirect, that are in ``among``."""
        members = {name}
        pending = [name]
        while pending:
            for reader in self.readers[pending.pop()]:
                if reader in among and reader not in members and self.is_view(reader):
                    members.add(reader)
                    pending.append(reader)
        return frozenset(members)

    def without_idle_views(self, nodes: frozenset[str]) -> frozenset[str]:
        """The nodes without trailing views: these stay views of the kernel's result."""
        result = set(nodes)
        for name in sorted(nodes, key=self.order.__getitem__, reverse=True):
            read_inside = not self.readers[name].isdisjoint(result)
            reads_only_outside = result.isdisjoint(self.sources[name])
            if self.is_view(name) and not read_inside and reads_only_outside:
                result.discard(name)
        return frozenset(result)

    def closed(self, nodes: frozenset[str]) -> frozenset[str]:
        """The nodes with all nodes on paths between them (the convex closure)."""
        result = set(nodes)
        self._close(result, list(nodes))
        return frozenset(result)

    def widened(self, nodes: frozenset[str], added: frozenset[str]) -> frozenset[str]:
        """The closure of the union of closed ``nodes`` and ``added``; faster than :meth:`closed`."""
        result = set(nodes)
        more = added - result
        self._close(result, self._joined(result, more))
        return frozenset(result)

    def ahead(self, nodes: frozenset[str], most: int, refused: Collection[str]) -> frozenset[str]:
        """A region with up to ``most`` more computing units, nearest first, and the views around them.

        The result is closed if ``nodes`` are. Between half of ``most`` and ``most``, it ends where the fewest values leave the
        region, for example after a step of an unrolled loop rather than within one.

        Args:
            most: units to add; a kernel of the schedule is one unit.
        """
        front = _Frontier(self, nodes)
        added: list[str] = []
        count, fewest, end = 0, len(self._nodes), 0
        while count < most:
            unit = front.next(refused)
            if unit is None:
                # No unit remains.
                return frozenset(front.inside)
            front.take(unit)
            added += unit
            count += any(not self.is_view(name) for name in unit)
            if 2 * count >= most and len(front.leaving) <= fewest:
                fewest, end = len(front.leaving), len(added)
        return frozenset((*nodes, *added[:end]))

    def _close(self, result: set[str], pending: list[str]) -> None:
        """Add all nodes between members; ``pending`` are members whose readers are not checked yet."""
        while pending:
            # A node between two members reads one and is read by one.
            for reader in self.readers[pending.pop()]:
                if reader not in result and not self.readers[reader].isdisjoint(result):
                    more = self.unit_of(reader) - result
                    pending += self._joined(result, more)

    def _joined(self, result: set[str], more: Set[str]) -> list[str]:
        """Add members; returns the members whose readers must be checked."""
        result |= more
        # Sources of new members may be between: check the members that they read.
        between = {source for name in more for source in self.sources[name]} - result
        return [*more, *(name for source in between for name in self.sources[source] if name in result)]


class _Frontier:
    """A growing closed set of nodes and the neighbours that can be added without breaking closure."""

    def __init__(self, around: Neighbourhood, nodes: Set[str]) -> None:
        """Start with a closed set."""
        self._around = around
        self._names = list(around.order)
        self.inside: set[str] = set()
        self.leaving: set[str] = set()
        """Members whose values are read outside."""
        self._before: set[str] = set()
        """Outside nodes that a member depends on, directly or indirectly."""
        self._after: set[str] = set()
        """Outside nodes that depend on a member."""
        self._sources: list[int] = []
        """Heap of the negated positions of sources of members: latest first."""
        self._readers: list[int] = []
        """Heap of the positions of readers of members: earliest first."""
        self.take(nodes)

    def take(self, nodes: Set[str]) -> None:
        """Add nodes."""
        around = self._around
        self.inside |= nodes
        self._before -= nodes
        self._after -= nodes
        for name in nodes:
            if name in around.returned or not around.readers[name] <= self.inside:
                self.leaving.add(name)
            for source in around.sources[name]:
                if source in self.leaving and source not in around.returned and around.readers[source] <= self.inside:
                    self.leaving.discard(source)
                if source not in self.inside:
                    heapq.heappush(self._sources, -around.order[source])
            for reader in around.readers[name]:
                if reader not in self.inside:
                    heapq.heappush(self._readers, around.order[reader])
            self._spread(name, self._before, around.sources)
            self._spread(name, self._after, around.readers)

    def _spread(self, name: str, reached: set[str], edges: Mapping[str, Collection[str]]) -> None:
        pending = [name]
        while pending:
            for other in edges[pending.pop()]:
                if other not in reached and other not in self.inside:
                    reached.add(other)
                    pending.append(other)

    def next(self, refused: Collection[str]) -> frozenset[str] | None:
        """The next neighbour to add, sources before readers; None if only refused ones remain."""
        while self._sources or self._readers:
            position = -heapq.heappop(self._sources) if self._sources else heapq.heappop(self._readers)
            name = self._names[position]
            if name not in self.inside and name not in refused and name not in self._around.opaque:
                unit = self._around.unit_of(name)
                # If another neighbour is between, this one is found again once that is added.
                if not self._is_behind_another(unit):
                    return unit
        return None

    def _is_behind_another(self, unit: Set[str]) -> bool:
        for name in unit:
            if any(source in self._after and source not in unit for source in self._around.sources[name]):
                return True
            if any(reader in self._before and reader not in unit for reader in self._around.readers[name]):
                return True
        return False
