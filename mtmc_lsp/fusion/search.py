"""Which nodes to put into one kernel: grow from each node to its neighbours while the model predicts a gain."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.fusion.neighbours import Surroundings
from mtmc_lsp.ir.primitives import KernelIR, PrimOp
from mtmc_lsp.ir.recurrence import recurrence_in
from mtmc_lsp.ir.regions import VIEWS, CannotFuse, Region, RegionKind, analyse, product_in
from mtmc_lsp.schedule.attention_configs import attention_config
from mtmc_lsp.schedule.configs import KernelConfig, PrecisionMode
from mtmc_lsp.schedule.matmul_configs import fitted, product_config, with_tma
from mtmc_lsp.schedule.recurrent_configs import recurrent_config
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.schedule.tile_configs import tile_config
from mtmc_lsp.tuning.cost import ZERO, Cost, kernel_cost, matmul_flops, torch_cost
from mtmc_lsp.tuning.kernel_length import is_too_long
from mtmc_lsp.tuning.load_cost import loaded_bytes

MUCH_WORK = 20_000
"""Nodes in all sets of them that were looked at, from which on fusions keep to nodes that no other has: of a long chain, as one
of time steps written out is, each node would grow to most of it. And nodes after which a long region that has not grown since is
long enough."""
LONG, MUCH_FOR_ONE = 64, 8_000
"""Nodes of a region, and nodes in all sets that one region's growth has looked at, from which on it takes in many neighbours at a
time: one by one these would be the cube of its length. A layer's kernel has at most 50 nodes, and took 4,000 to find."""
SEVERAL = (16, 8, 4, 2)
"""How many nodes a region takes in at once where none pays by itself: what lies between a tensor of pairs of points and its
coordinates."""
LONGEST = 400
"""Operations of a long region that compute something: a kernel of 1,400 took more than a minute to compile, one of 350 a few
seconds."""

LEAST_HANDED = 0.125
"""In the cost of a launch: a smaller predicted gain is no reason to move a node from one kernel to the next."""


