"""Which values of an integer input are valid indices, derived from how the graph uses it.

An index outside its dimension ends a GPU process with a device-side assert, so no case may have one. Labels may also have the
value that a loss ignores, or that the code compares them with (``labels != -100``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref
from mtmc_lsp.core.sizes import Size

KEEP_VALUES = frozenset(
    "view _unsafe_view reshape flatten unflatten squeeze unsqueeze expand repeat permute transpose t clone contiguous "
    "to _to_copy copy alias detach slice select split chunk unbind narrow flip roll where masked_fill clamp clamp_min clamp_max "
    "maximum minimum relu stack cat lift_fresh_copy".split()
)
"""Operations whose results have values of their operands, or constants and bounds instead of some: an index stays one."""
INDEX_ALONG_DIM = frozenset(
    "gather scatter scatter_add scatter_reduce index_select index_add index_copy index_fill index_reduce".split()
)
"""Operations on ``(self, dim, index)``."""
OTHER_INDEXING = frozenset("take put max_unpool2d max_unpool3d segment_reduce embedding_bag _embedding_bag".split())
"""Operations that take indices in other ways than :func:`_counts` knows."""
LOSSES: Mapping[str, int] = {
    "cross_entropy_loss": 4,
    "nll_loss": 4,
    "nll_loss_nd": 4,
    "nll_loss2d": 4,
    "nll_loss_forward": 4,
}
"""Losses of ``(scores, labels)``, and the position of ``ignore_index``."""
DEFAULT_IGNORED = -100
INTEGERS = ("int", "uint")
"""Beginnings of the names of integer dtypes."""


@dataclass(frozen=True)
class IndexBounds:
    """The valid values of an integer input."""

    counts: tuple[Size, ...]
    """It must be smaller than each of these sizes."""
    others: tuple[int, ...] = ()
    """Further values that the code treats specially, such as ``ignore_index``."""
    may_count_from_end: bool = True
    """Whether negative indices count from the end, as in ``x[index]``."""

    def range_of(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """The smallest and the largest valid index at these sizes; the largest is -1 if there is none."""
        count = min(size.value(sizes) for size in self.counts)
        return (-count if self.may_count_from_end else 0), count - 1


def index_bounds(graph: Graph) -> dict[str, IndexBounds]:
    """The bounds of the integer inputs that are used as indices, by name."""
    bounds = {}
    for item in graph.inputs:
        if item.type.dtype.startswith(INTEGERS):
            found = _bounds(graph, item.name)
            if found is not None:
                bounds[item.name] = found
    return bounds


def sizes_of_computed_indices(graph: Graph) -> set[str]:
    """Names of the sizes of tables that computed indices refer to, as in ``table[positions.clamp(0, 8)]``.

    The indices do not depend on these sizes, so they would be outside of a smaller table. Sizes that indices depend on are left
    out, and so are indices that are integer inputs, which have bounds (:func:`index_bounds`).
    """
    names: set[str] = set()
    for node in graph.nodes:
        operation = node.op.split(".")[1]
        if operation == "eq":
            continue
        for source in {ref.name for ref in node.inputs()}:
            counts = [size for size, _ in _counts(graph, node, operation, source)]
            if counts and not _is_input_value(graph, source):
                names |= {name for size in counts for name in size.symbols()} - _sizes_behind(graph, source)
    return names


def sizes_behind_indices(graph: Graph, name: str) -> set[str] | None:
    """Names of the sizes of dimensions that the values of an input index, as they are or after any computation.

    ``None`` if they reach an operation that may index in a way that is not known here.
    """
    names: set[str] = set()
    pending, seen = [name], {name}
    while pending:
        source = pending.pop()
        for node in graph.readers(source):
            namespace, operation = node.op.split(".")[:2]
            if namespace != "aten" or node.loop is not None or operation in OTHER_INDEXING:
                return None
            names |= {symbol for size, _ in _counts(graph, node, operation, source) for symbol in size.symbols()}
            if node.name not in seen:
                seen.add(node.name)
                pending.append(node.name)
    return names


def _is_input_value(graph: Graph, name: str) -> bool:
    """Whether a value consists of values of an integer input, moved or limited."""
    inputs = {item.name for item in graph.inputs if item.type.dtype.startswith(INTEGERS)}
    pending, seen = [name], {name}
    while pending:
        each = pending.pop()
        if each in inputs:
            return True
        node = graph.named.get(each)
        if node is not None and node.op.split(".")[1] in KEEP_VALUES:
            sources = {ref.name for ref in node.inputs()} - seen
            seen |= sources
            pending += sources
    return False


def _sizes_behind(graph: Graph, name: str) -> set[str]:
    """Names of the sizes of a value and of everything that it is computed from."""
    pending, seen, names = [name], {name}, set[str]()
    while pending:
        each = pending.pop()
        node = graph.named.get(each)
        kinds = node.outputs if node is not None else (graph.type_of(Ref(each)),)
        names |= {symbol for kind in kinds for size in kind.shape for symbol in size.symbols()}
        sources = {ref.name for ref in node.inputs()} - seen if node is not None else set()
        seen |= sources
        pending += sources
    return names


def _bounds(graph: Graph, name: str) -> IndexBounds | None:
    counts: list[Size] = []
    others: list[int] = []
    from_end = True
    pending, seen = [name], {name}
    while pending:
        source = pending.pop()
        for node in graph.readers(source):
            operation = node.op.split(".")[1]
            for count, is_from_end in _counts(graph, node, operation, source):
                counts.append(count)
                from_end = from_end and is_from_end
            others += _special_values(node, operation, source)
            is_integer = bool(node.outputs) and node.type.dtype.startswith(INTEGERS)
            if operation in KEEP_VALUES and is_integer and node.name not in seen:
                seen.add(node.name)
                pending.append(node.name)
    return IndexBounds(tuple(dict.fromkeys(counts)), tuple(dict.fromkeys(others)), from_end) if counts else None


def _counts(graph: Graph, node: Node, operation: str, source: str) -> Iterator[tuple[Size, bool]]:
    """The sizes that the source indexes in this node, each with whether negative indices count from the end."""
    args = node.args
    if operation in ("embedding", "embedding_bag") and _is(args[1], source):
        yield _shape(graph, args[0])[0], False
    elif operation in INDEX_ALONG_DIM and len(args) > 2 and _is(args[2], source):
        shape, dim = _shape(graph, args[0]), args[1]
        if isinstance(dim, int) and shape:
            yield shape[dim], False
    elif operation in LOSSES and len(args) > 1 and _is(args[1], source):
        shape = _shape(graph, args[0])
        yield shape[1 if len(shape) > 1 else 0], False
    elif operation == "eq" and len(args) > 1 and _is(args[0], source):
        # torch.export has replaced one_hot(i) by i == arange(classes).
        positions = graph.named.get(args[1].name) if isinstance(args[1], Ref) else None
        if positions is not None and positions.op.split(".")[1] == "arange":
            yield positions.type.shape[0], False
    elif operation in ("index", "index_put", "_unsafe_index") and isinstance(args[1], tuple):
        dim = 0
        for item in args[1]:
            kind = graph.type_of(item) if isinstance(item, Ref) else None
            if _is(item, source):
                yield _shape(graph, args[0])[dim], True
            dim += len(kind.shape) if kind is not None and kind.dtype == "bool" else 1


def _special_values(node: Node, operation: str, source: str) -> list[int]:
    """Values of the source that this node treats specially."""
    if operation in LOSSES and len(node.args) > 1 and _is(node.args[1], source):
        position = LOSSES[operation]
        ignored = node.args[position] if len(node.args) > position else node.kwargs.get("ignore_index", DEFAULT_IGNORED)
        return [ignored] if isinstance(ignored, int) else []
    if operation in ("eq", "ne") and len(node.args) > 1 and _is(node.args[0], source):
        other = node.args[1]
        return [other] if isinstance(other, int) and not isinstance(other, bool) else []
    return []


def _is(argument: Argument, source: str) -> bool:
    return isinstance(argument, Ref) and argument.name == source


def _shape(graph: Graph, argument: Argument) -> tuple[Size, ...]:
    return graph.type_of(argument).shape if isinstance(argument, Ref) else ()
