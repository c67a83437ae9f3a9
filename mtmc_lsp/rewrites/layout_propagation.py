"""Propagates channels-last layout through a whole target.

With a single convolution, the operands and the result need copies. Here a value is converted to channels last once, before the
first convolution that reads it, and keeps this layout through all operations that work on each position of an image or volume
separately: elementwise operations, batch norm (statistics cover all positions of a channel, in any order), pooling, resampling
and concatenation of channels. Other operations, and the outputs of the target, read a copy in the original layout. Values do not
change: only the memory layout does, and kernels compute addresses from strides.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mtmc_lsp.core.graph import Graph, Node, Ref, TensorType
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.primitives import PrimOp
from mtmc_lsp.rewrites.convolution_layout import FORMATS, channels_last
from mtmc_lsp.rewrites.graph_editing import CannotRewrite, base_name

RULE = "channels-last-throughout"
LEAST_CONVOLUTIONS = 2
"""With a single convolution, the rewrite of that convolution does the same."""
ONE = Size.of(1)
CONVOLUTIONS = frozenset(f"{name}{n}d" for name in ("conv", "conv_transpose") for n in (2, 3))
LAYOUT_AGNOSTIC = frozenset(
    "max_pool2d max_pool3d avg_pool2d avg_pool3d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d "
    "upsample_nearest2d upsample_bilinear2d upsample_nearest3d upsample_trilinear3d "
    "batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit _native_batch_norm_legit_functional".split()
)
"""Operations on images that PyTorch runs in the memory layout of their input."""
COPIES = frozenset({"clone", "alias", "detach", "lift_fresh_copy"})
"""Operations that return their input, in its layout unless a memory format is given."""
ELEMENTWISE = frozenset({PrimOp.POINTWISE, PrimOp.CONSTANT, PrimOp.EXPAND, PrimOp.RANDOM})
REDUCTIONS = frozenset({"mean", "sum", "amax", "amin"})
POOLING = frozenset(name for name in LAYOUT_AGNOSTIC if "pool" in name)


@dataclass
class _Propagation:
    """One traversal of a graph that tracks which values are channels-last."""

    graph: Graph
    nodes: list[Node] = field(default_factory=list)
    packed: dict[Ref, TensorType] = field(default_factory=dict)
    """Values that are channels-last now, with their original types."""
    copies: dict[tuple[Ref, bool], Ref] = field(default_factory=dict)
    """Copies of values: ``(value, whether the copy is channels-last)`` to the copy."""

    def walk(self) -> Graph:
        for node in self.graph.nodes:
            name = base_name(node)
            if name in CONVOLUTIONS and _is_image(node.type) and not node.kwargs:
                self._convolution(node)
            elif self._propagates(node):
                # Concatenation needs one layout: inputs in the other layout are copied.
                others = dict.fromkeys(node.inputs()) if name == "cat" else ()
                self._append_packed(node.reading({ref: self._packed(ref) for ref in others}))
            elif self._ignores_layout(node):
                self.nodes.append(node)
            else:
                swap = {ref: self._unpacked(ref) for ref in node.inputs() if ref in self.packed}
                self.nodes.append(node.reading(swap))
        outputs = tuple(self._unpacked(ref) for ref in self.graph.outputs)
        mutations = tuple(replace(m, value=self._unpacked(m.value)) for m in self.graph.mutations)
        return replace(self.graph, nodes=tuple(self.nodes), outputs=outputs, mutations=mutations)

    def _convolution(self, node: Node) -> None:
        x, weight = node.args[:2]
        swap = {ref: self._packed(ref) for ref in (x, weight) if isinstance(ref, Ref)}
        self._append_packed(node.reading(swap))

    def _append_packed(self, node: Node) -> None:
        """Append the node with its first result in channels-last layout."""
        kind = node.type
        if _is_image(kind) and kind.is_contiguous:
            self.packed[Ref(node.name)] = kind
            node = replace(node, outputs=(channels_last(kind.shape, kind.dtype), *node.outputs[1:]))
        self.nodes.append(node)

    def _propagates(self, node: Node) -> bool:
        """Whether the node works on each position separately and reads a channels-last image, so that its result is too."""
        images = [ref for ref in node.inputs() if ref in self.packed]
        if not images or not _is_image(node.type):
            return False
        name = base_name(node)
        if name == "cat":
            dim = node.args[1] if len(node.args) > 1 else 0
            return dim in (1, 1 - len(node.type.shape))
        if name in LAYOUT_AGNOSTIC:
            return images[0] == node.args[0]
        if node.type.shape != self.graph.type_of(images[0]).shape or "memory_format" in node.kwargs:
            return False
        if name in COPIES:
            return True
        prims = list(lower(self.graph).of_node(node.name))
        return bool(prims) and all(prim.op in ELEMENTWISE for prim in prims)

    def _ignores_layout(self, node: Node) -> bool:
        """Whether the node's result does not depend on the layout: a reduction or pooling over all positions of each image."""
        images = [ref for ref in node.inputs() if ref in self.packed]
        if images and base_name(node) in POOLING and images[0] == node.args[0]:
            return not _is_image(node.type)
        if not images or base_name(node) not in REDUCTIONS or len(node.args) < 2:
            return False
        rank, dims = len(self.graph.type_of(images[0]).shape), node.args[1]
        reduced = {int(str(d)) % rank for d in dims} if isinstance(dims, tuple) else set()
        return reduced >= set(range(2, rank))

    def _packed(self, ref: Ref) -> Ref:
        kind = self.graph.type_of(ref)
        if ref in self.packed or not _is_image(kind) or kind.is_channels_last:
            return ref
        return self._copy(ref, channels_last(kind.shape, kind.dtype), packed=True)

    def _unpacked(self, ref: Ref) -> Ref:
        return self._copy(ref, self.packed[ref], packed=False) if ref in self.packed else ref

    def _copy(self, ref: Ref, kind: TensorType, *, packed: bool) -> Ref:
        key = (ref, packed)
        if key not in self.copies:
            source = self.graph.named.get(ref.name)
            name = f"{ref.name}_{'packed' if packed else 'unpacked'}{ref.index or ''}"
            order = FORMATS[len(kind.shape)] if packed else "torch.contiguous_format"
            line = source.line if source is not None else 0
            self.nodes.append(Node(name, "aten.clone.default", (ref,), {"memory_format": order}, (kind,), line))
            self.copies[key] = Ref(name)
        return self.copies[key]


def _is_image(kind: TensorType) -> bool:
    """Whether a tensor has several channels and positions, so that the two layouts differ."""
    return len(kind.shape) in FORMATS and kind.shape[1] != ONE and any(size != ONE for size in kind.shape[2:])


def matches(graph: Graph) -> bool:
    """Whether the graph has enough convolutions and none of them is channels-last."""
    convolutions = [node for node in graph.nodes if base_name(node) in CONVOLUTIONS and _is_image(node.type)]
    return len(convolutions) >= LEAST_CONVOLUTIONS and not any(node.type.is_channels_last for node in convolutions)


def is_channels_last(graph: Graph) -> bool:
    """Whether all convolutions are channels-last."""
    convolutions = [node for node in graph.nodes if base_name(node) in CONVOLUTIONS and _is_image(node.type)]
    return bool(convolutions) and all(node.type.is_channels_last for node in convolutions)


def in_channels_last(graph: Graph) -> Graph:
    """``graph`` with every image that it computes in channels-last layout.

    Raises:
        CannotRewrite: the graph has too few convolutions, or one is already channels-last.
    """
    if not matches(graph):
        raise CannotRewrite("there are no convolutions to run with channels last")
    return _Propagation(graph).walk()
