"""The launcher: the Python function that allocates outputs, launches the kernels and makes the remaining torch calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mtmc_lsp.codegen.kernel.kernel import Kernel, Scratch
from mtmc_lsp.codegen.kernel.snippets import LINE, call_text, def_lines, filled, tuple_text
from mtmc_lsp.codegen.loop.torch_loop import loop_statements
from mtmc_lsp.codegen.matmul.descriptors import ALLOCATOR, MAKE_DESCRIPTOR
from mtmc_lsp.codegen.module.constants import constant_text, is_literal_tensor
from mtmc_lsp.codegen.module.direct_launches import launched_directly
from mtmc_lsp.codegen.module.guard import bindings, size_text
from mtmc_lsp.codegen.module.naming import Names, value_name
from mtmc_lsp.codegen.module.side_by_side import NUMBERS
from mtmc_lsp.codegen.module.tables import TableFunction, table_function
from mtmc_lsp.codegen.module.torch_calls import argument_text, torch_call
from mtmc_lsp.core.dtypes import POINTER_TYPES
from mtmc_lsp.core.graph import InputKind, Mutation, Node, Ref, TensorType
from mtmc_lsp.core.loop import Loop
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import KernelLaunch
from mtmc_lsp.core.sizes import Number, Size, rename_symbols
from mtmc_lsp.ir.buffer_updates import call_counters, running_statistics
from mtmc_lsp.ir.concat_outputs import adds_to_zeros
from mtmc_lsp.ir.output_aliasing import may_overwrite, replaced_product
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import VIEWS, Region
from mtmc_lsp.ir.run_time_numbers import numbers_of, numbers_of_node
from mtmc_lsp.rewrites.convolution_layout import FORMATS, channels_last
from mtmc_lsp.schedule.column_tiles import next_power_of_two

FLAG = "needs_gradients"
"""The parameter of functions that compute gradients only for calls that autograd records."""
RESERVED_LOCALS = frozenset(
    [
        *"original references tangents run".split(),
        *"torch triton tl math seed n_rows n_cols n_outer n_batch n_m n_n n_q n_k rows_m rows_n k_pad start stop".split(),
        ALLOCATOR,
        FLAG,
        *NUMBERS,
    ]
)
"""Names that every launcher may use for its own variables."""
FRESH = frozenset(
    "zeros zeros_like ones ones_like full full_like empty empty_like new_zeros select_scatter clone".split()
)
"""Operations that create a tensor that shares memory with no other one."""
MAX_ARGUMENTS = 64
"""Maximum number of arguments of a PyTorch operator."""


@dataclass
class Launcher:
    """Collects the launcher's statements while the kernels are written."""

    ir: KernelIR
    namespace: str = "{__name__.replace('.', '_')}"
    """Namespace of the operators, as the content of an f-string: the name under which the user's module is imported."""
    names: Names = field(default_factory=lambda: Names(RESERVED_LOCALS))
    lines: list[str] = field(default_factory=list)
    variables: dict[Ref, str] = field(default_factory=dict)
    """The variable of each graph value that is in memory."""
    buffers: dict[str, TensorType] = field(default_factory=dict)
    """The type of each primitive that is in memory."""
    holders: dict[str, str] = field(default_factory=dict)
    """The variable of each primitive that is in memory."""
    launches: list[KernelLaunch] = field(default_factory=list)
    uses_seed: bool = False
    makes_descriptors: bool = False
    """Whether a kernel makes tensor descriptors."""
    uses_atomics: bool = False
    """Whether a kernel uses atomic additions, so that results are non-deterministic in the last bits."""
    makes_constants: bool = False
    """Whether the launcher creates literal tensors."""
    functions: list[str] = field(default_factory=list)
    """Sources of functions that the launcher calls."""
    function_launches: list[KernelLaunch] = field(default_factory=list)
    """Launches in these functions."""
    accumulators: dict[Ref, str] = field(default_factory=dict)
    """Products that are added to a tensor instead of being returned, each with the parameter for that tensor."""
    destinations: dict[Ref, str] = field(default_factory=dict)
    """Products that are written into a tensor instead of being returned, each with the parameter for that tensor."""
    optional: frozenset[Ref] = frozenset()
    """Values that only gradients need, which calls that autograd does not record leave out."""
    flags: tuple[str, ...] = ()
    """Parameters that say which results to compute."""
    whole_sizes: tuple[str, ...] = ()
    """Named sizes that are parameters, because no input has them."""
    reuses_products: bool = False
    """Whether a kernel may overwrite a product that nothing else reads."""
    done: set[str] = field(default_factory=set)
    """The nodes whose kernels and calls were written."""
    recomputed: frozenset[str] = frozenset()
    """Nodes that some kernels recompute in addition to the kernel that stores them."""
    is_part: bool = False
    """Whether another launcher calls the function."""
    runs_operators: bool = False
    """Whether the launcher calls operators of torch that autocast may cast for."""

    def __post_init__(self) -> None:
        for item in self.ir.graph.inputs:
            variable = self.names.unique(item.name)
            self._register(Ref(item.name), variable, item.type)
        graph = self.ir.graph
        self.input_names = {item.name: self.variables[Ref(item.name)] for item in graph.inputs}
        used_numbers = {name for number in numbers_of(graph) for name in number.names()}
        self.number_names = {i.name: self.names.unique(i.name) for i in graph.numbers if i.name in used_numbers}
        """The launcher's parameter for each number among the arguments that the graph uses."""
        self._numbers: dict[str, str] = {}
        """Expressions for numbers that are computed from arguments, and their variables."""
        self._sizes = {symbol: binding.text for symbol, binding in bindings(graph, self.input_names).items()}
        self._size_names = {symbol: self.names.unique(symbol) for symbol in self.whole_sizes}
        self._scratch: dict[Scratch, str] = {}
        self._locals: dict[str, str] = {}
        self._table_lines: list[str] = []
        """Statements that create tables: tensors that depend only on sizes."""
        self._counts = call_counters(graph)
        self._allocated: set[str] = set()
        """Variables of tensors that the launcher allocated."""
        self.aligned: dict[str, None] = {}
        """Inputs with tensor descriptors; the guard checks their alignment."""
        self._written: dict[Ref, str] = {}
        """The variable of each value that a kernel has written so far."""
        self._overwritten: set[str] = set()
        """Products that a kernel overwrites."""
        self._storage: dict[str, str] = {}
        """The variable of the tensor on which each view is based."""

    def _register(self, ref: Ref, variable: str, kind: TensorType) -> None:
        self.variables[ref] = variable
        prim = self.ir.of(ref).name
        self.holders.setdefault(prim, variable)
        self.buffers.setdefault(prim, kind)

    def size(self, size: Size) -> str:
        """A size as Python; each named size in it becomes a local variable."""
        for symbol in size.symbols():
            if symbol not in self._size_names:
                self._size_names[symbol] = self.names.unique(symbol)
        return size_text(size, self._size_names)

    def number(self, number: Number) -> str:
        """A run-time number as Python; a number that is computed from arguments becomes a local variable."""
        text = rename_symbols(number.text, self.number_names)
        if number.is_argument:
            return text
        if text not in self._numbers:
            self._numbers[text] = self.names.unique(number.preferred_name)
        return self._numbers[text]

    def torch_call(self, node: Node) -> None:
        """Emit an ATen node as a torch call."""
        if node.name in self._counts:
            self._register(Ref(node.name), self.input_names[self._counts[node.name].input], node.type)
            return
        if node.loop is not None:
            self._torch_loop(node, node.loop)
            return
        if not node.op.startswith("aten."):
            raise CannotCode(f"{node.op.split('.')[1]} is not a PyTorch operation, so it must be part of a kernel")
        for ref in node.inputs():
            if ref not in self.variables:
                raise CannotCode(f"{node.op} reads a value that no kernel writes; fuse it with its producer")
        for argument in (*node.args, *node.kwargs.values()):
            for size in _sizes_in(argument):
                self.size(size)
        self.runs_operators |= not _is_view(node) and node.op.split(".")[1] not in FRESH
        if running := running_statistics(self.ir.graph, node):
            self._batch_norm_in_place(node, running)
            return
        first = self.input_names[self.ir.graph.inputs[0].name]
        if is_literal_tensor(node):
            text, self.makes_constants = constant_text(node, first), True
        else:
            text = torch_call(node, self.variables, {**self._size_names, **self.number_names}, first)
        result_names = [self.names.unique(value_name(self.ir, Ref(node.name, i))) for i in range(len(node.outputs))]
        is_contiguous = all(kind.is_contiguous for kind in node.outputs) and not _is_view(node)
        lines = self._table_lines if node.name in self.ir.tables.nodes else self.lines
        if self._is_written_outside(Ref(node.name)):
            left, right = (argument_text(item, self.variables, self._size_names) for item in node.args)
            if total := self.accumulators.get(Ref(node.name)):
                lines.append(f"{total}.addmm_({left}, {right})")
            else:
                lines.append(f"torch.mm({left}, {right}, out={self.destinations[Ref(node.name)]})")
            return
        if len(result_names) == 1:
            # Kernels expect contiguous tensors; torch may return another layout.
            order = ".contiguous()" if is_contiguous and _may_be_strided(node) else _channels_last(node)
            lines.append(f"{result_names[0]} = {text}{order}")
        else:
            lines.append(f"{', '.join(result_names)} = {text}")
            if _channels_last(node):
                lines.append(f"{result_names[0]} = {result_names[0]}{_channels_last(node)}")
        for i, (name, kind) in enumerate(zip(result_names, node.outputs, strict=True)):
            self._register(Ref(node.name, i), name, kind)
            if _is_view(node):
                source = self.variables[next(node.inputs())]
                self._storage[name] = self._storage.get(source, source)

    def _is_written_outside(self, ref: Ref) -> bool:
        """Whether a value goes into a tensor of the caller."""
        return ref in self.accumulators or ref in self.destinations

    def _torch_loop(self, node: Node, loop: Loop) -> None:
        """Emit a loop over time steps as a loop of torch calls."""
        for size in (
            *loop.sizes(),
            *(size for inner in loop.nodes for size in _sizes_in((*inner.args, *inner.kwargs.values()))),
        ):
            self.size(size)
        self.runs_operators = True
        results = [self.names.unique(value_name(self.ir, Ref(node.name, i))) for i in range(len(node.outputs))]
        texts = {**self._size_names, **self.number_names}
        first = self.input_names[self.ir.graph.inputs[0].name]
        self.lines += loop_statements(node, self.variables, results, self.names, self.size, texts, first)
        for i, (name, kind) in enumerate(zip(results, node.outputs, strict=True)):
            self._register(Ref(node.name, i), name, kind)

    def _batch_norm_in_place(self, node: Node, running: Mapping[Ref, str]) -> None:
        """Emit a training-mode batch norm like the user's module: it updates the running statistics in place."""
        x, weight, bias, mean, var, training, momentum, eps = (
            argument_text(item, self.variables, self._size_names) for item in node.args
        )
        call = f"torch.nn.functional.batch_norm({', '.join([x, mean, var, weight, bias, training, momentum, eps])})"
        self.define(Ref(node.name), f"{call}{_channels_last(node)}")
        for ref, name in running.items():
            self._register(ref, self.input_names[name], self.ir.graph.type_of(ref))

    def define(self, ref: Ref, text: str) -> None:
        """Assign the expression ``text`` to a new variable for a value."""
        name = self.names.unique(value_name(self.ir, ref))
        self.lines.append(f"{name} = {text}")
        self._register(ref, name, self.ir.graph.type_of(ref))

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
                else self._memory("empty_strided", kind.dtype, kind.shape, kind.stride)
            )
            self.lines.append(f"{name} = {text}")
        self._allocated.add(name)
        self._register(ref, name, kind)
        return name

    def zeros(self, kind: TensorType) -> str:
        """A call that creates a contiguous tensor of zeros."""
        return self._memory("zeros", kind.dtype, kind.shape)

    def _empty(self, dtype: str, shape: Sequence[Size]) -> str:
        """A call that allocates a contiguous tensor: by a method of an input and with separate sizes, as it is fastest."""
        inputs = self.ir.graph.inputs
        template = next((item for item in inputs if item.type.dtype == dtype), inputs[0])
        arguments = [self.size(size) for size in shape] or ["()"]
        if template.type.dtype != dtype:
            arguments.append(f"dtype=torch.{dtype}")
        return f"{self.input_names[template.name]}.new_empty({', '.join(arguments)})"

    def _memory(self, function: str, dtype: str, *sizes: Sequence[Size]) -> str:
        """A torch call that creates a tensor with this shape (and strides, if given) on the inputs' device."""
        size_arguments = ", ".join(tuple_text([self.size(size) for size in group]) for group in sizes)
        first = self.input_names[self.ir.graph.inputs[0].name]
        return f"torch.{function}({size_arguments}, dtype=torch.{dtype}, device={first}.device)"

    def supports_descriptors(self, kernel: Kernel) -> bool:
        """Whether all tensors with descriptors in this kernel are aligned, or are inputs that the guard can check.

        Results of torch calls may be arbitrary views, so their alignment is unknown.
        """
        holders = (self.holders[prim] for prim in kernel.described)
        return all(holder in self._allocated or holder in self.input_names.values() for holder in holders)

    def _output(self, ref: Ref, regions: Sequence[Region]) -> str:
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
            self._register(ref, self.input_names[base.name], kind)
        elif not adds_to_zeros(self.ir, ref):
            self.define(ref, f"{self.variables[base]}.clone(memory_format=torch.contiguous_format)")
        elif is_alone and base in self.variables and self._is_zeros(base, kind):
            self._register(ref, self.variables[base], kind)
        else:
            self.define(ref, self._memory("zeros", kind.dtype, kind.shape))
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
            is_fresh = graph.node(base.name).word in FRESH and base.name not in self.ir.tables.nodes
            may_overwrite = is_fresh or self.variables[base] in self._allocated
        if is_alone and may_overwrite:
            self._register(ref, self.variables[base], graph.type_of(ref))
        else:
            order = "memory_format=torch.contiguous_format" if graph.type_of(ref).is_contiguous else ""
            self.define(ref, f"{self.variables[base]}.clone({order})")
        return self.variables[ref]

    def _is_zeros(self, base: Ref, kind: TensorType) -> bool:
        """Whether the value is a zero tensor that no other value shares."""
        node = self.ir.graph.named.get(base.name)
        return node is not None and "zeros" in node.word and node.type == kind

    def _overwritten_input(self, ref: Ref, regions: Sequence[Region]) -> str:
        """The input that a value may overwrite directly; empty if it needs its own memory."""
        graph = self.ir.graph
        replaced = graph.written_inputs.get(ref)
        region = next(region for region in regions if ref in region.outputs)
        if replaced is None or not may_overwrite(self.ir, region, Mutation(replaced, ref), self.recomputed):
            return ""
        self._register(ref, self.input_names[replaced], graph.type_of(ref))
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
        self._register(ref, name, self.ir.graph.type_of(ref))
        return name

    def _allocate_scratch(self, scratch: Scratch) -> str:
        name = self.names.unique(scratch.name)
        self.lines.append(f"{name} = {self._empty(scratch.dtype, scratch.shape)}")
        self._scratch[scratch] = name
        return name

    def launch(self, kernel: Kernel, regions: Sequence[Region]) -> None:
        """Emit the allocation of the outputs and the launch of the kernel of these regions."""
        if any(prim == "seed" for _, prim in kernel.tensors):
            self.uses_seed = True
        arguments = [("seed" if prim == "seed" else self.holders[prim]) for _, prim in kernel.tensors]
        arguments += [self._scratch[scratch] for _, scratch in kernel.scratch_read]
        arguments += [self._output(ref, regions) for _, ref in kernel.outputs]
        arguments += [self._allocate_scratch(scratch) for _, scratch in kernel.scratch_written]
        size_variables = {}
        expressions = f"{kernel.grid} {kernel.dynamic} {kernel.numbers}"
        for name, size in kernel.grid_sizes.items():
            text = self.size(size)
            is_parameter = any(
                param == name or (other_size == size and not size.is_symbol and not size.is_constant)
                for param, other_size in kernel.sizes
            )
            if re.search(rf"\b{name}\b", expressions) or is_parameter:
                if self._locals.get(name) != text:
                    self.lines.append(f"{name} = {text}")
                    self._locals[name] = text
                size_variables[size] = name
        keywords = []
        for param, size in kernel.sizes:
            text = size_variables.get(size) or self.size(size)
            if kernel.passed_as_constant(param, size):
                keywords.append(f"{param}={text}")
            else:
                arguments.append(text)
        for _, number, dtype in kernel.run_time_numbers:
            text = self.number(number)
            arguments.append(f"float({text})" if number.kind == "int" and dtype != "int64" else text)
        for name, text in kernel.numbers.items():
            self.lines.append(f"{name} = {text}")
            arguments.append(name)
        keywords += [f"{name}={value!r}" for name, value in kernel.constexprs.items()]
        keywords += [f"{name}={text}" for name, text in kernel.dynamic.items()]
        keywords += [f"num_warps={kernel.num_warps}", f"num_stages={kernel.num_stages}"]
        grid = tuple_text(list(kernel.grid))
        head = f"{kernel.name}[{grid}]("
        one_line = head + ", ".join([*arguments, *keywords]) + ")"
        if len(one_line) <= LINE:
            self.lines.append(one_line)
        else:
            self.lines += [head, *filled(arguments, "    "), *filled(keywords, "    "), ")"]
        self.makes_descriptors |= f"{MAKE_DESCRIPTOR}(" in kernel.source
        for holder in (self.holders[prim] for prim in kernel.described):
            self.aligned.update(
                dict.fromkeys(name for name, variable in self.input_names.items() if variable == holder)
            )
        self.launches.append(self._signature(kernel))

    def _signature(self, kernel: Kernel) -> KernelLaunch:
        sizes = self.ir.graph.sizes
        signature: dict[str, str] = {}
        divisible: list[str] = []
        for param, prim in kernel.tensors:
            dtype = "int64" if prim == "seed" else self.buffers[prim].dtype
            signature[param] = POINTER_TYPES[dtype]
            divisible.append(param)
        for param, ref in kernel.outputs:
            signature[param] = POINTER_TYPES[self.ir.graph.type_of(ref).dtype]
            divisible.append(param)
        constexprs: dict[str, object] = dict(kernel.constexprs)
        for param, scratch in (*kernel.scratch_read, *kernel.scratch_written):
            signature[param] = POINTER_TYPES[scratch.dtype]
            divisible.append(param)
        for param, size in kernel.sizes:
            number = size.value(sizes)
            if kernel.passed_as_constant(param, size) or number == 1:
                # Triton specialises sizes that equal 1.
                constexprs[param] = number
            else:
                signature[param] = "i32" if number < 2**31 else "i64"
                if number % 16 == 0:
                    divisible.append(param)
        types = {"float32": "fp32", "float64": "fp64", "int64": "i64"}
        signature |= {parameter: types[dtype] for parameter, _, dtype in kernel.run_time_numbers}
        signature |= dict.fromkeys(kernel.numbers, "i32")
        for param, text in kernel.dynamic.items():
            constexprs[param] = _evaluate_dynamic(text, kernel, sizes)
        return KernelLaunch(
            kernel.name,
            signature,
            constexprs,
            kernel.num_warps,
            kernel.num_stages,
            tuple(divisible),
        )

    def finish(self, name: str, operator: str, summary: str) -> str:
        """The source of the launcher, and of the operator around it if one is possible.

        Args:
            name: name of the launcher. Eager code calls it directly, because operator dispatch takes longer than a launch.
            operator: name of the operator, which ``torch.compile`` and ``torch.export`` can trace.
            summary: docstring of the launcher, one line.
        """
        source = self.finish_function(name, operator.removesuffix("_triton"), summary)
        if not self.is_operator():
            return source
        kernels = list(dict.fromkeys(launch.kernel for launch in self.launches))
        return source + "\n".join(["", "", *self._operator(name, operator, kernels, len(self.ir.graph.outputs))]) + "\n"

    def finish_function(self, name: str, base: str, summary: str, *, distinct: bool = False) -> str:
        """The source of the launcher alone.

        Args:
            base: begins the name of the function that creates the tables.
            distinct: whether each tensor is returned once only.
        """
        graph = self.ir.graph
        outputs = self.distinct_outputs if distinct else graph.outputs
        returned = [self.variables[ref] for ref in outputs if not self._is_written_outside(ref)]
        for mutation in graph.mutations:
            input_name, value = self.input_names[mutation.input], self.variables[mutation.value]
            if input_name != value:
                self.lines.append(f"{input_name}.copy_({value})")
        self._count()
        computed = {symbol: name for symbol, name in self._size_names.items() if symbol not in self.whole_sizes}
        prelude = [f"{local} = {self._sizes[symbol]}" for symbol, local in computed.items()]
        if self.makes_descriptors:
            # The allocator is specific to thread and context, so each call sets it.
            prelude.append(f"triton.set_allocator({ALLOCATOR})")
        if self.uses_seed:
            count = sum(1 for prim in self.ir.prims.values() if prim.op.value == "random")
            first = self.input_names[graph.inputs[0].name]
            prelude.append(f"seed = torch.randint(2**31 - 1, ({count},), device={first}.device)")
        kernels = list(dict.fromkeys(launch.kernel for launch in self.launches))
        tables = self._tables(base)
        if tables is not None:
            prelude.append(f"{', '.join(tables.results)}{',' * (len(tables.results) == 1)} = {tables.call}")
        prelude += [f"{variable} = {text}" for text, variable in self._numbers.items()]
        parameters = [*self.parameters, *self.flags, *map(launched_directly, kernels)]
        lines = [
            *(tables.source.split("\n") if tables is not None else []),
            *def_lines(name, parameters),
            f'    """{summary}"""',
            *(f"    {line}" for line in self._without_autocast(name, parameters)),
            *(f"    {line}" for line in [*prelude, *self.lines]),
        ]
        if returned:
            lines.append(f"    return {', '.join(returned)}")
        return "\n\n".join([*self.functions, "\n".join(lines) + "\n"])

    def _without_autocast(self, name: str, parameters: Sequence[str]) -> list[str]:
        """Statements that run the function without autocast, whose casts are nodes of the graph."""
        graph = self.ir.graph
        may_be_on = graph.autocast or any(item.kind is InputKind.TANGENT for item in graph.sources)
        if self.is_part or not may_be_on or not (self.runs_operators or self.functions):
            return []
        arguments = [parameter.partition("=")[0] for parameter in parameters]
        call = f"        return {call_text(name, arguments, '        ')}"
        return [
            "if torch.is_autocast_enabled():",
            "    # The casts are part of the kernels and of the calls below.",
            f"    with torch.autocast({arguments[0]}.device.type, enabled=False):",
            *call.split("\n"),
        ]

    def _tables(self, base: str) -> TableFunction | None:
        """The function that creates the tables; ``None`` if there are none."""
        if not self._table_lines:
            return None
        graph = self.ir.graph
        nodes = [graph.node(name) for name in graph.named if name in self.ir.tables.nodes]
        arguments = [argument for node in nodes for argument in (*node.args, *node.kwargs.values())]
        sizes = dict.fromkeys(name for each in arguments for size in _sizes_in(each) for name in size.symbols())
        numbers = dict.fromkeys(name for node in nodes for number in numbers_of_node(node) for name in number.names())
        results = [self.variables[Ref(name)] for name in self.ir.tables.results if Ref(name) in self.variables]
        return table_function(
            base,
            self.input_names[graph.inputs[0].name],
            [self._size_names[name] for name in sizes],
            [self.number_names[name] for name in numbers],
            self._table_lines,
            results,
        )

    @property
    def parameters(self) -> list[str]:
        """The launcher's parameters without the kernels: tensors and run-time numbers."""
        sizes = [self._size_names[symbol] for symbol in self.whole_sizes]
        written = [*self.accumulators.values(), *self.destinations.values()]
        return [*self.input_names.values(), *self.number_names.values(), *sizes, *written]

    def _count(self) -> None:
        """Increment call counters such as ``num_batches_tracked``; counters with the same increment share one launch."""
        amounts: dict[int, list[str]] = {}
        for count in self._counts.values():
            amounts.setdefault(count.amount, []).append(self.input_names[count.input])
        for amount, counters in amounts.items():
            if len(counters) == 1:
                self.lines.append(f"{counters[0]}.add_({amount})")
            else:
                self.lines += [
                    "torch._foreach_add_(",
                    "    [",
                    *filled(counters, "        "),
                    "    ],",
                    f"    {amount},",
                    ")",
                ]

    def _operator(self, launcher: str, name: str, kernels: list[str], results: int) -> list[str]:
        inputs = list(self.input_names.values())
        kinds = {item.name: type(item.value).__name__ for item in self.ir.graph.numbers}
        numbers = list(self.number_names.values())
        typed_numbers = [f"{variable}: {kinds[name]}" for name, variable in self.number_names.items()]
        mutated = [self.input_names[mutation.input] for mutation in self.ir.graph.mutations]
        mutates = "{" + ", ".join(repr(m) for m in mutated) + "}" if mutated else "()"
        result_type = "torch.Tensor" if results == 1 else f"tuple[{', '.join(['torch.Tensor'] * results)}]"
        result_type, return_keyword = (result_type, "return ") if results else ("None", "")
        qualified = f'f"{self.namespace}::{name}"'
        wrapped = [f"wrap_triton({kernel})" for kernel in kernels]
        docstring = f'    """``{launcher}`` as an operator for torch.compile, torch.export and CUDA graphs."""'
        if len(inputs) + len(numbers) <= MAX_ARGUMENTS:
            call = f"    {return_keyword}{call_text(launcher, [*inputs, *numbers, *wrapped], '    ')}"
            head = def_lines(name, [*(f"{n}: torch.Tensor" for n in inputs), *typed_numbers], result_type)
            return [f"@triton_op({qualified}, mutates_args={mutates})", *head, docstring, call]
        # Too many arguments for an operator: pass the tensors as lists, with updated tensors in a separate list.
        lists = {self.names.unique("updated"): mutated} if mutated else {}
        lists[self.names.unique("tensors")] = [n for n in inputs if n not in mutated]
        element_of = {n: f"{list_name}[{i}]" for list_name, items in lists.items() for i, n in enumerate(items)}
        passed = [*(element_of[n] for n in inputs), *numbers, *wrapped]
        call = f"    {return_keyword}{call_text(launcher, passed, '    ')}"
        mutates = f"{{{next(iter(lists))!r}}}" if mutated else "()"
        list_statements = [
            line
            for list_name, items in lists.items()
            for line in (f"    {list_name} = [", *filled(items, "        "), "    ]")
        ]
        return [
            f"@triton_op({qualified}, mutates_args={mutates})",
            *def_lines(
                f"{name}_of_list",
                [*(f"{list_name}: list[torch.Tensor]" for list_name in lists), *typed_numbers],
                result_type,
            ),
            docstring,
            call,
            "",
            "",
            *def_lines(name, [*inputs, *numbers]),
            f'    """Call ``{name}_of_list`` with these tensors."""',
            *list_statements,
            f"    {return_keyword}{name}_of_list({', '.join([*lists, *numbers])})",
        ]

    def is_operator(self) -> bool:
        """Whether the launcher can be an operator, which must not return inputs, a tensor twice, or views of either.

        With alignment checks an operator is useless, because a compiler cannot evaluate the guard. The operator passes its
        kernels to the launcher, but not to functions that this calls.
        """
        if self.aligned or self.functions:
            return False
        return len(self.distinct_outputs) == len(self.ir.graph.outputs) and self.returns_new_tensors()

    @property
    def distinct_outputs(self) -> list[Ref]:
        """The graph's outputs, each variable once."""
        return list({self.variables[ref]: ref for ref in reversed(self.ir.graph.outputs)}.values())[::-1]

    def returns_new_tensors(self) -> bool:
        """Whether no result is an input, and no two distinct ones share memory."""
        returned = [self.variables[ref] for ref in self.distinct_outputs]
        storages = [self._storage.get(name, name) for name in returned]
        return len(set(storages)) == len(storages) and not set(storages) & set(self.input_names.values())


