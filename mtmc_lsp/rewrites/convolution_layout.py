"""Operands of convolutions in the order, and in the precision, in which tensor cores take them.

``channels_last`` copies both operands so that channels lie densest, and the result back: the library then runs its own kernels
without bringing the layouts into order itself, and what is around the convolution reads and writes any layout, so the copies
become part of its neighbours' kernels. Each element keeps its value.

``fp16_operands`` does so in float16 where the user's own convolution runs TF32. Both formats keep 10 bits of a significand;
what float16 lacks is range, so each sample and each output channel's weights are first scaled by a power of two, and the result
is scaled back in float32. The scales are chosen so that no sum of products reaches float16's largest number (nor with up to
sixteen times the workload's channels, where those are not constant).

``split_operands`` keeps all bits: each scaled operand is packed as the sum of two float16 tensors, which are as large as the
float32 tensor together, and one kernel sums three products of them: high * high, low * high and high * low.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.lower.convolution import LOW_PART, SPLIT
from mtmc_lsp.rewrites.graph_editing import AlgebraRule, Edit, base_name, dense, made, uses_other_outputs

FORMATS = {4: "torch.channels_last", 5: "torch.channels_last_3d"}
"""Rank to the name of the layout; PyTorch has none for lines."""
LINES, HEIGHT = 3, 2
"""The rank of lines with channels, which become images one place high, and the dimension that these have more."""
LARGEST_EXPONENT = 15
"""Sums of products stay below two to this, and so below float16's largest number."""
SPARE = 4
"""Powers of two left for more channels than the workload has."""
LEAST_ROOM = -6
"""With less room than this, much of what is small would be rounded to float16's subnormal numbers."""
SPLIT_EXPONENT = 12
"""Split operands stay below two to this: sums are float32, and low halves of all but tiny elements are no subnormal numbers."""
ONE = Size.of(1)
HALF_WHY = (
    "your own code runs it in TF32, whose significands are as short as float16's: scaled float16 operands take half the memory "
    "and run at twice the rate"
)


@dataclass
class Chain:
    """New nodes in the place of one."""

    like: Node
    graph: Graph
    nodes: list[Node] = field(default_factory=list)

    def add(self, op: str, args: tuple[Argument, ...], kind: TensorType, **kwargs: Argument) -> Ref:
        """An operation of PyTorch's with a result of that type."""
        qualified = op if op.startswith("mtmc.") else f"aten.{op}"
        node = made(self.like, f"packed{len(self.nodes)}", qualified, args, kind)
        self.nodes.append(replace(node, kwargs=kwargs))
        return Ref(node.name)


def channels_last(shape: tuple[Size, ...], dtype: str) -> TensorType:
    """A dense tensor whose dimension 1 lies densest."""
    order = [0, *range(2, len(shape)), 1]
    steps = contiguous_stride(tuple(shape[d] for d in order))
    return TensorType(shape, dtype, tuple(steps[order.index(d)] for d in range(len(shape))))


