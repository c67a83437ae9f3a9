"""Rewrites results that are written row by row, ``out[:, t] = last``, to a stack of these rows.

In a functional trace, each write creates a new full tensor, so T rows would cost T copies of the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.sizes import Size

WRITES = ("select_scatter", "slice_scatter")


def stack_rows(graph: Graph) -> Graph:
    """Replace each chain of writes that covers every row by a stack.

    Also removes slices of everything, and replaces reads of a written row by the row.
    """
    graph = _simplify_reads(graph)
    chains = _WriteChains(graph, graph.named)
    return replace(graph, nodes=tuple(chains.stacked(node) or node for node in graph.nodes))


def _simplify_reads(graph: Graph) -> Graph:
    replacements: dict[Ref, Ref] = {}
    """Tensor to an earlier equal tensor."""
    nodes_by_name: dict[str, Node] = {}
    chains = _WriteChains(graph, nodes_by_name)
    for node in graph.nodes:
        node, ref = node.reading(replacements), Ref(node.name)
        equal: Ref | None = None
        if _operation(node) == "select" and ref not in graph.escaping:
            node = chains.skip_other_rows(node)
            equal = chains.written_row(node)
        elif _operation(node) in ("slice", "slice_scatter"):
            equal = chains.full_slice_source(node)
        elif _operation(node) == "select_scatter":
            equal = chains.written_before(node)
        # If both escape, they are two tensors, and the caller may modify one.
        if equal is not None and not {equal, ref} <= graph.escaping:
            replacements[ref] = equal
        else:
            nodes_by_name[node.name] = node
    return graph.of_nodes(nodes_by_name.values(), replacements)


@dataclass(frozen=True)
class _WriteChains:
    """Tensors that are written row by row."""

    graph: Graph
    nodes: Mapping[str, Node]
    """The nodes so far, by name."""

    def full_slice_source(self, node: Node) -> Ref | None:
        """The source of a slice of everything, or the value that is written over everything."""
        is_read = _operation(node) == "slice"
        source, slice_arguments = (node.args[0], node.args[1:]) if is_read else (node.args[1], node.args[2:])
        defaults: tuple[Argument, ...] = (0, None, None, 1)
        dim, start, end, step = (*slice_arguments, *defaults[len(slice_arguments) :])
        assert isinstance(source, Ref)
        kind = self._type(node.args[0])
        is_all = _is(start, 0, None) and _is(step, 1) and (end is None or _reaches(end, kind.shape[_dim(dim, kind)]))
        # A written value must be a fresh tensor. A read must not be a second returned tensor.
        is_allowed = Ref(node.name) not in self.graph.escaping if is_read else self._is_written(source)
        return source if is_all and is_allowed and self._type(source) == node.type else None

    def skip_other_rows(self, node: Node) -> Node:
        """Read a row from the tensor before writes to other rows."""
        row = _index(node.args[2], self._type(node.args[0]), node.args[1])
        while row is not None and (write := self._write(node.args[0], node.args[1])) is not None:
            if _index(write.args[3], write.type, write.args[2]) == row:
                break
            node = replace(node, args=(write.args[0], *node.args[1:]))
        return node

    def written_row(self, node: Node) -> Ref | None:
        """The value that was written into the row that is read."""
        write = self._write(node.args[0], node.args[1])
        is_known = _index(node.args[2], self._type(node.args[0]), node.args[1]) is not None
        row = write.args[1] if write is not None and is_known else None
        if not isinstance(row, Ref) or row.name not in self.nodes:
            return None
        kind = self._type(row)
        is_same = (kind.dtype, kind.shape) == (node.type.dtype, node.type.shape)
        return row if is_same and kind.stride == contiguous_stride(kind.shape) else None

    def written_before(self, node: Node) -> Ref | None:
        """The base of a write, if the row already has this value."""
        base, row, dim, index = node.args
        assert isinstance(base, Ref)
        position = _index(index, self._type(base), dim)
        write = self._write(base, dim) if position is not None else None
        while write is not None and _index(write.args[3], write.type, dim) != position:
            write = self._write(write.args[0], dim)
        return base if write is not None and write.args[1] == row and self._type(base) == node.type else None

    def stacked(self, node: Node) -> Node | None:
        """The stack of all rows, if the node writes the last of them."""
        kind = node.type
        if _operation(node) != "select_scatter" or kind.stride != contiguous_stride(kind.shape):
            return None
        dim = node.args[2]
        if any(
            self._write(Ref(reader.name), dim) and reader.args[0] == Ref(node.name)
            for reader in self.graph.readers(node.name)
        ):
            return None
        rows: dict[int, Ref] = {}
        write = self._write(Ref(node.name), dim)
        while write is not None:
            index, row = _index(write.args[3], kind, dim), write.args[1]
            assert index is not None and isinstance(row, Ref)
            rows.setdefault(index, row)
            write = self._write(write.args[0], dim)
        count = kind.shape[_dim(dim, kind)]
        if not count.is_constant or len(rows) != count.constant:
            return None
        if any(self._type(row).dtype != kind.dtype for row in rows.values()):
            return None
        return replace(node, op="aten.stack.default", args=(tuple(rows[i] for i in range(len(rows))), _dim(dim, kind)))

    def _write(self, value: Argument, dim: Argument) -> Node | None:
        """The node that creates ``value`` by writing a row at a known index along ``dim``."""
        node = self.nodes.get(value.name) if isinstance(value, Ref) else None
        if node is None or _operation(node) != "select_scatter":
            return None
        is_same_dim = _dim(node.args[2], node.type) == _dim(dim, node.type)
        return node if is_same_dim and _index(node.args[3], node.type, dim) is not None else None

    def _is_written(self, ref: Ref) -> bool:
        return ref.name in self.nodes and _operation(self.nodes[ref.name]) in WRITES

    def _type(self, value: Argument) -> TensorType:
        assert isinstance(value, Ref)
        return self.graph.type_of(value)


def _operation(node: Node) -> str:
    return node.op.split(".")[1]


def _number(value: Argument) -> int | None:
    if isinstance(value, Size):
        return value.constant if value.is_constant else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is(value: Argument, *expected: int | None) -> bool:
    return (value is None and None in expected) or (value is not None and _number(value) in expected)


def _reaches(end: Argument, size: Size) -> bool:
    """Whether a slice with this end includes the last element for all sizes."""
    number = _number(end)
    if number is None:
        return end == size
    return number >= (size.constant if size.is_constant else 2**62)


def _dim(dim: Argument, kind: TensorType) -> int:
    number = _number(dim)
    assert number is not None
    return number % len(kind.shape)


def _index(index: Argument, kind: TensorType, dim: Argument) -> int | None:
    """A non-negative index; ``None`` if it is unknown."""
    number, size = _number(index), kind.shape[_dim(dim, kind)]
    if number is None:
        return None
    if number >= 0:
        return number
    return number + size.constant if size.is_constant else None
