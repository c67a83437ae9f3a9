"""Finds the operations around a matrix product that are independent for each of its rows, until they are small.

In ``loss = f(x @ weight.T)`` with a large vocabulary, the product and the values of its size (logits, probabilities, their
gradients) are larger than all operands and results. If each row of them depends on one row of ``x`` alone, a loop over chunks of
rows computes the same, and the large values exist for one chunk at a time.

The analysis follows the rows through the primitives, from the product to its readers (:func:`forwarded`), and from each operation
to what it reads (:func:`demanded`). Where an operation sums over rows, the sum over all chunks is its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Union

from mtmc_lsp.core.graph import Ref, Rows
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.primitives import ONE, KernelIR, Prim, PrimOp, ProductDims
from mtmc_lsp.ir.regions import VIEWS


class NotByRow(Exception):
    """The operations are not independent for each row; the message tells users why."""


class PartOfRows(NotByRow):
    """An operand is the same for a part of the rows, such as one number a sequence; it can be expanded to all rows before."""

    def __init__(self, node: str, operand: Ref, shape: tuple[Size, ...]) -> None:
        """``operand`` of ``node`` needs this shape."""
        super().__init__("an operand is broadcast to a part of the rows")
        self.node, self.operand, self.shape = node, operand, shape


class SumOverRows:
    """The label of a value that is the sum over rows of the product."""


SUM = SumOverRows()
Label = Union[Rows, SumOverRows, None]
"""How a value depends on the rows: which of its dimensions they are, whether it is a sum over them, or not at all (None)."""
SAME_ROWS = frozenset({PrimOp.SLICE, PrimOp.CAT, PrimOp.SCAN, PrimOp.FLIP})
"""Operations along ``dim`` or ``dims`` that keep each row apart if rows are other dimensions."""


@dataclass(frozen=True)
class RowRegion:
    """Operations that a loop over chunks of rows may run."""

    nodes: tuple[str, ...]
    """In execution order."""
    inputs: tuple[tuple[Ref, Rows | None], ...]
    """The values that the operations read from outside, with their rows; None for a value that all rows read whole."""
    outputs: tuple[tuple[Ref, Rows | None], ...]
    """The values that are read outside, with their rows; None for sums over rows."""
    reads: Mapping[tuple[str, Ref], Rows | None]
    """The rows of an input that a node reads."""
    labels: Mapping[str, Label]
    """By primitive, for the operations of the region."""
    total: Size
    """Number of rows."""
    large: frozenset[Ref]
    """The values of the product's size."""


def row_region(ir: KernelIR, node: str, allowed: frozenset[str]) -> RowRegion:
    """The operations around a product that are independent for each of its rows.

    Args:
        node: the product of two matrices.
        allowed: the nodes of its pass.

    Raises:
        NotByRow: an operation combines several rows, or a value of the product's size is needed whole.
    """
    return _Search(ir, node, allowed).region()