@dataclass(frozen=True)
class Convolution:
    """A convolution that tensor cores compute, its operands dense in one of the two layouts.

    One of lines is run as one of images that are one place high: these have a layout with channels densest, and the library
    runs them as fast.
    """

    chain: Chain
    node: Node
    x: Ref
    weight: Ref
    kinds: tuple[TensorType, TensorType]

    @property
    def result(self) -> TensorType:
        return self.node.type

    @property
    def lines(self) -> bool:
        return len(self.result.shape) == LINES

    @property
    def transposed(self) -> bool:
        return "transpose" in base_name(self.node)

    @property
    def layout(self) -> str:
        """The name of the layout with channels densest."""
        return FORMATS[len(self._shape(self.result))]

    def _shape(self, kind: TensorType) -> tuple[Size, ...]:
        return (*kind.shape[:HEIGHT], ONE, *kind.shape[HEIGHT:]) if self.lines else kind.shape

    def packed(self, value: Ref, side: int, half: bool) -> Ref:
        """A copy of an operand (0 the input, 1 the weight) with channels densest, in float16 where that is asked for."""
        kind = self.kinds[side]
        shape = self._shape(kind)
        if self.lines:
            value = self.chain.add("unsqueeze.default", (value, HEIGHT), dense(shape, kind.dtype))
        if half:
            type_of_copy = channels_last(shape, "float16")
            return self.chain.add(
                "_to_copy.default", (value,), type_of_copy, dtype="float16", memory_format=self.layout
            )
        return self.chain.add("clone.default", (value,), channels_last(shape, kind.dtype), memory_format=self.layout)

    def of_packed(self, x: Ref, weight: Ref, bias: Argument, dtype: str) -> Ref:
        """The same operation on packed operands, with a packed result."""
        return self._of(x, weight, bias, channels_last(self._shape(self.result), dtype))

    def of_halves(self, x: tuple[Ref, Ref], weight: tuple[Ref, Ref]) -> Ref:
        """The same operation on packed high and low halves, with a result in the order of the user's own."""
        kind = dense(self._shape(self.result), "float32") if self.lines else self.result
        return self._as_lines(self._of(x[0], weight[0], None, kind, SPLIT, x_low=x[1], weight_low=weight[1]))

    def unpacked(self, value: Ref, half: bool) -> Ref:
        """A copy of the result in the order of the user's own, and in float32 where it is not."""
        kind = dense(self._shape(self.result), self.result.dtype) if self.lines else self.result
        order = self.layout if kind.is_channels_last else "torch.contiguous_format"
        if half:
            value = self.chain.add("_to_copy.default", (value,), kind, dtype="float32", memory_format=order)
        else:
            value = self.chain.add("clone.default", (value,), kind, memory_format=order)
        return self._as_lines(value)

    def _as_lines(self, value: Ref) -> Ref:
        return self.chain.add("squeeze.dim", (value, HEIGHT), self.result) if self.lines else value

    def _of(self, x: Ref, weight: Ref, bias: Argument, kind: TensorType, prefix: str = "", **low: Argument) -> Ref:
        op, numbers = self.node.op.removeprefix("aten."), self.node.args[3:]
        if self.lines:
            op = "conv_transpose2d.input" if self.transposed else op.replace("conv1d", "conv2d")
            neutral = (1, 0, 0, None, 1) if self.transposed else (1, 0, 1, None)
            numbers = tuple(_with_height(value, own) for value, own in zip(numbers, neutral, strict=False))
        return self.chain.add(prefix + op, (x, weight, bias, *numbers), kind, **low)

    def finished(self, result: Ref, why: str, text: str) -> Edit:
        """The edit, once the result is there; the last new node is called as the user calls the convolution's."""
        nodes = self.chain.nodes
        last = replace(nodes[-1], variable=self.node.variable)
        return Edit(self.node.name, result, (*nodes[:-1], last), why, f"run the {base_name(self.node)} {text}")


def _with_height(value: Argument, own: int | None) -> Argument:
    """A convolution's number for lines as those for images one place high; groups and words are the same for both."""
    if own is None or isinstance(value, str):
        return value
    return (own, *(value if isinstance(value, tuple) else (value,)))


def convolution(graph: Graph, node: Node) -> Convolution | None:
    """A node as a convolution whose input and result lie dense; one channel per group is none for tensor cores."""
    name = base_name(node)
    if name not in {f"{kind}{n}d" for kind in ("conv", "conv_transpose") for n in (1, 2, 3)} or node.kwargs:
        return None
    x, weight = node.args[:2]
    if not isinstance(x, Ref) or not isinstance(weight, Ref) or uses_other_outputs(graph, node):
        return None
    kind, own = graph.type_of(x), graph.type_of(weight)
    per_channel = own.shape[1] == ONE and _groups(node) != 1
    if len(own.shape) not in (LINES, *FORMATS) or len(kind.shape) != len(own.shape) or per_channel:
        return None
    orderly = all(item == _dense_as(item, packed=item.is_channels_last) for item in (kind, node.type))
    return Convolution(Chain(node, graph), node, x, weight, (kind, own)) if orderly else None


