"""Writes loops over chunks of rows: a function for the operations of one chunk, and the loop of the launcher that calls it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mtmc_lsp.codegen.kernel.kernel import Kernel
from mtmc_lsp.codegen.kernel.snippets import call_text
from mtmc_lsp.codegen.module.launchers.launcher import Launcher
from mtmc_lsp.codegen.module.launchers.values import FLAG
from mtmc_lsp.core.dtypes import is_float, itemsize
from mtmc_lsp.core.graph import PRODUCTS, Node, Ref, RowLoop, Rows, TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.schedule.launch_units import Unit, launches
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule


@dataclass
class LoopBody:
    """The function for one chunk, while it is written."""

    node: Node
    loop: RowLoop
    outer: Launcher
    name: str
    ir: KernelIR
    launcher: Launcher
    units: list[list[Unit]]
    """Launches that results need."""
    units_for_gradients: list[list[Unit]] = field(default_factory=list)
    """Launches that only gradients need."""

    @staticmethod
    def of(node: Node, outer: Launcher, kernels: Sequence[KernelPlan], name: str) -> LoopBody:
        """Begin the function ``name`` for the chunks of ``node``.

        Args:
            outer: the launcher with the loop.
            kernels: kernels of all loops.
        """
        assert node.row_loop is not None
        ir = lower(node.row_loop.body)
        plans = tuple(plan for plan in kernels if plan.key in ir.graph.named)
        launcher = Launcher(ir, outer.namespace, whole_sizes=node.row_loop.sizes, reuses_products=True, is_part=True)
        if outer.functions:
            name = f"{name}_{len(outer.functions) + 1}"
        body = LoopBody(node, node.row_loop, outer, name, ir, launcher, launches(ir, Schedule(kernels=plans)))
        body._write_products_outside({name for plan in plans for name in plan.nodes})
        body._part_units()
        return body

    def _write_products_outside(self, in_kernels: set[str]) -> None:
        """Let products add to, or write into, the results of the loop."""
        launcher = self.launcher
        for ref, rows in zip(self.ir.graph.outputs, self.loop.outputs, strict=True):
            product = self.ir.graph.node(ref.name)
            if product.op != "aten.mm.default" or ref.name in in_kernels or self.ir.graph.readers(ref.name):
                continue
            if rows is None:
                launcher.accumulators[ref] = launcher.names.unique(product.variable)
            elif rows == Rows(0) and product.type.is_contiguous:
                launcher.destinations[ref] = launcher.names.unique(product.variable)

    def _part_units(self) -> None:
        graph = self.ir.graph
        if graph.backward is None:
            return
        self.launcher.flags = (FLAG,)
        self.units_for_gradients = [
            launch for launch in self.units if all(unit.nodes[-1] in graph.backward_nodes for unit in launch)
        ]
        self.units = [launch for launch in self.units if launch not in self.units_for_gradients]

    def return_early(self) -> None:
        """Return the results without gradients; called between the launches of both kinds."""
        if self.launcher.flags:
            parts = [
                self.launcher.variables[ref] if Ref(self.node.name, i) not in self.outer.optional else "None"
                for i, ref in enumerate(self.ir.graph.outputs)
                if not self._is_written_by_body(ref)
            ]
            self.launcher.lines += [f"if not {FLAG}:", f"    return {', '.join(parts)}"]

    def _is_written_by_body(self, ref: Ref) -> bool:
        return ref in self.launcher.accumulators or ref in self.launcher.destinations

    def finish(self, kernels: Sequence[Kernel]) -> list[Kernel]:
        """Add the function and the loop to the launcher; returns the kernels, with limits over the launcher's sizes."""
        launcher, outer = self.launcher, self.outer
        if launcher.uses_seed or launcher.makes_descriptors or launcher.aligned:
            raise CannotCode("a loop over rows has kernels that need values of the whole call")
        returned = [launcher.variables[ref] for ref in self.ir.graph.outputs if not self._is_written_by_body(ref)]
        names = [*returned, *launcher.accumulators.values(), *launcher.destinations.values()]
        summary = f"{', '.join(names)} for one chunk of rows."
        outer.functions.append(launcher.finish_function(self.name, self.name, summary))
        outer.function_launches += [*launcher.launches, *launcher.function_launches]
        outer.uses_atomics |= launcher.uses_atomics
        outer.makes_constants |= launcher.makes_constants
        self._write_loop()
        return [replace(kernel, limits=self._limits(kernel)) for kernel in kernels]

    def _limits(self, kernel: Kernel) -> tuple[str, ...]:
        """The limits of a kernel for the largest chunk."""
        limits = [re.sub(rf"\b{self.loop.symbol}\b", str(self.loop.rows), limit) for limit in kernel.limits]
        general = [limit for limit in limits if re.search(r"[a-zA-Z_]", limit)]
        for limit in set(limits) - set(general):
            # Safe to evaluate: limits are generated arithmetic, here over numbers.
            if not eval(limit, {"__builtins__": {}}, {}):
                raise CannotCode(f"the kernels of a chunk require {limit}; choose fewer rows")
        return tuple(general)

    def _write_loop(self) -> None:
        outer, loop, graph = self.outer, self.loop, self.ir.graph
        refs = [ref for ref in self.node.args if isinstance(ref, Ref)]
        if missing := next((ref for ref in refs if ref not in outer.variables), None):
            raise CannotCode(
                f"the loop over rows reads {missing.name}, which no kernel writes; fuse it with its producer"
            )
        arguments = [
            _chunk(outer.variables[ref], rows) + _copied(outer.ir.graph.type_of(ref), item.type)
            for ref, rows, item in zip(refs, loop.inputs, graph.inputs, strict=True)
        ]
        arguments += [outer.number_names[name] for name in self.launcher.number_names]
        arguments += [outer.size(Size.symbol(name)) for name in loop.sizes]
        totals, destinations = dict[Ref, str](), dict[Ref, str]()
        assigned, added = [], []
        for i, (ref, rows) in enumerate(zip(graph.outputs, loop.outputs, strict=True)):
            result = Ref(self.node.name, i)
            condition = f" if {FLAG} else None" if result in outer.optional else ""
            if rows is None:
                total = self._accumulator(result, ref, condition)
                if ref in self.launcher.accumulators:
                    totals[ref] = total
                else:
                    part = outer.names.unique("part")
                    assigned.append(part)
                    added += [f"if {FLAG}:"] if condition else []
                    added.append(f"{'    ' if condition else ''}{total} += {part}")
                continue
            target = _chunk(self._rows_of_all(result, condition), rows)
            if ref in self.launcher.destinations:
                destinations[ref] = f"{target}{condition}"
            elif condition:
                part = outer.names.unique("part")
                assigned.append(part)
                added += [f"if {FLAG}:", f"    {target} = {part}"]
            else:
                assigned.append(target)
        arguments += [totals[ref] for ref in self.launcher.accumulators]
        arguments += [destinations[ref] for ref in self.launcher.destinations]
        arguments += [FLAG] if self.launcher.flags else []
        call = call_text(self.name, arguments, "    " * 2)
        outer.lines += [
            self._comment(),
            f"for start in range(0, {outer.size(loop.total)}, {loop.rows}):",
            f"    stop = start + {loop.rows}",
            f"    {', '.join(assigned)} = {call}" if assigned else f"    {call}",
            *(f"    {line}" for line in added),
        ]
        self._round_totals()

    def _rows_of_all(self, result: Ref, condition: str) -> str:
        """The tensor into which the chunks write their rows of a result."""
        name = self.outer.allocate(result)
        self.outer.lines[-1] += condition
        return name

    def _accumulator(self, result: Ref, ref: Ref, condition: str) -> str:
        """The tensor of zeros to which the chunks add a sum."""
        outer, kind = self.outer, self.outer.ir.graph.type_of(result)
        if ref not in self.launcher.accumulators and _is_short(kind.dtype):
            kind = replace(kind, dtype="float32")
        outer.define(result, f"{outer.zeros(kind)}{condition}")
        return outer.variables[result]

    def _round_totals(self) -> None:
        """Round sums that were accumulated in float32."""
        for i, (ref, rows) in enumerate(zip(self.ir.graph.outputs, self.loop.outputs, strict=True)):
            result = Ref(self.node.name, i)
            dtype = self.outer.ir.graph.type_of(result).dtype
            if rows is None and ref not in self.launcher.accumulators and _is_short(dtype):
                name = self.outer.variables[result]
                condition = f" if {FLAG} else None" if result in self.outer.optional else ""
                self.outer.lines.append(f"{name} = {name}.to(torch.{dtype}){condition}")

    def _comment(self) -> str:
        graph, sizes = self.ir.graph, self.ir.graph.sizes
        product = next(node for node in graph.nodes if node.word in PRODUCTS)
        chunk = product.type.numel.value(sizes) * itemsize(product.type.dtype)
        total = self.loop.total.value(self.outer.ir.graph.sizes)
        name = self.launcher.variables[Ref(product.name)]
        whole = _bytes_text(chunk / sizes[self.loop.symbol] * total)
        return f"# {name} of all {total} rows would take {whole}. A chunk computes, uses and drops {_bytes_text(chunk)} of it."


def _chunk(variable: str, rows: Rows | None) -> str:
    """The rows of a chunk in a tensor; the whole tensor if it has no rows."""
    if rows is None:
        return variable
    colons = ":, " * rows.first
    if rows.count == 1:
        return f"{variable}[{colons}start:stop]"
    flat = f"{variable}.flatten({rows.first}, {rows.first + rows.count - 1})"
    return f"{flat}[{colons}{'None, ' * (rows.count - 1)}start:stop]"


def _copied(whole: TensorType, chunk: TensorType) -> str:
    """What makes the rows of a chunk contiguous if the body expects that, and the tensor is not.

    ``flatten`` copies rows that are not one dimension in memory, but not where a size is 1. With a batch of 1, the rows of an
    expanded tensor have a stride of 0.
    """
    return ".contiguous()" if chunk.is_contiguous and not whole.is_contiguous else ""


def _is_short(dtype: str) -> bool:
    return is_float(dtype) and itemsize(dtype) < 4


def _bytes_text(size: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"
