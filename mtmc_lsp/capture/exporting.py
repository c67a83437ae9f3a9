"""Export a call as a functional ATen graph with named sizes and source lines, as our own plain value."""

from __future__ import annotations

import contextlib
import math
import operator
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx.proxy
from torch.export import Dim, export
from torch.export.graph_signature import OutputKind

from mtmc_lsp.capture.awkward import AwkwardSize, Watch, awkward_sizes, blamed, is_symbol, step_of, symbols_of
from mtmc_lsp.capture.expanding import expansions
from mtmc_lsp.capture.synonyms import canonical
from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.core.graph import INPUT_DEVICE, Argument, Graph, GraphInput, InputKind, Mutation, Node, Ref, TensorType
from mtmc_lsp.core.returned import PLAIN, RESULTS, SIZES, form, is_nested, is_tensor, leaves, put_together
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import Target

LINE_MARK = "mtmc-line "
Place = tuple[int, int]
"""A dimension of an input: the input's number and its own."""
MOST_WRITTEN = 4096
"""Numbers of a tensor that a launcher writes down."""
ATTEMPTS = 6
"""Whole exports tried while sizes that divisions speak of are made constant."""


@dataclass(frozen=True)
class InputTensor:
    """A tensor that the target reads, in the order in which the export takes them."""

    name: str
    access: str
    kind: InputKind
    value: torch.Tensor
    size_names: tuple[str, ...] = ()
    """The workload's names of its dimensions, empty where a dimension is a number."""


