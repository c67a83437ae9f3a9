"""The launcher: the Python function that allocates, launches the kernels and makes the torch calls that remain."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mtmc_lsp.codegen.kernel.kernel import Kernel, Scratch
from mtmc_lsp.codegen.kernel.snippets import LINE, call_text, filled
from mtmc_lsp.codegen.matmul.descriptors import MAKE, MEMORY
from mtmc_lsp.codegen.module.constants import constant_text, is_written
from mtmc_lsp.codegen.module.guard import bindings, size_text
from mtmc_lsp.codegen.module.naming import Names, value_name
from mtmc_lsp.codegen.module.side_by_side import NUMBERS
from mtmc_lsp.codegen.module.torch_calls import argument_text, torch_call
from mtmc_lsp.core.dtypes import POINTER_TYPES
from mtmc_lsp.core.graph import Mutation, Node, Ref, TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import KernelLaunch
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.buffer_updates import call_counters, running_statistics
from mtmc_lsp.ir.concat_outputs import adds_to_zeros
from mtmc_lsp.ir.output_aliasing import may_overwrite
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import VIEWS, Region
from mtmc_lsp.rewrites.convolution_layout import FORMATS, channels_last
from mtmc_lsp.schedule.column_tiles import next_power_of_two

LOCALS = frozenset(
    [
        *"torch triton tl seed n_rows n_cols n_outer n_batch n_m n_n n_q n_k rows_m rows_n k_pad".split(),
        MEMORY,
        *NUMBERS,
    ]
)
"""Names that a launcher uses for itself."""
MOST_ARGUMENTS = 64
"""Of an operator, in PyTorch."""


@dataclass
class Launcher:
    """Collects the launcher's statements while the kernels are written."""

    ir: KernelIR
    namespace: str = "{__name__.replace('.', '_')}"
    """Of the operators, inside an f-string: the user's module, wherever it is imported."""
    names: Names = field(default_factory=lambda: Names(LOCALS))
    lines: list[str] = field(default_factory=list)
    variables: dict[Ref, str] = field(default_factory=dict)
    """The variable that holds each value that lies in memory."""
    buffers: dict[str, TensorType] = field(default_factory=dict)
    """The type of each primitive that lies in memory."""
    holders: dict[str, str] = field(default_factory=dict)
    """The variable that holds each primitive that lies in memory."""
    launches: list[KernelLaunch] = field(default_factory=list)
    uses_seed: bool = False
    makes_descriptors: bool = False
    """Whether a kernel makes tensor descriptors."""
    adds_in_no_order: bool = False
    """Whether a kernel adds to memory by atomics, whose order, and so the last bits, are another in each call."""
    makes_constants: bool = False
    """Whether it has tensors of written numbers."""
    recomputed: frozenset[str] = frozenset()
    """Nodes that kernels compute for themselves beside the kernel that is theirs."""

    def __post_init__(self) -> None:
        for item in self.ir.graph.inputs:
            variable = self.names.unique(item.name)
            self._place(Ref(item.name), variable, item.type)
        graph = self.ir.graph
        self.input_names = {item.name: self.variables[Ref(item.name)] for item in graph.inputs}
        self._sizes = {symbol: binding.text for symbol, binding in bindings(graph, self.input_names).items()}
        self._size_names: dict[str, str] = {}
        self._scratch: dict[Scratch, str] = {}
        self._locals: dict[str, str] = {}
        self._counts = call_counters(graph)
        self._allocated: set[str] = set()
        """Variables of tensors with memory of their own."""
        self.aligned: dict[str, None] = {}
        """Inputs of which descriptors are made: where these begin, the guard must ask."""
        self._written: dict[Ref, str] = {}
        """The variable of each value that a kernel writes."""
        self._storage: dict[str, str] = {}
        """The variable whose memory each view shows."""

    def _place(self, ref: Ref, variable: str, kind: TensorType) -> None:
        self.variables[ref] = variable
        prim = self.ir.of(ref).name
        self.holders.setdefault(prim, variable)
        self.buffers.setdefault(prim, kind)

    def size(self, size: Size) -> str:
        """A size as Python; every named size in it becomes a local variable."""
        for symbol in size.symbols():
            if symbol not in self._size_names:
                self._size_names[symbol] = self.names.unique(symbol)
        return size_text(size, self._size_names)

    def torch_call(self, node: Node) -> None:
        """Emit an ATen node as a torch call."""
        if node.name in self._counts:
            self._place(Ref(node.name), self.input_names[self._counts[node.name].input], node.type)
            return
        if not node.op.startswith("aten."):
            raise CannotCode(f"{node.op.split('.')[1]} is no operation of PyTorch's; it must be part of a kernel")
        for ref in node.inputs():
            if ref not in self.variables:
                raise CannotCode(f"{node.op} reads a value that no kernel writes")
        for argument in (*node.args, *node.kwargs.values()):
            for size in _sizes_in(argument):
                self.size(size)
        if running := running_statistics(self.ir.graph, node):
            self._batch_norm_in_place(node, running)
            return
        first = self.input_names[self.ir.graph.inputs[0].name]
        if is_written(node):
            text, self.makes_constants = constant_text(node, first), True
        else:
            text = torch_call(node, self.variables, self._size_names, first)
        wanted = [self.names.unique(value_name(self.ir, Ref(node.name, i))) for i in range(len(node.outputs))]
        dense = all(kind.is_contiguous for kind in node.outputs) and not _is_view(node)
        if len(wanted) == 1:
            # Kernels read the result as dense rows; where torch chose another layout this makes it so.
            order = ".contiguous()" if dense and _may_be_strided(node) else _channels_last(node)
            self.lines.append(f"{wanted[0]} = {text}{order}")
        else:
            self.lines.append(f"{', '.join(wanted)} = {text}")
            if _channels_last(node):
                self.lines.append(f"{wanted[0]} = {wanted[0]}{_channels_last(node)}")
        for i, (name, kind) in enumerate(zip(wanted, node.outputs, strict=True)):
            self._place(Ref(node.name, i), name, kind)
            if _is_view(node):
                source = self.variables[next(node.inputs())]
                self._storage[name] = self._storage.get(source, source)

    def _batch_norm_in_place(self, node: Node, running: Mapping[Ref, str]) -> None:
        """Emit a batch norm in training mode as the user's module calls it: the running statistics change where they are."""
        x, weight, bias, mean, var, training, momentum, eps = (
            argument_text(item, self.variables, self._size_names) for item in node.args
        )
        call = f"torch.nn.functional.batch_norm({', '.join([x, mean, var, weight, bias, training, momentum, eps])})"
        self.define(Ref(node.name), f"{call}{_channels_last(node)}")
        for ref, name in running.items():
            self._place(ref, self.input_names[name], self.ir.graph.type_of(ref))

    def define(self, ref: Ref, text: str) -> None:
        """Give a value its variable, which holds what ``text`` is."""
        name = self.names.unique(value_name(self.ir, ref))
        self.lines.append(f"{name} = {text}")
        self._place(ref, name, self.ir.graph.type_of(ref))

    def allocate(self, ref: Ref) -> str:
        """A new buffer for a value; returns its variable."""
        kind = self.ir.graph.type_of(ref)
        name = self.names.unique(value_name(self.ir, ref))
        twin = next(
            (
                item
                for item in self.ir.graph.inputs
                if item.type.shape == kind.shape and item.type.is_contiguous and kind.is_contiguous
            ),
            None,
        )
        if twin is not None:
            dtype = "" if twin.type.dtype == kind.dtype else f", dtype=torch.{kind.dtype}"
            self.lines.append(f"{name} = torch.empty_like({self.input_names[twin.name]}{dtype})")
        else:
            text = (
                self._memory("empty", kind.dtype, kind.shape)
                if kind.is_contiguous
                else self._memory("empty_strided", kind.dtype, kind.shape, kind.stride)
            )
            self.lines.append(f"{name} = {text}")
        self._allocated.add(name)
        self._place(ref, name, kind)
        return name

    def _memory(self, function: str, dtype: str, *sizes: Sequence[Size]) -> str:
        """A call of torch's that makes a tensor of this shape, and strides where it takes them, on the inputs' device."""
        given = ", ".join(_tuple([self.size(size) for size in each]) for each in sizes)
        first = self.input_names[self.ir.graph.inputs[0].name]
        return f"torch.{function}({given}, dtype=torch.{dtype}, device={first}.device)"

    def may_be_described(self, kernel: Kernel) -> bool:
        """Whether all tensors that a kernel makes descriptors of begin at memory of their own, or the guard can ask where.

        Of what torch returns neither is known: it may be any view.
        """
        holders = (self.holders[prim] for prim in kernel.described)
        return all(holder in self._allocated or holder in self.input_names.values() for holder in holders)

    def _output(self, ref: Ref, regions: Sequence[Region]) -> str:
        """The variable of the tensor that a kernel writes: several kernels may each write a part of it."""
        if ref not in self._written:
            self._written[ref] = self._begun(ref, regions) or self._in_place(ref, regions) or self.allocate(ref)
        return self._written[ref]

    def _begun(self, ref: Ref, regions: Sequence[Region]) -> str:
        """A tensor that holds what a kernel adds rows to; empty where a kernel writes the value whole."""
        if not any(part.index for region in regions for part in region.parts.get(ref, ())):
            return ""
        self.adds_in_no_order = True
        graph = self.ir.graph
        kind, node = graph.type_of(ref), graph.node(ref.name)
        base = node.args[0]
        assert isinstance(base, Ref)
        is_alone = graph.readers(base.name) == (node,) and base not in graph.left
        if is_alone and graph.replaced.get(ref) == base.name and graph.type_of(base) == kind:
            self._place(ref, self.input_names[base.name], kind)
        elif not adds_to_zeros(self.ir, ref):
            self.define(ref, f"{self.variables[base]}.clone(memory_format=torch.contiguous_format)")
        elif is_alone and base in self.variables and self._is_zeros(base, kind):
            self._place(ref, self.variables[base], kind)
        else:
            self.define(ref, self._memory("zeros", kind.dtype, kind.shape))
        return self.variables[ref]

    def _is_zeros(self, base: Ref, kind: TensorType) -> bool:
        """Whether this is a tensor of zeros with memory of its own."""
        made = self.ir.graph.named.get(base.name)
        return made is not None and "zeros" in made.word and made.type == kind

    def _in_place(self, ref: Ref, regions: Sequence[Region]) -> str:
        """The input that a value may be written into at once; empty where it needs memory of its own."""
        graph = self.ir.graph
        replaced = graph.replaced.get(ref)
        region = next(region for region in regions if ref in region.outputs)
        if replaced is None or not may_overwrite(self.ir, region, Mutation(replaced, ref), self.recomputed):
            return ""
        self._place(ref, self.input_names[replaced], graph.type_of(ref))
        return self.input_names[replaced]

    def _allocate_scratch(self, scratch: Scratch) -> str:
        name = self.names.unique(scratch.name)
        self.lines.append(f"{name} = {self._memory('empty', scratch.dtype, scratch.shape)}")
        self._scratch[scratch] = name
        return name

    def launch(self, kernel: Kernel, regions: Sequence[Region]) -> None:
        """Emit allocation of the outputs and the launch of a kernel that computes these regions."""
        if any(prim == "seed" for _, prim in kernel.tensors):
            self.uses_seed = True
        arguments = [("seed" if prim == "seed" else self.holders[prim]) for _, prim in kernel.tensors]
        arguments += [self._scratch[scratch] for _, scratch in kernel.scratch_read]
        arguments += [self._output(ref, regions) for _, ref in kernel.outputs]
        arguments += [self._allocate_scratch(scratch) for _, scratch in kernel.scratch_written]
        local = {}
        used = f"{kernel.grid} {kernel.dynamic} {kernel.numbers}"
        for name, size in kernel.grid_sizes.items():
            text = self.size(size)
            passed = any(
                param == name or (own == size and not size.is_symbol and not size.is_constant)
                for param, own in kernel.sizes
            )
            if re.search(rf"\b{name}\b", used) or passed:
                if self._locals.get(name) != text:
                    self.lines.append(f"{name} = {text}")
                    self._locals[name] = text
                local[size] = name
        keywords = []
        for param, size in kernel.sizes:
            text = local.get(size) or self.size(size)
            if kernel.passed_as_constant(param, size):
                keywords.append(f"{param}={text}")
            else:
                arguments.append(text)
        for name, text in kernel.numbers.items():
            self.lines.append(f"{name} = {text}")
            arguments.append(name)
        keywords += [f"{name}={value!r}" for name, value in kernel.constexprs.items()]
        keywords += [f"{name}={text}" for name, text in kernel.dynamic.items()]
        keywords += [f"num_warps={kernel.num_warps}", f"num_stages={kernel.num_stages}"]
        grid = _tuple(list(kernel.grid))
        head = f"{kernel.name}[{grid}]("
        one_line = head + ", ".join([*arguments, *keywords]) + ")"
        if len(one_line) <= LINE:
            self.lines.append(one_line)
        else:
            self.lines += [head, *filled(arguments, "    "), *filled(keywords, "    "), ")"]
        self.makes_descriptors |= f"{MAKE}(" in kernel.source
        for holder in (self.holders[prim] for prim in kernel.described):
            self.aligned.update(dict.fromkeys(name for name, own in self.input_names.items() if own == holder))
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
                # Triton makes constants of sizes that are 1.
                constexprs[param] = number
            else:
                signature[param] = "i32" if number < 2**31 else "i64"
                if number % 16 == 0:
                    divisible.append(param)
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

    def finish(self, name: str, operator: str, what: str) -> str:
        """The source of the launcher and, where there can be one, of the operator around it.

        Args:
            name: of the launcher. Eager code calls it: the dispatch of an operator would take longer than a launch.
            operator: name of the operator, which ``torch.compile`` and ``torch.export`` see through.
            what: one line that says what is computed.
        """
        graph = self.ir.graph
        returned = [self.variables[ref] for ref in graph.outputs]
        for mutation in graph.mutations:
            own, value = self.input_names[mutation.input], self.variables[mutation.value]
            if own != value:
                self.lines.append(f"{own}.copy_({value})")
        self._count()
        prelude = [f"{local} = {self._sizes[symbol]}" for symbol, local in self._size_names.items()]
        if self.makes_descriptors:
            # Of the present thread and context, which is why each call sets it.
            prelude.append(f"triton.set_allocator({MEMORY})")
        if self.uses_seed:
            count = sum(1 for prim in self.ir.prims.values() if prim.op.value == "random")
            first = self.input_names[graph.inputs[0].name]
            prelude.append(f"seed = torch.randint(2**31 - 1, ({count},), device={first}.device)")
        kernels = list(dict.fromkeys(launch.kernel for launch in self.launches))
        parameters = [*self.input_names.values(), *(f"{kernel}={kernel}" for kernel in kernels)]
        lines = [*_head(name, parameters), f'    """{what}"""', *(f"    {line}" for line in [*prelude, *self.lines])]
        if returned:
            lines.append(f"    return {', '.join(returned)}")
        if self.is_operator():
            lines += ["", "", *self._operator(name, operator, kernels, len(returned))]
        return "\n".join(lines) + "\n"

    def _count(self) -> None:
        """Add to the numbers that count calls, all of one amount in one launch."""
        amounts: dict[int, list[str]] = {}
        for count in self._counts.values():
            amounts.setdefault(count.amount, []).append(self.input_names[count.input])
        for amount, names in amounts.items():
            if len(names) == 1:
                self.lines.append(f"{names[0]}.add_({amount})")
            else:
                self.lines += [
                    "torch._foreach_add_(",
                    "    [",
                    *filled(names, "        "),
                    "    ],",
                    f"    {amount},",
                    ")",
                ]

    def _operator(self, launcher: str, name: str, kernels: list[str], results: int) -> list[str]:
        inputs = list(self.input_names.values())
        mutated = [self.input_names[mutation.input] for mutation in self.ir.graph.mutations]
        mutates = "{" + ", ".join(repr(m) for m in mutated) + "}" if mutated else "()"
        result = "torch.Tensor" if results == 1 else f"tuple[{', '.join(['torch.Tensor'] * results)}]"
        result, give = (result, "return ") if results else ("None", "")
        qualified = f'f"{self.namespace}::{name}"'
        wrapped = [f"wrap_triton({kernel})" for kernel in kernels]
        what = (
            f'    """``{launcher}`` as an operator, which torch.compile, torch.export and CUDA graphs see through."""'
        )
        if len(inputs) <= MOST_ARGUMENTS:
            call = f"    {give}{call_text(launcher, [*inputs, *wrapped], '    ')}"
            head = _head(name, [f"{n}: torch.Tensor" for n in inputs], result)
            return [f"@triton_op({qualified}, mutates_args={mutates})", *head, what, call]
        # So many arguments no operator takes: tensors come as lists, what is changed as one of its own.
        lists = {self.names.unique("changed"): mutated} if mutated else {}
        lists[self.names.unique("tensors")] = [n for n in inputs if n not in mutated]
        places = {n: f"{own}[{i}]" for own, items in lists.items() for i, n in enumerate(items)}
        call = f"    {give}{call_text(launcher, [*(places[n] for n in inputs), *wrapped], '    ')}"
        mutates = f"{{{next(iter(lists))!r}}}" if mutated else "()"
        made = [
            line for own, items in lists.items() for line in (f"    {own} = [", *filled(items, "        "), "    ]")
        ]
        return [
            f"@triton_op({qualified}, mutates_args={mutates})",
            *_head(f"{name}_of_list", [f"{own}: list[torch.Tensor]" for own in lists], result),
            what,
            call,
            "",
            "",
            *_head(name, inputs),
            f'    """``{name}_of_list`` of these tensors."""',
            *made,
            f"    {give}{name}_of_list({', '.join(lists)})",
        ]

    def is_operator(self) -> bool:
        """An operator may not return its inputs, nor one tensor twice, nor views of these.

        None is needed where a compiler cannot tell whether the guard holds.
        """
        if self.aligned:
            return False
        returned = [self.variables[ref] for ref in self.ir.graph.outputs]
        storages = [self._storage.get(name, name) for name in returned]
        return len(set(storages)) == len(storages) and not set(storages) & set(self.input_names.values())


