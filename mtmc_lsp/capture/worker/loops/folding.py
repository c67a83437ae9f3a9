"""Folds the nodes between the marks of a kept loop into one node, whose body is a graph.

Nodes of the body that depend on nothing that changes stay outside: they are the same in all iterations.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mtmc_lsp.capture.worker.loops.distribution import distribute_layers
from mtmc_lsp.capture.worker.loops.hoisting import hoist_products
from mtmc_lsp.capture.worker.loops.iteration import MOST_UNROLLED, NotKept, OutsideLoop
from mtmc_lsp.capture.worker.loops.markers import NAMESPACE, mark_of
from mtmc_lsp.capture.worker.loops.reversing import needed_nodes, with_bodies_again
from mtmc_lsp.capture.worker.loops.sums import sink_sums
from mtmc_lsp.capture.worker.loops.supported import PRODUCTS, SHIFTS, multiplies_once, runs_step_by_step
from mtmc_lsp.capture.worker.passes.graph_cleanup import remove_dead_nodes
from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.loop import LOOP, MOST_BLOCK, MOST_MATRIX_TILES, Loop, LoopInput, LoopOutput, Position, pruned
from mtmc_lsp.core.sizes import Size, product

VIEWS = frozenset(
    "expand view permute transpose t unsqueeze squeeze select slice alias detach _unsafe_view split unsafe_split chunk "
    "split_with_sizes".split()
)
"""Those that return a view."""
FILLED = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "ones": 1.0, "ones_like": 1.0, "new_ones": 1.0}
"""Operations that create a tensor of one number."""


def fold_loops(graph: Graph) -> Graph:
    """Replace each kept loop by one node.

    Raises:
        NotKept: the body contains something that no kernel can run step by step.
    """
    graph = remove_dead_nodes(with_bodies_again(graph))
    while (leave := next((node for node in graph.nodes if mark_of(node) == "leave"), None)) is not None:
        graph = _Folding(graph, leave).folded()
    graph = _with_layouts(_without_copies(graph))
    if (lost := next((node for node in graph.nodes if mark_of(node)), None)) is not None:
        raise NotKept("a value of one iteration is read after the loop", lost.line)
    graph = sink_sums(hoist_products(distribute_layers(graph)))
    for node in graph.nodes:
        if node.loop is None:
            continue
        words = {each.word for each in node.loop.nodes}
        if node.name in graph.backward_nodes and "cat" in words and words & PRODUCTS:
            raise NotKept("no kernel runs its backward pass: it multiplies by concatenated gradients", node.line)
        if node.loop.matrix_tiles(graph) <= MOST_MATRIX_TILES or multiplies_once(node.loop):
            continue
        # Unrolled, the operations of an iteration fuse. A longer loop stays a loop of torch calls.
        if node.loop.count.value(graph.sizes) <= MOST_UNROLLED:
            raise NotKept("its matrices are too large for one program instance", node.line)
    return graph


def remove_dead_traces(graph: torch.fx.Graph) -> None:
    """Remove the traces of bodies that no loop uses, and what only they read, from an exported graph."""
    if not any(NAMESPACE in str(node.target) for node in graph.nodes):
        return
    for node in reversed(list(graph.nodes)):
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        is_functional = isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable
        if node.op == "call_function" and not node.users and is_functional and not is_random:
            graph.erase_node(node)


def _refs(argument: Argument) -> tuple[Ref, ...]:
    assert isinstance(argument, tuple)
    return tuple(item for item in argument if isinstance(item, Ref))


def _size(argument: Argument) -> Size:
    assert isinstance(argument, (int, Size))
    return Size.of(argument)


def _number(argument: Argument) -> int:
    size = _size(argument) if isinstance(argument, (int, Size)) else Size.of(0)
    return size.constant


@dataclass
class _Folding:
    """The fold of one loop."""

    graph: Graph
    leave: Node

    def folded(self) -> Graph:
        """The graph with the loop as one node."""
        states, initial, rows, bases, items, loop, count, dims, firsts, steps = self.leave.args
        number = _number(loop)
        self.inside = self._inside(number)
        body = [node for node in self.graph.nodes if node.name in self.inside]
        for node in body:
            self._check(node)
        arguments: list[Ref] = []
        inputs: dict[Ref, LoopInput] = {}
        for node in body:
            self._add_inputs(node, arguments, inputs, _refs(states), _refs(initial))
        marks = [node for node in body if mark_of(node)]
        working = [node for node in body if not mark_of(node)]
        kinds = self.leave.outputs
        n_states, n_rows = len(_refs(states)), len(_refs(rows))
        read = {ref for node in self.graph.nodes for ref in node.inputs()} | self.graph.escaping
        needed = [i for i in range(len(kinds)) if Ref(self.leave.name, i) in read]
        if not needed:
            raise NotKept("nothing reads what it computes", self.leave.line)
        outputs: list[LoopOutput] = []
        for i in needed:
            if i < n_states:
                self._add_last_value(i, _refs(states), _refs(initial), inputs, arguments)
                outputs.append(LoopOutput(_refs(states)[i]))
            elif i < n_states + n_rows:
                outputs.append(self._written(i - n_states, rows, bases, dims, firsts, steps, _size(count), arguments))
            else:
                value = _refs(items)[i - n_states - n_rows]
                outputs.append(LoopOutput(value, Position(0, Size.of(0), 1)))
        loop_value = Loop(_size(count), tuple(inputs.values()), tuple(working), tuple(outputs))
        variables = {node.name: str(node.args[3]) for node in marks if mark_of(node) == "enter"}
        loop_value = _named(_Copies(loop_value).result(), self.graph, tuple(arguments), variables)
        taken = {each.name for each in self.graph.nodes} | {item.name for item in self.graph.sources}
        name = next(name for i in itertools.count(1) if (name := f"loop_{i}" if i > 1 else "loop") not in taken)
        node = replace(
            self.leave,
            name=name,
            op=LOOP,
            args=tuple(arguments),
            kwargs={},
            outputs=tuple(kinds[i] for i in needed),
            loop=loop_value,
        )
        node = pruned(node)
        renamed = {Ref(self.leave.name, i): Ref(name, new) for new, i in enumerate(needed)}
        outside = [each for each in self.graph.nodes if each.name not in self.inside]
        nodes = [node if each is self.leave else each.reading(renamed) for each in outside]
        graph = self.graph.of_nodes(nodes, renamed)
        for each in nodes:
            if any(ref.name in self.inside for ref in each.inputs()):
                raise NotKept("a value of one iteration is read after the loop", self.leave.line)
        return graph

    def _inside(self, loop: int) -> set[str]:
        """The nodes that change from iteration to iteration and that the end of the loop needs."""
        changing: set[str] = set()
        for node in self.graph.nodes:
            is_mark = mark_of(node) in ("enter", "read", "index") and _number(node.args[1]) == loop
            if node is self.leave:
                break
            if is_mark or any(ref.name in changing for ref in node.inputs()):
                changing.add(node.name)
        results = [ref for part in (0, 2, 4) for ref in _refs(self.leave.args[part])]
        return needed_nodes(self.graph, results, changing)

    def _check(self, node: Node) -> None:
        if mark_of(node) in ("enter", "read"):
            if any(ref.name in self.inside for ref in node.inputs()):
                raise NotKept("it reads an intermediate value at the number of the iteration", self.leave.line)
            return
        if mark_of(node) == "index":
            return
        namespace, name, overload = node.op.split(".")
        operator = getattr(getattr(torch.ops.aten, name, None), overload, None) if namespace == "aten" else None
        if torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()):
            raise NotKept("it draws random numbers", self.leave.line)
        if name in SHIFTS and self._elements_per_row(node) <= MOST_BLOCK:
            return
        if not runs_step_by_step(node.op):
            raise OutsideLoop(f"its body contains {node.word}, which no kernel computes step by step", self.leave.line)

    def _elements_per_row(self, node: Node) -> int:
        """The elements of a value for one element of its first dimension, which is the batch as a rule."""
        shape = node.type.shape
        return product(shape[1:] if len(shape) > 1 else shape).value(self.graph.sizes)

    def _add_inputs(
        self,
        node: Node,
        arguments: list[Ref],
        inputs: dict[Ref, LoopInput],
        states: Sequence[Ref],
        initial: Sequence[Ref],
    ) -> None:
        ref, mark = Ref(node.name), mark_of(node)
        if mark == "enter":
            slot = _number(node.args[2])
            inputs[ref] = self._state(node.name, node.type, states[slot], initial[slot], arguments)
        elif mark == "read":
            source, _, dim, first, step = node.args
            assert isinstance(source, Ref)
            kind = self.graph.type_of(source)
            shape = tuple(Size.of(1) if d == _number(dim) else size for d, size in enumerate(kind.shape))
            position = Position(_number(dim), _size(first), _number(step))
            inputs[ref] = LoopInput(
                node.name, TensorType(shape, kind.dtype, kind.stride), _argument(arguments, source), position
            )
        elif mark == "index":
            inputs[ref] = LoopInput(node.name, node.type, None, Position(0, _size(node.args[2]), _number(node.args[3])))
        else:
            for item in node.inputs():
                if item.name not in self.inside and item not in inputs:
                    inputs[item] = LoopInput(item.name, self.graph.type_of(item), _argument(arguments, item))
                    if item.index:
                        raise NotKept("it reads one of several results of an operation", self.leave.line)

    def _state(self, name: str, kind: TensorType, value: Ref, initial: Ref, arguments: list[Ref]) -> LoopInput:
        number = self._filled_with(initial)
        if number is not None:
            return LoopInput(name, kind, None, None, number, value)
        return LoopInput(name, kind, _argument(arguments, initial), None, None, value)

    def _add_last_value(
        self, i: int, states: Sequence[Ref], initial: Sequence[Ref], inputs: dict[Ref, LoopInput], arguments: list[Ref]
    ) -> None:
        """Make a value that only the code after the loop reads a state of the loop."""
        if any(item.next == states[i] for item in inputs.values()):
            return
        name = f"{self.leave.name}_last_{i}"
        kind = self._type(states[i])
        dense = TensorType(kind.shape, kind.dtype, contiguous_stride(kind.shape))
        inputs[Ref(name)] = self._state(name, dense, states[i], initial[i], arguments)

    def _written(
        self,
        i: int,
        rows: Argument,
        bases: Argument,
        dims: Argument,
        firsts: Argument,
        steps: Argument,
        count: Size,
        arguments: list[Ref],
    ) -> LoopOutput:
        assert isinstance(dims, tuple) and isinstance(firsts, tuple) and isinstance(steps, tuple)
        base, dim, first, step = _refs(bases)[i], _number(dims[i]), _size(firsts[i]), _number(steps[i])
        length = self.graph.type_of(base).shape[dim]
        ends = {(0, 1): Size.of(0), (1, -1): count - 1}
        is_whole = length == count and any(step == sign and first == end for (_, sign), end in ends.items())
        return LoopOutput(_refs(rows)[i], Position(dim, first, step), None if is_whole else _argument(arguments, base))

    def _type(self, ref: Ref) -> TensorType:
        return self.graph.type_of(ref)

    def _filled_with(self, ref: Ref) -> float | None:
        """The number that all elements of a tensor are, if that is known."""
        node = self.graph.named.get(ref.name)
        if node is None:
            return None
        name = node.op.split(".")[1]
        if name in FILLED:
            return FILLED[name]
        if name in ("clone", "expand", "alias") and isinstance(node.args[0], Ref):
            return self._filled_with(node.args[0])
        value = node.args[-1] if name in ("full", "full_like", "new_full") else None
        if isinstance(value, Size) and value.is_constant:
            return float(value.constant)
        return float(value) if isinstance(value, (bool, int, float)) else None


def _argument(arguments: list[Ref], ref: Ref) -> int:
    if ref not in arguments:
        arguments.append(ref)
    return arguments.index(ref)


def _named(loop: Loop, graph: Graph, arguments: tuple[Ref, ...], variables: Mapping[str, str]) -> Loop:
    """The loop with inputs that have the names of the user's variables, and with each row read once.

    Args:
        variables: the variable of each state, by the name of its mark.
    """
    used = {node.name for node in loop.nodes}
    renamed: dict[Ref, Ref] = {}
    inputs: dict[tuple[object, ...], LoopInput] = {}
    for item in loop.inputs:
        key = (item.argument, item.position, item.name if item.is_state else "")
        if item.is_index:
            name = "iteration"
        elif item.is_state:
            name = variables.get(item.name, item.name)
        else:
            assert item.argument is not None
            source = arguments[item.argument]
            node = graph.named.get(source.name)
            name = (node.variable if node is not None else "") or source.name
            name = f"{name}_t" if item.position is not None else name
        if key not in inputs:
            while name in used:
                name = f"{name}_"
            used.add(name)
            inputs[key] = replace(item, name=name)
        renamed[Ref(item.name)] = Ref(inputs[key].name)
    nodes = tuple(node.reading(renamed) for node in loop.nodes)
    return replace(loop, inputs=tuple(inputs.values()), nodes=nodes)


class _Copies:
    """Gives every result of a body memory. A result that is an input or a view of an input becomes a copy."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.nodes = list(loop.nodes)

    def result(self) -> Loop:
        """The loop with the copies."""
        inputs = {Ref(item.name): item for item in self.loop.inputs}
        replaced: dict[Ref, Ref] = {}
        for ref in self.loop.results:
            outside = ref not in inputs and all(ref.name != node.name for node in self.loop.nodes)
            if outside:
                raise NotKept("what it computes is the same in every iteration")
            if self._viewed(ref) in inputs:
                kind = inputs[ref].type if ref in inputs else self._node(ref).outputs[ref.index]
                name = f"{ref.name}_copy"
                dense = TensorType(kind.shape, kind.dtype, contiguous_stride(kind.shape))
                self.nodes.append(Node(name, "aten.clone.default", (ref,), {}, (dense,)))
                replaced[ref] = Ref(name)
        following = tuple(
            replace(item, next=replaced.get(item.next, item.next)) if item.next else item for item in self.loop.inputs
        )
        outputs = tuple(replace(item, value=replaced.get(item.value, item.value)) for item in self.loop.outputs)
        return replace(self.loop, inputs=following, nodes=tuple(self.nodes), outputs=outputs)

    def _node(self, ref: Ref) -> Node:
        return next(node for node in self.nodes if node.name == ref.name)

    def _viewed(self, ref: Ref) -> Ref:
        """The value that ``ref`` is a view of, or itself."""
        names = {node.name for node in self.nodes}
        while ref.name in names and self._node(ref).op.split(".")[1] in VIEWS:
            ref = next(self._node(ref).inputs())
        return ref


