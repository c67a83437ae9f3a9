"""Fusion search: grows regions from each node to its neighbours while the cost model predicts a gain."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.fusion.neighbours import Neighbourhood
from mtmc_lsp.fusion.unit_order import parts_in_order
from mtmc_lsp.ir.known_regions import region_or_none
from mtmc_lsp.ir.loops.fusion import loop_in
from mtmc_lsp.ir.primitives import KernelIR, PrimOp
from mtmc_lsp.ir.recurrence import recurrence_in
from mtmc_lsp.ir.regions import VIEWS, Region, RegionKind, product_in, products_in
from mtmc_lsp.schedule.attention_configs import attention_config
from mtmc_lsp.schedule.configs import KernelConfig, PrecisionMode
from mtmc_lsp.schedule.matmul_configs import fitted, product_config, with_tma
from mtmc_lsp.schedule.recurrent_configs import recurrent_config
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.schedule.tile_configs import tile_config
from mtmc_lsp.tuning.cost import ZERO, Cost, matmul_flops
from mtmc_lsp.tuning.kernel_cost import kernel_cost
from mtmc_lsp.tuning.kernel_length import is_too_long
from mtmc_lsp.tuning.load_cost import loaded_bytes
from mtmc_lsp.tuning.loop_forms import first_form
from mtmc_lsp.tuning.torch_cost import torch_cost

MUCH_WORK = 20_000
"""Search effort (total size of all examined sets). Beyond it, fusions only use nodes that no other fusion has: in a long chain,
such as unrolled time steps, every node would otherwise grow to most of the chain. It also bounds the effort without growth for
one long region."""
LONG, MUCH_FOR_ONE = 64, 8_000
"""Nodes of a region, and search effort for it, from which on many neighbours are added at a time: adding them one by one is
cubic in the region's length. A layer's kernel has at most 50 nodes and takes an effort of 4,000."""
SEVERAL = (16, 8, 4, 2)
"""How many nodes are added at once where no single node pays, for example between pairwise distances and coordinates."""
LONGEST = 400
"""Most computing operations of a long region: a kernel of 1,400 took more than a minute to compile, one of 350 a few seconds."""

MIN_MOVE_GAIN = 0.125
"""Predicted gain, in launches, from which on a node is moved from one kernel to the next."""


@dataclass(frozen=True)
class Fusion:
    """A region that is worth fusing, with its predicted cost before and after."""

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
    """Finds fusions for a graph with a schedule."""

    def __init__(
        self,
        ir: KernelIR,
        schedule: Schedule,
        device: DeviceModel,
        precision: Callable[[str], PrecisionMode | None] = lambda node: None,
        refused: Collection[frozenset[str]] = (),
        slow: Collection[frozenset[str]] = (),
        deadline: float | None = None,
        refused_forms: Mapping[str, Collection[ActionKind]] = {},
    ) -> None:
        """Prepare a search.

        Args:
            precision: the precision mode of a node's fp32 product in a new kernel; None for the user's mode.
            refused: sets of nodes that failed as one kernel.
            slow: sets of nodes with a product that were slower as one kernel; subsets with that product are skipped too.
            deadline: time of the monotonic clock after which regions stop growing.
            refused_forms: for nodes of loops, the forms in which a kernel failed.
        """
        self._deadline = deadline
        self._refused_forms = refused_forms
        self.ir = ir
        self.schedule = schedule
        self.device = device
        self.precision = precision
        self._regions: dict[frozenset[str], Region | None] = dict.fromkeys(refused)
        graph = ir.graph
        self._slow = {name: nodes for nodes in slow for name in nodes if name in graph.named and matmul_flops(ir, name)}
        self._around = Neighbourhood(ir, schedule)
        self._order = graph.positions
        self._nodes = graph.named
        self._torch: dict[str, Cost] = {}
        self._costs: dict[frozenset[str], Cost] = {}
        self._ends: dict[frozenset[str], frozenset[str]] = {}
        """For each set that growth passed through, its final set."""
        self._work = 0

    def least_uncertain(self) -> Fusion | None:
        """The possible kernel with the smallest predicted loss; ``None`` if there is none."""
        fusions = [
            fusion for seed in self._around.seeds() if (fusion := self._fusion(self._around.closed(seed))) is not None
        ]
        return max(fusions, key=lambda fusion: fusion.saved_us, default=None)

    def best(self, near: Collection[str] | None = None) -> list[Fusion]:
        """Disjoint fusions, largest predicted gain first.

        Args:
            near: start nodes of fusions; None for all nodes.
        """
        fusions: list[Fusion] = []
        inside: set[str] = set()
        for seed in self._around.seeds():
            if (near is not None and not seed & set(near)) or self._is_empty(seed):
                continue
            if fusions and self._is_late():
                break
            if self._work > MUCH_WORK and seed & inside:
                continue
            fusion = self._grow(seed, inside if self._work > MUCH_WORK else frozenset())
            if fusion is not None and fusion.saved_us > 0:
                fusions.append(fusion)
                inside |= fusion.nodes
            elif self.schedule.kernel_of(next(iter(seed))) is not None:
                inside |= seed
        fusions.sort(key=lambda fusion: (-fusion.saved_us, min(self._order[n] for n in fusion.nodes)))
        chosen: list[Fusion] = []
        used: set[str] = set()
        for fusion in fusions:
            disjoint = fusion if not fusion.nodes & used else self._without_nodes(fusion, used)
            if disjoint is not None:
                chosen.append(disjoint)
                used |= disjoint.nodes
        while not self._is_late() and (better := self._with_moved_node(chosen)) is not None:
            chosen = better
        chosen = [part for fusion in chosen for part in self._possible(fusion)]
        return sorted(chosen, key=lambda fusion: (-fusion.saved_us, min(self._order[n] for n in fusion.nodes)))

    def _is_empty(self, nodes: frozenset[str]) -> bool:
        """Whether no node computes an element at the captured sizes, as for an expert without tokens."""
        sizes = self.ir.graph.sizes
        types = [kind for name in nodes for kind in self._nodes[name].outputs]
        return all(kind.numel.value(sizes) == 0 for kind in types)

    def _possible(self, fusion: Fusion) -> list[Fusion]:
        """The fusion, or its parts before and after other kernels that must run between them."""
        parts = parts_in_order(self._around.sources, self.schedule, fusion.nodes)
        if len(parts) == 1:
            return [fusion]
        smaller = [self._without_nodes(fusion, fusion.nodes - part) for part in parts]
        return [
            each
            for each in smaller
            if each is not None and len(parts_in_order(self._around.sources, self.schedule, each.nodes)) == 1
        ]

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _without_nodes(self, fusion: Fusion, used: Set[str]) -> Fusion | None:
        """A fusion without taken nodes, if the remaining nodes are one kernel with a gain.

        Otherwise a value that both ends of a chain read would leave the whole chain to torch.
        """
        remaining = fusion.nodes - used
        if not remaining or self._around.closed(remaining) != remaining:
            return None
        smaller = self._fusion(self._around.without_idle_views(remaining))
        return smaller if smaller is not None and smaller.saved_us > 0 else None

    def _with_moved_node(self, chosen: Sequence[Fusion]) -> list[Fusion] | None:
        """The fusions with one node moved from the end of one to its only reader, if both then cost less.

        Growth considers one fusion at a time, so it keeps a cheap last node that the next kernel should compute. Views of the
        node move with it.
        """
        for giver in chosen:
            for name in sorted(giver.nodes, key=self._order.__getitem__, reverse=True):
                moved = self._around.with_views_behind(name, giver.nodes)
                readers = {reader for name in moved for reader in self._around.readers[name]} - moved
                if not readers or readers & giver.nodes or readers & self._around.opaque:
                    continue
                taker = next((other for other in chosen if readers <= other.nodes), None)
                units = {self._around.unit_of(reader) for reader in readers}
                if taker is None and (len(units) > 1 or any(readers & other.nodes for other in chosen)):
                    continue
                nodes = taker.nodes if taker is not None else next(iter(units))
                before_us = giver.after.us + (taker.after.us if taker is not None else self._apart(nodes).us)
                pair = self._moved(moved, giver, nodes, before_us)
                if pair is not None:
                    return [*(each for each in chosen if each not in (giver, taker)), *pair]
        return None

    def _moved(
        self, moved: frozenset[str], giver: Fusion, taker: frozenset[str], before_us: float
    ) -> list[Fusion] | None:
        """Both kernels with the nodes moved, if together they take less than ``before_us``."""
        left, used = giver.nodes - moved, self._around.closed(taker | moved)
        if not left or left & used or self._region(left) is None or self._region(used) is None:
            return None
        if self._around.closed(left) != left or used & giver.nodes != moved:
            return None
        fusions = [fusion for nodes in (left, used) if (fusion := self._fusion(nodes)) is not None]
        is_better = (
            len(fusions) == 2
            and sum(fusion.after.us for fusion in fusions) < before_us - MIN_MOVE_GAIN * self.device.launch_us
        )
        return fusions if is_better else None

    def _grow(self, seed: frozenset[str], others: Set[str]) -> Fusion | None:
        """The fusion that a start set grows to, without nodes of ``others``."""
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
        """The final set that nodes grow to; all sets on the way have the same one."""
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
        """A region with the first addition that does not raise the predicted cost; None if all do."""
        for added in self._around.additions(nodes):
            larger = widened(nodes, added)
            if larger != nodes and self._pays(nodes, larger):
                return larger
        return None

    def _several_more(self, nodes: frozenset[str]) -> frozenset[str] | None:
        """A region with several of the nearest nodes, which may pay together where single ones do not."""
        for most in SEVERAL:
            larger = self._around.ahead(nodes, most, ())
            if larger != nodes and self._pays(nodes, larger):
                return larger
        return None

    def _pays(self, nodes: frozenset[str], larger: frozenset[str]) -> bool:
        """Whether a larger region can be written, and costs no more than the region and the added nodes separately.

        What an attention adds may be a kernel before it: rotary embeddings would be computed again for each block of queries.
        """
        region = self._region(larger)
        if region is None or is_too_long(self.ir, region):
            return False
        added = larger - nodes
        separate_us = self._apart(added).us
        if region.kind is RegionKind.ATTENTION and len(added) > 1 and self._region(added) is not None:
            separate_us = min(separate_us, self._cost(added).us)
        return self._cost(larger).us <= self._cost(nodes).us + separate_us

    def _grown_in_strides(
        self, nodes: frozenset[str], most: int, others: Collection[str] = frozenset()
    ) -> frozenset[str]:
        """A region that grew by many nodes at a time.

        The number of added nodes halves after a failure and doubles after a success. Single nodes that do not pay are skipped
        until all others were tried. At the end many nodes are tried once more: a step of an unrolled loop may only pay as a
        whole.

        Args:
            most: how many nodes to add first.
            others: nodes that must not be added.
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
        """The nodes as one kernel; None if they compute nothing."""
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
            inlined = nodes & self._around.inlined
            again = self._around.recomputed_in(nodes) | inlined
            self._regions[nodes] = region_or_none(self.ir, nodes - inlined, again)
        return self._regions[nodes]

    def _config(self, region: Region) -> KernelConfig:
        for kernel in self.schedule.kernels:
            if set(kernel.nodes) <= set(region.nodes) and self._is_alike(kernel.nodes, region):
                return kernel.config
        if region.kind is RegionKind.MATMUL:
            prim = product_in(self.ir, region)
            config = product_config(self.ir, region, self.device, self.precision(prim.origin))
            loaded = loaded_bytes(self.ir, region) if config.precision is PrecisionMode.NATIVE else 2
            config = fitted(config, self.device.shared_bytes, loaded, len(products_in(self.ir, region)))
            return with_tma(self.ir, region, config, self.device)
        if region.kind is RegionKind.RECURRENT:
            layers = recurrence_in(self.ir, region)
            return recurrent_config(self.ir, layers, self.device, self.precision(layers.origin))
        if region.kind is RegionKind.LOOP:
            refused = {kind for name in region.nodes for kind in self._refused_forms.get(name, ())}
            precision = self.precision(loop_in(self.ir, region).node.name) or PrecisionMode.IEEE
            return first_form(self.ir, region, self.device, refused, precision)
        if region.kind in (RegionKind.ATTENTION, RegionKind.ATTENTION_GRADIENT):
            return attention_config(self.ir, region, self.device)
        return tile_config(self.ir, region, self.device)

    def _is_alike(self, nodes: Iterable[str], region: Region) -> bool:
        """Whether the kernel of some nodes has the kind of ``region``, and as many products and column sums."""
        kernel = self._region(frozenset(nodes))
        if kernel is None or kernel.kind is not region.kind or len(kernel.sums) != len(region.sums):
            return False
        return len(products_in(self.ir, kernel)) == len(products_in(self.ir, region))

    def _cost(self, nodes: frozenset[str]) -> Cost:
        """Predicted cost of the nodes as one kernel."""
        if nodes not in self._costs:
            region = self._region(nodes)
            assert region is not None
            self._costs[nodes] = kernel_cost(self.ir, region, self._config(region), self.device)
        return self._costs[nodes]

    def _apart(self, nodes: Iterable[str]) -> Cost:
        """Predicted cost of the nodes in the present schedule."""
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
    """Whether the region contains a float32 matrix product."""
    return any(
        ir.prims[name].op in (PrimOp.MATMUL, PrimOp.RECURRENT) and ir.prims[ir.prims[name].inputs[0]].dtype == "float32"
        for name in region.prims
    )