def _head(name: str, parameters: list[str], result: str = "") -> list[str]:
    """A function's first lines."""
    arrow = f" -> {result}" if result else ""
    one_line = f"def {name}({', '.join(parameters)}){arrow}:"
    return [one_line] if len(one_line) <= LINE else [f"def {name}(", *(f"    {p}," for p in parameters), f"){arrow}:"]


def _evaluate_dynamic(text: str, kernel: Kernel, sizes: Mapping[str, int]) -> int | bool:
    """The workload's value of a constexpr that the launcher computes."""
    divisible = re.fullmatch(r"(\w+) % (\d+) == 0", text)
    if divisible is not None:
        return kernel.grid_sizes[divisible[1]].value(sizes) % int(divisible[2]) == 0
    within = re.fullmatch(r"(\w+) <= (\d+)", text)
    if within is not None:
        return kernel.grid_sizes[within[1]].value(sizes) <= int(within[2])
    chosen = re.fullmatch(r"(\d+) if (\w+) >= (\d+) else (\d+)", text)
    if chosen is not None:
        return int(chosen[1] if kernel.grid_sizes[chosen[2]].value(sizes) >= int(chosen[3]) else chosen[4])
    power = re.fullmatch(r"triton\.next_power_of_2\((\w+)\)", text)
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
    """Operations whose result may come in another memory format than the capture saw (channels last)."""
    return node.op.split(".")[1].startswith(
        ("conv", "_conv", "max_pool", "avg_pool", "adaptive", "upsample", "_to_copy")
    )


def _channels_last(node: Node) -> str:
    """What puts a result in the order with channels densest, where the graph says that it has it; nothing elsewhere."""
    kind = node.type
    rows = len(kind.shape) not in FORMATS or _is_view(node)
    if rows or not kind.is_channels_last or kind.stride != channels_last(kind.shape, kind.dtype).stride:
        return ""
    return f".contiguous(memory_format=torch.channels_last{'_3d' if len(node.type.shape) == 5 else ''})"


def _tuple(items: list[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