def _without_copies(graph: Graph) -> Graph:
    """Replace copies of what a loop wrote into the tensor from before the loop, which has the same type."""
    replaced: dict[Ref, Ref] = {}
    nodes = []
    for each in graph.nodes:
        node = each.reading(replaced)
        source = node.args[1] if node.op == "aten.copy.default" else None
        producer = graph.named.get(source.name) if isinstance(source, Ref) else None
        is_written = producer is not None and producer.loop is not None
        if isinstance(source, Ref) and is_written and graph.type_of(source) == node.type:
            replaced[Ref(node.name)] = source
        else:
            nodes.append(node)
    return graph.of_nodes(nodes, replaced)


def _with_layouts(graph: Graph) -> Graph:
    """Let loops write stacked results in the order of dimensions in which they are read."""
    while (node := next((item for item in graph.nodes if mark_of(item) == "stack"), None)) is not None:
        source, dim = node.args[0], _number(node.args[1])
        assert isinstance(source, Ref)
        producer = graph.named.get(source.name)
        is_alone = graph.readers(source.name) and all(
            reader is node for reader in graph.readers(source.name) if source in reader.inputs()
        )
        if producer is not None and producer.loop is not None and is_alone and source not in graph.escaping:
            loop = producer.loop
            output = loop.outputs[source.index]
            assert output.position is not None
            moved = replace(output, position=replace(output.position, dim=dim))
            outputs = tuple(moved if i == source.index else item for i, item in enumerate(loop.outputs))
            kinds = tuple(node.type if i == source.index else kind for i, kind in enumerate(producer.outputs))
            changed = replace(producer, outputs=kinds, loop=replace(loop, outputs=outputs), variable=node.variable)
            nodes = [changed if item is producer else item for item in graph.nodes if item is not node]
            replaced = {Ref(node.name): source}
            graph = graph.of_nodes([item.reading(replaced) for item in nodes], replaced)
            continue
        kind = graph.type_of(source)
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(kind.shape))]
        view = TensorType(tuple(kind.shape[d] for d in order), kind.dtype, tuple(kind.stride[d] for d in order))
        name = f"{node.name}_view"
        permuted = Node(name, "aten.permute.default", (source, tuple(order)), {}, (view,), node.line)
        dense = replace(
            node, op="aten.clone.default", args=(Ref(name),), kwargs={"memory_format": "torch.contiguous_format"}
        )
        position = graph.positions[node.name]
        graph = replace(graph, nodes=(*graph.nodes[:position], permuted, dense, *graph.nodes[position + 1 :]))
    return graph