class _Flat(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """The target as a module without parts: an export takes modules alone, and puts back what they assign to themselves."""

    def __init__(self, function: _Returning) -> None:
        super().__init__()
        self._function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self._function(*tensors)


class _Returning:
    """The target as a function of tensors alone, which gives tensors and numbers that follow from the sizes."""

    def __init__(self, function: Any, named: Callable[[type], str], own: Callable[[Any], Any]) -> None:
        self._function, self._named, self._own = function, named, own
        self.returns = ""
        """The form of what it returned last, in which such a number is ``sizes[0]``: by its place among these."""

    def __call__(self, *tensors: torch.Tensor) -> Any:
        value = self._function(*tensors)
        found = leaves(value)
        numbers = [item for item in found if isinstance(item, torch.SymInt)]
        places = iter(range(len(numbers)))

        def written(leaf: Any) -> str:
            if not isinstance(leaf, (torch.SymInt, *PLAIN)):
                # Without free sizes it is a plain value.
                raise TypeError(f"a result follows from the sizes, as {leaf}")
            return f"{SIZES}[{next(places)}]" if isinstance(leaf, torch.SymInt) else repr(leaf)

        self.returns = form(self._own(value), self._named, written)
        return (*(item for item in found if is_tensor(item)), *numbers)


@contextlib.contextmanager
def _recording_lines(path: str, watch: Watch | None = None) -> Iterator[None]:
    """While exporting, every node remembers the innermost line of the user's file that made it, and is watched.

    Export's own stack traces keep only frames called ``forward``; a node's ``stack_trace`` survives decomposition, so the
    line travels in it.
    """
    original = torch.fx.proxy.TracerBase.create_node

    def create_node(self: Any, *args: Any, **kwargs: Any) -> Any:
        node = original(self, *args, **kwargs)
        if watch is not None:
            watch.look(node)
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == path:
                node.meta["stack_trace"] = f"{LINE_MARK}{frame.f_lineno}"
                break
            frame = frame.f_back
        return node

    torch.fx.proxy.TracerBase.create_node = create_node
    try:
        yield
    finally:
        torch.fx.proxy.TracerBase.create_node = original


def export_graph(
    function: Any,
    inputs: Sequence[InputTensor],
    target: Target,
    variables: Mapping[int, str],
    named: Callable[[type], str],
    text: Sequence[str],
    own: Callable[[Any], Any] = lambda value: value,
) -> tuple[Graph, tuple[str, ...]]:
    """The graph of ``function`` over ``inputs``, and notes on what was fixed.

    Args:
        function: takes the input tensors in order.
        variables: line to the user's variable assigned there.
        named: Python for the class of a result.
        text: the lines of the target's file.
        own: what the target itself returned, of what ``function`` gives; what it keeps comes behind that.

    Raises:
        TargetUnsupported: it cannot be exported; names file and line where that is known.
    """
    flat = _Returning(function, named, own)
    fixed: set[Place] = set()
    lines: dict[Place, int] = {}
    held = {i for i, item in enumerate(inputs) if item.kind is not InputKind.ARGUMENT}
    attempts = 0
    while attempts < ATTEMPTS:
        watch = Watch([item.value for item in inputs], held, fixed)
        try:
            program = _export(flat, inputs, fixed, target, watch)
        except AwkwardSize:
            fixed |= watch.found.keys()
            lines |= {place: line_of(node) for place, node in watch.found.items()}
            continue
        except TargetUnsupported:
            # What cannot be traced for any size, as where a condition on sizes has no solution, may be for the given ones.
            break
        attempts, written = attempts + 1, _written(program)
        reader = _Reader(program, inputs, variables, target, flat.returns, written)
        awkward = reader.awkward_symbols()
        if not awkward:
            # Taking operations apart takes longer than the export: it is only done with sizes that may stay.
            reader = _Reader(_expanded(program, target), inputs, variables, target, flat.returns, written)
            awkward = reader.awkward_symbols()
        if not awkward:
            return reader.read(), tuple(_told(inputs, reader, lines, text))
        for place, symbols in reader.symbols_at.items():
            for symbol in symbols & awkward.keys():
                fixed.add(place)
                lines[place] = awkward[symbol]
    fixed = {(i, d) for i, item in enumerate(inputs) for d in range(item.value.dim())}
    program = _export(flat, inputs, fixed, target)
    written, program = _written(program), _expanded(program, target)
    return _Reader(program, inputs, variables, target, flat.returns, written).read(), (
        "the graph holds for the workload's sizes alone",
    )


def _told(
    inputs: Sequence[InputTensor], reader: _Reader, lines: Mapping[Place, int], text: Sequence[str]
) -> Iterator[str]:
    """What to say of sizes that the workload names and the graph has as numbers; one of 0 or 1 is no other size's case."""
    told: set[str] = set()
    for i, item in enumerate(inputs):
        for d, name in enumerate(item.size_names):
            value = int(item.value.shape[d])
            if not name or name in told or reader.symbols_at[i, d] or value < 2:
                continue
            told.add(name)
            line = next((lines[place] for place in lines if _name(inputs, place) == name and lines[place]), 0)
            why = (
                f"of line {line}: `{text[line - 1].strip()}`"
                if 0 < line <= len(text)
                else "torch's trace holds for it alone"
            )
            yield f"{name} is fixed at {value}, because {why}"


def _name(inputs: Sequence[InputTensor], place: Place) -> str:
    names = inputs[place[0]].size_names
    return names[place[1]] if place[1] < len(names) else ""


def _expanded(program: Any, target: Target) -> Any:
    """An exported program as functions without side effects, with some operations as the smaller ones they are made of."""
    with _recording_lines(target.path), torch.no_grad():
        try:
            return program.run_decompositions(expansions())
        except Exception as error:
            raise export_error(error, target) from error


def _export(
    flat: _Returning,
    inputs: Sequence[InputTensor],
    fixed: set[Place],
    target: Target,
    watch: Watch | None = None,
) -> Any:
    """The target's program, as torch exports it.

    Raises:
        AwkwardSize: the watch ended it.
        TargetUnsupported: it cannot be traced with these sizes fixed and all others free.
    """
    # On a GPU a module's own sizes are constants of its kernels. The interpreter needs smaller ones than that.
    free_parameters = all(item.value.device.type == "cpu" for item in inputs)
    named = any(name for item in inputs for name in item.size_names)

    def is_static(i: int, d: int) -> bool:
        item = inputs[i]
        # Where the workload names some sizes, those that it gives as numbers are constants.
        literal = named and d < len(item.size_names) and not item.size_names[d]
        return (item.kind is not InputKind.ARGUMENT and not free_parameters) or literal or (i, d) in fixed

    shapes = tuple(
        {d: Dim.STATIC if is_static(i, d) else Dim.AUTO for d in range(item.value.dim())}
        for i, item in enumerate(inputs)
    )
    tensors = tuple(item.value for item in inputs)
    with _recording_lines(target.path, watch), torch.no_grad():
        try:
            return export(_Flat(flat), tensors, dynamic_shapes=(shapes,), strict=False)
        except Exception as error:
            if watch is not None and watch.found:
                # Torch may have put an error of its own around it.
                raise AwkwardSize from error
            raise export_error(error, target) from error


def _decides_by_values(target: Target, line: int) -> TargetUnsupported:
    return TargetUnsupported(
        f"{target.qualname} decides by the values of a tensor, so it is no single graph",
        where=Location(target.path, line or target.start_line),
        remedy="Write the choice with torch.where, or optimise the functions that it chooses between.",
    )


def export_error(error: Exception, target: Target) -> TargetUnsupported:
    """What stopped a target from being traced, at the user's line."""
    import traceback

    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == target.path]
    line = frames[-1].lineno if frames and frames[-1].lineno else target.start_line
    text = f"{type(error).__name__}: {error}"
    where = Location(target.path, line)
    if any(word in text for word in ("data-dependent", "DataDependent", "_local_scalar_dense", "DynamicOutputShape")):
        return _decides_by_values(target, line)
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return TargetUnsupported(
        f"{target.qualname} cannot be exported as a graph: {first}",
        where=where,
        remedy="Move this part into a function of its own and optimise the rest.",
    )


