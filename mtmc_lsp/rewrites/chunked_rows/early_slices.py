"""Slices of rows before a product instead of after it, for loops over chunks of rows.

Language models drop the logits of the last token: ``F.cross_entropy((x @ weight.T)[:, :-1], ...)``. The product has rows that
nothing reads, and the gradient of the logits is padded with rows of zeros. Here the operand is sliced.

Proof: a row of the product, and of each value that is computed from it row by row, depends on the same row of the operand, so
the slice of the value is the value of the slice. In the backward pass, rows of zeros stay zeros when they are multiplied, cast or
summed along the row; they add nothing to a sum over rows; and their product with a matrix is zero. (Where rounding overflows,
zero times infinity would be NaN: the rows that nothing reads then have the gradient 0 instead.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.primitives import KernelIR, PrimOp
from mtmc_lsp.rewrites.graph_editing import base_name, contiguous_type, numbers, producer, without_dead

ONE = Size.of(1)
VIEWS = frozenset({"view", "_unsafe_view", "reshape"})
COPIES = frozenset({"clone", "contiguous"})
REDUCTIONS = frozenset({"sum", "amax", "mean", "logsumexp"})
OF_ROWS = frozenset({"_softmax", "_log_softmax"})
FACTOR = {"mm": 0, "addmm": 1, "matmul": 0, "linear": 0}
"""Products of rows with a matrix, each with the position of the rows among its arguments."""
KEEPING_ZERO = frozenset({"_to_copy", "neg", "mul", "div", "sum", "t", *VIEWS, *COPIES})
"""Operations that map rows of zeros (of the first operand, or of one factor) to rows of zeros."""


def with_early_slices(graph: Graph, product_node: str) -> Graph:
    """The graph in which a product, and others with as many rows and columns, have only the rows that are read.

    A product stays as it is if all of its rows are read.
    """
    product_type = graph.node(product_node).type if product_node in graph.named else None
    for node in graph.nodes:
        if product_type is not None and node.type.shape == product_type.shape:
            rewriting = _Rewriting.of(graph, node.name)
            graph = rewriting.graph_after() if rewriting is not None else graph
    return graph


@dataclass(frozen=True)
class _Slice:
    """The rows that are read: a part of one dimension of several that are the rows together."""

    lead: tuple[Size, ...]
    """The dimensions that are rows."""
    dim: int
    start: Argument
    end: Argument
    size: Size
    """The length of the part."""

    @property
    def kept(self) -> tuple[Size, ...]:
        return (*self.lead[: self.dim], self.size, *self.lead[self.dim + 1 :])

    @property
    def rows(self) -> Size:
        return product(self.lead)

    @property
    def kept_rows(self) -> Size:
        return product(self.kept)


class _Unknown(Exception):
    """A value whose rows cannot be told apart."""


class _Rewriting:
    def __init__(self, graph: Graph, ir: KernelIR, node: Node, part: _Slice, computed: frozenset[str]) -> None:
        self._graph, self._ir, self._node, self._part, self._computed = graph, ir, node, part, computed
        self._padded: dict[str, bool] = {}
        self._sliced: dict[Ref, Ref] = {}
        self._added: list[Node] = []
        self._swap: dict[Ref, Ref] = {}

    @staticmethod
    def of(graph: Graph, name: str) -> _Rewriting | None:
        """The rewriting of a product whose rows are read through equal slices."""
        node = graph.named.get(name)
        if node is None or base_name(node) not in FACTOR or len(node.type.shape) < 2:
            return None
        weights, rows = node.args[FACTOR[base_name(node)] + 1], product(node.type.shape[:-1])
        if not isinstance(weights, Ref) or len(graph.type_of(weights).shape) != 2 or rows == ONE:
            return None
        ir = lower(graph)
        computed, found, pending = {name}, set[_Slice](), [node]
        while pending:
            current = pending.pop()
            for reader in graph.readers(current.name):
                part = _slice_of(graph, reader, rows)
                if part is not None:
                    found.add(part)
                elif reader.name not in computed and _is_by_row(ir, reader, {current.name}, rows):
                    computed.add(reader.name)
                    pending.append(reader)
        if len(found) != 1:
            return None
        return _Rewriting(graph, ir, node, found.pop(), frozenset(computed))

    def graph_after(self) -> Graph:
        """The graph with slices before the product."""
        nodes: list[Node] = []
        for node in self._graph.nodes:
            before = len(self._added)
            changed = self._changed(node)
            nodes += self._added[before:]
            if changed is not None:
                nodes.append(changed)
        result = without_dead(self._graph.of_nodes(nodes, self._swap))
        return self._renamed(result) if self._node.name not in result.named else self._graph

    def _renamed(self, graph: Graph) -> Graph:
        """The graph whose new product has the name of the old one."""
        old, new = self._node.name, self._sliced.get(Ref(self._node.name), Ref("")).name
        if new not in graph.named:
            return self._graph
        named = {Ref(new): Ref(old)}
        nodes = [replace(node, name=old) if node.name == new else node.reading(named) for node in graph.nodes]
        return replace(graph, nodes=tuple(nodes), outputs=tuple(named.get(ref, ref) for ref in graph.outputs))

    def _changed(self, node: Node) -> Node | None:
        """The node with slices before its operands; ``None`` if another value replaces it."""
        try:
            if _slice_of(self._graph, node, self._part.rows) == self._part and self._is_computed(node.args[0]):
                self._swap[Ref(node.name)] = self._cut(_ref(node.args[0]))
                return None
            if base_name(node) in COPIES and (source := self._swap.get(_ref(node.args[0]))) is not None:
                self._swap[Ref(node.name)] = source
                return None
            if self._is_padded(Ref(node.name)) and base_name(node) == "sum":
                # Few numbers a row, so these may have rows of zeros.
                return self._with_zeros(node, self._cut(Ref(node.name)))
            if not any(self._is_padded(ref) for ref in node.inputs()) or self._is_padded(Ref(node.name)):
                return node.reading(self._swap)
            return self._contraction(node) or node.reading(self._swap)
        except _Unknown:
            return node.reading(self._swap)

    def _contraction(self, node: Node) -> Node | None:
        """A product with, or a sum over, rows of zeros, without these rows."""
        name, part = base_name(node), self._part
        if name == "mm":
            left, right = (_ref(item) for item in node.args[:2])
            if self._is_padded(left) and self._layout(left) == "flat" and not self._is_padded(right):
                return self._padded_product(node, left, right)
            if self._layout(left) == "columns" and self._layout(right) == "flat":
                return replace(node, args=(self._cut(left), self._cut(right)))
            return None
        if name == "sum" and len(node.args) > 1 and self._layout(_ref(node.args[0])) in ("flat", "full"):
            source = _ref(node.args[0])
            count = 1 if self._layout(source) == "flat" else len(part.lead)
            dims = {int(str(dim)) % len(self._type(source).shape) for dim in _items(node.args[1])}
            if dims == set(range(count)):
                return replace(node, args=(self._cut(source), *node.args[1:]))
        return None

    def _padded_product(self, node: Node, left: Ref, right: Ref) -> Node:
        """A product of the rows that are not zeros, padded with rows of zeros."""
        kind = contiguous_type((self._part.kept_rows, node.type.shape[1]), node.type.dtype)
        return self._with_zeros(node, self._add(node, "mm.default", (self._cut(left), right), kind))

    def _with_zeros(self, node: Node, short: Ref) -> Node:
        """The node as its rows that are not zeros, padded with rows of zeros."""
        part, kind = self._part, node.type
        rest = kind.shape[1:] if self._layout(Ref(node.name)) == "flat" else kind.shape[len(part.lead) :]
        kept, full = (contiguous_type((*lead, *rest), kind.dtype) for lead in (part.kept, part.lead))
        short = self._add(node, "view.default", (short, numbers(kept.shape)), kept)
        zeros = self._add(node, "new_zeros.default", (short, numbers(full.shape)), full)
        padded = self._add(node, "slice_scatter.default", (zeros, short, part.dim, part.start, part.end), full)
        return replace(node, op="aten.view.default", args=(padded, numbers(kind.shape)), kwargs={})

    # Values of the rows that are read ---------------------------------------------------------------------------

    def _cut(self, ref: Ref) -> Ref:
        """The rows of a value that are read."""
        if ref not in self._sliced:
            self._sliced[ref] = self._newly_cut(ref)
        return self._sliced[ref]

    def _newly_cut(self, ref: Ref) -> Ref:
        node, part = self._graph.named.get(ref.name), self._part
        layout = self._layout(ref)
        if layout == "":
            raise _Unknown
        if node is not None and (node.name in self._computed or self._is_padded(ref)):
            if (source := self._pad_source(node)) is not None:
                return self._swap.get(source, source)
            if _is_identity_scatter(self._graph, node):
                return self._cut(_ref(node.args[1]))
            return self._repeated(node, layout)
        kind = self._type(ref)
        source, rest = self._swap.get(ref, ref), kind.shape[1:] if layout == "flat" else kind.shape[len(part.lead) :]
        if layout == "columns":
            raise _Unknown
        full = contiguous_type((*part.lead, *rest), kind.dtype)
        viewed = producer(self._graph, ref)
        if (
            layout == "flat"
            and viewed is not None
            and base_name(viewed) in VIEWS
            and self._type(_ref(viewed.args[0])).shape == full.shape
        ):
            # The view of a tensor that has these dimensions, such as the input of a linear layer.
            source, full = self._swap.get(_ref(viewed.args[0]), _ref(viewed.args[0])), self._type(_ref(viewed.args[0]))
        elif layout == "flat":
            source = self._add(self._node, "view.default", (source, numbers(full.shape)), full)
        else:
            full = kind
        shape = (*part.kept, *rest)
        cut = self._add(
            self._node,
            "slice.Tensor",
            (source, part.dim, part.start, part.end),
            TensorType(shape, kind.dtype, full.stride),
        )
        copied = self._add(
            self._node,
            "clone.default",
            (cut,),
            contiguous_type(shape, kind.dtype),
            memory_format="torch.contiguous_format",
        )
        if layout == "full":
            return copied
        flat = contiguous_type((part.kept_rows, *rest), kind.dtype)
        return self._add(self._node, "view.default", (copied, numbers(flat.shape)), flat)

    def _repeated(self, node: Node, layout: str) -> Ref:
        """An operation on the rows that are read."""
        part, shape = self._part, node.type.shape
        if layout == "columns":
            (rest,) = shape[:1]
            cut = self._cut(_ref(node.args[0]))
            flat = contiguous_type((part.kept_rows, rest), node.type.dtype)
            return self._add(node, node.op, (cut,), TensorType((rest, part.kept_rows), flat.dtype, flat.stride[::-1]))
        kept = (part.kept_rows, *shape[1:]) if layout == "flat" else (*part.kept, *shape[len(part.lead) :])
        kind = contiguous_type(kept, node.type.dtype)
        if base_name(node) in VIEWS:
            return self._add(node, "view.default", (self._cut(_ref(node.args[0])), numbers(kept)), kind)
        if node.name == self._node.name:
            position = FACTOR[base_name(node)]
            args = [*node.args]
            args[position] = self._cut(_ref(node.args[position]))
            return self._add(node, node.op, tuple(args), kind, **node.kwargs)
        swap = {ref: self._operand(ref, shape, layout) for ref in node.inputs()}
        changed = node.reading(swap)
        return self._add(node, node.op, changed.args, kind, **changed.kwargs)

    def _operand(self, ref: Ref, shape: tuple[Size, ...], layout: str) -> Ref:
        """An operand of an operation on rows; as it is if it is the same for all rows."""
        own, count = self._type(ref).shape, 1 if layout == "flat" else len(self._part.lead)
        missing = max(0, len(shape) - len(own))
        rows = own[: count - missing] if missing < count else ()
        if all(size == ONE for size in rows):
            return self._swap.get(ref, ref)
        if missing or self._layout(ref) != layout:
            raise _Unknown
        return self._cut(ref)

    # What values are --------------------------------------------------------------------------------------------

    def _layout(self, ref: Ref) -> str:
        """Which dimensions of a value are rows: ``flat`` (the first), ``full`` (several), ``columns`` (the second); or none."""
        part, node = self._part, self._graph.named.get(ref.name)
        shape = self._type(ref).shape
        if node is not None and base_name(node) == "t" and self._layout(_ref(node.args[0])) == "flat":
            return "columns"
        if shape[: len(part.lead)] == part.lead and (len(part.lead) > 1 or len(shape) > 0):
            return "full" if len(part.lead) > 1 else "flat"
        return "flat" if shape[:1] == (part.rows,) else ""

    def _is_computed(self, value: Argument) -> bool:
        return isinstance(value, Ref) and value.name in self._computed

    def _pad_source(self, node: Node) -> Ref | None:
        """What a node pads with zeros to all rows."""
        part = self._part
        if base_name(node) != "slice_scatter" or not _is_zero(self._graph, node.args[0]):
            return None
        dim, start, end = _range_of(node.args[2:])
        source = self._type(_ref(node.args[1])).shape
        is_part = node.type.shape[: len(part.lead)] == part.lead and source[: len(part.lead)] == part.kept
        return _ref(node.args[1]) if is_part and (dim, start, end) == (part.dim, part.start, part.end) else None

    def _is_padded(self, ref: Ref) -> bool:
        """Whether the rows that nothing reads are zeros."""
        if ref.name not in self._padded:
            self._padded[ref.name] = False
            node = self._graph.named.get(ref.name)
            self._padded[ref.name] = node is not None and self._computes_zeros(node)
        return self._padded[ref.name]

    def _computes_zeros(self, node: Node) -> bool:
        if self._pad_source(node) is not None:
            return True
        name, operands = base_name(node), list(node.inputs())
        if _is_identity_scatter(self._graph, node):
            return self._is_padded(_ref(node.args[1]))
        if not operands or not any(self._is_padded(ref) for ref in operands) or not self._layout(Ref(node.name)):
            return False
        if name == "sum":
            return _reduces_last(self._type(operands[0]), node)
        if name == "where":
            return all(self._is_zero_or_padded(item) for item in node.args[1:3])
        if name in ("add", "sub"):
            return all(self._is_padded(ref) for ref in operands) and len(operands) == 2
        return name in KEEPING_ZERO and (name == "mul" or self._is_padded(operands[0]))

    def _is_zero_or_padded(self, value: Argument) -> bool:
        return self._is_padded(value) or _is_zero(self._graph, value) if isinstance(value, Ref) else value == 0

    # New nodes ----------------------------------------------------------------------------------------------------

    def _type(self, ref: Ref) -> TensorType:
        return next((node.type for node in self._added if node.name == ref.name), None) or self._graph.type_of(ref)

    def _add(self, like: Node, op: str, args: tuple[Argument, ...], kind: TensorType, **kwargs: Argument) -> Ref:
        qualified = op if op.startswith("aten.") else f"aten.{op}"
        name = f"{like.name}_part{len(self._added)}"
        self._added.append(
            replace(like, name=name, op=qualified, args=args, kwargs=kwargs, outputs=(kind,), variable="")
        )
        return Ref(name)


def _ref(value: Argument) -> Ref:
    if not isinstance(value, Ref):
        raise _Unknown
    return value


def _items(value: Argument) -> tuple[Argument, ...]:
    return value if isinstance(value, tuple) else (value,)


def _range_of(args: tuple[Argument, ...]) -> tuple[int, Argument, Argument]:
    """Dimension, start and end of a slice, whose step is 1.

    Raises:
        _Unknown: it has another step.
    """
    usual: tuple[Argument, ...] = (0, 0, None, 1)
    dim, start, end, step = [*args, *usual[len(args) :]]
    if step != 1 or not isinstance(dim, int):
        raise _Unknown
    return dim, 0 if start is None else start, end


def _slice_of(graph: Graph, node: Node, rows: Size) -> _Slice | None:
    """The part of the rows that a node slices."""
    if base_name(node) != "slice" or not isinstance(node.args[0], Ref):
        return None
    shape = graph.type_of(node.args[0]).shape
    try:
        dim, start, end = _range_of(node.args[1:])
    except _Unknown:
        return None
    for count in range(dim + 1, len(shape)):
        if product(shape[:count]) == rows:
            return _Slice(shape[:count], dim, start, end, node.type.shape[dim])
    return None


def _is_zero(graph: Graph, value: Argument) -> bool:
    zeros = producer(graph, value)
    return zeros is not None and base_name(zeros) in ("zeros", "new_zeros", "zeros_like")


def _is_identity_scatter(graph: Graph, node: Node) -> bool:
    """Whether a node overwrites a whole tensor."""
    source = node.args[1] if base_name(node) == "slice_scatter" else None
    return isinstance(source, Ref) and graph.type_of(source).shape == node.type.shape


def _reduces_last(kind: TensorType, node: Node) -> bool:
    """Whether a reduction is along the last dimension alone."""
    dims = _items(node.args[1]) if len(node.args) > 1 else ()
    return len(dims) == 1 and isinstance(dims[0], int) and dims[0] % len(kind.shape) == len(kind.shape) - 1


def _is_by_row(ir: KernelIR, node: Node, sources: set[str], rows: Size) -> bool:
    """Whether each row of a value is a function of one row of ``sources``."""
    graph, name = ir.graph, base_name(node)
    operands = list(node.inputs())
    if len(node.outputs) != 1 or node.name in ir.opaque or not operands:
        return False
    before, after = graph.type_of(next(ref for ref in operands if ref.name in sources)).shape, node.type.shape
    if name in VIEWS:
        return before[-1:] == after[-1:] and product(after[:-1]) == rows
    if name in REDUCTIONS:
        return _reduces_last(graph.type_of(operands[0]), node) and product(before[:-1]) == rows
    if name in OF_ROWS:
        return isinstance(node.args[1], int) and node.args[1] % len(before) == len(before) - 1
    is_plain = all(prim.op in (PrimOp.POINTWISE, PrimOp.CONSTANT) for prim in ir.of_node(node.name))
    return (is_plain or name in COPIES) and before[:-1] == after[:-1]
