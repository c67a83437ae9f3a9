"""Recomputes the probabilities of an attention in its backward pass, instead of saving them (Dao, arXiv 2307.08691).

Of ``out = softmax(scores) @ v``, the forward pass saves ``out``, the maximum of each row of scores, and the logarithm of the sum
of its exponentials. The backward pass computes the scores again, and from them the probabilities ``exp(scores - row_max -
log_total)``. One number, the sum of both, would be rounded as a large maximum is: a row of masked scores of -1e9 would have
probabilities of 1. The sum over the keys of a probability times its gradient, which the gradient of a softmax subtracts, equals
the sum of ``out`` times its gradient:

    sum_n(p[m, n] * sum_w(grad_out[m, w] * v[n, w])) = sum_w(grad_out[m, w] * sum_n(p[m, n] * v[n, w]))

So each tile of scores gives its share of the gradients alone, and no value with an element for each pair of a query and a key
is in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from mtmc_lsp.core.dtypes import is_low_precision
from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.axes import AxisTable
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.primitives import CHEAP, VIEW_OPS, KernelIR, PrimOp
from mtmc_lsp.rewrites.graph_editing import CannotRewrite, base_name, contiguous_type, numbers
from mtmc_lsp.rewrites.saved_values import AGAIN

RULE = "recomputed-attention"
LAYOUT = frozenset("view _unsafe_view reshape permute transpose t squeeze unsqueeze clone alias detach".split())
"""ATen operations that keep every element of a tensor, in the same or another order."""
RESHAPES = frozenset("view _unsafe_view reshape squeeze unsqueeze".split())
SAME = frozenset("clone alias detach".split())
CASTS = frozenset({"_to_copy"})
MATRIX = frozenset({"mm", "bmm"})
"""Products as they are in a graph with a backward pass."""


@dataclass(frozen=True)
class Attention:
    """The nodes of ``softmax(f(q @ k)) @ v`` in a graph with a backward pass."""

    graph: Graph
    scores: Node
    logits: Ref
    largest: Node
    shifted: Node
    powers: Node
    total: Node
    weights: Node
    """The quotient of the powers and their total."""
    result: Node
    """The second product."""
    inside: tuple[str, ...]
    """The nodes from the scores to the left operand of the second product, in execution order."""
    outcome: tuple[str, ...]
    """The second product and the operations behind it that change its layout; the last one is in memory."""


def attention_of(graph: Graph, name: str) -> Attention:
    """The attention whose second product is the node ``name``.

    Raises:
        CannotRewrite: there is none, or another operation needs its scores or probabilities.
    """
    backward = graph.backward_nodes
    result = graph.named.get(name)
    if not backward or result is None or base_name(result) not in MATRIX or name in backward:
        raise CannotRewrite(f"{name} is no matrix product of a forward pass")
    weights = _behind(graph, next(iter(result.inputs())), LAYOUT | CASTS)
    powers = _source(graph, weights, "div", 0)
    total, shifted = _source(graph, weights, "div", 1), _source(graph, powers, "exp", 0)
    largest = _source(graph, shifted, "sub", 1)
    if weights is None or powers is None or total is None or shifted is None or largest is None:
        raise CannotRewrite(f"the left operand of {name} is no softmax")
    logits = _ref(shifted, 0)
    is_softmax = (
        logits is not None
        and _reduces_rows(total, "sum", Ref(powers.name), graph)
        and _reduces_rows(largest, "amax", logits, graph)
    )
    if not is_softmax or logits is None:
        raise CannotRewrite(f"the left operand of {name} is no softmax over the keys")
    dependent = _until_product(graph, logits)
    scores = next((graph.node(each) for each in dependent if base_name(graph.node(each)) in MATRIX), None)
    if scores is None:
        raise CannotRewrite("the logits of the softmax are no elementwise function of one product")
    inside = _between(graph, scores.name, next(iter(result.inputs())).name)
    found = Attention(
        graph, scores, logits, largest, shifted, powers, total, weights, result, inside, _outcome(graph, name)
    )
    later = backward | {*inside, name}
    for each in inside:
        if any(reader.name not in later for reader in graph.readers(each)) or _is_returned(graph, each):
            raise CannotRewrite(
                "another operation of the forward pass, or the caller, reads its scores or probabilities"
            )
    return found


def recomputing(graph: Graph, name: str) -> Graph:
    """The graph with the probabilities of an attention computed again by the backward pass.

    Raises:
        CannotRewrite: it is not possible.
    """
    found = attention_of(graph, name)
    log_total = _log_total(found)
    cheap = set(_cheap_sources(found, lower(graph)))
    again, chain = _computed_again(found, Ref(log_total.name), cheap)
    swap = {Ref(each): Ref(chain[each]) for each in found.inside}
    swap |= {Ref(f"{each}{AGAIN}"): Ref(chain[each]) for each in found.inside}
    # Views of the operands are free, so that their sources are saved, once.
    swap |= {Ref(each): Ref(f"{each}{AGAIN}") for each in cheap}
    delta_of = _row_sums(found)
    named = _variables(graph, set(delta_of))
    copies = {node.name: node for node in again}
    nodes: list[Node] = []
    pending = list(again)
    first = next(
        node.name for node in graph.nodes if node.name in graph.backward_nodes and not node.name.endswith(AGAIN)
    )
    for node in graph.nodes:
        if node.name == first:
            nodes += pending
        if node.name in copies:
            continue
        if node.name in delta_of:
            added, delta = delta_of[node.name]
            nodes += added
            swap[Ref(node.name)] = delta
            continue
        updated = node.reading(swap) if node.name in graph.backward_nodes else node
        variable = named.get(node.name, updated.variable) or ("row_max" if node is found.largest else "")
        nodes.append(replace(updated, variable=variable))
        if node.name == found.total.name:
            nodes.append(log_total)
    assert graph.backward is not None
    passes = replace(graph.backward, early=(*graph.backward.early, found.largest.name, log_total.name))
    changed = replace(graph, nodes=tuple(nodes), backward=passes)
    changed = _live(
        replace(changed, outputs=(*graph.forward_outputs, *(swap.get(ref, ref) for ref in graph.gradients)))
    )
    return _with_separate_positions(changed, {name for each in cheap for name in (each, f"{each}{AGAIN}")})


def _variables(graph: Graph, sums: set[str]) -> dict[str, str]:
    """Names for the gradients of the scores: the last values between some sums and the products that read them."""
    reached = set(sums)
    for node in graph.nodes:
        if base_name(node) not in MATRIX and reached & {ref.name for ref in node.inputs()}:
            reached.add(node.name)
    last = [
        name for name in reached - sums if base_name(graph.node(name)) not in LAYOUT and not _is_returned(graph, name)
    ]
    ends = LAYOUT | MATRIX
    return {name: "grad_scores" for name in last if all(base_name(reader) in ends for reader in graph.readers(name))}


def _log_total(found: Attention) -> Node:
    total = found.total
    return Node(f"{total.name}_log", "aten.log.default", (Ref(total.name),), {}, (total.type,), total.line, "log_total")


def _computed_again(found: Attention, log_total: Ref, cheap: set[str]) -> tuple[list[Node], dict[str, str]]:
    """Copies of the nodes that compute the probabilities and of the cheap nodes that these read, and their names."""
    graph = found.graph
    chain: dict[str, str] = {}
    for name in found.inside:
        if name not in (found.largest.name, found.total.name, found.weights.name):
            chain[name] = f"{name}{AGAIN}"
    # The quotient is the exponential itself.
    chain[found.weights.name] = chain[found.powers.name]
    chain[found.largest.name] = chain[found.total.name] = chain[found.powers.name]
    swap = {Ref(name): Ref(copy) for name, copy in chain.items()}
    swap |= {Ref(name): Ref(f"{name}{AGAIN}") for name in cheap}
    shifted, largest = found.shifted, Ref(found.largest.name)
    normalised = Ref(f"{shifted.name}_normalised{AGAIN}")
    copies = []
    for node in graph.nodes:
        if node.name in cheap or (node.name in chain and chain[node.name] == f"{node.name}{AGAIN}"):
            changed = node.reading({**swap, largest: largest, Ref(shifted.name): normalised})
            is_behind = node is found.powers or graph.positions[node.name] > graph.positions[found.powers.name]
            variable = (found.weights.variable or "weights") if is_behind and node.name in chain else node.variable
            copies.append(replace(changed, name=f"{node.name}{AGAIN}", variable=variable))
            if node is shifted:
                args: tuple[Argument, ...] = (Ref(f"{shifted.name}{AGAIN}"), log_total)
                copies.append(Node(normalised.name, "aten.sub.Tensor", args, {}, (shifted.type,), shifted.line))
    return copies, chain


def _cheap_sources(found: Attention, ir: KernelIR) -> Iterator[str]:
    """Forward nodes outside the attention that a kernel computes while it computes the scores.

    For the operands of a product these are views alone.
    """
    graph, inside = found.graph, set(found.inside)
    pending = [(ref.name, name == found.scores.name) for name in found.inside for ref in graph.node(name).inputs()]
    pending += [(ref.name, True) for ref in found.result.inputs()]
    seen: set[str] = set()
    while pending:
        name, is_operand = pending.pop()
        if name in seen or name in inside or name not in graph.named:
            continue
        if is_cheap(ir, name, VIEW_OPS if is_operand else CHEAP):
            seen.add(name)
            yield name
            pending += [(ref.name, is_operand) for ref in graph.node(name).inputs()]


def is_cheap(ir: KernelIR, name: str, allowed: Iterable[PrimOp]) -> bool:
    """Whether a node consists of these primitives alone."""
    return name not in ir.opaque and all(prim.op in allowed for prim in ir.of_node(name))


def _row_sums(found: Attention) -> dict[str, tuple[list[Node], Ref]]:
    """For each sum over the keys of probabilities times their gradients: nodes that compute it from the result."""
    graph = found.graph
    equal = {found.weights.name} | {
        name for name in found.inside if _behind(graph, Ref(name), LAYOUT | CASTS) is found.weights
    }
    equal |= {f"{name}{AGAIN}" for name in equal}
    sums: dict[str, tuple[list[Node], Ref]] = {}
    for node in graph.nodes:
        if node.name not in graph.backward_nodes or base_name(node) != "sum":
            continue
        factor = _source(graph, node, "sum", 0)
        sides = [_ref(factor, i) for i in (0, 1)] if factor is not None and base_name(factor) == "mul" else []
        for side, other in (sides, sides[::-1]) if len(sides) == 2 and None not in sides else ():
            assert side is not None and other is not None
            start = _behind(graph, side, LAYOUT | CASTS, among=equal)
            gradient = _behind(graph, other, LAYOUT | CASTS)
            if start is None or start.name not in equal or gradient is None or base_name(gradient) not in MATRIX:
                continue
            if _reduces_rows(node, "sum", Ref(factor.name if factor else ""), graph) and factor is not None:
                _check_order(graph, gradient, factor)
                sums[node.name] = _from_result(found, node, _upstream(found, gradient))
                break
    return sums


def _upstream(found: Attention, gradient: Node) -> Ref:
    """The gradient of the result: the left operand of the product with the values that gives those of the probabilities.

    Raises:
        CannotRewrite: it is another product.
    """
    upstream = next(iter(gradient.inputs()))
    if found.graph.type_of(upstream).shape != found.result.type.shape:
        raise CannotRewrite("the gradient of the probabilities is no product of the result's gradient and the values")
    return upstream


def _check_order(graph: Graph, gradient: Node, factor: Node) -> None:
    """Check that the operations between both nodes keep the order of rows.

    Raises:
        CannotRewrite: they do not.
    """
    ir = lower(graph)
    between = {gradient.name, factor.name, *_between(graph, gradient.name, factor.name)}
    prims = [name for name, prim in ir.prims.items() if prim.origin in between]
    table = AxisTable(ir.prims, prims, graph.sizes)
    orders = [table.all_axes(ir.of(Ref(node.name)).name) for node in (gradient, factor)]
    if orders[0] != orders[1]:
        raise CannotRewrite("the gradient of the probabilities has another order of rows than they")


def _from_result(found: Attention, node: Node, upstream: Ref) -> tuple[list[Node], Ref]:
    """The sum of the result times its gradient over the width, in place of ``node``."""
    graph, added = found.graph, list[Node]()

    def add(op: str, args: tuple[Argument, ...], kind: TensorType, variable: str = "", **kwargs: Argument) -> Ref:
        name = f"{node.name}_of_result{len(added)}"
        added.append(Node(name, op, args, kwargs, (kind,), found.result.line, variable))
        return Ref(name)

    value = Ref(found.outcome[-1])
    for name in reversed(found.outcome[1:]):
        behind, before = graph.node(name), graph.type_of(next(iter(graph.node(name).inputs())))
        kind = contiguous_type(before.shape, before.dtype)
        word = base_name(behind)
        if word in RESHAPES:
            value = add("aten.reshape.default", (value, numbers(before.shape)), kind)
        elif word == "permute":
            order = behind.args[1]
            assert isinstance(order, tuple)
            dims = [int(str(dim)) % len(order) for dim in order]
            value = add("aten.permute.default", (value, tuple(dims.index(dim) for dim in range(len(dims)))), kind)
        elif word == "transpose":
            value = add("aten.transpose.int", (value, *behind.args[1:]), kind)
        elif word == "t":
            value = add("aten.t.default", (value,), kind)
    operands = []
    for ref, dtype in ((value, found.result.type.dtype), (upstream, graph.type_of(upstream).dtype)):
        wide = contiguous_type(found.result.type.shape, "float32")
        operands.append(add("aten._to_copy.default", (ref,), wide, dtype="float32") if is_low_precision(dtype) else ref)
    wide = contiguous_type(found.result.type.shape, "float32")
    pairs = add("aten.mul.Tensor", tuple(operands), wide)
    rows = contiguous_type((*found.result.type.shape[:-1], Size.of(1)), "float32")
    total = add("aten.sum.dim_IntList", (pairs, (-1,), True), rows, "delta")
    if node.type.shape != rows.shape:
        kind = contiguous_type(node.type.shape, "float32")
        total = add("aten.reshape.default", (total, numbers(node.type.shape)), kind, "delta")
    return added, total


def _ref(node: Node | None, number: int) -> Ref | None:
    value = node.args[number] if node is not None and len(node.args) > number else None
    return value if isinstance(value, Ref) else None


def _source(graph: Graph, node: Node | None, word: str, number: int) -> Node | None:
    """The node that computes an argument of an operation ``word``."""
    ref = _ref(node, number)
    if node is None or ref is None or base_name(node) != word:
        return None
    return graph.named.get(ref.name)


def _behind(graph: Graph, ref: Ref, words: frozenset[str], among: Iterable[str] = ()) -> Node | None:
    """The node that computes a value, looking through some operations until one in ``among``."""
    node = graph.named.get(ref.name)
    while node is not None and base_name(node) in words and node.name not in among:
        node = graph.named.get(next(iter(node.inputs())).name)
    return node


def _reduces_rows(node: Node, word: str, source: Ref, graph: Graph) -> bool:
    rank = len(graph.type_of(source).shape)
    rows = [(-1,), (rank - 1,)]
    return base_name(node) == word and node.args[0] == source and node.args[1:] in [(dims, True) for dims in rows]


def _until_product(graph: Graph, ref: Ref) -> list[str]:
    """The nodes that a value is computed from, through operations that are no products; the first product ends the walk."""
    pending, seen, products = [ref.name], list[str](), list[str]()
    while pending:
        name = pending.pop()
        node = graph.named.get(name)
        if node is None or name in seen or name in products:
            continue
        if base_name(node) in MATRIX:
            products.append(name)
            continue
        seen.append(name)
        pending += [each.name for each in node.inputs()]
    return products if len(products) == 1 else []


def _between(graph: Graph, first: str, last: str) -> tuple[str, ...]:
    """The nodes on paths from one node to another, both included, in execution order."""
    reached = {first}
    for node in graph.nodes[graph.positions[first] : graph.positions[last] + 1]:
        if reached & {ref.name for ref in node.inputs()}:
            reached.add(node.name)
    needed, pending = set[str](), [last]
    while pending:
        name = pending.pop()
        if name in reached and name not in needed:
            needed.add(name)
            pending += [ref.name for ref in graph.node(name).inputs()]
    return tuple(node.name for node in graph.nodes if node.name in needed)


def _outcome(graph: Graph, name: str) -> tuple[str, ...]:
    """A product and the operations behind it that only change its layout, until a value that others read."""
    chain = [name]
    while True:
        following = graph.readers(chain[-1])
        is_inner = len(following) == 1 and following[0].name not in graph.backward_nodes
        if _is_returned(graph, chain[-1]) or not is_inner or base_name(following[0]) not in LAYOUT:
            return tuple(chain)
        chain.append(following[0].name)


def _is_returned(graph: Graph, name: str) -> bool:
    return any(ref.name == name for ref in graph.escaping)


def _with_separate_positions(graph: Graph, names: Iterable[str]) -> Graph:
    """The graph with one ``arange`` for each reader: positions of queries and keys are then different axes of a kernel."""
    nodes: list[Node] = []
    swaps: dict[str, dict[Ref, Ref]] = {}
    for node in graph.nodes:
        nodes.append(node.reading(swaps.get(node.name, {})))
        if node.name not in names or base_name(node) != "arange":
            continue
        for reader in graph.readers(node.name)[1:]:
            copy = f"{node.name}_of_{reader.name}"
            nodes.append(replace(node, name=copy))
            swaps.setdefault(reader.name, {})[Ref(node.name)] = Ref(copy)
    return replace(graph, nodes=tuple(nodes))


def _live(graph: Graph) -> Graph:
    """The graph without nodes that neither a result nor a gradient needs."""
    needed = {ref.name for ref in graph.outputs} | {item.value.name for item in graph.mutations}
    for node in reversed(graph.nodes):
        if node.name in needed:
            needed |= {ref.name for ref in node.inputs()}
    return replace(graph, nodes=tuple(node for node in graph.nodes if node.name in needed))
