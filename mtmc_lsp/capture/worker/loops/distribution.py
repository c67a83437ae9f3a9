"""Splits a loop over stacked layers into one loop per layer, where the lower layer does not read the upper one.

Layer ``k`` only needs what layer ``k - 1`` computes in the same iteration. Alone, its loop holds the matrices of one layer, and
the products of its inputs leave the loop. A loop is split only where both parts multiply their states with matrices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.capture.worker.loops.hoisting import unused_name
from mtmc_lsp.core.graph import MATRIX_PRODUCTS, Argument, Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.loop import Loop, LoopInput, LoopOutput, Position, pruned
from mtmc_lsp.core.sizes import Size

FIRST = Position(0, Size.of(0), 1)
"""Where iterations write what a later loop reads."""


def distribute_layers(graph: Graph) -> Graph:
    """Split each loop that contains several layers with products."""
    pending = [node.name for node in graph.nodes if node.loop is not None and node.name not in graph.backward_nodes]
    while pending:
        name = pending.pop()
        split = _Layers(graph, graph.named[name]).split()
        if split is not None:
            # The upper part may contain further layers.
            graph = split
            pending.append(name)
    return graph


@dataclass(frozen=True)
class _Crossing:
    """A value of the lowest layer that the others read."""

    value: Ref
    """In the body."""
    sequence: Ref
    """Its values of all iterations."""
    type: TensorType
    """Of the sequence."""
    position: Position

    @property
    def row_type(self) -> TensorType:
        """What an iteration reads."""
        dim = self.position.dim
        shape = tuple(Size.of(1) if d == dim else size for d, size in enumerate(self.type.shape))
        return TensorType(shape, self.type.dtype, self.type.stride)

    @property
    def item_type(self) -> TensorType:
        """The value as a view of the row."""
        dims = [d for d in range(len(self.type.shape)) if d != self.position.dim]
        shape, stride = (tuple(sizes[d] for d in dims) for sizes in (self.type.shape, self.type.stride))
        return TensorType(shape, self.type.dtype, stride)


class _Layers:
    """The layers of one loop."""

    def __init__(self, graph: Graph, node: Node) -> None:
        assert node.loop is not None
        self.graph, self.node = graph, node
        self.loop: Loop = node.loop
        self.nodes = {each.name: each for each in self.loop.nodes}
        self.inputs = {item.name: item for item in self.loop.inputs}
        self.before = {name: self._needs(name) for name in (*self.inputs, *self.nodes)}
        self.taken = {each.name for each in graph.nodes} | {item.name for item in graph.sources}

    def split(self) -> Graph | None:
        """The graph after the lowest layer became a separate loop; ``None`` if no layer reads another one."""
        layers = list(self._layers())
        read = [layer for layer in layers if any(layer < other for other in layers)]
        return self._split_at(min(read, key=len)) if read else None

    def _layers(self) -> Iterator[frozenset[str]]:
        """What the states that are multiplied by matrices need: for each group of states that need each other, once."""
        found: set[frozenset[str]] = set()
        for item in self.loop.states:
            needed = frozenset(self.before[item.name])
            group = {name for name in needed if item.name in self.before[name]}
            if needed not in found and any(self._multiplies(name, group) for name in group):
                found.add(needed)
                yield needed

    def _multiplies(self, name: str, group: Collection[str]) -> bool:
        """Whether a node is a product of a value of the group and a matrix that is the same in all iterations."""
        node = self.nodes.get(name)
        place = MATRIX_PRODUCTS.get(node.op.split(".")[1]) if node is not None else None
        if node is None or place is None:
            return False
        left, right = node.args[place], node.args[place + 1]
        return isinstance(left, Ref) and left.name in group and isinstance(right, Ref) and not self._varies(right.name)

    def _needs(self, name: str) -> set[str]:
        """The inputs and nodes that a value needs, in this iteration or in earlier ones, with itself if it is a state."""
        found: set[str] = set()
        pending = list(self._read(name))
        while pending:
            each = pending.pop()
            if each not in found:
                found.add(each)
                pending += self._read(each)
        return found

    def _read(self, name: str) -> Iterator[str]:
        if name in self.nodes:
            yield from (ref.name for ref in self.nodes[name].inputs())
        elif (following := self.inputs[name].next) is not None:
            yield following.name

    def _varies(self, name: str) -> bool:
        """Whether a value is another one in each iteration."""
        return any(
            each in self.inputs and (self.inputs[each].is_state or self.inputs[each].position is not None)
            for each in {name, *self.before[name]}
        )

    def _depends_on_state(self, name: str) -> bool:
        return any(each in self.inputs and self.inputs[each].is_state for each in {name, *self.before[name]})

    # The two loops -----------------------------------------------------------------------------------------------

    def _split_at(self, lowest: frozenset[str]) -> Graph:
        below = {name for name in lowest if self._depends_on_state(name)}
        crossing = [ref for each in self.loop.nodes if each.name not in below for ref in each.inputs()]
        crossing += [item.next for item in self.loop.states if item.name not in below and item.next is not None]
        crossing = list(dict.fromkeys(ref for ref in crossing if ref.name in below))
        lower, rows = self._lower(below, crossing)
        upper = self._upper(below, rows)
        renamed: dict[Ref, Ref] = {}
        new = {lower.name: 0, upper.name: 0}
        for i, output in enumerate(self.loop.outputs):
            name = lower.name if output.value.name in below else upper.name
            renamed[Ref(self.node.name, i)] = Ref(name, new[name])
            new[name] += 1
        nodes: list[Node] = []
        for each in self.graph.nodes:
            nodes += [lower, upper] if each is self.node else [each.reading(renamed)]
        return self.graph.of_nodes(nodes, renamed)

    def _lower(self, below: Collection[str], crossing: Sequence[Ref]) -> tuple[Node, list[_Crossing]]:
        """The loop of the lowest layer, and what the other loop reads of it."""
        numbers = [i for i, output in enumerate(self.loop.outputs) if output.value.name in below]
        outputs = [self.loop.outputs[i] for i in numbers]
        kinds = [self.node.outputs[i] for i in numbers]
        nodes = list(self.loop.nodes)
        name = unused_name(f"{self.node.name}_layer", self.taken)
        rows: list[_Crossing] = []
        used = {*self.nodes, *self.inputs}
        for ref in crossing:
            kind = self._type(ref)
            place = next((i for i, output in enumerate(outputs) if self._is_sequence(output, kinds[i], ref)), None)
            if place is None:
                value = ref
                if ref.name in self.inputs:
                    value = Ref(unused_name(f"{ref.name}_copy", used))
                    nodes.append(Node(value.name, "aten.clone.default", (ref,), {}, (_dense(kind.shape, kind.dtype),)))
                place = len(outputs)
                outputs.append(LoopOutput(value, FIRST))
                kinds.append(_dense((self.loop.count, *kind.shape), kind.dtype))
            position = outputs[place].position
            assert position is not None
            rows.append(_Crossing(ref, Ref(name, place), kinds[place], position))
        names = [self.nodes[ref.name].variable for ref in crossing if ref.name in self.nodes]
        loop = replace(self.loop, nodes=tuple(nodes), outputs=tuple(outputs))
        variable = names[0] if len(outputs) == 1 and names else ""
        return pruned(replace(self.node, name=name, outputs=tuple(kinds), loop=loop, variable=variable)), rows

    def _is_sequence(self, output: LoopOutput, kind: TensorType, ref: Ref) -> bool:
        """Whether a result of the loop holds the values of all iterations."""
        position = output.position
        return (
            output.value == ref
            and position is not None
            and output.base is None
            and len(kind.shape) == len(self._type(ref).shape) + 1
            and position == replace(FIRST, dim=position.dim)
        )

    def _upper(self, below: Collection[str], rows: Sequence[_Crossing]) -> Node:
        """The loop of the other layers."""
        used = {*self.nodes, *self.inputs}
        arguments: list[Argument] = list(self.node.args)
        inputs = [item for item in self.loop.inputs if item.name not in below]
        nodes: list[Node] = []
        renamed: dict[Ref, Ref] = {}
        for row in rows:
            variable = self.nodes[row.value.name].variable if row.value.name in self.nodes else row.value.name
            read = Ref(unused_name(f"{variable or row.value.name}_t", used))
            inputs.append(LoopInput(read.name, row.row_type, len(arguments), row.position))
            arguments.append(row.sequence)
            renamed[row.value] = Ref(unused_name(f"{read.name}_row", used))
            args = (read, row.position.dim, 0)
            nodes.append(
                Node(renamed[row.value].name, "aten.select.int", args, {}, (row.item_type,), self.node.line, variable)
            )
        nodes += [each.reading(renamed) for each in self.loop.nodes if each.name not in below]
        for i, item in enumerate(inputs):
            if item.next in renamed:
                # A state that is a view of an input has no memory.
                kind = self._type(item.next)
                copy = Ref(unused_name(f"{item.name}_next", used))
                dense = _dense(kind.shape, kind.dtype)
                nodes.append(Node(copy.name, "aten.clone.default", (renamed[item.next],), {}, (dense,)))
                inputs[i] = replace(item, next=copy)
        numbers = [i for i, output in enumerate(self.loop.outputs) if output.value.name not in below]
        outputs = tuple(self.loop.outputs[i] for i in numbers)
        loop = replace(self.loop, inputs=tuple(inputs), nodes=tuple(nodes), outputs=outputs)
        kinds = tuple(self.node.outputs[i] for i in numbers)
        return pruned(replace(self.node, args=tuple(arguments), outputs=kinds, loop=loop))

    def _type(self, ref: Ref) -> TensorType:
        return self.inputs[ref.name].type if ref.name in self.inputs else self.nodes[ref.name].outputs[ref.index]


def _dense(shape: tuple[Size, ...], dtype: str) -> TensorType:
    return TensorType(shape, dtype, contiguous_stride(shape))