class _Search:
    def __init__(self, ir: KernelIR, node: str, allowed: frozenset[str]) -> None:
        prim = ir.product_of_node(node)
        dims = ProductDims.of(prim) if prim is not None else None
        if prim is None or dims != ProductDims(0) or len(prim.inputs) != 2:
            raise NotByRow("only the product of two matrices has rows to loop over")
        self._ir, self._graph, self._allowed, self._product = ir, ir.graph, allowed, prim
        self._total, self._columns = prim.shape
        if self._total == ONE:
            raise NotByRow("the product has one row")
        self._labels: dict[str, Label] = {prim.name: Rows(0)}
        self._mixed: dict[str, str] = {}
        """Primitives that need several rows, each with the ATen node that combines them."""
        self._nodes = {node}
        self._reads: dict[tuple[str, Ref], Rows | None] = {}

    def region(self) -> RowRegion:
        self._forward()
        self._nodes |= {name for name in self._graph.named if name in self._allowed and self._touches_large(name)}
        while True:
            inputs, added = self._demands()
            added |= self._between() - self._nodes
            if not added:
                break
            self._nodes |= added
        outputs = self._outputs()
        ordered = tuple(name for name in self._graph.named if name in self._nodes)
        return RowRegion(
            ordered,
            tuple(sorted(inputs, key=lambda item: (*self._position(item[0]), item[1] is None, str(item[1])))),
            outputs,
            self._reads,
            self._labels,
            self._total,
            frozenset(ref for name in ordered for ref in self._values(name) if self._is_large(ref)),
        )

    def _position(self, ref: Ref) -> tuple[int, int, int]:
        names = [item.name for item in self._graph.sources]
        if ref.name in names:
            return 0, names.index(ref.name), 0
        return 1, self._graph.positions[ref.name], ref.index

    def _values(self, node: str) -> list[Ref]:
        return [Ref(node, i) for i in range(len(self._graph.node(node).outputs))]

    def _forward(self) -> None:
        """Label everything that depends on the product."""
        for name, prim in self._ir.prims.items():
            if prim.origin not in self._allowed or name == self._product.name:
                continue
            if blocked := next((self._mixed[i] for i in prim.inputs if i in self._mixed), ""):
                self._mixed[name] = blocked
                continue
            labels = [self._labels.get(i) for i in prim.inputs]
            if all(label is None for label in labels):
                continue
            try:
                self._labels[name] = forwarded(self._ir, prim, labels)
            except NotByRow:
                self._mixed[name] = prim.origin

    def _is_large(self, ref: Ref) -> bool:
        """Whether a value has at least as many elements for each row as the product."""
        kind, sizes = self._graph.type_of(ref), self._graph.sizes
        rows = self._total.value(sizes)
        held = product([n for n, step in zip(kind.shape, kind.stride, strict=True) if step.terms]).value(sizes)
        return held >= rows * self._columns.value(sizes) and held % rows == 0

    def _touches_large(self, node: str) -> bool:
        refs = [*self._values(node), *self._graph.node(node).inputs()]
        return any(isinstance(self._labels.get(self._ir.of(ref).name), Rows) and self._is_large(ref) for ref in refs)

    def _demands(self) -> tuple[set[tuple[Ref, Rows | None]], set[str]]:
        """The inputs of the region, and nodes to add: those that compute large values that the region reads."""
        inputs: set[tuple[Ref, Rows | None]] = set()
        added: set[str] = set()
        for name in reversed(list(self._graph.named)):
            if name not in self._nodes:
                continue
            self._check(name)
            value_of = {self._ir.of(ref).name: ref for ref in reversed(list(self._graph.node(name).inputs()))}
            for prim in reversed(list(self._ir.of_node(name))):
                label = self._labels.get(prim.name)
                if isinstance(label, Rows) and prim.op is PrimOp.POINTWISE:
                    self._check_operands(name, prim, label, value_of)
                demands = zip(prim.inputs, demanded(self._ir, prim, label, self._labels), strict=True)
                for source, demand in demands:
                    origin = self._ir.prims[source].origin
                    if origin == name or origin in self._nodes:
                        self._agree(source, demand)
                    elif source in value_of:
                        ref = value_of[source]
                        is_large = demand is not None and self._is_large(ref)
                        if origin in self._allowed and (is_large or (demand is None and self._is_private(origin))):
                            self._agree(source, demand)
                            added.add(origin)
                        else:
                            self._read(name, ref, demand)
                            inputs.add((ref, demand))
        return inputs, added

    def _is_private(self, node: str) -> bool:
        """Whether only the region reads the node, and it is a view (of the weights) or computed from sizes (the columns)."""
        is_view = self._graph.node(node).op.split(".")[1] in VIEWS
        is_free = is_view or (node not in self._ir.opaque and not any(self._graph.node(node).inputs()))
        return is_free and all(reader.name in self._nodes for reader in self._graph.readers(node))

    def _read(self, node: str, ref: Ref, demand: Rows | None) -> None:
        if self._reads.setdefault((node, ref), demand) != demand:
            raise NotByRow(f"{self._word(node)} reads an operand both whole and by row")

    def _agree(self, source: str, demand: Rows | None) -> None:
        known = self._labels.get(source)
        if known is SUM:
            return
        if source in self._labels and known != demand:
            raise NotByRow(f"{self._word(self._ir.prims[source].origin)} is needed for other rows as well")
        if demand is not None:
            self._labels[source] = demand

    def _check(self, name: str) -> None:
        """Refuse a node that no loop over rows can run."""
        node, ir = self._graph.node(name), self._ir
        if node.row_loop is not None:
            raise NotByRow("a loop over rows computes the values already")
        if name in ir.opaque:
            raise NotByRow(f"{node.word} stays a call of PyTorch, whose rows may depend on each other")
        if node.draws or any(prim.op is PrimOp.RANDOM for prim in ir.of_node(name)):
            raise NotByRow(f"{node.word} draws random numbers for all rows at once")
        for prim in ir.of_node(name):
            if prim.name in self._mixed:
                raise NotByRow(f"{self._word(self._mixed[prim.name])} combines several rows")

    def _check_operands(self, node: str, prim: Prim, label: Rows, value_of: Mapping[str, Ref]) -> None:
        """Ask for operands that are the same for a part of the rows to be expanded.

        Raises:
            PartOfRows: there is one.
        """
        for source in prim.inputs:
            shape, shift = list(self._ir.prims[source].shape), len(prim.shape) - len(self._ir.prims[source].shape)
            dims = [dim for dim in label.dims if dim >= shift]
            sizes = {shape[dim - shift] == prim.shape[dim] for dim in dims}
            is_part = len(sizes) > 1 or (sizes == {True} and len(dims) < label.count)
            if is_part and source in value_of:
                for dim in dims:
                    shape[dim - shift] = prim.shape[dim]
                leading = [prim.shape[dim] for dim in range(label.first, shift)] if len(dims) < label.count else []
                raise PartOfRows(node, value_of[source], (*leading, *shape))

    def _word(self, node: str) -> str:
        named = self._graph.named.get(node)
        return f"{named.word} in line {named.line}" if named is not None and named.line else node

    def _between(self) -> set[str]:
        """Nodes that depend on the region and that the region depends on."""
        after = self._reached(lambda name: [reader.name for reader in self._graph.readers(name)])
        before = self._reached(lambda name: [ref.name for ref in self._graph.node(name).inputs()])
        return after & before

    def _reached(self, step: Callable[[str], Iterable[str]]) -> set[str]:
        pending, seen = list(self._nodes), set[str]()
        while pending:
            for name in step(pending.pop()):
                if name in self._graph.named and name not in seen:
                    seen.add(name)
                    pending.append(name)
        return seen

    def _outputs(self) -> tuple[tuple[Ref, Rows | None], ...]:
        graph, outputs = self._graph, list[tuple[Ref, Rows | None]]()
        for name in graph.named:
            if name not in self._nodes:
                continue
            outside = {ref for node in graph.readers(name) if node.name not in self._nodes for ref in node.inputs()}
            for ref in self._values(name):
                if ref not in outside and ref not in graph.escaping:
                    if self._labels.get(self._ir.of(ref).name) is SUM and graph.readers(name):
                        raise NotByRow(f"{self._word(name)} is a sum over rows that the rows depend on")
                    continue
                label = self._labels.get(self._ir.of(ref).name)
                if self._is_large(ref) and label is not SUM:
                    raise NotByRow(f"{self._word(name)} is needed for all rows at once")
                if any(node.name in self._nodes for node in graph.readers(name)) and label is SUM:
                    raise NotByRow(f"{self._word(name)} is a sum over rows that the rows depend on")
                if label is None:
                    raise NotByRow(f"{self._word(name)} does not depend on the rows")
                outputs.append((ref, label if isinstance(label, Rows) else None))
        return tuple(outputs)