@dataclass(frozen=True)
class Fusion:
    """A region worth making one kernel, with the model's cost of it before and after."""

    nodes: frozenset[str]
    region: Region
    config: KernelConfig
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
        ir: KernelIR,
        schedule: Schedule,
        device: DeviceModel,
        precision: Callable[[str], PrecisionMode | None] = lambda node: None,
        refused: Collection[frozenset[str]] = (),
        slow: Collection[frozenset[str]] = (),
        deadline: float | None = None,
    ) -> None:
        """Prepare a search.

        Args:
            precision: the mode that a node's fp32 matrix product is given in a new kernel; None for the user's own.
            refused: sets of nodes that were tried as one kernel and came to nothing.
            slow: sets of nodes with a product that were slower as one kernel: so is that product with fewer of them.
            deadline: of the monotonic clock, from which on nothing is grown further.
        """
        self._deadline = deadline
        self.ir = ir
        self.schedule = schedule
        self.device = device
        self.precision = precision
        self._regions: dict[frozenset[str], Region | None] = dict.fromkeys(refused)
        graph = ir.graph
        self._slow = {name: nodes for nodes in slow for name in nodes if name in graph.named and matmul_flops(ir, name)}
        self._around = Surroundings(ir, schedule)
        self._order = graph.positions
        self._nodes = graph.named
        self._torch: dict[str, Cost] = {}
        self._costs: dict[frozenset[str], Cost] = {}
        self._ends: dict[frozenset[str], frozenset[str]] = {}
        """What growth comes to from each set that it went through."""
        self._work = 0

    def least_doubted(self) -> Fusion | None:
        """Of all kernels that could be, that with the least predicted loss; ``None`` where there can be none."""
        found = [
            fusion for seed in self._around.seeds() if (fusion := self._fusion(self._around.closed(seed))) is not None
        ]
        return max(found, key=lambda fusion: fusion.saved_us, default=None)

    def best(self, near: Collection[str] | None = None) -> list[Fusion]:
        """Disjoint fusions, largest predicted gain first.

        Args:
            near: nodes from one of which each fusion grows; all nodes where it is None.
        """
        found: list[Fusion] = []
        inside: set[str] = set()
        for seed in self._around.seeds():
            if near is not None and not seed & set(near):
                continue
            if found and self._is_late():
                break
            if self._work > MUCH_WORK and seed & inside:
                continue
            fusion = self._grow(seed, inside if self._work > MUCH_WORK else frozenset())
            if fusion is not None and fusion.saved_us > 0:
                found.append(fusion)
                inside |= fusion.nodes
            elif self.schedule.kernel_of(next(iter(seed))) is not None:
                inside |= seed
        found.sort(key=lambda fusion: (-fusion.saved_us, min(self._order[n] for n in fusion.nodes)))
        chosen: list[Fusion] = []
        taken: set[str] = set()
        for fusion in found:
            own = fusion if not fusion.nodes & taken else self._left_of(fusion, taken)
            if own is not None:
                chosen.append(own)
                taken |= own.nodes
        while not self._is_late() and (better := self._one_handed_on(chosen)) is not None:
            chosen = better
        return sorted(chosen, key=lambda fusion: (-fusion.saved_us, min(self._order[n] for n in fusion.nodes)))

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _left_of(self, fusion: Fusion, taken: Set[str]) -> Fusion | None:
        """A fusion without the nodes that others have, where the rest is one kernel that gains too.

        Otherwise what is read at both ends of a chain would leave the whole chain to torch.
        """
        left = fusion.nodes - taken
        if not left or self._around.closed(left) != left:
            return None
        rest = self._fusion(self._around.without_idle_views(left))
        return rest if rest is not None and rest.saved_us > 0 else None

    def _one_handed_on(self, chosen: Sequence[Fusion]) -> list[Fusion] | None:
        """The fusions with one node moved from the end of one of them to its only reader, where both then cost less.

        Growth goes by one fusion alone: it keeps a cheap last node that the next kernel would rather compute for itself. Views
        of it go with it.
        """
        for giver in chosen:
            for name in sorted(giver.nodes, key=self._order.__getitem__, reverse=True):
                moved = self._around.with_views_behind(name, giver.nodes)
                readers = {reader for own in moved for reader in self._around.readers[own]} - moved
                if not readers or readers & giver.nodes or readers & self.ir.opaque:
                    continue
                taker = next((other for other in chosen if readers <= other.nodes), None)
                units = {self._around.unit_of(reader) for reader in readers}
                if taker is None and (len(units) > 1 or any(readers & other.nodes for other in chosen)):
                    continue
                nodes = taker.nodes if taker is not None else next(iter(units))
                before_us = giver.after.us + (taker.after.us if taker is not None else self._apart(nodes).us)
                pair = self._handed_on(moved, giver, nodes, before_us)
                if pair is not None:
                    return [*(each for each in chosen if each not in (giver, taker)), *pair]
        return None

    def _handed_on(
        self, moved: frozenset[str], giver: Fusion, taker: frozenset[str], before_us: float
    ) -> list[Fusion] | None:
        """Both kernels with the nodes moved, where they take less than ``before_us`` together."""
        left, taken = giver.nodes - moved, self._around.closed(taker | moved)
        if not left or left & taken or self._region(left) is None or self._region(taken) is None:
            return None
        if self._around.closed(left) != left or taken & giver.nodes != moved:
            return None
        made = [fusion for nodes in (left, taken) if (fusion := self._fusion(nodes)) is not None]
        is_better = (
            len(made) == 2
            and sum(fusion.after.us for fusion in made) < before_us - LEAST_HANDED * self.device.launch_us
        )
        return made if is_better else None

    def _grow(self, seed: frozenset[str], others: Set[str]) -> Fusion | None:
        """The fusion that nodes grow to, without nodes of others where there are any."""
        if self._region(seed) is None:
            return None
        if not others:
            end = self._end_of(seed)
        else:
            nodes = self._around.closed(seed)
            if nodes & others or self._region(nodes) is None:
                return None
            end = self._grown_in_strides(nodes, 1, others)
        trimmed = self._around.without_idle_views(end)
        if trimmed == seed and self.schedule.kernel_of(next(iter(seed))) is not None:
            return None
        return self._fusion(trimmed)

    def _end_of(self, seed: frozenset[str]) -> frozenset[str]:
        """What nodes grow to; that of all sets on the way is the same."""
        passed: list[frozenset[str]] = []
        nodes, is_closed = seed, self._around.closed(seed) == seed
        enough = self._work + MUCH_FOR_ONE
        while nodes not in self._ends:
            passed.append(nodes)
            if self._is_late():
                return nodes
            if is_closed and (len(nodes) > LONG or self._work > enough):
                self._ends[nodes] = self._grown_in_strides(nodes, LONGEST)
                break
            larger = self._one_more(nodes, self._around.widened if is_closed else self._widened)
            if larger is None and is_closed:
                larger = self._several_more(nodes)
            if larger is None:
                self._ends[nodes] = nodes
                break
            nodes, is_closed = larger, True
        end = self._ends[nodes]
        self._ends.update(dict.fromkeys(passed, end))
        return end

    def _widened(self, nodes: frozenset[str], added: frozenset[str]) -> frozenset[str]:
        return self._around.closed(nodes | added)

    def _one_more(
        self, nodes: frozenset[str], widened: Callable[[frozenset[str], frozenset[str]], frozenset[str]]
    ) -> frozenset[str] | None:
        """A region with the first addition that the model does not expect to cost more; None where each would."""
        for added in self._around.additions(nodes):
            larger = widened(nodes, added)
            if larger != nodes and self._pays(nodes, larger):
                return larger
        return None

    def _several_more(self, nodes: frozenset[str]) -> frozenset[str] | None:
        """A region with several of the nearest nodes, which may pay together where the first of them alone does not."""
        for most in SEVERAL:
            larger = self._around.ahead(nodes, most, ())
            if larger != nodes and self._pays(nodes, larger):
                return larger
        return None

    def _pays(self, nodes: frozenset[str], larger: frozenset[str]) -> bool:
        """Whether a region that takes in more is one that can be written, and costs no more than both apart."""
        region = self._region(larger)
        if region is None or is_too_long(self.ir, region):
            return False
        return self._cost(larger).us <= self._cost(nodes).us + self._apart(larger - nodes).us

    def _grown_in_strides(
        self, nodes: frozenset[str], most: int, others: Collection[str] = frozenset()
    ) -> frozenset[str]:
        """A region with what pays to be in it, by many nodes at a time.

        After a time that comes to nothing it is half as many, after one that pays twice as many. What alone comes to nothing is
        passed over until all else was tried; at the end many are tried once more, as a step of a loop may pay as a whole alone.

        Args:
            nodes: a region.
            most: how many are tried first.
            others: nodes that are left to others.
        """
        refused, has_grown, is_last = set(others), False, False
        enough = self._work + MUCH_WORK
        while self._work < enough and not self._is_late():
            room = LONGEST - sum(not self._around.is_view(name) for name in nodes)
            larger = self._around.ahead(nodes, min(most, room), refused) if room > 0 else nodes
            if larger == nodes:
                if room <= 0 or (is_last and not has_grown):
                    break
                refused, most, has_grown, is_last = set(others), LONG, False, not has_grown
            elif self._pays(nodes, larger):
                nodes, most, has_grown, enough = larger, 2 * most, True, self._work + MUCH_WORK
            elif most > 1:
                most = min(most, len(larger - nodes)) // 2 or 1
            else:
                refused |= larger - nodes
        return nodes

    def _fusion(self, nodes: frozenset[str]) -> Fusion | None:
        """The nodes as one kernel, unless they compute nothing."""
        region = self._region(nodes)
        if region is None or not self._computes(region):
            return None
        return Fusion(nodes, region, self._config(region), self._apart(nodes), self._cost(nodes))

    def _computes(self, region: Region) -> bool:
        return any(self._nodes[name].op.split(".")[1] not in VIEWS for name in region.nodes)

    def _region(self, nodes: frozenset[str]) -> Region | None:
        if nodes not in self._regions and any(nodes <= self._slow[name] for name in nodes if name in self._slow):
            self._regions[nodes] = None
        if nodes not in self._regions:
            self._work += len(nodes)
            try:
                self._regions[nodes] = analyse(self.ir, nodes)
            except CannotFuse:
                self._regions[nodes] = None
        return self._regions[nodes]

    def _config(self, region: Region) -> KernelConfig:
        for kernel in self.schedule.kernels:
            if set(kernel.nodes) <= set(region.nodes) and self._kind_of(kernel.nodes) is region.kind:
                return kernel.config
        if region.kind is RegionKind.MATMUL:
            prim = product_in(self.ir, region)
            config = product_config(self.ir, region, self.device, self.precision(prim.origin))
            loaded = loaded_bytes(self.ir, region) if config.precision is PrecisionMode.NATIVE else 2
            config = fitted(config, self.device.shared_bytes, loaded)
            return with_tma(self.ir, region, config, self.device)
        if region.kind is RegionKind.RECURRENT:
            layers = recurrence_in(self.ir, region)
            return recurrent_config(self.ir, layers, self.device, self.precision(layers.origin))
        if region.kind is RegionKind.ATTENTION:
            return attention_config(self.ir, region, self.device)
        return tile_config(self.ir, region, self.device)

    def _kind_of(self, nodes: Iterable[str]) -> RegionKind | None:
        region = self._region(frozenset(nodes))
        return region.kind if region else None

    def _cost(self, nodes: frozenset[str]) -> Cost:
        """Of the nodes as one kernel, or as torch calls where that is cheaper and they are no kernel yet."""
        if nodes not in self._costs:
            region = self._region(nodes)
            assert region is not None
            self._costs[nodes] = kernel_cost(self.ir, region, self._config(region), self.device)
        return self._costs[nodes]

    def _apart(self, nodes: Iterable[str]) -> Cost:
        """Of the nodes as the schedule has them now."""
        total = ZERO
        counted: set[frozenset[str]] = set()
        for name in sorted(nodes, key=self._order.__getitem__):
            unit = self._around.unit_of(name)
            if unit in counted:
                continue
            counted.add(unit)
            kernel = self.schedule.kernel_of(name)
            region = self._region(unit) if kernel else None
            if kernel and region:
                total = total + kernel_cost(self.ir, region, kernel.config, self.device)
            else:
                if name not in self._torch:
                    self._torch[name] = torch_cost(self.ir, self._nodes[name], self.device)
                total = total + self._torch[name]
        return total


def has_fp32_product(ir: KernelIR, region: Region) -> bool:
    """Whether the region holds a float32 matrix product."""
    return any(
        ir.prims[name].op in (PrimOp.MATMUL, PrimOp.RECURRENT) and ir.prims[ir.prims[name].inputs[0]].dtype == "float32"
        for name in region.prims
    )
