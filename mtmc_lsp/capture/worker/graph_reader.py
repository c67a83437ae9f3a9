"""Reads a program that torch exported as our graph: its sizes by name, its nodes with the lines that made them."""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.export.graph_signature import OutputKind

from mtmc_lsp.capture.result_structure import RESULTS, SIZES, fill_structure, is_nested
from mtmc_lsp.capture.worker.passes.aten_aliases import canonical
from mtmc_lsp.capture.worker.passes.non_polynomial_sizes import (
    causes_of,
    is_symbol,
    non_polynomials,
    simplified_stride,
    symbols_of,
)
from mtmc_lsp.capture.worker.size_conditions import Guard, Question, condition, guards_of, strongest
from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.core.graph import INPUT_DEVICE, Argument, Graph, GraphInput, InputKind, Mutation, Node, Ref, TensorType
from mtmc_lsp.core.sizes import FUNCTIONS, Size
from mtmc_lsp.core.workload import Target

LINE_MARK = "mtmc-line "
MOST_WRITTEN = 4096
"""Numbers of a tensor that a launcher writes down."""


@dataclass(frozen=True)
class InputTensor:
    """A tensor that the target reads, in the order in which the export takes them."""

    name: str
    access: str
    kind: InputKind
    value: torch.Tensor
    size_names: tuple[str, ...] = ()
    """The workload's names of its dimensions, empty where a dimension is a number."""


def depends_on_values(target: Target, line: int) -> TargetUnsupported:
    """The error for a target of which no single graph can be made; the line is 0 where it is not known."""
    return TargetUnsupported(
        f"{target.qualname} depends on the values of a tensor, so no single graph describes it",
        where=Location(target.path, line or target.start_line),
        remedy="Use torch.where for the choice, or optimise each of the functions separately.",
    )