class _Reader:
    """Turns an exported program into our graph."""

    def __init__(
        self,
        program: Any,
        inputs: Sequence[InputTensor],
        variables: Mapping[int, str],
        target: Target,
        returns: str,
        written: Set[str],
    ) -> None:
        self.program = program
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
        taken = {item.name for item in self.inputs}
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
            for expression in awkward_sizes(node.meta.get("val"), node.target, numbers=True):
                found = {**dict.fromkeys(self._blamed(expression), line_of(node)), **found}
        for guard in self._guards():
            text = str(guard)
            # Comparisons with Max(1, size) only ask whether a tensor is dense; sizes of at least 1 satisfy them.
            if not text.startswith("Ne(") and any(word in text for word in ("Mod(", "//", "Piecewise")):
                found = {**dict.fromkeys(self._blamed(guard), 0), **found}
        # Only symbols of the inputs can be made constant.
        return {symbol: line for symbol, line in found.items() if symbol in self.names}

    def _blamed(self, expression: Any) -> set[str]:
        held = {i for i, item in enumerate(self.inputs) if item.kind is not InputKind.ARGUMENT}
        parameters = {symbol for (i, _), symbols in self.symbols_at.items() if i in held for symbol in symbols}
        values = {symbol: self.sizes[name] for symbol, name in self.names.items() if name in self.sizes}
        return blamed(expression, set(self.names), parameters, values)

    def _guards(self) -> list[Any]:
        for node in self.placeholders:
            mode = getattr(node.meta["val"], "fake_mode", None)
            if mode is not None and mode.shape_env is not None:
                return [guard.expr for guard in mode.shape_env.guards]
        return []

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
        return self._named(step_of(value.node.expr))

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
        return put_together(self.returns, lambda i: f"{RESULTS}[{i}]", lambda i: f"{SIZES}[{str(sizes[i])!r}]")

    def _node(self, node: torch.fx.Node, references: dict[str, Argument]) -> Node | None:
        value = node.meta.get("val")
        if node.target is operator.getitem:
            source = references[node.args[0].name]
            assert isinstance(source, Ref) and isinstance(node.args[1], int)
            references[node.name] = Ref(source.name, node.args[1])
            return None
        if "_local_scalar_dense" in str(node.target) or "aten.item." in str(node.target):
            raise _decides_by_values(self.target, line_of(node))
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
        found: list[str] = []
        for guard in self._guards():
            text = str(guard)
            unequal = re.fullmatch(r"Ne\((\w+), (\d{1,9})\)", text)
            if unequal is not None and self.names.get(unequal[1]) in self.sizes and int(unequal[2]) > 1:
                found.append(f"{self.names[unequal[1]]} != {unequal[2]}")
            if text.startswith(("Ne(", "Eq(")) or any(
                text.endswith(end) for end in (">= 2", "> 1", ">= 1", "> 0", ">= 0")
            ):
                continue
            if any(operator_ in text for operator_ in ("<", ">")) and not any(c in text for c in "(&|"):
                own = {str(symbol): self.names.get(str(symbol), "") for symbol in guard.free_symbols}
                if all(name in self.sizes for name in own.values()):
                    words = re.split(r"([A-Za-z_]\w*)", text)
                    found.append("".join(own.get(word, word) for word in words))
        return tuple(dict.fromkeys(found))


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


def _written(program: Any) -> set[str]:
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
