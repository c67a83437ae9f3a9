"""Results that are written row by row, ``out[:, t] = last``, as the stack of these rows.

In a trace without side effects each write makes a new whole tensor of the one before: of T rows each would be computed T times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.sizes import Size

WRITES = ("select_scatter", "slice_scatter")


def with_rows_stacked(graph: Graph) -> Graph:
    """The graph with a stack in the place of a chain of writes that reaches every row.

    Slices of all there is are what they slice, and a row that is read after it was written is what was written.
    """
    graph = _read_through(graph)
    chains = _Chains(graph, graph.named)
    return replace(graph, nodes=tuple(chains.stacked(node) or node for node in graph.nodes))


def _read_through(graph: Graph) -> Graph:
    same: dict[Ref, Ref] = {}
    """What is equal to an earlier value."""
    made: dict[str, Node] = {}
    chains = _Chains(graph, made)
    for node in graph.nodes:
        node, ref = node.reading(same), Ref(node.name)
        equal: Ref | None = None
        if _word(node) == "select" and ref not in graph.escaping:
            node = chains.as_it_was_written(node)
            equal = chains.written_row(node)
        elif _word(node) in ("slice", "slice_scatter"):
            equal = chains.whole(node)
        elif _word(node) == "select_scatter":
            equal = chains.written_before(node)
        # Two values that both leave the target are two tensors, of which the caller may change one.
        if equal is not None and not {equal, ref} <= graph.escaping:
            same[ref] = equal
        else:
            made[node.name] = node
    return graph.of_nodes(made.values(), same)


@dataclass(frozen=True)
class _Chains:
    """Tensors that are written row after row."""

    graph: Graph
    made: Mapping[str, Node]
    """What is known of the nodes, by name."""

    def whole(self, node: Node) -> Ref | None:
        """What a slice of everything is a slice of, or what is written over everything."""
        is_read = _word(node) == "slice"
        same, further = (node.args[0], node.args[1:]) if is_read else (node.args[1], node.args[2:])
        defaults: tuple[Argument, ...] = (0, None, None, 1)
        dim, start, end, step = (*further, *defaults[len(further) :])
        assert isinstance(same, Ref)
        kind = self._type(node.args[0])
        is_all = _is(start, 0, None) and _is(step, 1) and (end is None or _reaches(end, kind.shape[_dim(dim, kind)]))
        # What is written must be nobody else's memory, and what is read stays a tensor beside the one that is returned.
        is_own = Ref(node.name) not in self.graph.escaping if is_read else self._is_written(same)
        return same if is_all and is_own and self._type(same) == node.type else None

    def as_it_was_written(self, node: Node) -> Node:
        """A row that is read, of the tensor before what was written into other rows."""
        place = _index(node.args[2], self._type(node.args[0]), node.args[1])
        while place is not None and (own := self._write(node.args[0], node.args[1])) is not None:
            if _index(own.args[3], own.type, own.args[2]) == place:
                break
            node = replace(node, args=(own.args[0], *node.args[1:]))
        return node

    def written_row(self, node: Node) -> Ref | None:
        """What was written into the row that is read."""
        own = self._write(node.args[0], node.args[1])
        is_known = _index(node.args[2], self._type(node.args[0]), node.args[1]) is not None
        row = own.args[1] if own is not None and is_known else None
        if not isinstance(row, Ref) or row.name not in self.made:
            return None
        kind = self._type(row)
        is_same = (kind.dtype, kind.shape) == (node.type.dtype, node.type.shape)
        return row if is_same and kind.stride == contiguous_stride(kind.shape) else None

    def written_before(self, node: Node) -> Ref | None:
        """What a row is written into, where the same is there already."""
        base, row, dim, index = node.args
        assert isinstance(base, Ref)
        place = _index(index, self._type(base), dim)
        own = self._write(base, dim) if place is not None else None
        while own is not None and _index(own.args[3], own.type, dim) != place:
            own = self._write(own.args[0], dim)
        return base if own is not None and own.args[1] == row and self._type(base) == node.type else None

    def stacked(self, node: Node) -> Node | None:
        """The stack of all rows, where the node writes the last of them."""
        kind = node.type
        if _word(node) != "select_scatter" or kind.stride != contiguous_stride(kind.shape):
            return None
        dim = node.args[2]
        if any(
            self._write(Ref(reader.name), dim) and reader.args[0] == Ref(node.name)
            for reader in self.graph.readers(node.name)
        ):
            return None
        rows: dict[int, Ref] = {}
        own = self._write(Ref(node.name), dim)
        while own is not None:
            index, row = _index(own.args[3], kind, dim), own.args[1]
            assert index is not None and isinstance(row, Ref)
            rows.setdefault(index, row)
            own = self._write(own.args[0], dim)
        count = kind.shape[_dim(dim, kind)]
        if not count.is_constant or len(rows) != count.constant:
            return None
        if any(self._type(row).dtype != kind.dtype for row in rows.values()):
            return None
        return replace(node, op="aten.stack.default", args=(tuple(rows[i] for i in range(len(rows))), _dim(dim, kind)))

    def _write(self, value: Argument, dim: Argument) -> Node | None:
        """The write of a row at a known place along ``dim`` that gives a value."""
        node = self.made.get(value.name) if isinstance(value, Ref) else None
        if node is None or _word(node) != "select_scatter":
            return None
        same = _dim(node.args[2], node.type) == _dim(dim, node.type)
        return node if same and _index(node.args[3], node.type, dim) is not None else None

    def _is_written(self, ref: Ref) -> bool:
        return ref.name in self.made and _word(self.made[ref.name]) in WRITES

    def _type(self, value: Argument) -> TensorType:
        assert isinstance(value, Ref)
        return self.graph.type_of(value)


def _word(node: Node) -> str:
    return node.op.split(".")[1]


def _number(value: Argument) -> int | None:
    if isinstance(value, Size):
        return value.constant if value.is_constant else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is(value: Argument, *wanted: int | None) -> bool:
    return (value is None and None in wanted) or (value is not None and _number(value) in wanted)


def _reaches(end: Argument, size: Size) -> bool:
    """Whether a slice that ends there takes everything, whatever the size."""
    number = _number(end)
    if number is None:
        return end == size
    return number >= (size.constant if size.is_constant else 2**62)


def _dim(dim: Argument, kind: TensorType) -> int:
    number = _number(dim)
    assert number is not None
    return number % len(kind.shape)


def _index(index: Argument, kind: TensorType, dim: Argument) -> int | None:
    """A place from the front; None where it is not known."""
    number, size = _number(index), kind.shape[_dim(dim, kind)]
    if number is None:
        return None
    if number >= 0:
        return number
    return number + size.constant if size.is_constant else None
