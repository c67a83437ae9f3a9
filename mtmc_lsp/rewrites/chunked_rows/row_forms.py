"""Forms of operations that a loop over chunks of rows can run.

- An index may take elements of any rows. With all row numbers in order as the first index, as in
  ``x[torch.arange(n), target]``, it takes one element of each row, so it is ``x.gather(1, target[:, None])``. Its gradient,
  values that are added to zeros at these places, is a comparison with the number of the column. A negative index counts from
  the end of the row.
- A mean over rows and columns is a sum, divided by the number of all elements.
"""

from __future__ import annotations

from dataclasses import replace

from mtmc_lsp.core.graph import INPUT_DEVICE, Argument, Graph, Node, Ref, TensorType
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.rewrites.graph_editing import Chain, base_name, contiguous_type, producer

ONE = Size.of(1)


def with_gathers(graph: Graph) -> Graph:
    """The graph with gathers for indices that take one element of each row of a matrix, and comparisons for their gradients."""
    nodes: list[Node] = []
    for node in graph.nodes:
        chain = _replacement(graph, node)
        if chain is None:
            nodes.append(node)
        else:
            # The last node has the name of the replaced one, so that readers need no change.
            nodes += [*chain.nodes[:-1], replace(chain.nodes[-1], name=node.name, variable=node.variable)]
    return replace(graph, nodes=tuple(nodes))


def _replacement(graph: Graph, node: Node) -> Chain | None:
    name, args = base_name(node), node.args
    if name not in ("index", "index_put") or len(args) < 2 or not isinstance(args[0], Ref):
        return None
    matrix, target = graph.type_of(args[0]), _target(graph, args[1])
    if target is None or len(matrix.shape) != 2 or graph.type_of(target).shape != matrix.shape[:1]:
        return None
    if not _counts_rows(graph, args[1], matrix.shape[0]):
        return None
    chain = Chain(node, graph, "row")
    columns = _column_numbers(chain, target, matrix)
    if name == "index":
        taken = chain.add(
            "gather.default", (args[0], 1, columns), contiguous_type((matrix.shape[0], ONE), matrix.dtype)
        )
        chain.add("squeeze.dim", (taken, 1), node.type)
        return chain
    zeros, values = producer(graph, args[0]), args[2]
    is_zero = zeros is not None and base_name(zeros) in ("zeros", "new_zeros", "zeros_like")
    if not is_zero or not isinstance(values, Ref) or graph.type_of(values).shape != matrix.shape[:1]:
        return None
    added = chain.add("unsqueeze.default", (values, 1), contiguous_type((matrix.shape[0], ONE), matrix.dtype))
    every = chain.add(
        "arange.default", (matrix.shape[1],), contiguous_type((matrix.shape[1],), "int64"), device=INPUT_DEVICE
    )
    is_column = chain.add("eq.Tensor", (every, columns), contiguous_type(matrix.shape, "bool"))
    zero = chain.add("zeros.default", ((),), contiguous_type((), matrix.dtype), dtype=matrix.dtype, device=INPUT_DEVICE)
    chain.add("where.self", (is_column, added, zero), node.type)
    return chain


def _target(graph: Graph, indices: Argument) -> Ref | None:
    """The second of two indices, if both are tensors."""
    if not isinstance(indices, tuple) or len(indices) != 2:
        return None
    first, second = indices
    is_number = isinstance(first, Ref) and isinstance(second, Ref) and graph.type_of(second).dtype == "int64"
    return second if is_number and isinstance(second, Ref) else None


def _counts_rows(graph: Graph, indices: Argument, rows: Size) -> bool:
    """Whether the first index is the numbers of all rows in order."""
    assert isinstance(indices, tuple)
    numbers = producer(graph, indices[0])
    if numbers is None or numbers.op != "aten.arange.default" or not numbers.args:
        return False
    end = numbers.args[0]
    return isinstance(end, (int, Size)) and Size.of(end) == rows


def _column_numbers(chain: Chain, target: Ref, matrix: TensorType) -> Ref:
    """The numbers of the columns, one a row, without negative ones."""
    kind = contiguous_type(matrix.shape[:1], "int64")
    is_negative = chain.add("lt.Scalar", (target, 0), contiguous_type(kind.shape, "bool"))
    from_end = chain.add("add.Tensor", (target, matrix.shape[1]), kind)
    positive = chain.add("where.self", (is_negative, from_end, target), kind)
    return chain.add("unsqueeze.default", (positive, 1), contiguous_type((matrix.shape[0], ONE), "int64"))


def with_sums(graph: Graph, product: str) -> Graph:
    """The graph with sums and divisions for means over rows and columns of large values: a chunk does not know all rows."""
    elements = graph.node(product).type.numel
    nodes: list[Node] = []
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        is_large = isinstance(source, Ref) and graph.type_of(source).numel == elements
        if base_name(node) != "mean" or not is_large or not node.type.numel.is_constant or node.type.dtype == "float16":
            nodes.append(node)
            continue
        op = "aten.sum.default" if len(node.args) == 1 else "aten.sum.dim_IntList"
        total = replace(node, name=f"{node.name}_total", op=op, variable="")
        nodes += [total, replace(node, op="aten.div.Tensor", args=(Ref(total.name), elements), kwargs={})]
    return replace(graph, nodes=tuple(nodes))
