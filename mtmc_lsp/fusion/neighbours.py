"""What lies around a set of nodes: which nodes it may take in next, and which it must then take in too."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Set

from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import VIEWS
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.tuning.cost import matmul_flops

COPIES = frozenset({"clone", "contiguous"})
"""Operations that bring the elements of a view into an order of their own."""


class Surroundings:
    """Which nodes of a program neighbour which, where the kernels of a schedule are taken whole."""

    def __init__(self, ir: KernelIR, schedule: Schedule) -> None:
        """Look at every node once."""
        graph = ir.graph
        self._schedule = schedule
        self.returned = {ref.name for ref in graph.escaping}
        self.opaque = ir.opaque
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
        """Whether a node only makes another view of a tensor."""
        return self._nodes[name].op.split(".")[1] in VIEWS

    def seeds(self) -> list[frozenset[str]]:
        """What fusions grow from: each kernel of the schedule, and each other node that computes something."""
        seeds = [frozenset(kernel.nodes) for kernel in self._schedule.kernels]
        taken = {name for seed in seeds for name in seed}
        for name, node in self._nodes.items():
            if name not in taken and name not in self.opaque and not self.is_view(name):
                # A copy computes nothing; a kernel of it is one that reads the tensor as the views before it do.
                views = self._views_of([name]) - taken if node.op.split(".")[1] in COPIES else frozenset()
                seeds.append(frozenset({name}) | views)
        return seeds

    def unit_of(self, name: str) -> frozenset[str]:
        """The nodes of the kernel that computes a node; the node alone where none does."""
        return self._units.get(name) or frozenset({name})

    def additions(self, nodes: frozenset[str]) -> list[frozenset[str]]:
        """What may be added at once: one neighbour, the products on both sides of a softmax with their views, or all that
        reads parts of a value.

        One part alone would leave the value to the others, which have no axes in common with it.
        """
        near = self._neighbours(nodes)
        seen = self._seen_through_views(nodes, near)
        products = [name for name in seen if name in self._products]
        both = [frozenset(products) | self._views_of(products)] if len(products) == 2 else []
        # A view alone may cost more than it saves, where what it shows and it do not.
        behind = [self.unit_of(name) for name in seen if name not in near and name not in self.opaque]
        return [self.unit_of(name) for name in near] + both + behind + self._parts_of(nodes)

    def _parts_of(self, nodes: frozenset[str]) -> list[frozenset[str]]:
        """For each value of which others see several parts: these views, and what reads them."""
        found = []
        for name in sorted(nodes, key=self.order.__getitem__):
            outside = self.readers[name] - nodes
            if name in self.returned or len(outside) < 2 or not all(map(self.is_view, outside)):
                continue
            views = self.with_views_behind(name, self.readers.keys() - nodes) - {name}
            readers = set[str]().union(*(self.readers[view] for view in views)) - views - nodes
            if not readers & self.opaque:
                found.append(views.union(*map(self.unit_of, readers)))
        return found

    def _neighbours(self, nodes: Collection[str]) -> list[str]:
        near: set[str] = set()
        for name in nodes:
            near.update(self.sources[name])
            near |= self.readers[name]
        return sorted(near.difference(nodes) - self.opaque, key=self.order.__getitem__)

    def _seen_through_views(self, nodes: frozenset[str], near: Collection[str]) -> list[str]:
        seen = set(nodes)
        found: list[str] = []
        pending = list(near)
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            if self.is_view(name):
                pending += self._neighbours({name})
            else:
                found.append(name)
        return sorted(found, key=self.order.__getitem__)

    def _views_of(self, names: Collection[str]) -> frozenset[str]:
        """Views that the named nodes read."""
        found: set[str] = set()
        pending = [source for name in names for source in self.sources[name]]
        while pending:
            name = pending.pop()
            if name not in found and self.is_view(name):
                found.add(name)
                pending += self.sources[name]
        return frozenset(found)

    def with_views_behind(self, name: str, among: Set[str]) -> frozenset[str]:
        """A node and the views of it that are among others, views of these included."""
        found = {name}
        pending = [name]
        while pending:
            for reader in self.readers[pending.pop()]:
                if reader in among and reader not in found and self.is_view(reader):
                    found.add(reader)
                    pending.append(reader)
        return frozenset(found)

    def without_idle_views(self, nodes: frozenset[str]) -> frozenset[str]:
        """Views at the very end of a region that only leave it stay views of the result."""
        result = set(nodes)
        for name in sorted(nodes, key=self.order.__getitem__, reverse=True):
            read_inside = not self.readers[name].isdisjoint(result)
            made_outside = result.isdisjoint(self.sources[name])
            if self.is_view(name) and not read_inside and made_outside:
                result.discard(name)
        return frozenset(result)

    def closed(self, nodes: frozenset[str]) -> frozenset[str]:
        """With every view that lies between members, and with the nodes on paths that leave and come back."""
        result = set(nodes)
        self._close(result, list(nodes))
        return frozenset(result)

    def widened(self, nodes: frozenset[str], added: frozenset[str]) -> frozenset[str]:
        """As :meth:`closed`, of both, where ``nodes`` are closed: nothing between them needs to be looked for again."""
        result = set(nodes)
        more = added - result
        self._close(result, self._joined(result, more))
        return frozenset(result)

    def ahead(self, nodes: frozenset[str], most: int, refused: Collection[str]) -> frozenset[str]:
        """A region with up to ``most`` more of what computes something, the nearest first, and the views around them.

        No value leaves what comes out and comes back, where none does of ``nodes``. Between half of the number and all of it, it
        ends where the fewest values leave it: with a step of a loop, rather than in its middle.

        Args:
            nodes: a region.
            most: how many to take in; kernels of the schedule count as one.
            refused: nodes to pass over.
        """
        front = _Front(self, nodes)
        taken: list[str] = []
        count, fewest, end = 0, len(self._nodes), 0
        while count < most:
            unit = front.next(refused)
            if unit is None:
                # There is no more: that is an end too.
                return frozenset(front.inside)
            front.take(unit)
            taken += unit
            count += any(not self.is_view(name) for name in unit)
            if 2 * count >= most and len(front.leaving) <= fewest:
                fewest, end = len(front.leaving), len(taken)
        return frozenset((*nodes, *taken[:end]))

    def _close(self, result: set[str], pending: list[str]) -> None:
        """Take in what lies between members; ``pending`` are those of them of which that is not known yet."""
        while pending:
            # A node between two members reads one of them and is read by one.
            for reader in self.readers[pending.pop()]:
                if reader not in result and not self.readers[reader].isdisjoint(result):
                    more = self.unit_of(reader) - result
                    pending += self._joined(result, more)

    def _joined(self, result: set[str], more: Set[str]) -> list[str]:
        """Add members; returns those members between whom others may lie now."""
        result |= more
        # What the new ones read may lie between: it is found from the members that it reads.
        between = {source for name in more for source in self.sources[name]} - result
        return [*more, *(name for source in between for name in self.sources[source] if name in result)]


class _Front:
    """Nodes that take in their neighbours, none of which lies on a way out of them and back around another node."""

    def __init__(self, around: Surroundings, nodes: Set[str]) -> None:
        """Begin with nodes that no value leaves and comes back to."""
        self._around = around
        self._names = list(around.order)
        self.inside: set[str] = set()
        self.leaving: set[str] = set()
        """Members whose values others read."""
        self._before: set[str] = set()
        """Nodes outside that a member needs, through others perhaps."""
        self._after: set[str] = set()
        """Nodes outside that need a member."""
        self._sources: list[int] = []
        """A heap of the negative places of those of which a member reads: the latest first."""
        self._readers: list[int] = []
        """A heap of the places of those that read a member: the earliest first."""
        self.take(nodes)

    def take(self, nodes: Set[str]) -> None:
        """Make nodes members."""
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

    def _spread(self, name: str, reached: set[str], ways: Mapping[str, Collection[str]]) -> None:
        pending = [name]
        while pending:
            for other in ways[pending.pop()]:
                if other not in reached and other not in self.inside:
                    reached.add(other)
                    pending.append(other)

    def next(self, refused: Collection[str]) -> frozenset[str] | None:
        """The neighbour to take in now, what members read first; None where there is no other than the refused."""
        while self._sources or self._readers:
            place = -heapq.heappop(self._sources) if self._sources else heapq.heappop(self._readers)
            name = self._names[place]
            if name not in self.inside and name not in refused and name not in self._around.opaque:
                unit = self._around.unit_of(name)
                # Another neighbour lies between: when it is taken in, this one is found again.
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