def forwarded(ir: KernelIR, prim: Prim, labels: Sequence[Label]) -> Label:
    """How a primitive depends on rows if its inputs do so.

    Raises:
        NotByRow: it combines several rows.
    """
    sources = [ir.prims[name] for name in prim.inputs]
    if any(label is SUM for label in labels):
        is_linear = prim.op in (PrimOp.RESHAPE, PrimOp.PERMUTE, PrimOp.ALIAS) or prim.fn == "cast"
        if is_linear and len(labels) == 1:
            return SUM
        raise NotByRow("more than a view of a sum over rows")
    rows = {i: label for i, label in enumerate(labels) if isinstance(label, Rows)}
    first = next(iter(rows))
    label = rows[first]
    if prim.op in (PrimOp.POINTWISE, PrimOp.EXPAND, PrimOp.GATHER):
        shifted = {
            Rows(label.first + len(prim.shape) - len(sources[i].shape), label.count) for i, label in rows.items()
        }
        if len(shifted) > 1:
            raise NotByRow("operands with different rows")
        (result,) = shifted
        if prim.op is PrimOp.GATHER and prim.attrs["dim"] in result.dims and 0 in rows:
            raise NotByRow("a gather from other rows")
        return result
    if prim.op is PrimOp.ALIAS:
        return label
    if prim.op is PrimOp.REDUCE:
        return _reduced(prim, rows)
    if prim.op is PrimOp.RESHAPE:
        return _reshaped(sources[0].shape, prim.shape, label)
    if prim.op is PrimOp.PERMUTE:
        order = prim.attrs["dims"]
        assert isinstance(order, tuple)
        places = [order.index(dim) for dim in label.dims]
        if places != list(range(places[0], places[0] + label.count)):
            raise NotByRow("rows that are torn apart")
        return Rows(places[0], label.count)
    if prim.op in SAME_ROWS:
        if set(_dims_of(prim)) & set(label.dims) or len(set(rows.values())) > 1 or len(rows) < len(labels):
            raise NotByRow("an operation along the rows")
        return label
    if prim.op is PrimOp.MATMUL and ProductDims.of(prim) == ProductDims(0) and len(labels) == 2:
        return _product_label(rows)
    raise NotByRow("an operation whose rows may depend on each other")


