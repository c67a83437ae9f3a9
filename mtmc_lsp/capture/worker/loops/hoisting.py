"""Moves matrix products that no iteration waits for out of loops over time steps.

A product of a row of each iteration, ``x[:, t] @ w``, becomes one product of the whole sequence before the loop, and a product
that only results read, such as ``out[:, t] = h @ w``, one after it. Each element is the same sum of the same products.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.loop import Loop, LoopInput, LoopOutput, Position, pruned
from mtmc_lsp.core.sizes import Size

PRODUCTS = frozenset({"mm", "matmul", "linear"})
"""Products that may leave the loop. Their first operand is that of the iteration, the second one the same in all of them."""
KEEPING = frozenset("clone alias detach contiguous unsqueeze select".split())
"""Operations that a row passes on its way to a product, besides elementwise functions of one tensor."""
ONE = Size.of(1)


def hoist_products(graph: Graph) -> Graph:
    """The graph with products outside of its loops wherever no iteration waits for them."""
    for node in graph.nodes:
        if node.loop is not None:
            graph = _Hoisting(graph, node).result()
    return graph


@dataclass(frozen=True)
class _Sequence:
    """The values that one value of the body has in all iterations, as one value of the graph."""

    ref: Ref
    type: TensorType
    position: Position
    """Where iteration ``i`` has its value."""
    has_dim: bool
    """Whether the value of an iteration has the time dimension, with length 1."""


class _Hoisting:
    """One loop while products leave it."""

    def __init__(self, graph: Graph, node: Node) -> None:
        assert node.loop is not None
        self.graph, self.node = graph, node
        self.loop: Loop = node.loop
        self.inputs = {item.name: item for item in self.loop.inputs}
        self.arguments: list[Argument] = list(node.args)
        self.before: list[Node] = []
        self.after: list[Node] = []
        self.nodes: list[Node] = list(self.loop.nodes)
        self.outside: dict[str, TensorType] = {}
        self.sequences: dict[Ref, _Sequence | None] = {}
        self.taken = {each.name for each in graph.nodes} | {item.name for item in graph.sources}
        self.used = {*self.inputs, *(each.name for each in self.loop.nodes)}

    def result(self) -> Graph:
        """The graph with the products outside."""
        self._split_concatenations()
        self._hoist()
        outputs, kinds, renamed = self._sink()
        loop = replace(self.loop, inputs=tuple(self.inputs.values()), nodes=tuple(self.nodes), outputs=outputs)
        node = replace(self.node, args=tuple(self.arguments), outputs=kinds, loop=loop)
        if node == self.node:
            return self.graph
        node = pruned(node)
        moved = {Ref(self.node.name, i): ref for i, ref in renamed.items()}
        nodes: list[Node] = []
        for each in self.graph.nodes:
            nodes += [*self.before, node, *self.after] if each.name == node.name else [each.reading(moved)]
        return self.graph.of_nodes(nodes, moved)

    # Products of concatenated tensors ----------------------------------------------------------------------------

    def _split_concatenations(self) -> None:
        """``cat((x, h), -1) @ w`` is ``x @ w[:n] + h @ w[n:]``."""
        nodes: list[Node] = []
        for node in self.nodes:
            source = self._of(node.args[0]) if self._is_product(node) else None
            parts = source.args[0] if source is not None and source.op.split(".")[1] == "cat" else None
            rank = len(source.type.shape) if source is not None else 0
            dim = source.args[1] if source is not None and len(source.args) > 1 else 0
            if not isinstance(parts, tuple) or len(parts) < 2 or dim not in (-1, rank - 1):
                nodes.append(node)
                continue
            total: Ref | None = None
            start = Size.of(0)
            for part in parts:
                assert isinstance(part, Ref)
                length = self._type(part).shape[-1]
                weight = self._weight_slice(node, start, length)
                start = start + length
                has_bias = total is None and node.op.split(".")[1] == "linear"
                args = (part, weight, *(node.args[2:] if has_bias else ()))
                value = replace(node, name=self._unique(node.name), args=args, variable="")
                nodes.append(value)
                if total is not None:
                    is_last = part is parts[-1]
                    name = node.name if is_last else self._unique(f"{node.name}_sum")
                    added = replace(node, name=name, op="aten.add.Tensor", args=(total, Ref(value.name)), kwargs={})
                    nodes.append(added)
                    total = Ref(name)
                else:
                    total = Ref(value.name)
        self.nodes = nodes

    def _weight_slice(self, node: Node, start: Size, length: Size) -> Ref:
        """The part of a weight that belongs to a part of the concatenated tensor, as an input of the body."""
        weight = node.args[1]
        assert isinstance(weight, Ref)
        item = self.inputs[weight.name]
        assert item.argument is not None
        dim = 1 if node.op.split(".")[1] == "linear" else 0
        shape = tuple(length if d == dim else size for d, size in enumerate(item.type.shape))
        kind = TensorType(shape, item.type.dtype, item.type.stride)
        source = self.arguments[item.argument]
        sliced = self._add_before("slice", "aten.slice.Tensor", (source, dim, start, start + length), kind)
        return self._add_input(item.name, kind, sliced, None)

    # Before the loop ---------------------------------------------------------------------------------------------

    def _hoist(self) -> None:
        nodes: list[Node] = []
        for node in self.nodes:
            sequence = self._product_of_sequence(node)
            nodes += [node] if sequence is None else self._read(node, sequence)
        self.nodes = nodes

    def _product_of_sequence(self, node: Node) -> _Sequence | None:
        if not self._is_product(node) or not isinstance(node.args[0], Ref):
            return None
        source = self._sequence(node.args[0])
        if source is None:
            return None
        rank = len(source.type.shape)
        dim = source.position.dim
        if dim == rank - 1:
            if source.has_dim or rank < 2:
                return None
            # The rows of a product are its first dimensions.
            order = (*range(rank - 2), rank - 1, rank - 2)
            kind = TensorType(
                tuple(source.type.shape[d] for d in order),
                source.type.dtype,
                tuple(source.type.stride[d] for d in order),
            )
            ref = self._add_before("permute", "aten.permute.default", (source.ref, order), kind)
            source = _Sequence(ref, kind, replace(source.position, dim=rank - 2), has_dim=False)
        op = "aten.matmul.default" if node.op.split(".")[1] == "mm" else node.op
        weights = [self._outside(item) for item in node.args[1:]]
        kind = _dense((*source.type.shape[:-1], node.type.shape[-1]), node.type.dtype)
        ref = self._add_before(node.name, op, (source.ref, *weights), kind, node)
        return _Sequence(ref, kind, source.position, source.has_dim)

    def _outside(self, item: Argument) -> Argument:
        if not isinstance(item, Ref):
            return item
        number = self.inputs[item.name].argument
        assert number is not None
        return self.arguments[number]

    def _sequence(self, ref: Ref) -> _Sequence | None:
        """All values of a value that depends on one row of each iteration alone."""
        if ref not in self.sequences:
            self.sequences[ref] = self._computed_sequence(ref)
        return self.sequences[ref]

    def _computed_sequence(self, ref: Ref) -> _Sequence | None:
        item = self.inputs.get(ref.name)
        if item is not None:
            if item.position is None or item.argument is None or item.is_state:
                return None
            argument = self.arguments[item.argument]
            assert isinstance(argument, Ref)
            return _Sequence(argument, self._graph_type(argument), item.position, has_dim=True)
        node = next((each for each in self.nodes if each.name == ref.name), None)
        read = list(node.inputs()) if node is not None else []
        if node is None or len(read) != 1 or node.args[0] != read[0] or len(node.outputs) > 1:
            return self._product_of_sequence(node) if node is not None else None
        word = node.op.split(".")[1]
        source = self._sequence(read[0])
        if source is None:
            return None
        if word == "select":
            dim, index = node.args[1], node.args[2]
            at = dim % len(self._type(read[0]).shape) if isinstance(dim, int) else -1
            return (
                replace(source, has_dim=False) if source.has_dim and at == source.position.dim and index == 0 else None
            )
        if word == "unsqueeze":
            # A vector as a matrix of one row is the row with its dimension again.
            return replace(source, has_dim=True) if not source.has_dim and node.args[1] == source.position.dim else None
        if word in KEEPING - {"select", "unsqueeze"} or self._is_function(node):
            kind = _dense(source.type.shape, node.type.dtype)
            copied = self._add_before(node.name, node.op, (source.ref, *node.args[1:]), kind, node)
            return replace(source, ref=copied, type=kind)
        return None

    @staticmethod
    def _is_function(node: Node) -> bool:
        namespace, name, overload = node.op.split(".")
        operator = getattr(getattr(torch.ops.aten, name, None), overload, None) if namespace == "aten" else None
        return operator is not None and torch.Tag.pointwise in operator.tags

    def _read(self, node: Node, sequence: _Sequence) -> list[Node]:
        """Nodes of the body that read the product of an iteration, in place of ``node``."""
        dim = sequence.position.dim
        shape = tuple(ONE if d == dim else size for d, size in enumerate(sequence.type.shape))
        row = TensorType(shape, sequence.type.dtype, sequence.type.stride)
        name = f"{sequence.ref.name}_t"
        ref = self._add_input(name, row, sequence.ref, sequence.position)
        kind = node.type
        if sequence.has_dim:
            return [replace(node, op="aten.alias.default", args=(ref,), kwargs={}, outputs=(row,))]
        stride = tuple(step for d, step in enumerate(sequence.type.stride) if d != dim)
        view = TensorType(kind.shape, kind.dtype, stride)
        return [replace(node, op="aten.select.int", args=(ref, dim, 0), kwargs={}, outputs=(view,))]

    # After the loop ----------------------------------------------------------------------------------------------

    def _sink(self) -> tuple[tuple[LoopOutput, ...], tuple[TensorType, ...], dict[int, Ref]]:
        """Move products that only results read behind the loop. Returns its results, and what replaces them."""
        outputs, kinds = list(self.loop.outputs), list(self.node.outputs)
        renamed: dict[int, Ref] = {}
        needed_last = {item.next for item in self.inputs.values() if item.is_state}
        readers: dict[Ref, int] = {}
        for node in self.nodes:
            for ref in node.inputs():
                readers[ref] = readers.get(ref, 0) + 1
        for i, output in enumerate(outputs):
            value, position, kind = self._of(output.value), output.position, kinds[i]
            if value is None or position is None or output.base is not None:
                continue
            dim = position.dim
            is_row = value.op.split(".")[1] == "unsqueeze" and value.args[1] in (dim, dim - len(kind.shape))
            product = self._of(value.args[0]) if is_row else value
            if product is not None and product.op.split(".")[1] == "squeeze":
                self._sink_vector(i, product, outputs, kinds, renamed, readers, needed_last)
                continue
            if product is None or not self._is_product(product):
                continue
            left = self._of(product.args[0])
            if left is None or Ref(product.name) in needed_last or readers.get(Ref(product.name), 0) > is_row:
                continue
            rank = len(product.type.shape) + 1
            if len(kind.shape) != rank or dim >= rank - 1 or not kind.is_contiguous:
                continue
            shape = (*left.type.shape[:dim], kind.shape[dim], *left.type.shape[dim:])
            written = Ref(left.name)
            if is_row:
                row = _dense((*left.type.shape[:dim], ONE, *left.type.shape[dim:]), left.type.dtype)
                written = Ref(self._unique(f"{left.name}_row"))
                unsqueezed = replace(value, name=written.name, args=(Ref(left.name), dim), outputs=(row,), variable="")
                self.nodes.append(unsqueezed)
            outputs[i] = LoopOutput(written, position)
            kinds[i] = _dense(shape, left.type.dtype)
            op = "aten.matmul.default" if product.op.split(".")[1] == "mm" else product.op
            args = (Ref(self.node.name, i), *(self._outside(item) for item in product.args[1:]))
            variable = self.node.variable if len(outputs) == 1 else ""
            name = self._unique_outside(product.name)
            self.after.append(replace(product, name=name, op=op, args=args, outputs=(kind,), variable=variable))
            renamed[i] = Ref(name)
            if len(outputs) == 1:
                self.node = replace(self.node, variable=left.variable)
        return tuple(outputs), tuple(kinds), renamed

    def _sink_vector(
        self,
        i: int,
        squeezed: Node,
        outputs: list[LoopOutput],
        kinds: list[TensorType],
        renamed: dict[int, Ref],
        readers: Mapping[Ref, int],
        needed_last: Collection[Ref | None],
    ) -> None:
        """Move the product of a vector, ``mm(x.unsqueeze(0), w).squeeze(0)``, behind the loop."""
        output, kind = outputs[i], kinds[i]
        assert output.position is not None
        product = self._of(squeezed.args[0])
        left = self._of(product.args[0]) if product is not None and self._is_product(product) else None
        if product is None or left is None or left.op.split(".")[1] != "unsqueeze" or left.args[1] != 0:
            return
        vector = left.args[0]
        is_item = output.value == Ref(squeezed.name)
        is_read = readers.get(Ref(product.name), 0) > 1 or readers.get(Ref(squeezed.name), 0) > (not is_item)
        is_last = not {Ref(product.name), Ref(squeezed.name)}.isdisjoint(needed_last)
        is_plain = len(kind.shape) == 2 and output.position.dim == 0 and kind.is_contiguous
        if is_read or is_last or not is_plain or not isinstance(vector, Ref) or len(left.type.shape) != 2:
            return
        outputs[i] = LoopOutput(vector if is_item else Ref(left.name), output.position)
        kinds[i] = _dense((kind.shape[0], left.type.shape[1]), left.type.dtype)
        op = "aten.matmul.default" if product.op.split(".")[1] == "mm" else product.op
        args = (Ref(self.node.name, i), *(self._outside(item) for item in product.args[1:]))
        name = self._unique_outside(product.name)
        self.after.append(replace(product, name=name, op=op, args=args, outputs=(kind,), variable=""))
        renamed[i] = Ref(name)

    # Helpers -----------------------------------------------------------------------------------------------------

    def _is_product(self, node: Node) -> bool:
        """Whether a node multiplies a value of the iteration by a matrix that is the same in all of them."""
        namespace, name, _ = node.op.split(".")
        if namespace != "aten" or name not in PRODUCTS or node.kwargs or len(node.outputs) > 1:
            return False
        if not isinstance(node.args[0], Ref) or len(self._type(node.args[0]).shape) < 2:
            return False
        rest = [item for item in node.args[1:] if item is not None]
        items = [self.inputs.get(item.name) for item in rest if isinstance(item, Ref)]
        is_same = all(item is not None and item.position is None and not item.is_state for item in items)
        return is_same and len(items) == len(rest) and items[0] is not None and len(items[0].type.shape) == 2

    def _of(self, ref: Argument) -> Node | None:
        if not isinstance(ref, Ref) or ref.index:
            return None
        return next((node for node in self.nodes if node.name == ref.name), None)

    def _type(self, ref: Ref) -> TensorType:
        if ref.name in self.inputs:
            return self.inputs[ref.name].type
        return next(node for node in self.nodes if node.name == ref.name).outputs[ref.index]

    def _graph_type(self, ref: Ref) -> TensorType:
        return self.outside[ref.name] if ref.name in self.outside else self.graph.type_of(ref)

    def _unique(self, name: str) -> str:
        return unused_name(name, self.used)

    def _unique_outside(self, name: str) -> str:
        return unused_name(name, self.taken)

    def _add_before(
        self, name: str, op: str, args: tuple[Argument, ...], kind: TensorType, like: Node | None = None
    ) -> Ref:
        same = (each for each in self.before if each.op == op and each.args == args)
        if (present := next(same, None)) is not None:
            return Ref(present.name)
        line, kwargs = (like.line, like.kwargs) if like is not None else (self.node.line, {})
        variable = like.variable if like is not None else ""
        node = Node(self._unique_outside(name), op, args, kwargs, (kind,), line, variable)
        self.before.append(node)
        self.outside[node.name] = kind
        return Ref(node.name)

    def _add_input(self, name: str, kind: TensorType, source: Ref, position: Position | None) -> Ref:
        if source not in self.arguments:
            self.arguments.append(source)
        number = self.arguments.index(source)
        for item in self.inputs.values():
            if (item.argument, item.position) == (number, position) and not item.is_state:
                return Ref(item.name)
        name = self._unique(name)
        self.inputs[name] = LoopInput(name, kind, number, position)
        return Ref(name)


def _dense(shape: tuple[Size, ...], dtype: str) -> TensorType:
    return TensorType(shape, dtype, contiguous_stride(shape))


def unused_name(name: str, taken: set[str]) -> str:
    """The name, with a number if it is taken; it is taken afterwards."""
    result = next(text for i in itertools.count() if (text := f"{name}_{i}" if i else name) not in taken)
    taken.add(result)
    return result
