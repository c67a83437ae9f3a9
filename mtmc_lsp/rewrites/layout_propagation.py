"""Channels last through a whole target: every image that convolutions make, and what is computed of it place by place.

One convolution alone pays for copies of its operands and its result. Here a value is brought into the order with channels
densest once, before the first convolution that reads it, and stays so through everything that works on each place of an image
or volume by itself: elementwise operations, batch norm (statistics are of all places of a channel, in any order), pooling,
resampling, and concatenation of channels. What walks its elements in another way, and what the target returns, reads a copy in
the order that it had. No value changes: an element's place in memory is all that does, and kernels take addresses from the
strides.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from mtmc_lsp.core.graph import Graph, Node, Ref, TensorType
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.primitives import PrimOp
from mtmc_lsp.rewrites.convolution_layout import FORMATS, channels_last
from mtmc_lsp.rewrites.graph_editing import CannotRewrite, base_name

RULE = "channels-last-throughout"
LEAST_CONVOLUTIONS = 2
"""With one alone, its own copies are all there is to it."""
ONE = Size.of(1)
CONVOLUTIONS = frozenset(f"{name}{n}d" for name in ("conv", "conv_transpose") for n in (2, 3))
BY_PLACE = frozenset(
    "max_pool2d max_pool3d avg_pool2d avg_pool3d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d "
    "upsample_nearest2d upsample_bilinear2d upsample_nearest3d upsample_trilinear3d "
    "batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit _native_batch_norm_legit_functional".split()
)
"""Operations that read and give images in any order of their dimensions, and that PyTorch runs in the order given."""
SAME = frozenset({"clone", "alias", "detach", "lift_fresh_copy"})
"""Operations that give what they read, in the order in which it lies where none is asked for."""
ELEMENTWISE = frozenset({PrimOp.POINTWISE, PrimOp.CONSTANT, PrimOp.EXPAND, PrimOp.RANDOM})
REDUCTIONS = frozenset({"mean", "sum", "amax", "amin"})


@dataclass
class _Pass:
    """One walk over a graph: which values lie with channels densest from now on."""

    graph: Graph
    nodes: list[Node] = field(default_factory=list)
    packed: dict[Ref, TensorType] = field(default_factory=dict)
    """Values that lie so now, with their types as they were."""
    copies: dict[tuple[Ref, bool], Ref] = field(default_factory=dict)
    """Of values in the other order: whether with channels densest, and where they are."""

    def walk(self) -> Graph:
        for node in self.graph.nodes:
            name = base_name(node)
            if name in CONVOLUTIONS and _is_image(node.type) and not node.kwargs:
                self._convolution(node)
            elif self._follows(node):
                # Channels are put together in one order: what has another is copied.
                others = dict.fromkeys(node.inputs()) if name == "cat" else ()
                self._place(node.reading({ref: self._with_channels_densest(ref) for ref in others}))
            elif self._accepts(node):
                self.nodes.append(node)
            else:
                swap = {ref: self._as_it_was(ref) for ref in node.inputs() if ref in self.packed}
                self.nodes.append(node.reading(swap))
        outputs = tuple(self._as_it_was(ref) for ref in self.graph.outputs)
        mutations = tuple(replace(m, value=self._as_it_was(m.value)) for m in self.graph.mutations)
        return replace(self.graph, nodes=tuple(self.nodes), outputs=outputs, mutations=mutations)

    def _convolution(self, node: Node) -> None:
        x, weight = node.args[:2]
        swap = {ref: self._with_channels_densest(ref) for ref in (x, weight) if isinstance(ref, Ref)}
        self._place(node.reading(swap))

    def _place(self, node: Node) -> None:
        """The node with its first result in the other order."""
        kind = node.type
        if _is_image(kind) and kind.is_contiguous:
            self.packed[Ref(node.name)] = kind
            node = replace(node, outputs=(channels_last(kind.shape, kind.dtype), *node.outputs[1:]))
        self.nodes.append(node)

    def _follows(self, node: Node) -> bool:
        """Whether the result lies as what is read: work on each place by itself on at least one image that lies so now."""
        images = [ref for ref in node.inputs() if ref in self.packed]
        if not images or not _is_image(node.type):
            return False
        name = base_name(node)
        if name == "cat":
            dim = node.args[1] if len(node.args) > 1 else 0
            return dim in (1, 1 - len(node.type.shape))
        if name in BY_PLACE:
            return images[0] == node.args[0]
        if node.type.shape != self.graph.type_of(images[0]).shape or "memory_format" in node.kwargs:
            return False
        if name in SAME:
            return True
        prims = list(lower(self.graph).of_node(node.name))
        return bool(prims) and all(prim.op in ELEMENTWISE for prim in prims)

    def _accepts(self, node: Node) -> bool:
        """Whether it reads images in any order and gives the same whatever the order: a reduction of all places of each."""
        images = [ref for ref in node.inputs() if ref in self.packed]
        if not images or base_name(node) not in REDUCTIONS or len(node.args) < 2:
            return False
        rank, dims = len(self.graph.type_of(images[0]).shape), node.args[1]
        reduced = {int(str(d)) % rank for d in dims} if isinstance(dims, tuple) else set()
        return reduced >= set(range(2, rank))

    def _with_channels_densest(self, ref: Ref) -> Ref:
        kind = self.graph.type_of(ref)
        if ref in self.packed or not _is_image(kind) or kind.is_channels_last:
            return ref
        return self._copy(ref, channels_last(kind.shape, kind.dtype), packed=True)

    def _as_it_was(self, ref: Ref) -> Ref:
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
    """Whether it has channels and more than one place, so that the two orders differ."""
    return len(kind.shape) in FORMATS and kind.shape[1] != ONE and any(size != ONE for size in kind.shape[2:])


def matches(graph: Graph) -> bool:
    """Whether there are convolutions enough, and none has its channels densest yet."""
    own = [node for node in graph.nodes if base_name(node) in CONVOLUTIONS and _is_image(node.type)]
    return len(own) >= LEAST_CONVOLUTIONS and not any(node.type.is_channels_last for node in own)


def is_in_order(graph: Graph) -> bool:
    """Whether the convolutions have their channels densest."""
    own = [node for node in graph.nodes if base_name(node) in CONVOLUTIONS and _is_image(node.type)]
    return bool(own) and all(node.type.is_channels_last for node in own)


def in_channels_last(graph: Graph) -> Graph:
    """``graph`` with every image that it computes in that order.

    Raises:
        CannotRewrite: there are too few convolutions, or some have it already.
    """
    if not matches(graph):
        raise CannotRewrite("there are no convolutions to run with channels last")
    return _Pass(graph).walk()


def copied_images(before: Graph, after: Graph) -> Collection[str]:
    """The copies, but for those of weights."""
    weights = {ref.name for node in after.nodes if base_name(node) in CONVOLUTIONS for ref in list(node.inputs())[1:2]}
    return [node.name for node in after.nodes if node.name not in before.named and node.name not in weights]