def _product_label(rows: Mapping[int, Rows]) -> Label:
    if rows == {0: Rows(0)}:
        return Rows(0)
    if rows == {1: Rows(1)}:
        return Rows(1)
    if rows.get(0, Rows(1)) == Rows(1) and rows.get(1, Rows(0)) == Rows(0):
        return SUM
    raise NotByRow("a product of rows with rows")


def _dims_of(prim: Prim) -> tuple[int, ...]:
    dims = prim.attrs.get("dims", prim.attrs.get("dim"))
    if isinstance(dims, int):
        return (dims,)
    assert isinstance(dims, tuple)
    return dims


def _reduced(prim: Prim, rows: Mapping[int, Rows]) -> Label:
    label = next(iter(rows.values()))
    if len(set(rows.values())) > 1:
        raise NotByRow("operands with different rows")
    dims = prim.attrs["dims"]
    assert isinstance(dims, tuple)
    reduced = set(dims) & set(label.dims)
    if not reduced:
        return label
    if prim.fn != "sum" or reduced != set(label.dims):
        raise NotByRow("a reduction over rows")
    return SUM


def _reshaped(before: tuple[Size, ...], after: tuple[Size, ...], label: Rows) -> Rows:
    outer = product(before[: label.first])
    rows = product([before[dim] for dim in label.dims])
    for first in range(len(after)):
        if product(after[:first]) == outer and after[first] != ONE:
            for end in range(first + 1, len(after) + 1):
                if product(after[first:end]) == rows and after[end - 1] != ONE:
                    return Rows(first, end - first)
    raise NotByRow("a view that mixes rows with other dimensions")


def demanded(ir: KernelIR, prim: Prim, label: Label, labels: Mapping[str, Label]) -> list[Rows | None]:
    """Which rows of each input a primitive needs, to compute its value for some rows; None for a whole input.

    Raises:
        NotByRow: it needs other rows than those.
    """
    sources = [ir.prims[name] for name in prim.inputs]
    if label is None:
        return [None for _ in sources]
    if prim.op is PrimOp.MATMUL:
        if label is SUM:
            return [Rows(1), Rows(0)]
        return [Rows(0), None] if label == Rows(0) else [None, Rows(1)]
    known = [labels.get(name) for name in prim.inputs]
    if not isinstance(label, Rows):
        return [item if isinstance(item, Rows) else None for item in known]
    if prim.op in (PrimOp.POINTWISE, PrimOp.EXPAND):
        return [_aligned(prim, source, label) for source in sources]
    if prim.op is PrimOp.GATHER:
        is_table = prim.attrs["dim"] in label.dims
        return [None if is_table else _aligned(prim, sources[0], label), _aligned(prim, sources[1], label)]
    if prim.op is PrimOp.RESHAPE:
        return [_reshaped(prim.shape, sources[0].shape, label)]
    if prim.op is PrimOp.PERMUTE:
        order = prim.attrs["dims"]
        assert isinstance(order, tuple)
        places = [order[dim] for dim in label.dims]
        if places != list(range(places[0], places[0] + label.count)):
            raise NotByRow("rows that are torn apart")
        return [Rows(places[0], label.count)]
    if prim.op in SAME_ROWS and not set(_dims_of(prim)) & set(label.dims):
        return [label for _ in sources]
    if prim.op in (PrimOp.ALIAS, PrimOp.REDUCE):
        return [label for _ in sources]
    raise NotByRow("an operation whose rows may depend on each other")


def _aligned(prim: Prim, source: Prim, label: Rows) -> Rows | None:
    """The rows of an operand that broadcasts to the result; None if it is the same for all rows."""
    shift = len(prim.shape) - len(source.shape)
    dims = [dim - shift for dim in label.dims]
    sizes = [source.shape[dim] if dim >= 0 else ONE for dim in dims]
    if all(size == ONE for size in sizes):
        return None
    if sizes != [prim.shape[dim] for dim in label.dims]:
        raise NotByRow("an operand that is broadcast to a part of the rows")
    return Rows(dims[0], label.count)
