"""Converts a program that torch exported to a :class:`Graph`: named sizes, and nodes with their source lines."""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.export.graph_signature import OutputKind

from mtmc_lsp.capture.result_structure import RESULTS, SIZES, fill_structure, is_nested
from mtmc_lsp.capture.worker.literal_tensors import nested_literals
from mtmc_lsp.capture.worker.loops.pairs.emitter import PART
from mtmc_lsp.capture.worker.passes.aten_aliases import canonical
from mtmc_lsp.capture.worker.passes.free_sizes import FreeSizes
from mtmc_lsp.capture.worker.passes.gradients import IDENTITIES, TANGENT, GradientTrace
from mtmc_lsp.capture.worker.passes.non_polynomial_sizes import (
    CONSTANT,
    WINDOWS,
    Cause,
    constant_symbols,
    factors_of,
    is_symbol,
    non_polynomials,
    pooled_windows,
    simplified_stride,
    symbols_of,
    with_reduced_divisions,
)
from mtmc_lsp.capture.worker.size_conditions import Guard, Question, condition, equal_factors, guards_of, strongest
from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.core.graph import (
    INPUT_DEVICE,
    Argument,
    Backward,
    Graph,
    GraphInput,
    InputKind,
    Mutation,
    Node,
    Ref,
    TensorType,
)
from mtmc_lsp.core.sizes import FUNCTIONS, Size, greater_than
from mtmc_lsp.core.workload import Target

LINE_MARK = "mtmc-line "


@dataclass(frozen=True)
class InputTensor:
    """An input tensor of the target, in the order of the export's arguments."""

    name: str
    access: str
    kind: InputKind
    value: torch.Tensor
    size_names: tuple[str, ...] = ()
    """The workload's names of its dimensions; empty for a dimension that is a number."""
    path: str = ""
    """The path of an argument of the call; empty for parameters and buffers."""


def depends_on_values(target: Target, line: int, remedy: str = "") -> TargetUnsupported:
    """The error for a target that has no single graph; ``line`` is 0 if unknown."""
    return TargetUnsupported(
        f"{target.qualname} depends on the values of a tensor, so no single graph describes it",
        where=Location(target.path, line or target.start_line),
        remedy=remedy or "Use torch.where for the choice, or optimise each of the functions separately.",
    )


NO_TENSOR = TensorType((Size.of(0),), "float32", (Size.of(1),))
"""The type of a result that an operator leaves out, such as the gradient of an input that needs none."""


