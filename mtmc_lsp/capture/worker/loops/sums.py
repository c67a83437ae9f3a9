"""Finishes sums over all iterations after the loop, instead of in each iteration.

The gradient of a tensor that is the same in all iterations is such a sum. For ``total += g.sum(0)``, the loop only adds up
``g``; the sum over the batch follows once. For ``total += p.T @ q``, the loop writes the rows of ``p`` and ``q``, and one
product of all rows follows. Both add up the same terms.
"""

from __future__ import annotations

from dataclasses import replace

from mtmc_lsp.capture.worker.loops.hoisting import unused_name
from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.loop import Loop, LoopInput, LoopOutput, Position, pruned
from mtmc_lsp.core.sizes import Size

VIEWS = frozenset("view _unsafe_view squeeze unsqueeze permute t transpose alias clone".split())
"""Operations that only move elements, and so may follow a sum as well as precede it."""


def sink_sums(graph: Graph) -> Graph:
    """The graph of a target with gradients, with sums over iterations finished behind its loops."""
    if graph.backward is None:
        return graph
    for node in graph.nodes:
        if node.loop is not None:
            graph = _Sums(graph, node).result()
    return graph


class _Sums:
    """The sums of one loop."""

    def __init__(self, graph: Graph, node: Node) -> None:
        assert node.loop is not None
        self.graph, self.node, self.loop = graph, node, node.loop
        self.inputs = {item.name: item for item in node.loop.inputs}
        self.nodes = {each.name: each for each in node.loop.nodes}
        self.outputs: list[tuple[LoopOutput, TensorType]] = list(zip(node.loop.outputs, node.outputs, strict=True))
        self.removed: dict[int, Ref] = {}
        """Outputs that something behind the loop computes."""
        self.after: list[Node] = []
        self.taken = {each.name for each in graph.nodes} | {item.name for item in graph.sources}

    def result(self) -> Graph:
        """The graph with the sums behind the loop."""
        before = self.node
        for item in self.loop.states:
            self._sink(item)
        if not self.after:
            return self.graph
        kept = [i for i in range(len(self.outputs)) if i not in self.removed]
        moved = {Ref(before.name, old): Ref(before.name, new) for new, old in enumerate(kept)}
        loop: Loop = replace(
            self.loop,
            inputs=tuple(self.inputs.values()),
            nodes=tuple(self.nodes.values()),
            outputs=tuple(self.outputs[i][0] for i in kept),
        )
        node = pruned(replace(before, outputs=tuple(self.outputs[i][1] for i in kept), loop=loop))
        after = [each.reading(moved) for each in self.after]
        renamed = moved | {Ref(before.name, i): ref for i, ref in self.removed.items()}
        nodes: list[Node] = []
        for each in self.graph.nodes:
            nodes += [node, *after] if each.name == before.name else [each.reading(renamed)]
        return self.graph.of_nodes(nodes, renamed)

    def _sink(self, item: LoopInput) -> None:
        total = self.nodes.get(item.next.name) if item.next is not None else None
        if item.initial != 0.0 or total is None or total.op != "aten.add.Tensor" or total.kwargs:
            return
        added = [ref for ref in total.args if ref != Ref(item.name)]
        readers = [each for each in self.nodes.values() if {Ref(item.name), item.next} & set(each.inputs())]
        numbers = [i for i, (output, _) in enumerate(self.outputs) if output.value == item.next]
        is_sum = len(added) == 1 and readers == [total] and len(numbers) == 1
        if not is_sum or self.outputs[numbers[0]][0].position is not None:
            return
        (value,) = added
        chain: list[Node] = []
        while (node := self._of(value)) is not None and self._is_linear(node):
            chain.append(node)
            value = node.args[0]
        if node is not None and node.op.split(".")[1] == "mm":
            self.removed[numbers[0]] = self._again(chain, self._product(node))
            return
        last = max((i for i, each in enumerate(chain) if each.op == "aten.sum.dim_IntList"), default=-1)
        if last >= 0:
            self._add_up_earlier(item, total, chain[: last + 1], numbers[0])

    def _is_linear(self, node: Node) -> bool:
        """Whether it may follow the sum over iterations."""
        name = node.op.split(".")[1]
        if name == "mul":
            factor = node.args[1]
            item = self.inputs.get(factor.name) if isinstance(factor, Ref) else None
            return item is not None and item.argument is not None and item.position is None and not item.is_state
        return name in VIEWS or node.op == "aten.sum.dim_IntList"

    def _add_up_earlier(self, item: LoopInput, total: Node, chain: list[Node], number: int) -> None:
        """Add up what the first operation of the chain reads."""
        value = chain[-1].args[0]
        assert isinstance(value, Ref)
        kind = self._type(value)
        dense = TensorType(kind.shape, kind.dtype, contiguous_stride(kind.shape))
        self.inputs[item.name] = replace(item, type=dense)
        self.nodes[total.name] = replace(total, args=(Ref(item.name), value), outputs=(dense,))
        # A state that only the code behind the loop reads is the last value of another output.
        self.outputs.append((LoopOutput(Ref(total.name)), dense))
        self.removed[number] = self._again(chain, Ref(self.node.name, len(self.outputs) - 1))

    def _product(self, node: Node) -> Ref:
        """The product of the rows of all iterations."""
        left, right = node.args
        assert isinstance(left, Ref) and isinstance(right, Ref)
        transposed = self._of(left)
        count = self.loop.count
        if transposed is not None and transposed.op == "aten.t.default" and isinstance(transposed.args[0], Ref):
            rows = self._flat(self._rows(transposed.args[0]), self._type(transposed.args[0]))
            kind = self._outside_type(rows)
            shape = (kind.shape[1], kind.shape[0])
            first = self._add("aten.t.default", (rows,), TensorType(shape, kind.dtype, kind.stride[::-1]))
        else:
            kind = self._type(left)
            source = self._rows(left)
            order = (kind.shape[0], count, kind.shape[1])
            stride = contiguous_stride((count, *kind.shape))
            moved = TensorType(order, kind.dtype, (stride[1], stride[0], stride[2]))
            permuted = self._add("aten.permute.default", (source, (1, 0, 2)), moved)
            copied = self._add("aten.clone.default", (permuted,), _dense(order, kind.dtype))
            shape = (kind.shape[0], count * kind.shape[1])
            first = self._add("aten.view.default", (copied, shape), _dense(shape, kind.dtype))
        second = self._flat(self._rows(right), self._type(right))
        return self._add("aten.mm.default", (first, second), _dense(node.type.shape, node.type.dtype), node)

    def _rows(self, ref: Ref) -> Ref:
        """The values of all iterations, one after the other."""
        node, count = self._of(ref), self.loop.count
        position = Position(0, count - 1, -1)
        if node is not None and node.op == "aten.select.int" and node.args[1:] == (0, 0):
            assert isinstance(node.args[0], Ref)
            item = self.inputs.get(node.args[0].name)
            if item is not None and item.position == position and item.argument is not None:
                source = self.node.args[item.argument]
                assert isinstance(source, Ref)
                kind = self.graph.type_of(source)
                if kind.is_contiguous and kind.shape[0] == count:
                    return source
        kind = self._type(ref)
        dense = _dense((count, *kind.shape), kind.dtype)
        if node is None or node.op.split(".")[1] in VIEWS or node.op.split(".")[1] in ("select", "slice", "expand"):
            name = self._unique(f"{ref.name}_rows")
            self.nodes[name] = Node(name, "aten.clone.default", (ref,), {}, (_dense(kind.shape, kind.dtype),))
            ref = Ref(name)
        self.outputs.append((LoopOutput(ref, position), dense))
        return Ref(self.node.name, len(self.outputs) - 1)

    def _flat(self, rows: Ref, kind: TensorType) -> Ref:
        """Rows of matrices as one matrix."""
        shape = (self.loop.count * kind.shape[0], kind.shape[1])
        return self._add("aten.view.default", (rows, shape), _dense(shape, kind.dtype))

    def _again(self, chain: list[Node], source: Ref) -> Ref:
        """The operations of a chain, behind the loop."""
        for node in reversed(chain):
            others = [self._outside(item) for item in node.args[1:]]
            kind = (
                _dense(node.type.shape, node.type.dtype) if node.op.split(".")[1] not in ("permute", "t") else node.type
            )
            source = self._add(node.op, (source, *others), kind, node)
        return source

    def _outside(self, item: Argument) -> Argument:
        if not isinstance(item, Ref):
            return item
        number = self.inputs[item.name].argument
        assert number is not None
        return self.node.args[number]

    def _add(self, op: str, args: tuple[Argument, ...], kind: TensorType, like: Node | None = None) -> Ref:
        line, kwargs = (like.line, like.kwargs) if like is not None else (self.node.line, {})
        name = self._unique(op.split(".")[1])
        self.after.append(Node(name, op, args, kwargs, (kind,), line))
        return Ref(name)

    def _of(self, ref: Argument) -> Node | None:
        return self.nodes.get(ref.name) if isinstance(ref, Ref) and not ref.index else None

    def _type(self, ref: Ref) -> TensorType:
        return self.inputs[ref.name].type if ref.name in self.inputs else self.nodes[ref.name].outputs[ref.index]

    def _outside_type(self, ref: Ref) -> TensorType:
        return next(each.type for each in self.after if each.name == ref.name)

    def _unique(self, name: str) -> str:
        self.taken |= self.nodes.keys() | self.inputs.keys()
        return unused_name(name, self.taken)


def _dense(shape: tuple[Size, ...], dtype: str) -> TensorType:
    return TensorType(shape, dtype, contiguous_stride(shape))
