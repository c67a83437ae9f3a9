"""The memory of a launcher: what each kernel writes into, new tensors and those that are overwritten."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mtmc_lsp.codegen.kernel.kernel import Scratch
from mtmc_lsp.codegen.kernel.snippets import tuple_text
from mtmc_lsp.codegen.module.launchers.values import LauncherValues
from mtmc_lsp.codegen.module.naming import value_name
from mtmc_lsp.core.dtypes import itemsize
from mtmc_lsp.core.graph import Mutation, Ref, TensorType
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.concat_outputs import adds_to_zeros
from mtmc_lsp.ir.output_aliasing import may_overwrite, replaced_product
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.tuning.cost import tensor_bytes

FRESH = frozenset(
    "zeros zeros_like ones ones_like full full_like empty empty_like new_zeros select_scatter clone".split()
)
"""Operations that create a tensor that shares memory with no other one."""


class LauncherMemory(LauncherValues):
    """Allocates tensors, and decides which ones a kernel may overwrite."""

    def allocate(self, ref: Ref) -> str:
        """Allocate a buffer for a value; returns its variable."""
        kind = self.ir.graph.type_of(ref)
        name = self.names.unique(value_name(self.ir, ref))
        template = next(
            (
                item
                for item in self.ir.graph.inputs
                if item.type.shape == kind.shape and item.type.is_contiguous and kind.is_contiguous
            ),
            None,
        )
        if template is not None:
            dtype = "" if template.type.dtype == kind.dtype else f", dtype=torch.{kind.dtype}"
            self.lines.append(f"{name} = torch.empty_like({self.input_names[template.name]}{dtype})")
        else:
            text = (
                self._empty(kind.dtype, kind.shape)
                if kind.is_contiguous
                else self.memory("empty_strided", kind.dtype, kind.shape, kind.stride)
            )
            self.lines.append(f"{name} = {text}")
        self._allocated.add(name)
        self.register(ref, name, kind)
        return name

    def zeros(self, kind: TensorType) -> str:
        """A call that creates a contiguous tensor of zeros."""
        return self.memory("zeros", kind.dtype, kind.shape)

    def _empty(self, dtype: str, shape: Sequence[Size]) -> str:
        """A call that allocates a contiguous tensor: by a method of an input and with separate sizes, as it is fastest."""
        inputs = self.ir.graph.inputs
        template = next((item for item in inputs if item.type.dtype == dtype), inputs[0])
        arguments = [self.size(size) for size in shape] or ["()"]
        if template.type.dtype != dtype:
            arguments.append(f"dtype=torch.{dtype}")
        return f"{self.input_names[template.name]}.new_empty({', '.join(arguments)})"

    def memory(self, function: str, dtype: str, *sizes: Sequence[Size]) -> str:
        """A torch call that creates a tensor with this shape (and strides, if given) on the inputs' device."""
        size_arguments = ", ".join(tuple_text([self.size(size) for size in group]) for group in sizes)
        first = self.input_names[self.ir.graph.inputs[0].name]
        return f"torch.{function}({size_arguments}, dtype=torch.{dtype}, device={first}.device)"

    def output(self, ref: Ref, regions: Sequence[Region]) -> str:
        """The variable of the tensor that a kernel writes. Several kernels may each write a part of it."""
        if ref not in self._written:
            self._written[ref] = (
                self._initialised(ref, regions)
                or self._begun(ref)
                or self._overwritten_input(ref, regions)
                or self._overwritten_product(ref, regions)
                or self.allocate(ref)
            )
        return self._written[ref]

    def _initialised(self, ref: Ref, regions: Sequence[Region]) -> str:
        """The initialised tensor to which a kernel adds rows; empty if a kernel writes the whole value."""
        if not any(part.index for region in regions for part in region.parts.get(ref, ())):
            return ""
        self.uses_atomics = True
        graph = self.ir.graph
        # The value may be a view that changes nothing, such as `permute(0, 1)`, of the scatter-add's result.
        kind, node = graph.type_of(ref), graph.node(self.ir.of(ref).origin)
        base = node.args[0]
        assert isinstance(base, Ref)
        is_alone = graph.readers(base.name) == (node,) and base not in graph.escaping
        if is_alone and graph.written_inputs.get(ref) == base.name and graph.type_of(base) == kind:
            self.register(ref, self.input_names[base.name], kind)
        elif not adds_to_zeros(self.ir, ref):
            self.define(ref, f"{self.variables[base]}.clone(memory_format=torch.contiguous_format)")
        elif is_alone and base in self.variables and self._is_zeros(base, kind):
            self.register(ref, self.variables[base], kind)
        else:
            self.define(ref, self.memory("zeros", kind.dtype, kind.shape))
        return self.variables[ref]

    def _begun(self, ref: Ref) -> str:
        """The tensor that a loop writes in part; empty if the kernel writes the whole value."""
        graph = self.ir.graph
        node = graph.named[ref.name]
        number = node.loop.outputs[ref.index].base if node.loop is not None else None
        if node.loop is None or number is None:
            return ""
        base = node.args[number]
        assert isinstance(base, Ref)
        is_alone = graph.readers(base.name) == (node,) and base not in graph.escaping
        is_alone = is_alone and all(item.argument != number for item in node.loop.inputs)
        # Each result needs memory: two that begin with the same values cannot share it.
        is_alone = is_alone and sum(output.base == number for output in node.loop.outputs) == 1
        if base.name in self.input_names:
            may_overwrite = graph.written_inputs.get(ref) == base.name
        else:
            is_fresh = graph.node(base.name).word in FRESH and base.name not in self.kept
            may_overwrite = is_fresh or self.variables[base] in self._allocated
        if is_alone and may_overwrite:
            self.register(ref, self.variables[base], graph.type_of(ref))
        else:
            order = "memory_format=torch.contiguous_format" if graph.type_of(ref).is_contiguous else ""
            self.define(ref, f"{self.variables[base]}.clone({order})")
        return self.variables[ref]

    def _is_zeros(self, base: Ref, kind: TensorType) -> bool:
        """Whether the value is a zero tensor that no other value, and no other call, shares."""
        node = self.ir.graph.named.get(base.name)
        return node is not None and "zeros" in node.word and node.type == kind and base.name not in self.kept

    def _overwritten_input(self, ref: Ref, regions: Sequence[Region]) -> str:
        """The input that a value may overwrite directly; empty if it needs its own memory."""
        graph = self.ir.graph
        replaced = graph.written_inputs.get(ref)
        region = next(region for region in regions if ref in region.outputs)
        if replaced is None or not may_overwrite(self.ir, region, Mutation(replaced, ref), self.recomputed):
            return ""
        self.register(ref, self.input_names[replaced], graph.type_of(ref))
        return self.input_names[replaced]

    def _overwritten_product(self, ref: Ref, regions: Sequence[Region]) -> str:
        """The product that a value may overwrite, because nothing reads it afterwards; empty if there is none."""
        if not self.reuses_products or len(regions) != 1:
            return ""
        product = replaced_product(self.ir, regions[0], ref, self.done)
        if product is None or self.variables[product] in self._overwritten:
            return ""
        name = self.variables[product]
        self._overwritten.add(name)
        self.lines.append(f"# {value_name(self.ir, ref)} replaces {name}, which nothing reads afterwards.")
        self.register(ref, name, self.ir.graph.type_of(ref))
        return name

    def allocate_scratch(self, scratch: Scratch) -> str:
        """Allocate a buffer that kernels share; returns its variable."""
        name = self.names.unique(scratch.name)
        self.lines.append(f"{name} = {self._empty(scratch.dtype, scratch.shape)}")
        self._scratch[scratch] = name
        elements = math.prod(size.value(self.ir.graph.sizes) for size in scratch.shape)
        self._scratch_bytes[name] = float(itemsize(scratch.dtype) * elements)
        return name

    def tensor_bytes(self) -> dict[str, float]:
        """Bytes of the tensors, by variable, at the sizes of the workload."""
        graph, found = self.ir.graph, dict[str, float]()
        for ref, name in self.variables.items():
            found[name] = max(found.get(name, 0.0), tensor_bytes(graph.type_of(ref), graph.sizes))
        return found | self._scratch_bytes
