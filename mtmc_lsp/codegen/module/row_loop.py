"""Writes loops over chunks of rows: a function for the operations of one chunk, and the loop of the launcher that calls it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.codegen.kernel.kernel import Kernel
from mtmc_lsp.codegen.kernel.snippets import call_text
from mtmc_lsp.codegen.module.launcher import Launcher
from mtmc_lsp.core.dtypes import is_float, itemsize
from mtmc_lsp.core.graph import Node, Ref, RowLoop, Rows
from mtmc_lsp.core.protocols import CannotCode
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

    @staticmethod
    def of(node: Node, outer: Launcher, kernels: Sequence[KernelPlan], name: str) -> LoopBody:
        """Begin the function ``name`` for the chunks of ``node``.

        Args:
            outer: the launcher with the loop.
            kernels: kernels of all loops.
        """
        assert node.loop is not None
        ir = lower(node.loop.body)
        plans = tuple(plan for plan in kernels if plan.key in ir.graph.named)
        launcher = Launcher(ir, outer.namespace)
        if outer.functions:
            name = f"{name}_{len(outer.functions) + 1}"
        inside = {name for plan in plans for name in plan.nodes}
        for ref, rows in zip(ir.graph.outputs, node.loop.outputs, strict=True):
            product = ir.graph.node(ref.name)
            if rows is None and product.op == "aten.mm.default" and ref.name not in inside:
                launcher.accumulators[ref] = launcher.names.unique(product.variable or "total")
        return LoopBody(node, node.loop, outer, name, ir, launcher, launches(ir, Schedule(kernels=plans)))

    def finish(self, kernels: Sequence[Kernel]) -> list[Kernel]:
        """Add the function and the loop to the launcher; returns the kernels, with limits over the launcher's sizes."""
        launcher, outer = self.launcher, self.outer
        if launcher.uses_seed or launcher.makes_descriptors or launcher.aligned:
            raise CannotCode("a loop over rows has kernels that need values of the whole call")
        summary = f"The rows of one chunk: {', '.join(self._result_names())}."
        outer.functions.append(launcher.finish_function(self.name, self.name, summary))
        outer.function_launches += [*launcher.launches, *launcher.function_launches]
        outer.uses_atomics |= launcher.uses_atomics
        outer.makes_constants |= launcher.makes_constants
        self._write_loop()
        return [replace(kernel, limits=self._limits(kernel)) for kernel in kernels]

    def _result_names(self) -> list[str]:
        names = [*self.launcher.accumulators.values()]
        names += [self.launcher.variables[ref] for ref in self.ir.graph.outputs if ref not in self.launcher.accumulators]
        return names

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
            raise CannotCode(f"the loop over rows reads {missing.name}, which no kernel writes; fuse it with its producer")
        arguments = []
        for ref, rows in zip(refs, loop.inputs, strict=True):
            arguments.append(self._chunk_of(outer.variables[ref], rows, is_result=False))
        arguments += [outer.number_names[name] for name in self.launcher.number_names]
        assigned, finished = [], []
        for i, (ref, rows) in enumerate(zip(graph.outputs, loop.outputs, strict=True)):
            result = Ref(self.node.name, i)
            if rows is not None:
                assigned.append(self._chunk_of(outer.allocate(result), rows, is_result=True))
                continue
            total, dtype = self._accumulator(result, ref)
            if ref in self.launcher.accumulators:
                arguments.append(total)
            else:
                part = outer.names.unique("part")
                assigned.append(part)
                finished.append(f"{total} += {part}")
        call = call_text(self.name, arguments, "    " * 2)
        start, rows_text = "start", str(loop.rows)
        outer.lines += [
            *self._comment(),
            f"for {start} in range(0, {outer.size(loop.total)}, {rows_text}):",
            f"    stop = {start} + {rows_text}",
            f"    {', '.join(assigned)} = {call}" if assigned else f"    {call}",
            *(f"    {line}" for line in finished),
        ]
        self._round_totals()

    def _accumulator(self, result: Ref, ref: Ref) -> tuple[str, str]:
        """The tensor of zeros to which the chunks add a sum, and its dtype."""
        outer, kind = self.outer, self.outer.ir.graph.type_of(result)
        dtype = kind.dtype
        if ref not in self.launcher.accumulators and is_float(dtype) and itemsize(dtype) < 4:
            dtype = "float32"
        outer.define(result, outer.zeros(replace(kind, dtype=dtype)))
        return outer.variables[result], dtype

    def _round_totals(self) -> None:
        """Round sums that were accumulated in float32."""
        for i, (ref, rows) in enumerate(zip(self.ir.graph.outputs, self.loop.outputs, strict=True)):
            kind = self.outer.ir.graph.type_of(Ref(self.node.name, i))
            is_rounded = rows is None and ref not in self.launcher.accumulators and is_float(kind.dtype)
            if is_rounded and itemsize(kind.dtype) < 4:
                name = self.outer.variables[Ref(self.node.name, i)]
                self.outer.lines.append(f"{name} = {name}.to(torch.{kind.dtype})")

    def _chunk_of(self, variable: str, rows: Rows | None, *, is_result: bool) -> str:
        """The rows of a chunk in a tensor."""
        if rows is None:
            return variable
        colons = ":, " * rows.first
        if rows.count == 1:
            return f"{variable}[{colons}start:stop]"
        flat = f"{variable}.flatten({rows.first}, {rows.first + rows.count - 1})"
        return f"{flat}[{colons}{'None, ' * (rows.count - 1)}start:stop]"

    def _comment(self) -> list[str]:
        graph, sizes = self.ir.graph, self.ir.graph.sizes
        large = max((kind for node in graph.nodes for kind in node.outputs), key=lambda kind: kind.numel.value(sizes))
        chunk = large.numel.value(sizes) * itemsize(large.dtype)
        whole = chunk / sizes[self.loop.symbol] * self.loop.total.value(self.outer.ir.graph.sizes)
        return [
            f"# A loop, because the largest value of all rows would take {_bytes_text(whole)}; that of a chunk takes "
            f"{_bytes_text(chunk)}.",
        ]


def _bytes_text(size: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"
