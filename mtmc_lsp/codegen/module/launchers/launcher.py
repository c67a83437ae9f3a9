"""The launcher: the Python function that allocates outputs, launches the kernels and makes the remaining torch calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mtmc_lsp.codegen.kernel.kernel import Kernel
from mtmc_lsp.codegen.kernel.snippets import LINE, call_text, def_lines, filled, filled_groups, literal, tuple_text
from mtmc_lsp.codegen.loop.torch_loop import loop_statements
from mtmc_lsp.codegen.matmul.descriptors import ALLOCATOR, MAKE_DESCRIPTOR
from mtmc_lsp.codegen.module.constants import constant_text, is_literal_tensor
from mtmc_lsp.codegen.module.direct_launches import launched_directly
from mtmc_lsp.codegen.module.launchers.memory import FRESH, LauncherMemory
from mtmc_lsp.codegen.module.launchers.operator import operator_lines
from mtmc_lsp.codegen.module.launchers.releases import with_releases
from mtmc_lsp.codegen.module.launchers.signature import launch_signatures
from mtmc_lsp.codegen.module.launchers.views import SAME_START, View, without_views
from mtmc_lsp.codegen.module.naming import value_name
from mtmc_lsp.codegen.module.tables import TableFunction, table_function
from mtmc_lsp.codegen.module.torch_calls import argument_text, torch_call
from mtmc_lsp.core.graph import InputKind, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.loop import Loop
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.buffer_updates import running_statistics
from mtmc_lsp.ir.regions import VIEWS, Region
from mtmc_lsp.ir.run_time_numbers import numbers_of_node
from mtmc_lsp.rewrites.convolution_layout import FORMATS, channels_last


class Launcher(LauncherMemory):
    """Collects the launcher's statements while the kernels are written."""

    def torch_call(self, node: Node) -> None:
        """Emit an ATen node as a torch call."""
        if node.name in self._counts:
            self.register(Ref(node.name), self.input_names[self._counts[node.name].input], node.type)
            return
        for ref in node.inputs():
            self.find(ref)
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
        is_kept = self._is_kept(node)
        lines = self._table_lines if is_kept else self.lines
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
            self.register(Ref(node.name, i), name, kind)
            if _is_view(node):
                source = self.variables[next(node.inputs())]
                self._storage[name] = self._storage.get(source, source)
                if node.word in SAME_START and kind.dtype == self.ir.graph.type_of(next(node.inputs())).dtype:
                    self._views[name] = View(lines[-1], source)

    def _is_kept(self, node: Node) -> bool:
        """Whether the value is a table, which calls of the same sizes share; notes it."""
        reads_tables = all(ref.name in self.kept for ref in node.inputs())
        is_kept = node.name in self.ir.tables.nodes or (node.name in self.may_be_kept and reads_tables)
        self.kept += [node.name] if is_kept else []
        return is_kept

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
            self.register(Ref(node.name, i), name, kind)

    def _batch_norm_in_place(self, node: Node, running: Mapping[Ref, str]) -> None:
        """Emit a training-mode batch norm like the user's module: it updates the running statistics in place."""
        x, weight, bias, mean, var, training, momentum, eps = (
            argument_text(item, self.variables, self._size_names) for item in node.args
        )
        call = f"torch.nn.functional.batch_norm({', '.join([x, mean, var, weight, bias, training, momentum, eps])})"
        self.define(Ref(node.name), f"{call}{_channels_last(node)}")
        for ref, name in running.items():
            self.register(ref, self.input_names[name], self.ir.graph.type_of(ref))

    def supports_descriptors(self, kernel: Kernel) -> bool:
        """Whether all tensors with descriptors in this kernel are aligned, or are inputs that the guard can check.

        Results of torch calls may be arbitrary views, so their alignment is unknown.
        """
        holders = (self.holders[prim] for prim in kernel.described)
        return all(holder in self._allocated or holder in self.input_names.values() for holder in holders)

    def _copy(self, holder: str, view: TensorType) -> str:
        """The text of a contiguous copy of a view of a tensor's memory."""
        for node, name in self.input_names.items():
            kind = self.ir.graph.type_of(Ref(node))
            exchanged = (*view.shape[:-2], view.shape[-1], view.shape[-2])
            if name == holder and kind.shape == exchanged and kind.stride == contiguous_stride(exchanged):
                return f"{holder}.mT.contiguous()"
        shape, stride = (", ".join(map(self.size, sizes)) for sizes in (view.shape, view.stride))
        return f"{holder}.as_strided(({shape}), ({stride})).contiguous()"

    def launch(self, kernel: Kernel, regions: Sequence[Region]) -> None:
        """Emit the allocation of the outputs and the launch of the kernel of these regions."""
        if any(prim == "seed" for _, prim in kernel.tensors):
            self.uses_seed = True
        arguments = [("seed" if prim == "seed" else self.holders[prim]) for _, prim in kernel.tensors]
        self._read_by_kernels.update(arguments)
        for argument in arguments:
            self._kernel_arguments[argument] = self._kernel_arguments.get(argument, 0) + 1
        for i, (parameter, _) in enumerate(kernel.tensors):
            if parameter in kernel.copied:
                arguments[i] = self._copy(arguments[i], kernel.copied[parameter])
        arguments += [self._scratch[scratch] for _, scratch in kernel.scratch_read]
        arguments += [self.output(ref, regions) for _, ref in kernel.outputs]
        written = {parameter: self.allocate_scratch(scratch) for parameter, scratch in kernel.scratch_written}
        arguments += written.values()
        for parameter, value in kernel.initial:
            text = self.holders[value] if isinstance(value, str) else literal(value)
            self.lines.append(f"{written[parameter]}[0] = {text}")
        size_variables, direct = {}, {}
        expressions = f"{kernel.grid} {kernel.dynamic} {kernel.numbers} {kernel.warps_text}"
        for name, size in kernel.grid_sizes.items():
            text = self.size(size)
            is_parameter = any(
                param == name or (other_size == size and not size.is_symbol and not size.is_constant)
                for param, other_size in kernel.sizes
            )
            if text.isidentifier() or text.isdecimal():
                direct[name] = text
            elif re.search(rf"\b{name}\b", expressions) or is_parameter:
                if self._locals.get(name) != text:
                    self.lines.append(f"{name} = {text}")
                    self._locals[name] = text
                size_variables[size] = name

        def filled_in(expression: str) -> str:
            return re.sub(r"\b[^\W\d]\w*", lambda match: direct.get(match[0], match[0]), expression)

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
            self.lines.append(f"{name} = {filled_in(text)}")
            arguments.append(name)
        indent = ""
        if kernel.repeat is not None:
            variable = self.names.unique(kernel.repeat[0])
            self.lines.append(f"for {variable} in range({self.size(kernel.repeat[1])}):")
            arguments.append(variable)
            indent = "    "
        if kernel.passes is not None:
            parameter, values = kernel.passes
            variable = self.names.unique(parameter.lower())
            self.lines.append(f"for {variable} in {tuple_text([repr(value) for value in values])}:")
            keywords.append(f"{parameter}={variable}")
            indent = "    "
        keywords += [f"{name}={value!r}" for name, value in kernel.constexprs.items()]
        keywords += [f"{name}={filled_in(text)}" for name, text in kernel.dynamic.items()]
        warps = filled_in(kernel.warps_text) or kernel.num_warps
        keywords += [f"num_warps={warps}", f"num_stages={kernel.num_stages}"]
        grid = tuple_text([filled_in(text) for text in kernel.grid])
        head = f"{kernel.name}[{grid}]("
        one_line = indent + head + ", ".join([*arguments, *keywords]) + ")"
        if len(one_line) <= LINE:
            self.lines.append(one_line)
        else:
            call = [head, *filled_groups(arguments, keywords, "    "), ")"]
            self.lines += [f"{indent}{line}" for line in call]
        self.makes_descriptors |= f"{MAKE_DESCRIPTOR}(" in kernel.source
        for holder in (self.holders[prim] for prim in kernel.described):
            self.aligned.update(
                dict.fromkeys(name for name, variable in self.input_names.items() if variable == holder)
            )
        self.launches += launch_signatures(kernel, self.ir.graph, self.buffers)

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
        return source + "\n".join(["", "", *operator_lines(self, name, operator, kernels)]) + "\n"

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
        prelude = self._size_lines({local: self._sizes[symbol] for symbol, local in computed.items()})
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
        others = "\n".join([*prelude, *self._table_lines, *returned])
        self.lines = without_views(self.lines, self._views, self._kernel_arguments, others)
        self.lines = with_releases(self.lines, self.tensor_bytes(), self._storage, returned)
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

    def _size_lines(self, sizes: Mapping[str, str]) -> list[str]:
        """The statements that read these sizes, by the variable for each: one for all that are dimensions of one tensor."""
        ranks = {self.input_names[item.name]: len(item.type.shape) for item in self.ir.graph.inputs}
        found = {name: re.fullmatch(r"(\w+)\.shape\[(\d+)\]", text) for name, text in sizes.items()}
        dimensions: dict[str, dict[int, str]] = {}
        for name, match in found.items():
            if match is not None and match[1] in ranks:
                dimensions.setdefault(match[1], {}).setdefault(int(match[2]), name)
        lines = []
        for tensor, names in dimensions.items():
            if len(names) > 1:
                targets = ", ".join(names.get(i, "_") for i in range(ranks[tensor]))
                lines.append(f"{targets} = {tensor}.shape")
        unpacked = {name for names in dimensions.values() if len(names) > 1 for name in names.values()}
        return [*lines, *(f"{name} = {text}" for name, text in sizes.items() if name not in unpacked)]

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
        nodes = [graph.node(name) for name in self.kept]
        arguments = [argument for node in nodes for argument in (*node.args, *node.kwargs.values())]
        sizes = dict.fromkeys(name for each in arguments for size in _sizes_in(each) for name in size.symbols())
        numbers = dict.fromkeys(name for node in nodes for number in numbers_of_node(node) for name in number.names())
        kept = set(self.kept)
        read = {ref.name for node in graph.nodes if node.name not in kept for ref in node.inputs()}
        variables = {name: self.variables[Ref(name)] for name in self.kept}
        # A kernel may read a view of a table whose copy only torch reads.
        results = [
            variable for name, variable in variables.items() if name in read or variable in self._read_by_kernels
        ]
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
