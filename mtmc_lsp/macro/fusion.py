"""Which nodes to put into one kernel: grow from each node to its neighbours while the model predicts a gain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass

from mtmc_lsp.core.results import Device
from mtmc_lsp.macro.attention_tiles import attention_config
from mtmc_lsp.macro.configs import default_config, fitted, product_config, with_tiles_moved
from mtmc_lsp.macro.cost import ZERO, Cost, kernel_cost, matmul_flops, torch_cost
from mtmc_lsp.macro.loads import loaded_bytes
from mtmc_lsp.macro.prims import PrimOp, Program
from mtmc_lsp.macro.recurrence import first_config, recurrence_in
from mtmc_lsp.macro.regions import VIEWS, CannotFuse, Region, RegionKind, analyse, product_in
from mtmc_lsp.macro.schedule import Schedule

COPIES = frozenset({"clone", "contiguous"})
"""Operations that bring the elements of a view into an order of their own."""

MANY_REGIONS = 2000
"""Sets of nodes that were looked at from which on no fusion is grown from nodes that another has; a network of 100 nodes has some
hundred."""

LEAST_HANDED_US = 0.5
"""A smaller predicted gain is no reason to move a node from one kernel to the next."""


@dataclass(frozen=True)
class Fusion:
    """A region worth making one kernel, with the model's cost of it before and after."""

    nodes: frozenset[str]
    region: Region
    config: dict[str, int | str | bool]
    before: Cost
    after: Cost

    @property
    def saved_us(self) -> float:
        """Predicted gain."""
        return self.before.us - self.after.us