class Reader:
    """Turns an exported program into our graph."""

    def __init__(
        self,
        program: Any,
        inputs: Sequence[InputTensor],
        variables: Mapping[int, str],
        target: Target,
        returns: str,
        written: Set[str],
        questions: Sequence[Question],
    ) -> None:
        self.program = program
        self.questions = questions
        self.returns = returns
        self.inputs = inputs
        self.variables = variables
        self.target = target
        self.device = str(inputs[0].value.device)
        self.placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        self.numbers = self._take_numbers(written)
        if len(self.placeholders) != len(inputs):
            raise TargetUnsupported(
                f"{target.qualname} uses a tensor that is neither an argument nor a parameter",
                where=Location(target.path, target.start_line),
                remedy="Pass it as an argument, or register it as a buffer of the module.",
            )
        self.taken = {item.name for item in inputs}
        """Names of inputs and nodes: an operator may be called as an argument is."""
        self.symbols_at: dict[tuple[int, int], set[str]] = {}
        self.names: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self._name_symbols()

    def _take_numbers(self, written: Set[str]) -> dict[str, torch.Tensor]:
        """Tensors of numbers that the target makes, as ``torch.tensor([1, 2, 1])`` and ``y[:, 0] = 0`` do, by node."""
        signature = self.program.graph_signature
        found = {
            name: self.program.constants[target]
            for name, target in signature.inputs_to_lifted_tensor_constants.items()
            if self.program.constants[target].dim() == 0 or name in written
        }
        self.placeholders = [node for node in self.placeholders if node.name not in found]
        return found

    def _name_symbols(self) -> None:
        taken = {*FUNCTIONS, *(item.name for item in self.inputs)}
        same = _same_by_attention(self.program)
        given: set[str] = set()
        numbered = 0
        for i, (node, item) in enumerate(zip(self.placeholders, self.inputs, strict=True)):
            value = node.meta["val"]
            for d, size in enumerate(value.shape):
                symbols = symbols_of(size)
                self.symbols_at[i, d] = symbols
                for symbol in sorted(symbols):
                    if symbol in self.names:
                        continue
                    wanted = item.size_names[d] if d < len(item.size_names) else ""
                    if same.get(symbol) in self.names:
                        wanted = self.names[same[symbol]]
                    elif not wanted or len(symbols) != 1 or (wanted in taken and wanted not in given):
                        wanted, numbered = f"s{numbered}", numbered + 1
                    else:
                        # One name in the workload is one size, also where the operations would take two.
                        given.add(wanted)
                    taken.add(wanted)
                    self.names[symbol] = wanted
                if is_symbol(size):
                    self.sizes.setdefault(self.names[next(iter(symbols))], int(item.value.shape[d]))
        # Steps over memory that no size explains, as those of a slice, are sizes of their own.
        for node, item in zip(self.placeholders, self.inputs, strict=True):
            for d, stride in enumerate(node.meta["val"].stride()):
                for symbol in symbols_of(stride) - set(self.names):
                    if str(stride.node.expr) == symbol:
                        name = f"{item.name}_stride{d}"
                        while name in taken:
                            name += "_"
                        taken.add(name)
                        self.names[symbol] = name
                        self.sizes[name] = int(item.value.stride(d))

    def awkward_symbols(self) -> dict[str, int]:
        """Symbols in sizes or guards that are no polynomials (divisions, remainders, maxima), and attention's head sizes.

        Each with the line that makes it so; 0 where that is not known.
        """
        # A kernel is for one head size, and the scale comes from it.
        found = {
            symbol: line_of(node)
            for node in _attentions(self.program)
            for each in node.args[:3]
            for symbol in symbols_of(_size(each, -1))
        }
        for node in self.program.graph.nodes:
            for expression in non_polynomials(node.meta.get("val"), node.target, numbers=True):
                found = {**dict.fromkeys(self._blamed(expression), line_of(node)), **found}
        for guard in self._guards:
            text = str(guard.expression)
            if guard.is_asked:
                awkward = condition(guard, self.names, self.sizes) is None
            else:
                # Comparisons with Max(1, size) only ask whether a tensor is dense; sizes of at least 1 satisfy them.
                awkward = not text.startswith("Ne(") and any(word in text for word in ("Mod(", "//", "Piecewise"))
            if awkward:
                found = {**dict.fromkeys(self._blamed(guard.expression), guard.line), **found}
        # Only symbols of the inputs can be made constant.
        return {symbol: line for symbol, line in found.items() if symbol in self.names}

    def _blamed(self, expression: Any) -> set[str]:
        held = {i for i, item in enumerate(self.inputs) if item.kind is not InputKind.ARGUMENT}
        parameters = {symbol for (i, _), symbols in self.symbols_at.items() if i in held for symbol in symbols}
        values = {symbol: self.sizes[name] for symbol, name in self.names.items() if name in self.sizes}
        return causes_of(expression, set(self.names), parameters, values)

    @cached_property
    def _guards(self) -> list[Guard]:
        return guards_of(self.placeholders, self.questions, self.target.path)

    def size(self, value: Any) -> Size:
        """A dimension as our size."""
        if isinstance(value, int):
            return Size.of(value)
        return self._named(value.node.expr)

    def _named(self, expression: Any) -> Size:
        parsed = Size.parse(str(expression))
        return parsed.substitute({symbol: Size.symbol(name) for symbol, name in self.names.items()})

    def type(self, value: torch.Tensor) -> TensorType:
        """A fake tensor's type."""
        return TensorType(
            tuple(self.size(s) for s in value.shape),
            str(value.dtype).removeprefix("torch."),
            tuple(self._step(s) for s in value.stride()),
        )

    def _step(self, value: Any) -> Size:
        """A stride as our size."""
        if isinstance(value, int):
            return Size.of(value)
        return self._named(simplified_stride(value.node.expr))

    def read(self) -> Graph:
        """The graph."""
        references: dict[str, Argument] = {}
        for node, item in zip(self.placeholders, self.inputs, strict=True):
            references[node.name] = Ref(item.name)
        nodes: list[Node] = [self._number(node) for node in self.program.graph.nodes if node.name in self.numbers]
        references |= {node.name: Ref(node.name) for node in nodes}
        returned: Sequence[Any] = ()
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                made = self._node(node, references)
                if made is not None:
                    nodes.append(made)
            elif node.op == "output":
                returned = node.args[0]
            elif node.op == "get_attr":
                raise TargetUnsupported(
                    f"{self.target.qualname} uses a constant tensor of its own",
                    where=Location(self.target.path, line_of(node) or self.target.start_line),
                    remedy="Pass it as an argument, or register it as a buffer of the module.",
                )
        outputs, mutations, sizes = self._results(returned, references)
        inputs = [
            GraphInput(item.name, item.access, item.kind, self.type(node.meta["val"]), item.value.requires_grad)
            for node, item in zip(self.placeholders, self.inputs, strict=True)
        ]
        return Graph(
            inputs=tuple(inputs),
            nodes=tuple(self._with_variables(nodes)),
            outputs=outputs,
            returns=self._returns(sizes),
            sizes=self.sizes,
            mutations=mutations,
            conditions=self._conditions(),
        )

    def _number(self, node: torch.fx.Node) -> Node:
        kind = self.type(node.meta["val"])
        self.taken.add(node.name)
        keywords: dict[str, Argument] = {"dtype": kind.dtype, "device": INPUT_DEVICE}
        numbers = self.numbers[node.name]
        if not numbers.dim():
            return Node(node.name, "aten.full.default", ((), numbers.item()), keywords, (kind,))
        line = next(map(line_of, node.users), 0)
        return Node(node.name, "aten.tensor.default", (_as_written(numbers),), keywords, (kind,), line)

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
        """The form of the results, its numbers by the names of the sizes."""
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
        if "_local_scalar_dense" in str(node.target) or "aten.item." in str(node.target):
            raise depends_on_values(self.target, line_of(node))
        if _is_idle_copy(node, self.numbers) or self._is_whole_copy(node):
            # Of `copy(y, x)` the last argument, of `clone(x)` the only one.
            references[node.name] = references[node.args[-1].name]
            return None
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            references[node.name] = self.size(value)
            return None
        if value is None or isinstance(value, (bool, float, torch.SymBool, torch.SymFloat)):
            # Assertions on sizes: the graph's conditions say the same.
            references[node.name] = None
            return None
        tensors = list(value if isinstance(value, (tuple, list)) else [value])
        name = node.name
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        references[node.name] = Ref(name)
        return Node(
            name=name,
            op=canonical(str(node.target)),
            args=tuple(self._argument(item, references) for item in node.args),
            kwargs=self._keywords(node, references),
            outputs=tuple(self.type(item) for item in tensors if isinstance(item, torch.Tensor)),
            line=line_of(node),
        )

    def _is_whole_copy(self, node: torch.fx.Node) -> bool:
        """Whether it is what ``y.copy_(x)`` makes of an input ``y``, which is ``x``: no result, that would be ``x`` itself."""
        if node.target is not torch.ops.aten.copy.default:
            return False
        specs = self.program.graph_signature.output_specs
        changed = {spec.target for spec in specs if spec.kind is OutputKind.USER_INPUT_MUTATION}
        results = {spec.arg.name for spec in specs if spec.kind is not OutputKind.USER_INPUT_MUTATION}
        source, made = node.args[1], node.meta["val"]
        value = source.meta["val"]
        alike = (value.shape, value.stride(), value.dtype) == (made.shape, made.stride(), made.dtype)
        return alike and node.name not in results and source.name not in changed

    def _keywords(self, node: torch.fx.Node, references: Mapping[str, Argument]) -> dict[str, Argument]:
        found = {
            key: self._argument(item, references)
            for key, item in node.kwargs.items()
            if key not in ("pin_memory", "layout") and item is not None
        }
        # The kernels run where the inputs are, which need not be where they are captured.
        if str(node.kwargs.get("device") or "") in (self.device, self.device.partition(":")[0]):
            found["device"] = INPUT_DEVICE
            if "_to_copy" in str(node.target):
                del found["device"]
        return found

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

    def _with_variables(self, nodes: list[Node]) -> list[Node]:
        """Give the last node of each assignment's line the name it is assigned to."""
        last = {node.line: i for i, node in enumerate(nodes) if node.line}
        return [
            replace(node, variable=self.variables.get(node.line, "")) if last.get(node.line) == i else node
            for i, node in enumerate(nodes)
        ]

    def _conditions(self) -> tuple[str, ...]:
        """Guards that say more than that sizes differ or are at least 2 (the kernels hold for size 1 too)."""
        found = (condition(guard, self.names, self.sizes) for guard in self._guards)
        return tuple(strongest(text for text in found if text))