def _with_channels(graph: Graph, node: Node) -> Convolution | None:
    """One whose channels can be brought densest: one channel, or one place, lies the same either way."""
    own = convolution(graph, node)
    return own if own is not None and own.kinds[0].shape[1] != ONE != product(own.kinds[0].shape[2:]) else None


def _dense_as(kind: TensorType, *, packed: bool) -> TensorType:
    return channels_last(kind.shape, kind.dtype) if packed else dense(kind.shape, kind.dtype)


def _groups(node: Node) -> Argument:
    position = 6
    return node.args[position] if len(node.args) > position else 1


def in_channels_last(graph: Graph, node: Node) -> Edit | None:
    """Both operands and the result with their channels densest, and a copy of the result as it was."""
    own = _with_channels(graph, node)
    if own is None or own.kinds[0].is_channels_last or own.result.is_channels_last:
        return None
    x, weight = own.packed(own.x, 0, half=False), own.packed(own.weight, 1, half=False)
    result = own.of_packed(x, weight, node.args[2] if len(node.args) > 2 else None, node.type.dtype)
    return own.finished(
        own.unpacked(result, half=False),
        "the library computes it with channels densest, and otherwise brings operands and result into that order itself",
        "with channels last",
    )


def with_fp16_operands(graph: Graph, node: Node) -> Edit | None:
    """Scaled float16 operands where the user's own code runs TF32."""
    own = _with_channels(graph, node)
    return on_fp16_operands(own, HALF_WHY, "on scaled float16 operands with channels last") if own is not None else None