class Reader:
    """Converts an exported program to a :class:`Graph`."""

    def __init__(
        self,
        program: Any,
        inputs: Sequence[InputTensor],
        variables: Mapping[int, str],
        target: Target,
        returns: str,
        literal_names: Set[str],
        questions: Sequence[Question],
        free: FreeSizes,
        gradients: GradientTrace | None = None,
    ) -> None:
        self.program = program
        self.free = free
        self.gradients = gradients
        self.tangents: list[GraphInput] = []
        """The gradients of results, which the backward pass gets."""
        self.questions = questions
        self.returns = returns
        self.inputs = inputs
        self.variables = variables
        self.target = target
        self.device = str(inputs[0].value.device)
        self.placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        self.literals = self._literal_tensors(literal_names)
        if len(self.placeholders) != len(inputs):
            raise self._checked_result() or self._foreign_tensor(0)
        self.used_names = {item.name for item in inputs}
        """Names of inputs and nodes, to keep them distinct: an operator can have the name of an argument."""
        self.symbols_at: dict[tuple[int, int], set[str]] = {}
        self.names: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.parts: dict[str, str] = {}
        """Which part of a complex value a node is."""
        self._assign_size_names()

    def _is_expression(self, i: int, d: int) -> bool:
        """Whether the workload writes a size as an expression."""
        names = self.inputs[i].size_names
        return d < len(names) and names[d] != "" and not names[d].isidentifier()

    def _literal_tensors(self, literal_names: Set[str]) -> dict[str, torch.Tensor]:
        """Constant tensors that the target writes out, such as ``torch.tensor([1, 2, 1])`` and ``y[:, 0] = 0``, by node name."""
        signature = self.program.graph_signature
        literals = {
            name: self.program.constants[target]
            for name, target in signature.inputs_to_lifted_tensor_constants.items()
            if self.program.constants[target].dim() == 0 or name in literal_names
        }
        self.placeholders = [node for node in self.placeholders if node.name not in literals]
        return literals

    def _checked_result(self) -> TargetUnsupported | None:
        """The refusal of a library call that raises for some values; below autograd, its check is an operator by itself."""
        for node in self.program.graph.nodes:
            if str(node.target) == "with_effects" and str(node.args[1]) == "aten._linalg_check_errors.default":
                name = f"torch.{str(node.args[3]).removeprefix('torch.')}"
                return TargetUnsupported(
                    f"{self.target.qualname} calls {name}, which raises for some values of its tensor; {name}_ex does not",
                    where=Location(self.target.path, line_of(node) or self.target.start_line),
                    remedy=f"Call {name}_ex, which returns the error.",
                )
        return None

    def _foreign_tensor(self, line: int) -> TargetUnsupported:
        return TargetUnsupported(
            f"{self.target.qualname} uses a tensor that is neither an argument nor a parameter nor a buffer",
            where=Location(self.target.path, line or self.target.start_line),
            remedy="Pass it as an argument, or register it as a buffer of the module.",
        )

    def _assign_size_names(self) -> None:
        used_names = {*FUNCTIONS, *(item.name for item in self.inputs)}
        equal_symbols = _equal_by_attention(self.program)
        values = {
            str(size.node.expr): int(item.value.shape[d])
            for node, item in zip(self.placeholders, self.inputs, strict=True)
            for d, size in enumerate(node.meta["val"].shape)
            if is_symbol(size)
        }
        equal_if_unnamed = {b: a for pair in equal_factors(self._guards, values) for a, b in (pair, pair[::-1])}
        workload_names: set[str] = set()
        next_number = 0
        dimensions = [
            (i, d, size) for i, node in enumerate(self.placeholders) for d, size in enumerate(node.meta["val"].shape)
        ]
        # Names before expressions such as B*S, so that these are expressed by the names.
        for i, d, size in sorted(dimensions, key=lambda item: self._is_expression(item[0], item[1])):
            item = self.inputs[i]
            symbols = symbols_of(size)
            self.symbols_at[i, d] = symbols
            # In a size such as s + 1, which torch derives from others, s is not the size that the workload names.
            is_size = is_symbol(size) or (i, d) in self.free.units
            for symbol in sorted(symbols):
                if symbol in self.names:
                    continue
                name = item.size_names[d] if is_size and d < len(item.size_names) else ""
                name = name if name.isidentifier() else ""
                if name and (i, d) in self.free.units:
                    name = f"{name}_div_{self.free.units[i, d]}"
                if equal_symbols.get(symbol) in self.names:
                    name = self.names[equal_symbols[symbol]]
                elif not name and equal_if_unnamed.get(symbol) in self.names:
                    name = self.names[equal_if_unnamed[symbol]]
                elif not name or len(symbols) != 1 or (name in used_names and name not in workload_names):
                    name, next_number = f"s{next_number}", next_number + 1
                else:
                    # One name in the workload is one size, even if the trace has two symbols for it.
                    workload_names.add(name)
                used_names.add(name)
                self.names[symbol] = name
            if is_symbol(size) or (symbols and (i, d) in self.free.units):
                count = int(item.value.shape[d]) // self.free.units.get((i, d), 1)
                self.sizes.setdefault(self.names[next(iter(symbols))], count)
        for i, (node, item) in enumerate(zip(self.placeholders, self.inputs, strict=True)):
            for d, size in enumerate(node.meta["val"].shape):
                if len(self.symbols_at[i, d]) == 1:
                    self._add_derived_size(size.node.expr, int(item.value.shape[d]))
        # Strides that no size explains, such as those of a slice, become sizes themselves.
        for node, item in zip(self.placeholders, self.inputs, strict=True):
            for d, stride in enumerate(node.meta["val"].stride()):
                for symbol in symbols_of(stride) - set(self.names):
                    if str(stride.node.expr) == symbol:
                        name = f"{item.name}_stride{d}"
                        while name in used_names:
                            name += "_"
                        used_names.add(name)
                        self.names[symbol] = name
                        self.sizes[name] = int(item.value.stride(d))

    def _add_derived_size(self, expression: Any, length: int) -> None:
        """Add the value of the only symbol of a size, unless it is known or the size is not linear in it."""
        (symbol,) = expression.free_symbols
        name, factor, rest = self.names[str(symbol)], expression.coeff(symbol, 1), expression.subs(symbol, 0)
        if name not in self.sizes and factor and expression == factor * symbol + rest:
            self.sizes[name] = int((length - rest) // factor)

    def non_polynomial_symbols(self) -> dict[str, Cause]:
        """Symbols in sizes or guards that are not polynomials, and those of attention's head sizes, with the first cause.

        Divisions, remainders and maxima are not polynomials.
        """
        # A kernel supports one head size, and the softmax scale depends on it.
        causes = {
            symbol: Cause(CONSTANT, str(node.target), line_of(node))
            for node in _attentions(self.program)
            for each in node.args[:3]
            for symbol in symbols_of(_size(each, -1))
        }

        def add(expression: Any, operation: str, line: int) -> None:
            for symbol, factor in self._factors(expression).items():
                known = causes.get(symbol, Cause(factor, operation, line))
                causes[symbol] = known._replace(factor=math.lcm(known.factor, factor))

        for node in self.program.graph.nodes:
            for symbol in constant_symbols(node):
                causes[symbol] = Cause(CONSTANT, str(node.target), line_of(node))
            raw_strides, value = not self.free.windows_vary, node.meta.get("val")
            expressions = non_polynomials(value, node.target, numbers=True, raw_strides=raw_strides)
            for expression in (*expressions, *pooled_windows(node)):
                add(expression, str(node.target), line_of(node))
        for guard in self._guards:
            text = str(guard.expression)
            if guard.is_asked:
                is_rejected = condition(guard, self.names, self.sizes) is None
            else:
                # Comparisons with Max(1, size) only ask whether a tensor is dense. All sizes of at least 1 satisfy them.
                is_rejected = not text.startswith("Ne(") and any(word in text for word in ("Mod(", "//", "Piecewise"))
            if is_rejected:
                add(guard.expression, "", guard.line)
        # Only symbols of the inputs can change.
        return {symbol: cause for symbol, cause in causes.items() if symbol in self.names}

    def _factors(self, expression: Any) -> dict[str, int]:
        module_inputs = {i for i, item in enumerate(self.inputs) if item.kind is not InputKind.ARGUMENT}
        parameters = {symbol for (i, _), symbols in self.symbols_at.items() if i in module_inputs for symbol in symbols}
        values = {symbol: self.sizes[name] for symbol, name in self.names.items() if name in self.sizes}
        return factors_of(expression, set(self.names), parameters, values)

    @cached_property
    def _guards(self) -> list[Guard]:
        return guards_of(self.placeholders, self.questions, self.target.path)

    def size(self, value: Any) -> Size:
        """Convert a dimension."""
        if isinstance(value, int):
            return Size.of(value)
        return self._named(value.node.expr)

    def _named(self, expression: Any) -> Size:
        parsed = Size.parse(str(with_reduced_divisions(expression)))
        return parsed.substitute({symbol: Size.symbol(name) for symbol, name in self.names.items()})

    def type(self, value: torch.Tensor) -> TensorType:
        """The type of a fake tensor."""
        return TensorType(
            tuple(self.size(s) for s in value.shape),
            str(value.dtype).removeprefix("torch."),
            tuple(self._stride(s) for s in value.stride()),
        )

    def _stride(self, value: Any) -> Size:
        """Convert a stride."""
        if isinstance(value, int):
            return Size.of(value)
        return self._named(simplified_stride(with_reduced_divisions(value.node.expr)))

    def read(self) -> Graph:
        """Build the graph."""
        references: dict[str, Argument] = {}
        for node, item in zip(self.placeholders, self.inputs, strict=True):
            references[node.name] = Ref(item.name)
        nodes: list[Node] = [self._literal(node) for node in self.program.graph.nodes if node.name in self.literals]
        references |= {node.name: Ref(node.name) for node in nodes}
        returned: Sequence[Any] = ()
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                converted = self._node(node, references)
                if converted is not None:
                    nodes.append(converted)
            elif node.op == "output":
                returned = node.args[0]
            elif node.op == "get_attr":
                raise self._foreign_tensor(line_of(node))
        outputs, mutations, sizes = self._results(returned, references)
        inputs = [
            GraphInput(item.name, item.access, item.kind, self.type(node.meta["val"]), item.value.requires_grad)
            for node, item in zip(self.placeholders, self.inputs, strict=True)
        ]
        graph = Graph(
            inputs=tuple(inputs),
            nodes=tuple(nodes),
            outputs=outputs,
            returns=self._returns(sizes),
            sizes=self.sizes,
            mutations=mutations,
            conditions=self._conditions(),
            backward=self._backward(),
            has_pairs=any(self.parts.values()),
        )
        return replace(graph, nodes=tuple(self._with_variables(graph)))

    def _backward(self) -> Backward | None:
        if self.gradients is None:
            return None
        gradients = tuple(self.inputs[i].name for i in self.gradients.inputs)
        return Backward(tuple(self.tangents), tuple(self.gradients.results), gradients)

    def _tangent(self, kind: TensorType) -> Ref:
        """The input for the gradient of the next result."""
        assert self.gradients is not None
        number = self.gradients.results[len(self.tangents)]
        name = f"grad_out_{number}" if len(self.gradients.results) > 1 else "grad_out"
        while name in self.used_names:
            name += "_"
        self.used_names.add(name)
        self.tangents.append(GraphInput(name, name, InputKind.TANGENT, kind))
        return Ref(name)

    def _literal(self, node: torch.fx.Node) -> Node:
        kind = self.type(node.meta["val"])
        self.used_names.add(node.name)
        kwargs: dict[str, Argument] = {"dtype": kind.dtype, "device": INPUT_DEVICE}
        tensor = self.literals[node.name]
        if not tensor.dim():
            return Node(node.name, "aten.full.default", ((), tensor.item()), kwargs, (kind,))
        line = next(map(line_of, node.users), 0)
        return Node(node.name, "aten.tensor.default", (nested_literals(tensor),), kwargs, (kind,), line)

    def _results(
        self, returned: Sequence[Any], references: Mapping[str, Argument]
    ) -> tuple[tuple[Ref, ...], tuple[Mutation, ...], list[Size]]:
        outputs: list[Ref] = []
        mutations: list[Mutation] = []
        sizes: list[Size] = []
        by_placeholder = {node.name: item.name for node, item in zip(self.placeholders, self.inputs, strict=True)}
        for spec, node in zip(self.program.graph_signature.output_specs, returned, strict=True):
            value = references[node.name] if isinstance(node, torch.fx.Node) else Size.of(node)
            if spec.kind is OutputKind.USER_INPUT_MUTATION:
                assert isinstance(value, Ref)
                mutations.append(Mutation(by_placeholder[spec.target], value))
            elif isinstance(value, Ref):
                outputs.append(value)
            else:
                assert isinstance(value, Size)
                sizes.append(value)
        return tuple(outputs), tuple(mutations), sizes

    def _returns(self, sizes: Sequence[Size]) -> str:
        """The structure of the results, with the numbers by size name."""
        if not is_nested(self.returns):
            return self.returns
        return fill_structure(self.returns, lambda i: f"{RESULTS}[{i}]", lambda i: f"{SIZES}[{str(sizes[i])!r}]")

    def _node(self, node: torch.fx.Node, references: dict[str, Argument]) -> Node | None:
        value = node.meta.get("val")
        if node.target is operator.getitem:
            source = references[node.args[0].name]
            assert isinstance(source, Ref) and isinstance(node.args[1], int)
            references[node.name] = Ref(source.name, node.args[1])
            return None
        if str(node.target) == TANGENT:
            references[node.name] = self._tangent(self.type(value))
            return None
        if self.gradients is not None and str(node.target) in IDENTITIES:
            references[node.name] = references[node.args[0].name]
            return None
        if "_local_scalar_dense" in str(node.target) or "aten.item." in str(node.target):
            raise depends_on_values(self.target, line_of(node))
        if _is_redundant_copy(node, self.literals) or self._is_full_copy(node):
            # The source is the last argument of `copy(y, x)`, and the only one of `clone(x)`.
            references[node.name] = references[node.args[-1].name]
            return None
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            references[node.name] = self.size(value)
            return None
        if value is None or isinstance(value, (bool, float, torch.SymBool, torch.SymFloat)):
            # An assertion on sizes. The graph's conditions contain it.
            references[node.name] = None
            return None
        tensors = list(value if isinstance(value, (tuple, list)) else [value])
        name = node.name
        while name in self.used_names:
            name += "_"
        self.used_names.add(name)
        references[node.name] = Ref(name)
        self.parts[name] = node.meta.get(PART, "")
        return Node(
            name=name,
            op=canonical(str(node.target)),
            args=tuple(self._argument(item, references) for item in node.args),
            kwargs=self._keywords(node, references),
            outputs=tuple(self.type(item) if isinstance(item, torch.Tensor) else NO_TENSOR for item in tensors),
            line=line_of(node),
        )

    def _is_full_copy(self, node: torch.fx.Node) -> bool:
        """Whether the node is ``y.copy_(x)`` on an input ``y`` and ``x`` can replace it. A result cannot be replaced."""
        if node.target is not torch.ops.aten.copy.default:
            return False
        specs = self.program.graph_signature.output_specs
        written_inputs = {spec.target for spec in specs if spec.kind is OutputKind.USER_INPUT_MUTATION}
        results = {spec.arg.name for spec in specs if spec.kind is not OutputKind.USER_INPUT_MUTATION}
        source, copy = node.args[1], node.meta["val"]
        value = source.meta["val"]
        has_same_type = (value.shape, value.stride(), value.dtype) == (copy.shape, copy.stride(), copy.dtype)
        return has_same_type and node.name not in results and source.name not in written_inputs

    def _keywords(self, node: torch.fx.Node, references: Mapping[str, Argument]) -> dict[str, Argument]:
        kwargs = {
            key: self._argument(item, references)
            for key, item in node.kwargs.items()
            if key not in ("pin_memory", "layout") and item is not None
        }
        creates = not any(isinstance(each.meta.get("val"), torch.Tensor) for each in node.all_input_nodes)
        if creates and self._moves_constants and _is_on_cpu(node):
            kwargs["device"] = INPUT_DEVICE
        # The kernels run on the device of the inputs, which can differ from the device of the capture.
        if str(node.kwargs.get("device") or "") in (self.device, self.device.partition(":")[0]):
            kwargs["device"] = INPUT_DEVICE
            if "_to_copy" in str(node.target):
                del kwargs["device"]
        return kwargs

    @cached_property
    def _moves_constants(self) -> bool:
        """Whether tensors that the target creates on the CPU, such as a mask, can be created on the device of the inputs.

        Kernels cannot read CPU memory. Random numbers would differ, and a result must stay on the CPU.
        """
        on_cpu = [node for node in self.program.graph.nodes if _is_on_cpu(node)]
        results = self.program.graph.output_node().all_input_nodes
        return self.device != "cpu" and not any(
            (node.op == "placeholder" and node.name not in self.literals)
            or node in results
            or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            for node in on_cpu
        )

    def _argument(self, value: Any, references: Mapping[str, Argument]) -> Argument:
        if isinstance(value, torch.fx.Node):
            return references[value.name]
        if isinstance(value, torch.SymInt):
            return self.size(value)
        if isinstance(value, (tuple, list)):
            return tuple(self._argument(item, references) for item in value)
        if isinstance(value, torch.dtype):
            return str(value).removeprefix("torch.")
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        return str(value)

    def _with_variables(self, graph: Graph) -> list[Node]:
        """Name the last node of each assignment's line after the assigned variable, or each part of a complex value."""
        forward = [node for node in graph.nodes if node.line and node.name not in graph.backward_nodes]
        last = {node.line: self.parts.get(node.name, "") for node in forward}
        names = {(node.line, self.parts.get(node.name, "")): node.name for node in forward}
        variables: dict[str, str] = {}
        for (line, part), name in names.items():
            variable = self.variables.get(line, "")
            if variable and bool(part) == bool(last[line]):
                variables[name] = f"{variable}_{part}" if part else variable
        return [
            replace(node, variable=variables[node.name]) if node.name in variables else node for node in graph.nodes
        ]

    def _conditions(self) -> tuple[str, ...]:
        """The guards that are stronger than "sizes differ" or "size >= 2". Kernels are valid for size 1, too."""
        texts = [condition(guard, self.names, self.sizes) for guard in self._guards]
        # The user's code raises if an image is smaller than a window.
        texts += [greater_than(size, 0) for size in self._window_counts() if any(n < 0 for _, n in size.terms)]
        return tuple(strongest(text for text in texts if text))

    def _window_counts(self) -> Iterator[Size]:
        """The sizes of the results of operations on windows."""
        for node in self.program.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and any(word in str(node.target) for word in WINDOWS):
                yield from map(self.size, value.shape)


def _is_on_cpu(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def line_of(node: torch.fx.Node) -> int:
    """The line of the user's file that created a node; 0 if unknown."""
    trace = node.meta.get("stack_trace") or ""
    return int(trace.removeprefix(LINE_MARK)) if trace.startswith(LINE_MARK) else 0


def _is_redundant_copy(node: Any, literals: Container[str]) -> bool:
    """Whether the node copies a computed value, and only operators that compute read the copy.

    A dropout with probability 0 has such copies, and so has every tensor in ``literals``.
    """

    def computes(node: Any) -> bool:
        return isinstance(node.target, torch._ops.OpOverload) and not node.target.is_view

    if node.target is not torch.ops.aten.clone.default or node.kwargs or not all(computes(user) for user in node.users):
        return False
    source = node.args[0]
    return (computes(source) or source.name in literals) and source.meta["val"].stride() == node.meta["val"].stride()


def _attentions(program: Any) -> list[Any]:
    return [node for node in program.graph.nodes if "scaled_dot_product_attention" in str(node.target)]


def _size(node: Any, dim: int) -> Any:
    return node.meta["val"].shape[dim]


def _equal_by_attention(program: Any) -> dict[str, str]:
    """Pairs of symbols for the lengths of keys and values, which are equal. Attention's meta kernel does not tie them."""
    equal: dict[str, str] = {}
    for node in _attentions(program):
        keys, values = (symbols_of(_size(operand, -2)) for operand in node.args[1:3])
        if len(keys) == len(values) == 1 and keys != values:
            (key,), (value,) = keys, values
            equal |= {key: value, value: key}
    return equal