class FusionSearch:
    """Finds the fusions of a program in a schedule."""

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        device: Device,
        precision: Callable[[str], str] = lambda node: "",
        refused: Collection[frozenset[str]] = (),
        slow: Collection[frozenset[str]] = (),
    ) -> None:
        """Prepare a search.

        Args:
            precision: the mode that a node's fp32 matrix product is given in a new kernel; empty for the user's own.
            refused: sets of nodes that were tried as one kernel and came to nothing.
            slow: sets of nodes with a product that were slower as one kernel: so is that product with fewer of them.
        """
        self.program = program
        self.schedule = schedule
        self.device = device
        self.precision = precision
        self._regions: dict[frozenset[str], Region | None] = dict.fromkeys(refused)
        graph = program.graph
        self._slow = {
            name: nodes for nodes in slow for name in nodes if name in graph.named and matmul_flops(program, name)
        }
        self._order = graph.positions
        self._nodes = graph.named
        self._readers = {name: {node.name for node in graph.readers(name)} for name in self._nodes}
        self._units = {name: frozenset(kernel.nodes) for kernel in schedule.kernels for name in kernel.nodes}
        self._torch: dict[str, Cost] = {}
        self._costs: dict[frozenset[str], Cost] = {}
        self._grown: dict[frozenset[str], Fusion | None] = {}

    def least_doubted(self) -> Fusion | None:
        """Of all kernels that could be, that with the least predicted loss; ``None`` where there can be none."""
        found = [fusion for seed in self._seeds() if (fusion := self._fusion(self._closed(seed))) is not None]
        return max(found, key=lambda fusion: fusion.saved_us, default=None)

    def best(self, near: Collection[str] | None = None) -> list[Fusion]:
        """Disjoint fusions, largest predicted gain first.

        Args:
            near: nodes from one of which each fusion grows; all nodes where it is None.
        """
        found: list[Fusion] = []
        inside: set[str] = set()
        for seed in self._seeds():
            if near is not None and not seed & set(near):
                continue
            if len(self._regions) > MANY_REGIONS and seed <= inside:
                # Of a long chain, as a loop over time steps written out is, each node would grow to most of it.
                continue
            if seed not in self._grown:
                self._grown[seed] = self._grow(seed)
            fusion = self._grown[seed]
            if fusion is not None and fusion.saved_us > 0:
                found.append(fusion)
                inside |= fusion.nodes
        found.sort(key=lambda fusion: (-fusion.saved_us, min(self._order[n] for n in fusion.nodes)))
        chosen: list[Fusion] = []
        taken: set[str] = set()
        for fusion in found:
            own = fusion if not fusion.nodes & taken else self._left_of(fusion, taken)
            if own is not None:
                chosen.append(own)
                taken |= own.nodes
        while (better := self._one_handed_on(chosen)) is not None:
            chosen = better
        return sorted(chosen, key=lambda fusion: (-fusion.saved_us, min(self._order[n] for n in fusion.nodes)))

    def _left_of(self, fusion: Fusion, taken: Set[str]) -> Fusion | None:
        """A fusion without the nodes that others have, where the rest is one kernel that gains too.

        Otherwise what is read at both ends of a chain would leave the whole chain to torch.
        """
        left = fusion.nodes - taken
        if not left or self._closed(left) != left:
            return None
        rest = self._fusion(self._without_idle_views(left))
        return rest if rest is not None and rest.saved_us > 0 else None

    def _one_handed_on(self, chosen: Sequence[Fusion]) -> list[Fusion] | None:
        """The fusions with one node moved from the end of one of them to its only reader, where both then cost less.

        Growth goes by one fusion alone: it keeps a cheap last node that the next kernel would rather compute for itself. Views
        of it go with it.
        """
        for giver in chosen:
            for name in sorted(giver.nodes, key=self._order.__getitem__, reverse=True):
                moved = self._with_views_behind(name, giver.nodes)
                readers = {reader for own in moved for reader in self._readers[own]} - moved
                if not readers or readers & giver.nodes or readers & self.program.opaque:
                    continue
                taker = next((other for other in chosen if readers <= other.nodes), None)
                units = {self._unit_of(reader) for reader in readers}
                if taker is None and (len(units) > 1 or any(readers & other.nodes for other in chosen)):
                    continue
                nodes = taker.nodes if taker is not None else next(iter(units))
                before_us = giver.after.us + (taker.after.us if taker is not None else self._apart(nodes).us)
                pair = self._handed_on(moved, giver, nodes, before_us)
                if pair is not None:
                    return [*(each for each in chosen if each not in (giver, taker)), *pair]
        return None

    def _with_views_behind(self, name: str, among: Set[str]) -> frozenset[str]:
        """A node and the views of it that are among others, views of these included."""
        found = {name}
        pending = [name]
        while pending:
            for reader in self._readers[pending.pop()]:
                if reader in among and reader not in found and self._nodes[reader].op.split(".")[1] in VIEWS:
                    found.add(reader)
                    pending.append(reader)
        return frozenset(found)

    def _handed_on(
        self, moved: frozenset[str], giver: Fusion, taker: frozenset[str], before_us: float
    ) -> list[Fusion] | None:
        """Both kernels with the nodes moved, where they take less than ``before_us`` together."""
        left, taken = giver.nodes - moved, self._closed(taker | moved)
        if not left or left & taken or self._region(left) is None or self._region(taken) is None:
            return None
        if self._closed(left) != left or taken & giver.nodes != moved:
            return None
        made = [fusion for nodes in (left, taken) if (fusion := self._fusion(nodes)) is not None]
        is_better = len(made) == 2 and sum(fusion.after.us for fusion in made) < before_us - LEAST_HANDED_US
        return made if is_better else None

    def _seeds(self) -> list[frozenset[str]]:
        seeds = [frozenset(kernel.nodes) for kernel in self.schedule.kernels]
        taken = {name for seed in seeds for name in seed}
        for name, node in self._nodes.items():
            if name not in taken and name not in self.program.opaque and node.op.split(".")[1] not in VIEWS:
                # A copy computes nothing; a kernel of it is one that reads the tensor as the views before it do.
                views = self._views_of([name]) - taken if node.op.split(".")[1] in COPIES else frozenset()
                seeds.append(frozenset({name}) | views)
        return seeds

    def _unit_of(self, name: str) -> frozenset[str]:
        return self._units.get(name) or frozenset({name})

    def _neighbours(self, nodes: frozenset[str]) -> list[str]:
        near: set[str] = set()
        for name in nodes:
            near |= {ref.name for ref in self._nodes[name].inputs() if ref.name in self._nodes}
            near |= self._readers[name]
        return sorted(near - nodes - self.program.opaque, key=self._order.__getitem__)

    def _additions(self, nodes: frozenset[str]) -> list[frozenset[str]]:
        """What may be added at once: one neighbour, or the products on both sides of a softmax with their views."""
        near = self._neighbours(nodes)
        products = [name for name in self._around(nodes) if matmul_flops(self.program, name)]
        both = [frozenset(products) | self._views_of(products)] if len(products) == 2 else []
        return [self._unit_of(name) for name in near] + both

    def _around(self, nodes: frozenset[str]) -> list[str]:
        """Neighbours, seen through views."""
        seen = set(nodes)
        found: list[str] = []
        pending = self._neighbours(nodes)
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            if self._nodes[name].op.split(".")[1] in VIEWS:
                pending += self._neighbours(frozenset({name}))
            else:
                found.append(name)
        return sorted(found, key=self._order.__getitem__)

    def _views_of(self, names: Collection[str]) -> frozenset[str]:
        """Views that the named nodes read."""
        found: set[str] = set()
        pending = [ref.name for name in names for ref in self._nodes[name].inputs()]
        while pending:
            name = pending.pop()
            if name in self._nodes and name not in found and self._nodes[name].op.split(".")[1] in VIEWS:
                found.add(name)
                pending += [ref.name for ref in self._nodes[name].inputs()]
        return frozenset(found)

    def _grow(self, seed: frozenset[str]) -> Fusion | None:
        nodes = seed
        if self._region(nodes) is None:
            return None
        changed = True
        while changed:
            changed = False
            for added in self._additions(nodes):
                larger = self._closed(nodes | added)
                if larger == nodes or self._region(larger) is None:
                    continue
                if self._cost(larger).us <= self._cost(nodes).us + self._apart(larger - nodes).us:
                    nodes, changed = larger, True
                    break
        trimmed = self._without_idle_views(nodes)
        if trimmed == seed and self.schedule.kernel_of(next(iter(seed))) is not None:
            return None
        return self._fusion(trimmed)

    def _fusion(self, nodes: frozenset[str]) -> Fusion | None:
        """The nodes as one kernel, unless they compute nothing."""
        region = self._region(nodes)
        if region is None or not self._computes(region):
            return None
        return Fusion(nodes, region, self._config(region), self._apart(nodes), self._cost(nodes))

    def _closed(self, nodes: frozenset[str]) -> frozenset[str]:
        """With every view that lies between members, and with the nodes on paths that leave and come back."""
        result = set(nodes)
        pending = list(nodes)
        while pending:
            # A node between two members reads one of them and is read by one.
            for reader in self._readers[pending.pop()]:
                if reader not in result and self._readers[reader] & result:
                    more = self._unit_of(reader) - result
                    result |= more
                    pending += more
                    # What the new ones read may lie between now: it is found from the members that it reads.
                    between = {ref.name for name in more for ref in self._nodes[name].inputs()} & set(self._nodes)
                    pending += [r.name for s in between - result for r in self._nodes[s].inputs() if r.name in result]
        return frozenset(result)

    def _without_idle_views(self, nodes: frozenset[str]) -> frozenset[str]:
        """Views at the very end of a region that only leave it stay views of the result."""
        result = set(nodes)
        for name in sorted(nodes, key=self._order.__getitem__, reverse=True):
            node = self._nodes[name]
            is_view = node.op.split(".")[1] in VIEWS
            read_inside = bool(self._readers[name] & result)
            made_outside = all(ref.name not in result for ref in node.inputs())
            if is_view and not read_inside and made_outside:
                result.discard(name)
        return frozenset(result)

    def _computes(self, region: Region) -> bool:
        return any(self._nodes[name].op.split(".")[1] not in VIEWS for name in region.nodes)

    def _region(self, nodes: frozenset[str]) -> Region | None:
        if nodes not in self._regions and any(nodes <= self._slow[name] for name in nodes if name in self._slow):
            self._regions[nodes] = None
        if nodes not in self._regions:
            try:
                self._regions[nodes] = analyse(self.program, nodes)
            except CannotFuse:
                self._regions[nodes] = None
        return self._regions[nodes]

    def _config(self, region: Region) -> dict[str, int | str | bool]:
        for kernel in self.schedule.kernels:
            if set(kernel.nodes) <= set(region.nodes) and self._kind_of(kernel.nodes) is region.kind and kernel.config:
                return dict(kernel.config)
        if region.kind is RegionKind.MATMUL:
            own = product_in(self.program, region)
            config = product_config(self.program, region, self.precision(own.origin))
            loaded = loaded_bytes(self.program, region) if config.get("precision") == "native" else 2
            config = fitted(config, self.device.shared_bytes, loaded)
            return with_tiles_moved(self.program, region, config, self.device)
        if region.kind is RegionKind.RECURRENT:
            layers = recurrence_in(self.program, region)
            return first_config(self.program, layers, self.precision(layers.origin))
        if region.kind is RegionKind.ATTENTION:
            return attention_config(self.program, region, self.device.shared_bytes)
        return default_config(self.program, region)

    def _kind_of(self, nodes: Iterable[str]) -> RegionKind | None:
        region = self._region(frozenset(nodes))
        return region.kind if region else None

    def _cost(self, nodes: frozenset[str]) -> Cost:
        """Of the nodes as one kernel, or as torch calls where that is cheaper and they are no kernel yet."""
        if nodes not in self._costs:
            region = self._region(nodes)
            assert region is not None
            self._costs[nodes] = kernel_cost(self.program, region, self._config(region), self.device)
        return self._costs[nodes]

    def _apart(self, nodes: Iterable[str]) -> Cost:
        """Of the nodes as the schedule has them now."""
        total = ZERO
        counted: set[frozenset[str]] = set()
        for name in sorted(nodes, key=self._order.__getitem__):
            unit = self._unit_of(name)
            if unit in counted:
                continue
            counted.add(unit)
            kernel = self.schedule.kernel_of(name)
            region = self._region(unit) if kernel else None
            if kernel and region:
                total = total + kernel_cost(self.program, region, kernel.config, self.device)
            else:
                if name not in self._torch:
                    self._torch[name] = torch_cost(self.program, self._nodes[name], self.device)
                total = total + self._torch[name]
        return total


def has_fp32_product(program: Program, region: Region) -> bool:
    """Whether the region holds a float32 matrix product."""
    return any(
        program.prims[name].op in (PrimOp.MATMUL, PrimOp.RECURRENT)
        and program.prims[program.prims[name].inputs[0]].dtype == "float32"
        for name in region.prims
    )