def _evaluate_dynamic(text: str, kernel: Kernel, sizes: Mapping[str, int]) -> int | bool:
    """The value of a launcher-computed constexpr at the workload's sizes."""
    divisibility = re.fullmatch(r"(\w+) % (\d+) == 0", text)
    if divisibility is not None:
        return kernel.grid_sizes[divisibility[1]].value(sizes) % int(divisibility[2]) == 0
    upper_bound = re.fullmatch(r"(\w+) <= (\d+)", text)
    if upper_bound is not None:
        return kernel.grid_sizes[upper_bound[1]].value(sizes) <= int(upper_bound[2])
    selection = re.fullmatch(r"(\d+) if (\w+) >= (\d+) else (\d+)", text)
    if selection is not None:
        return int(selection[1] if kernel.grid_sizes[selection[2]].value(sizes) >= int(selection[3]) else selection[4])
    power = re.fullmatch(r"1 << \((\w+) - 1\)\.bit_length\(\)", text)
    assert power is not None, text
    return next_power_of_two(kernel.grid_sizes[power[1]].value(sizes))


def _sizes_in(argument: object) -> Sequence[Size]:
    if isinstance(argument, Size):
        return [argument]
    if isinstance(argument, tuple):
        return [size for item in argument for size in _sizes_in(item)]
    return []


def _is_view(node: Node) -> bool:
    return node.op.split(".")[1] in VIEWS


def _may_be_strided(node: Node) -> bool:
    """Operations whose result may have another memory format at run time (channels last) than during capture."""
    return node.op.split(".")[1].startswith(
        ("conv", "_conv", "max_pool", "avg_pool", "adaptive", "upsample", "_to_copy")
    )


def _channels_last(node: Node) -> str:
    """The suffix that converts a result to channels-last if the graph expects it; empty otherwise."""
    kind = node.type
    rows = len(kind.shape) not in FORMATS or _is_view(node)
    if rows or not kind.is_channels_last or kind.stride != channels_last(kind.shape, kind.dtype).stride:
        return ""
    return f".contiguous(memory_format=torch.channels_last{'_3d' if len(node.type.shape) == 5 else ''})"
