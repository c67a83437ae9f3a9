"""Loops over chunks of rows: the large values around a matrix product exist for a chunk of its rows at a time.

The rewrite ``chunk-rows`` names the product. If the backward pass reads large values of the forward pass, it computes them again
from the operands of the product, chunk by chunk (:func:`_computing_again`); of the forward pass, a few numbers a row are saved.
Then the large operations of each pass become one node with a loop (:class:`~mtmc_lsp.core.graph.RowLoop`).

Proof: :mod:`mtmc_lsp.ir.row_regions` shows that the operations are the same function of each row, so each row of a result is
computed by one chunk, by the same operations. Sums over rows are added chunk by chunk, which is another order of the same sum.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from mtmc_lsp.core.graph import (
    PRODUCTS,
    Argument,
    Backward,
    Graph,
    GraphInput,
    InputKind,
    Node,
    Ref,
    RowLoop,
    Rows,
    TensorType,
    contiguous_stride,
)
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.row_regions import NotByRow, PartOfRows, RowRegion, row_region
from mtmc_lsp.rewrites.chunked_rows.row_forms import with_sums
from mtmc_lsp.rewrites.graph_editing import VIEWS, CannotRewrite, base_name
from mtmc_lsp.rewrites.saved_values import AGAIN

RULE = "chunk-rows"
LOOP = "mtmc.chunked_rows.default"
RESHAPING = frozenset("view reshape _unsafe_view expand".split())
"""Views that name the shape of their result as second argument."""
CREATING = frozenset("zeros ones full new_zeros new_ones new_full empty new_empty".split())
"""Operations with a shape among their arguments."""


def in_chunks(graph: Graph, node: str, rows: int) -> Graph:
    """The graph with loops over chunks of at most ``rows`` rows around a product, in each pass that computes large values.

    Raises:
        CannotRewrite: the operations around the product are not independent for each row.
    """
    if node not in graph.named:
        raise CannotRewrite(f"the graph has no product {node}")
    if rows < 1:
        raise CannotRewrite("a chunk has at least one row")
    graph = with_sums(graph, node)
    for _ in graph.nodes:
        try:
            return _in_chunks(graph, node, rows)
        except PartOfRows as part:
            graph = _with_expanded(graph, part)
        except NotByRow as reason:
            raise CannotRewrite(str(reason)) from None
    raise CannotRewrite("operands of the loop are the same for a part of the rows")


def _with_expanded(graph: Graph, part: PartOfRows) -> Graph:
    """The graph with an operand of a node expanded, so that chunks of rows can slice it."""
    kind, node = graph.type_of(part.operand), graph.node(part.node)
    name = f"{part.operand.name}_expanded"
    while name in graph.named and graph.node(name).type.shape != part.shape:
        name += "_"
    missing = len(part.shape) - len(kind.shape)
    stride = tuple(
        Size.of(0) if i < missing or kind.shape[i - missing] != size else kind.stride[i - missing]
        for i, size in enumerate(part.shape)
    )
    expanded = Node(
        name,
        "aten.expand.default",
        (part.operand, part.shape),
        {},
        (TensorType(part.shape, kind.dtype, stride),),
        node.line,
    )
    nodes: list[Node] = []
    for each in graph.nodes:
        if each.name == part.node:
            nodes += [expanded] if name not in graph.named else []
            each = each.reading({part.operand: Ref(name)})
        nodes.append(each)
    return replace(graph, nodes=tuple(_in_order(nodes)))


def _in_chunks(graph: Graph, node: str, rows: int) -> Graph:
    if graph.backward is not None and graph.backward.in_forward:
        graph = _apart(graph, node)
        return _looped(graph, row_region(lower(graph), node, frozenset(graph.named)), node, rows)
    if node in graph.backward_nodes:
        return _looped(graph, row_region(lower(graph), node, graph.backward_nodes), node, rows)
    forward = frozenset(graph.named) - graph.backward_nodes
    graph, again = _computing_again(graph, node, forward)
    graph = _looped(graph, row_region(lower(graph), node, forward), node, rows)
    if again:
        graph = _looped(graph, row_region(lower(graph), again, graph.backward_nodes), again, rows)
    return graph


def _computing_again(graph: Graph, node: str, forward: frozenset[str]) -> tuple[Graph, str]:
    """The graph whose backward pass computes the large values of the forward pass again, and its copy of the product."""
    if not graph.backward_nodes:
        return graph, ""
    # The forward pass alone: here, it may keep large values for the backward pass.
    alone = tuple(each for each in graph.nodes if each.name in forward)
    passed = replace(graph, nodes=alone, outputs=graph.forward_outputs, backward=None)
    large = {ref.name for ref in row_region(lower(passed), node, forward).large}
    return _copied(graph, node, large, forward)


def _apart(graph: Graph, node: str) -> Graph:
    """The graph whose gradients read, of the large values that results need, only the products.

    Then separate kernels compute the results of a chunk, and calls without gradients run only these.
    """
    results = graph.needed_by_results
    region = row_region(lower(graph), node, frozenset(graph.named))
    large = {ref.name for ref in region.large if ref.name in results and graph.node(ref.name).word not in PRODUCTS}
    return _copied(graph, node, large, results)[0]


def _copied(graph: Graph, node: str, large: Set[str], first: Set[str]) -> tuple[Graph, str]:
    """The graph in which nodes that are not among ``first`` read copies of the large values, and the copy of the product."""
    later = frozenset(graph.named) - first
    hidden = {ref for name in later for ref in graph.node(name).inputs()} | set(graph.gradients)
    pending = [ref.name for ref in hidden if ref.name in large]
    copied: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in copied and name in graph.named:
            copied.add(name)
            sources = [ref.name for ref in graph.node(name).inputs()]
            pending += [source for source in sources if source in large or _is_view_of_input(graph, source)]
    if not copied:
        return graph, ""
    swap: dict[Ref, Ref] = {}
    copies = []
    for name in (each.name for each in graph.nodes if each.name in copied):
        copy = replace(graph.node(name).reading(swap), name=f"{name}{AGAIN}")
        # Other values may need the same copy.
        while graph.named.get(copy.name, copy) != copy:
            copy = replace(copy, name=f"{copy.name}{AGAIN}")
        if copy.name not in graph.named:
            copies.append(copy)
        swap |= {Ref(name, i): Ref(copy.name, i) for i in range(len(copy.outputs))}
    kept = [each for each in graph.nodes if each.name not in later]
    changed = [each.reading(swap) for each in graph.nodes if each.name in later]
    outputs = (*graph.forward_outputs, *(swap.get(ref, ref) for ref in graph.gradients))
    nodes = _in_order([*kept, *copies, *changed])
    return replace(graph, nodes=tuple(nodes), outputs=outputs), swap.get(Ref(node), Ref("")).name


def _is_view_of_input(graph: Graph, name: str) -> bool:
    while name in graph.named:
        node = graph.node(name)
        if base_name(node) not in VIEWS:
            return False
        name = next(node.inputs()).name
    return True


def _looped(graph: Graph, region: RowRegion, node: str, rows: int) -> Graph:
    """The graph with one node for the region, which runs it for one chunk of rows after another."""
    optional = graph.only_for_gradients if graph.backward is not None and graph.backward.in_forward else frozenset()
    # Results come before gradients, as in every graph.
    outputs = sorted(region.outputs, key=lambda output: output[0] in optional)
    region = replace(region, outputs=tuple(outputs))
    body = _Body(graph, region, sum(ref in optional for ref, _ in outputs))
    chunk = body.graph(rows)
    loop = RowLoop(
        chunk,
        body.symbol,
        rows,
        region.total,
        tuple(label for _, label in region.inputs),
        tuple(label for _, label in region.outputs),
        body.sizes,
    )
    lines = [graph.node(name).line for name in region.nodes]
    name = f"{node}_rows"
    while name in graph.named:
        name += "_"
    refs = tuple(ref for ref, _ in region.inputs)
    kinds = tuple(graph.type_of(ref) for ref, _ in region.outputs)
    whole = Node(name, LOOP, refs, {}, kinds, next(filter(None, lines), 0), row_loop=loop)
    swap = {ref: Ref(name, i) for i, (ref, _) in enumerate(region.outputs)}
    others = [each.reading(swap) for each in graph.nodes if each.name not in region.nodes]
    position = graph.positions[node]
    before = [each for each in others if graph.positions[each.name] < position]
    after = [each for each in others if graph.positions[each.name] >= position]
    return graph.of_nodes(_in_order([*before, whole, *after]), swap)


def _in_order(nodes: Sequence[Node]) -> list[Node]:
    """The nodes, each after those that it reads, otherwise in the same order.

    Raises:
        CannotRewrite: random numbers would be drawn in another order.
    """
    position = {node.name: i for i, node in enumerate(nodes)}
    waits = [{position[ref.name] for ref in node.inputs() if ref.name in position} for node in nodes]
    readers: list[list[int]] = [[] for _ in nodes]
    for i, sources in enumerate(waits):
        for source in sources:
            readers[source].append(i)
    ready = [i for i, sources in enumerate(waits) if not sources]
    ordered: list[Node] = []
    while ready:
        i = heapq.heappop(ready)
        ordered.append(nodes[i])
        for reader in readers[i]:
            waits[reader].discard(i)
            if not waits[reader]:
                heapq.heappush(ready, reader)
    assert len(ordered) == len(nodes), "the loop depends on its results"
    if [node.name for node in ordered if node.draws] != [node.name for node in nodes if node.draws]:
        raise CannotRewrite("random numbers would be drawn in another order")
    return ordered


class _Body:
    """The operations of a region for one chunk of rows."""

    def __init__(self, graph: Graph, region: RowRegion, n_gradients: int) -> None:
        """Begin a body whose last ``n_gradients`` outputs are read by gradients alone."""
        self._graph, self._region, self._n_gradients = graph, region, n_gradients
        self.symbol = "rows"
        while self.symbol in graph.sizes:
            self.symbol += "_"
        self._rows = Size.symbol(self.symbol)
        self._ir = lower(graph)
        self._names = self._input_names()
        self.sizes: tuple[str, ...] = ()
        """Named sizes that the inputs do not have."""

    def _input_names(self) -> list[str]:
        graph, used, names = self._graph, set(self._region.nodes), list[str]()
        for ref, _ in self._region.inputs:
            name = ref.name if ref.name not in graph.named else graph.node(ref.name).name_of(ref.index)
            while name in used:
                name += "_"
            used.add(name)
            names.append(name)
        return names

    def graph(self, rows: int) -> Graph:
        """The body as a graph.

        Raises:
            CannotRewrite: an operation has another shape for a chunk of rows.
        """
        outer, region = self._graph, self._region
        variables = self._result_names()
        results = tuple(ref for ref, _ in region.outputs)
        inputs = tuple(
            GraphInput(name, name, InputKind.ARGUMENT, self._type(outer.type_of(ref), label, is_slice=True))
            for name, (ref, label) in zip(self._names, region.inputs, strict=True)
        )
        nodes, same = list[Node](), dict[Ref, Ref]()
        for node in (self._node(outer.node(name)) for name in region.nodes):
            source = next(iter(node.inputs()), None)
            is_view = base_name(node) in RESHAPING and source is not None and Ref(node.name) not in results
            if is_view and source is not None and _type_in(inputs, nodes, same.get(source, source)) == node.type:
                # With the rows as one dimension, some views have no effect.
                same[Ref(node.name)] = same.get(source, source)
            else:
                nodes.append(replace(node.reading(same), variable=variables.get(node.name, node.variable)))
        body = replace(
            outer,
            inputs=inputs,
            nodes=tuple(nodes),
            outputs=results,
            returns="tuple",
            sizes={**outer.sizes, self.symbol: min(rows, region.total.value(outer.sizes))},
            mutations=(),
            state_attributes=(),
            unread_inputs=(),
            backward=self._gradients(results),
        )
        self._check(body)
        return body

    def _gradients(self, results: Sequence[Ref]) -> Backward | None:
        """Marks the last outputs as gradients, so that no kernel computes them together with results."""
        last = results[len(results) - self._n_gradients :]
        return Backward((), (), tuple(ref.name for ref in last)) if last else None

    def _result_names(self) -> dict[str, str]:
        """Variables for the results: the user's, ``grad_weight`` for a gradient, or ``row_amax`` for a number a row."""
        graph = self._graph
        gradients: dict[str, str] = {}
        for ref, name in zip(
            graph.gradients, graph.backward.gradients if graph.backward is not None else (), strict=True
        ):
            node = graph.named.get(ref.name)
            while node is not None and base_name(node) in VIEWS:
                node = graph.named.get(next(node.inputs()).name)
            if node is not None:
                gradients[node.name] = f"grad_{name}"
        names: dict[str, str] = {}
        for ref, label in self._region.outputs:
            node = graph.node(ref.name)
            kind = "total" if label is None else "row"
            names[ref.name] = gradients.get(ref.name) or node.variable or f"{kind}_{node.word}"
        return names

    def _label(self, ref: Ref) -> Rows | None:
        label = self._region.labels.get(self._ir.of(ref).name)
        return label if isinstance(label, Rows) else None

    def _node(self, node: Node) -> Node:
        labels = [self._label(Ref(node.name, i)) for i in range(len(node.outputs))]
        outputs = tuple(self._type(kind, label) for kind, label in zip(node.outputs, labels, strict=True))
        args = node.args
        if labels[0] is not None and base_name(node) in RESHAPING:
            args = (args[0], outputs[0].shape)
        elif labels[0] is not None and base_name(node) in CREATING:
            args = tuple(outputs[0].shape if isinstance(item, tuple) else item for item in args)
        changed = replace(node, args=args, outputs=outputs)
        # An operand that the chunks read whole and by rows is two inputs.
        swap = {
            ref: Ref(name)
            for name, (ref, label) in zip(self._names, self._region.inputs, strict=True)
            if self._demand(node, ref) == label
        }
        return changed.reading(swap)

    def _demand(self, node: Node, ref: Ref) -> Rows | None:
        return self._region.reads.get((node.name, ref))

    def _type(self, kind: TensorType, label: Rows | None, *, is_slice: bool = False) -> TensorType:
        """The type of a value for a chunk: of the dimensions that are rows, the last one has all rows of the chunk."""
        if label is None:
            return kind
        last, total = label.first + label.count - 1, self._region.total
        shape = tuple(
            self._rows if dim == last else Size.of(1) if dim in label.dims else size
            for dim, size in enumerate(kind.shape)
        )
        if kind.is_contiguous and not (is_slice and label.first):
            return TensorType(shape, kind.dtype, contiguous_stride(shape))
        if is_slice:
            return TensorType(shape, kind.dtype, kind.stride if _is_flat(kind, label) else contiguous_stride(shape))
        sizes = self._graph.sizes
        row_stride = kind.stride[last].value(sizes)
        stride = [
            share * self._rows
            if dim not in label.dims
            and step.value(sizes) > row_stride > 0
            and (share := step.divide_exactly(total)) is not None
            else step
            for dim, step in enumerate(kind.stride)
        ]
        return TensorType(shape, kind.dtype, tuple(stride))

    def _check(self, body: Graph) -> None:
        """Refuse a body whose operations disagree with the types, and note the sizes that its inputs do not have."""
        known = {
            symbol
            for item in body.inputs
            for size in (*item.type.shape, *item.type.stride)
            for symbol in size.symbols()
        }
        read = [size for node in body.nodes for size in _sizes_in((*node.args, *node.kwargs.values()))]
        read += [size for node in body.nodes for kind in node.outputs for size in kind.shape]
        self.sizes = tuple(dict.fromkeys(name for size in read for name in size.symbols() if name not in known))
        ir = lower(body)
        for node in body.nodes:
            for i, kind in enumerate(node.outputs):
                if ir.of(Ref(node.name, i)).shape != kind.shape:
                    raise CannotRewrite(f"{node.word} in line {node.line} has another shape for a chunk of rows")


def _type_in(inputs: Sequence[GraphInput], nodes: Sequence[Node], ref: Ref) -> TensorType | None:
    named = {item.name: (item.type,) for item in inputs} | {node.name: node.outputs for node in nodes}
    return named[ref.name][ref.index] if ref.name in named else None


def _is_flat(kind: TensorType, label: Rows) -> bool:
    """Whether the rows are one dimension in memory, so that a view flattens them."""
    dims = list(label.dims)
    return all(kind.stride[a] == kind.stride[b] * kind.shape[b] for a, b in itertools.pairwise(dims))


def _sizes_in(items: Iterable[Argument]) -> Iterable[Size]:
    for item in items:
        if isinstance(item, Size):
            yield item
        elif isinstance(item, tuple):
            yield from _sizes_in(item)
