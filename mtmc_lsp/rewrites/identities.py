"""Removes redundant operations: those that change nothing, and those that undo or repeat the previous one."""

from __future__ import annotations

from mtmc_lsp.capture.neutral_operations import constant_number, is_neutral, permutation
from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.graph import Argument, Graph, Node, Ref
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.rewrites.graph_editing import (
    AlgebraRule,
    Edit,
    base_name,
    escapes,
    new_node,
    numbers,
    producer,
    uses_other_outputs,
)

IDEMPOTENT = frozenset("relu abs floor ceil trunc round sign".split())
SAME_VALUES = frozenset("clone contiguous alias detach _to_copy to type_as lift_fresh_copy".split())
REDUCTIONS_OF_ONE = frozenset("sum mean amax amin prod logsumexp".split())
"""Reductions that return the element itself if there is only one."""


def _drop(graph: Graph, node: Node, source: Argument, why: str, text: str) -> Edit | None:
    """Make readers of ``node`` read ``source``, if the caller cannot observe the difference."""
    if not isinstance(source, Ref):
        return None
    kind = graph.type_of(source)
    # Strides must match too: a torch call that reads the value may need dense rows.
    # The caller must get a new tensor, never an alias of an input or of another result.
    if kind != node.type or uses_other_outputs(graph, node) or escapes(graph, node.name):
        return None
    return Edit(node.name, source, (), why, text)


def no_op(graph: Graph, node: Node) -> Edit | None:
    """``x * 1``, ``x / 1``, ``x - 0``, ``x ** 1``, a copy, dropout in evaluation mode."""
    name = base_name(node)
    if not node.args or not (is_neutral(graph, node) or name in SAME_VALUES):
        return None
    return _drop(graph, node, node.args[0], "it returns its input", f"drop the {name}, which changes nothing,")


def inverse_pair(graph: Graph, node: Node) -> Edit | None:
    """Two inverse permutations, two negations, a reshape back, or a widening cast and its inverse."""
    inner = producer(graph, node.args[0]) if node.args else None
    if inner is None or not inner.args or len(inner.outputs) != 1:
        return None
    outer_name, inner_name = base_name(node), base_name(inner)
    why, text = "the second undoes the first", f"drop the {inner_name} and the {outer_name}, which cancel,"
    if outer_name == inner_name == "neg" or _permutations_cancel(node, inner):
        return _drop(graph, node, inner.args[0], why, text)
    reshapes = ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze")
    if outer_name in reshapes and inner_name in reshapes:
        return _drop(graph, node, inner.args[0], why, text)
    source = inner.args[0]
    if outer_name in SAME_VALUES and inner_name in SAME_VALUES and isinstance(source, Ref):
        wide = {"float16": ("float32", "float64"), "bfloat16": ("float32", "float64"), "float32": ("float64",)}
        if inner.type.dtype in wide.get(graph.type_of(source).dtype, ()):
            return _drop(graph, node, source, why, text)
    if outer_name == inner_name and outer_name in IDEMPOTENT and not node.args[1:]:
        return _drop(graph, node, node.args[0], "the second has no further effect", f"drop the second {outer_name}")
    return None


def _permutations_cancel(node: Node, inner: Node) -> bool:
    first, second = permutation(inner), permutation(node)
    if first is None or second is None:
        return False
    return [first[i] for i in second] == list(range(len(first)))


def single_element_reduction(graph: Graph, node: Node) -> Edit | None:
    """A reduction of dimensions of size 1."""
    name = base_name(node)
    is_indexed = name in ("max", "min") and node.op.endswith(".dim")
    if (name not in REDUCTIONS_OF_ONE and not is_indexed) or len(node.args) < 2 or node.kwargs:
        return None
    source = node.args[0]
    if not isinstance(source, Ref):
        return None
    kind = graph.type_of(source)
    dims = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    reduced = [constant_number(item) for item in dims]
    if not reduced or any(d is None or kind.shape[int(d)] != Size.of(1) for d in reduced) or not is_float(kind.dtype):
        return None
    why, text = "the sum, mean and extremum of one element are the element", f"drop the {name} of a single element"
    if kind.shape == node.type.shape:
        return _drop(graph, node, source, why, text)
    if uses_other_outputs(graph, node) or escapes(graph, node.name) or kind.dtype != node.type.dtype:
        return None
    new = new_node(node, "element", "aten.reshape.default", (source, numbers(node.type.shape)), node.type)
    return Edit(node.name, Ref(new.name), (new,), why, text)


REWRITES = (
    AlgebraRule("drop-no-op", no_op, "1 and 0 are the neutral elements; a copy has the same values."),
    AlgebraRule(
        "cancel-inverses",
        inverse_pair,
        "g(f(x)) = x for inverse f and g, f(f(x)) = f(x) for projections; widening casts are exact.",
    ),
    AlgebraRule(
        "drop-single-element-reduction",
        single_element_reduction,
        "sum, mean, max, min and log(exp(x)) of one element are the element.",
    ),
)
