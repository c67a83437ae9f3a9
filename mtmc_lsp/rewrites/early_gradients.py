"""Gradients in the forward pass: where they are a multiple of the upstream gradient, they are computed before it is known.

If the only upstream gradient is a scalar, and every gradient is linear in it, the forward pass computes them for an upstream
gradient of 1 and the backward pass multiplies them by it. A loop over chunks of rows then needs the product once: otherwise the
backward pass computes it again.

Proof: :func:`_degree` shows that each gradient is homogeneous of degree 1 in the upstream gradient ``g``, so ``f(g) = g f(1)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mtmc_lsp.core.graph import INPUT_DEVICE, Graph, Node, Ref
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.primitives import VIEW_OPS, KernelIR, Prim, PrimOp
from mtmc_lsp.rewrites.graph_editing import VIEWS, CannotRewrite, base_name

ZERO = -1
"""The degree of zeros, which are homogeneous of every degree."""
OTHER = 99
"""The degree of values that are not homogeneous in the upstream gradient, or of a higher degree than 1."""
SAME_DEGREE = VIEW_OPS | {PrimOp.CAT, PrimOp.CROP}


def with_early_gradients(graph: Graph) -> Graph:
    """The graph whose forward pass computes the gradients.

    Raises:
        CannotRewrite: the gradients are not a multiple of one number, or the multiplication in place would change other tensors.
    """
    backward = graph.backward
    if backward is None:
        raise CannotRewrite("there is no backward pass")
    if backward.in_forward:
        return graph
    if len(backward.tangents) != 1 or backward.tangents[0].type.shape:
        raise CannotRewrite("only a single scalar loss has gradients that the forward pass can compute")
    tangent = backward.tangents[0]
    _check_degrees(lower(graph), tangent.name, graph.gradients)
    _check_memory(graph)
    name = f"{tangent.name}_of_1"
    while name in graph.named:
        name += "_"
    one = Node(name, "aten.ones.default", ((),), {"dtype": tangent.type.dtype, "device": INPUT_DEVICE}, (tangent.type,))
    swap = {Ref(tangent.name): Ref(name)}
    nodes = (one, *(node.reading(swap) for node in graph.nodes))
    return replace(graph, nodes=nodes, backward=replace(backward, in_forward=True))


def _check_degrees(ir: KernelIR, tangent: str, gradients: tuple[Ref, ...]) -> None:
    """Refuse gradients that are not linear in the upstream gradient."""
    degrees: dict[str, int] = {}
    for name, prim in ir.prims.items():
        degrees[name] = 1 if prim.attrs.get("input") == tangent and prim.op is PrimOp.INPUT else _degree(prim, degrees)
        if prim.op is PrimOp.OPAQUE:
            read = [degrees[ir.of(ref).name] for ref in ir.graph.node(prim.origin).inputs()]
            degrees[name] = OTHER if any(degree > 0 for degree in read) else 0
    if any(degrees[ir.of(ref).name] not in (1, ZERO) for ref in gradients):
        raise CannotRewrite("the gradients are not a multiple of the upstream gradient")


def _degree(prim: Prim, degrees: Mapping[str, int]) -> int:
    """The degree of a primitive as a polynomial in the upstream gradient."""
    read = [degrees[name] for name in prim.inputs]
    if prim.op is PrimOp.CONSTANT:
        return ZERO if prim.attrs["value"] in (0, False) else 0
    if all(degree == 0 for degree in read):
        return 0
    if prim.op is PrimOp.MATMUL or prim.fn == "mul":
        return ZERO if ZERO in read else sum(read) if sum(read) <= 1 else OTHER
    if prim.fn == "div":
        return read[0] if read[1] == 0 else OTHER
    if prim.fn == "where":
        return _common(read[1:]) if read[0] == 0 else OTHER
    if prim.op is PrimOp.PAD:
        return read[0] if prim.attrs["value"] == 0 else OTHER
    if prim.op is PrimOp.GATHER:
        return read[0] if read[1] == 0 else OTHER
    if prim.op is PrimOp.SCATTER_ADD:
        return _common([read[0], read[2]]) if read[1] == 0 else OTHER
    is_sum = prim.op in (PrimOp.REDUCE, PrimOp.UNROLLED_REDUCE) and prim.fn == "sum"
    if is_sum or prim.op in SAME_DEGREE or prim.fn in ("add", "sub", "neg", "cast"):
        return _common(read)
    return OTHER if any(degree > 0 for degree in read) else 0


def _common(degrees: list[int]) -> int:
    """The degree of a sum of terms."""
    distinct = {degree for degree in degrees if degree != ZERO}
    return ZERO if not distinct else distinct.pop() if len(distinct) == 1 else OTHER


def _check_memory(graph: Graph) -> None:
    """Refuse gradients that share memory: each is multiplied in place."""
    storages = []
    results = {_storage(graph, ref) for ref in graph.forward_outputs}
    for ref in graph.gradients:
        kind = graph.type_of(ref)
        is_expanded = any(
            not step.terms and size != Size.of(1) for size, step in zip(kind.shape, kind.stride, strict=True)
        )
        storages.append(_storage(graph, ref))
        if kind.dtype == "float16":
            raise CannotRewrite("a gradient in float16 may underflow before it is multiplied by the upstream gradient")
        if is_expanded or storages[-1] not in graph.named:
            raise CannotRewrite("a gradient is a view of another tensor")
    if len(set(storages)) < len(storages) or set(storages) & results:
        raise CannotRewrite("two gradients share memory")


def _storage(graph: Graph, ref: Ref) -> str:
    """The node or input whose memory a value views."""
    node = graph.named.get(ref.name)
    while node is not None and base_name(node) in VIEWS:
        ref = next(node.inputs())
        node = graph.named.get(ref.name)
    return ref.name if not ref.index else f"{ref.name}.{ref.index}"