def _as_written(numbers: torch.Tensor) -> tuple[Argument, ...]:
    """The numbers of a tensor in nested tuples, each as short as it can be written."""

    def short(number: Any) -> Argument:
        if not isinstance(number, float) or not math.isfinite(number):
            return number  # type: ignore[no-any-return]
        texts = (float(f"{number:.{digits}g}") for digits in range(1, 18))
        return next(text for text in texts if torch.tensor(text, dtype=numbers.dtype).item() == number)

    def nested(value: Any) -> Any:
        return tuple(map(nested, value)) if isinstance(value, list) else short(value)

    made: tuple[Argument, ...] = nested(numbers.tolist())
    return made


def written_in(program: Any) -> set[str]:
    """The inputs of an exported program that are tensors of numbers which the target writes down, and none that it finds."""
    lift = torch.ops.aten.lift_fresh_copy.default
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    return {
        node.name
        for node in program.graph.nodes
        if node.name in constants
        and all(user.target is lift for user in node.users)
        and program.constants[constants[node.name]].numel() <= MOST_WRITTEN
    }


def line_of(node: torch.fx.Node) -> int:
    """The line of the user's file that made a node; 0 where it is not known."""
    trace = node.meta.get("stack_trace") or ""
    return int(trace.removeprefix(LINE_MARK)) if trace.startswith(LINE_MARK) else 0


def _is_idle_copy(node: Any, numbers: Container[str]) -> bool:
    """Whether it copies a computed value for operations that compute: the trace of a dropout that keeps all has such copies.

    So has that of written numbers, which are ``numbers``.
    """

    def computes(other: Any) -> bool:
        return isinstance(other.target, torch._ops.OpOverload) and not other.target.is_view

    if node.target is not torch.ops.aten.clone.default or node.kwargs or not all(computes(user) for user in node.users):
        return False
    source = node.args[0]
    return (computes(source) or source.name in numbers) and source.meta["val"].stride() == node.meta["val"].stride()


def _attentions(program: Any) -> list[Any]:
    return [node for node in program.graph.nodes if "scaled_dot_product_attention" in str(node.target)]


def _size(node: Any, dim: int) -> Any:
    return node.meta["val"].shape[dim]


def _same_by_attention(program: Any) -> dict[str, str]:
    """Symbols of keys and values whose numbers must be equal, each to the other: attention's meta kernel does not say so."""
    same: dict[str, str] = {}
    for node in _attentions(program):
        keys, values = (symbols_of(_size(operand, -2)) for operand in node.args[1:3])
        if len(keys) == len(values) == 1 and keys != values:
            (key,), (value,) = keys, values
            same |= {key: value, value: key}
    return same