def on_fp16_operands(own: Convolution, why: str, text: str) -> Edit | None:
    """A convolution on operands that are scaled, and packed in float16, where the user's own code runs TF32."""
    graph, node = own.chain.graph, own.node
    if graph.convolution_mode(node.name) != "tf32" or node.type.dtype != "float32":
        return None
    terms = product(own.kinds[1].shape).divide_exactly(own.result.shape[1])
    terms = own.kinds[1].numel if terms is None else terms
    summed = max(1, terms.value(graph.sizes))
    room = LARGEST_EXPONENT - math.ceil(math.log2(summed))
    room -= 0 if terms.is_constant else SPARE
    if room < LEAST_ROOM or (own.transposed and _groups(node) != 1):
        return None
    packed: list[Ref] = []
    factors: list[Ref] = []
    for side, (ref, exponent, kept) in enumerate(
        zip((own.x, own.weight), (room - room // 2, room // 2), _kept(own), strict=True)
    ):
        factor = _factor(own.chain, ref, own.kinds[side], exponent, kept)
        scaled = own.chain.add("div.Tensor", (ref, factor), own.kinds[side])
        packed.append(own.packed(scaled, side, half=True))
        factors.append(factor)
    wide = own.unpacked(own.of_packed(packed[0], packed[1], None, "float16"), half=True)
    return own.finished(_unscaled(own, wide, factors), why, text)


def with_split_operands(graph: Graph, node: Node) -> Edit | None:
    """Scaled operands as sums of two float16 tensors, and three products of these."""
    own = _with_channels(graph, node)
    if own is None or any(kind.dtype != "float32" for kind in (*own.kinds, node.type)):
        return None
    if own.transposed and _groups(node) != 1:
        return None
    halves: list[tuple[Ref, Ref]] = []
    factors: list[Ref] = []
    for side, (ref, kept, name) in enumerate(
        zip((own.x, own.weight), _kept(own), ("input", "weight"), strict=True),
    ):
        factors.append(_factor(own.chain, ref, own.kinds[side], SPLIT_EXPONENT, kept))
        scaled = own.chain.add("div.Tensor", (ref, factors[-1]), own.kinds[side])
        halves.append(_high_and_low(own, scaled, side, name))
    return own.finished(
        _unscaled(own, own.of_halves(*halves), factors),
        "tensor cores take scaled operands as sums of two float16 tensors, which keep 22 of 24 bits in as much memory; three "
        "products of halves are summed, each block of channels by itself and the blocks by fp32 units",
        "on operands split into float16 halves",
    )


def _kept(own: Convolution) -> tuple[int, int]:
    """The dimension of each operand whose slices have a factor each: samples, and output channels."""
    return 0, 1 if own.transposed else 0


def _high_and_low(own: Convolution, scaled: Ref, side: int, name: str) -> tuple[Ref, Ref]:
    """Two float16 tensors whose sum is ``scaled`` but for the last two of its 24 bits, with channels densest."""
    chain = own.chain
    rest = chain.add(LOW_PART, (scaled,), own.kinds[side])
    found: list[Ref] = []
    for value, part in ((scaled, "high"), (rest, "low")):
        found.append(own.packed(value, side, half=True))
        chain.nodes[-1] = replace(chain.nodes[-1], variable=f"{name}_{part}")
    return found[0], found[1]


def _unscaled(own: Convolution, value: Ref, factors: Sequence[Ref]) -> Ref:
    """A convolution's result times its operands' factors, and with the bias, which no factor is for."""
    chain, kind, args = own.chain, own.result, own.node.args
    per_channel = tuple(size if d == 1 else ONE for d, size in enumerate(kind.shape))
    value = chain.add("mul.Tensor", (value, factors[0]), kind)
    shaped = chain.add("reshape.default", (factors[1], numbers(per_channel)), dense(per_channel, "float32"))
    value = chain.add("mul.Tensor", (value, shaped), kind)
    bias = args[2] if len(args) > 2 else None
    if isinstance(bias, Ref):
        spread = chain.add("reshape.default", (bias, numbers(per_channel)), dense(per_channel, "float32"))
        value = chain.add("add.Tensor", (value, spread), kind)
    return value


def numbers(shape: tuple[Size, ...]) -> tuple[Argument, ...]:
    """A shape as an argument."""
    return tuple(size.constant if size.is_constant else size for size in shape)


def _factor(chain: Chain, ref: Ref, kind: TensorType, exponent: int, kept: int) -> Ref:
    """A power of two per slice along ``kept``; divided by it, the slice's largest element is below two to ``exponent``.

    Operands are divided as they are packed, which takes as long as memory does: the many elements of the result are multiplied.
    Slices that are all 0, or hold an infinity or NaN, are left as they are.
    """
    shape = tuple(size if d == kept else ONE for d, size in enumerate(kind.shape))
    small, dims = dense(shape, "float32"), tuple(d for d in range(len(shape)) if d != kept)
    size = chain.add("abs.default", (ref,), kind)
    top = chain.add("amax.default", (size, dims, True), small)
    usual = chain.add("clamp.default", (top, 2.0**-100, 2.0**100), small)
    power = chain.add("floor.default", (chain.add("log2.default", (usual,), small),), small)
    # The logarithm may be rounded up to the next power, so there is one of slack.
    wanted = chain.add("sub.Tensor", (power, float(exponent - 2)), small)
    scale = chain.add("exp2.default", (wanted,), small)
    same = chain.add("eq.Tensor", (usual, top), TensorType(shape, "bool", small.stride))
    one = chain.add("full_like.default", (top, 1.0), small)
    return chain.add("where.self", (same, scale, one), small)


LAYOUTS = (
    AlgebraRule("channels-last", in_channels_last, "A copy has the same values, whatever the order they lie in."),
)
NARROW = (
    AlgebraRule(
        "fp16-operands",
        with_fp16_operands,
        "Scaling by powers of two is exact, and a convolution is linear in each sample and in each output channel's weights; "
        "float16 rounds what is scaled to as many bits as TF32 does.",
        changes_rounding=True,
    ),
    AlgebraRule(
        "split-operands",
        with_split_operands,
        "Scaling by powers of two is exact, and a convolution is linear in each operand: (h + l) * (h' + l') is the sum of four "
        "products, of which l * l' alone, at most 2 ** -22 of a term, is left out, as are the last bits of l and l'.",
        changes_rounding=True,
    ),
)
