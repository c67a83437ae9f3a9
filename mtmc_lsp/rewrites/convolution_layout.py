"""Converts operands of convolutions to the memory layout and the precision that tensor cores need.

``channels_last`` copies both operands to channels-last layout, and the result back: the library then runs its fastest kernels
without converting layouts itself. Kernels around the convolution read and write any layout, so the copies fuse into them.
Values do not change.

``fp16_operands`` also converts to float16 if the user's convolution runs in TF32. Both formats have 10 significand bits, but
float16 has a smaller range, so each sample and each output channel's weights are first scaled by a power of two, and the
result is scaled back in float32. The scales ensure that no sum of products overflows float16, also with up to sixteen times
the workload's channels if the number of channels is symbolic.

``split_operands`` keeps full precision: each scaled operand becomes the sum of two float16 tensors, which together take as much
memory as the float32 tensor, and one kernel sums three products: high * high, low * high and high * low.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.lower.convolution import LOW_PART, SPLIT
from mtmc_lsp.rewrites.graph_editing import (
    CONVOLUTIONS,
    AlgebraRule,
    Chain,
    Edit,
    base_name,
    contiguous_type,
    numbers,
    uses_other_outputs,
)

FORMATS = {4: "torch.channels_last", 5: "torch.channels_last_3d"}
"""Rank to PyTorch's memory format; there is none for 1D convolutions."""
RANK_1D, HEIGHT = 3, 2
"""Rank of the tensors of a 1D convolution, and the dimension of size 1 that turns it into a 2D convolution."""
LARGEST_EXPONENT = 15
"""Sums of products stay below 2 ** 15, which float16 can represent."""
RESERVED_EXPONENT = 4
"""Exponent reserve for a symbolic number of channels: up to 2 ** 4 times the workload's."""
MIN_EXPONENT_RANGE = -6
"""With a smaller exponent range, many small values would become float16 subnormals."""
SPLIT_EXPONENT = 12
"""Split operands stay below 2 ** 12: sums are float32, and only tiny elements have subnormal low parts."""
ONE = Size.of(1)
FP16_REASON = (
    "your code runs it in TF32, which has as many significand bits as float16: scaled float16 operands take half the memory and "
    "run at twice the rate"
)


def channels_last(shape: tuple[Size, ...], dtype: str) -> TensorType:
    """The type of a dense channels-last tensor: dimension 1 has stride 1."""
    order = [0, *range(2, len(shape)), 1]
    steps = contiguous_stride(tuple(shape[d] for d in order))
    return TensorType(shape, dtype, tuple(steps[order.index(d)] for d in range(len(shape))))


@dataclass(frozen=True)
class Convolution:
    """A convolution for tensor cores whose operands are dense in one of the two layouts.

    A 1D convolution runs as a 2D convolution of height 1: only the latter has a channels-last format, and the library runs it
    as fast.
    """

    chain: Chain
    node: Node
    x: Ref
    weight: Ref
    operand_types: tuple[TensorType, TensorType]

    @property
    def result(self) -> TensorType:
        return self.node.type

    @property
    def is_1d(self) -> bool:
        return len(self.result.shape) == RANK_1D

    @property
    def transposed(self) -> bool:
        return "transpose" in base_name(self.node)

    @property
    def layout(self) -> str:
        """The channels-last memory format."""
        return FORMATS[len(self._shape(self.result))]

    def _shape(self, kind: TensorType) -> tuple[Size, ...]:
        return (*kind.shape[:HEIGHT], ONE, *kind.shape[HEIGHT:]) if self.is_1d else kind.shape

    def packed(self, value: Ref, side: int, fp16: bool) -> Ref:
        """A channels-last copy of an operand (0 the input, 1 the weight), in float16 if ``half``."""
        kind = self.operand_types[side]
        shape = self._shape(kind)
        if self.is_1d:
            value = self.chain.add("unsqueeze.default", (value, HEIGHT), contiguous_type(shape, kind.dtype))
        if fp16:
            type_of_copy = channels_last(shape, "float16")
            return self.chain.add(
                "_to_copy.default", (value,), type_of_copy, dtype="float16", memory_format=self.layout
            )
        return self.chain.add("clone.default", (value,), channels_last(shape, kind.dtype), memory_format=self.layout)

    def on_packed(self, x: Ref, weight: Ref, bias: Argument, dtype: str) -> Ref:
        """The same operation on packed operands, with a packed result."""
        return self._call(x, weight, bias, channels_last(self._shape(self.result), dtype))

    def on_split(self, x: tuple[Ref, Ref], weight: tuple[Ref, Ref]) -> Ref:
        """The same operation on packed high and low parts, with a result in the original layout."""
        kind = contiguous_type(self._shape(self.result), "float32") if self.is_1d else self.result
        return self._as_1d(self._call(x[0], weight[0], None, kind, SPLIT, x_low=x[1], weight_low=weight[1]))

    def unpacked(self, value: Ref, fp16: bool) -> Ref:
        """A copy of the result in the original layout, converted to float32 if ``half``."""
        kind = contiguous_type(self._shape(self.result), self.result.dtype) if self.is_1d else self.result
        order = self.layout if kind.is_channels_last else "torch.contiguous_format"
        if fp16:
            value = self.chain.add("_to_copy.default", (value,), kind, dtype="float32", memory_format=order)
        else:
            value = self.chain.add("clone.default", (value,), kind, memory_format=order)
        return self._as_1d(value)

    def _as_1d(self, value: Ref) -> Ref:
        return self.chain.add("squeeze.dim", (value, HEIGHT), self.result) if self.is_1d else value

    def _call(self, x: Ref, weight: Ref, bias: Argument, kind: TensorType, prefix: str = "", **low: Argument) -> Ref:
        op, numbers = self.node.op.removeprefix("aten."), self.node.args[3:]
        if self.is_1d:
            op = "conv_transpose2d.input" if self.transposed else op.replace("conv1d", "conv2d")
            neutral_numbers = (1, 0, 0, None, 1) if self.transposed else (1, 0, 1, None)
            numbers = tuple(
                _with_height(value, neutral) for value, neutral in zip(numbers, neutral_numbers, strict=False)
            )
        return self.chain.add(prefix + op, (x, weight, bias, *numbers), kind, **low)

    def edit(self, result: Ref, why: str, text: str) -> Edit:
        """The edit for ``result``; the last new node gets the user's variable name of the convolution."""
        nodes = self.chain.nodes
        last = replace(nodes[-1], variable=self.node.variable)
        return Edit(self.node.name, result, (*nodes[:-1], last), why, f"run the {base_name(self.node)} {text}")


def _with_height(value: Argument, neutral: int | None) -> Argument:
    """The 2D form of a 1D convolution's argument; ``neutral`` is the number for the height, or None for unchanged arguments."""
    if neutral is None or isinstance(value, str):
        return value
    return (neutral, *(value if isinstance(value, tuple) else (value,)))


def convolution(graph: Graph, node: Node) -> Convolution | None:
    """A node as a convolution with dense input and result; ``None`` for depthwise ones, which do not use tensor cores."""
    name = base_name(node)
    if name not in CONVOLUTIONS or node.kwargs:
        return None
    x, weight = node.args[:2]
    if not isinstance(x, Ref) or not isinstance(weight, Ref) or uses_other_outputs(graph, node):
        return None
    kind, weight_type = graph.type_of(x), graph.type_of(weight)
    is_depthwise = weight_type.shape[1] == ONE and _groups(node) != 1
    if len(weight_type.shape) not in (RANK_1D, *FORMATS) or len(kind.shape) != len(weight_type.shape) or is_depthwise:
        return None
    are_dense = all(item == _dense_as(item, packed=item.is_channels_last) for item in (kind, node.type))
    return Convolution(Chain(node, graph, "packed"), node, x, weight, (kind, weight_type)) if are_dense else None


def _with_channels(graph: Graph, node: Node) -> Convolution | None:
    """A convolution for which channels-last differs from the default layout: more than one channel and one position."""
    conv = convolution(graph, node)
    return (
        conv
        if conv is not None and conv.operand_types[0].shape[1] != ONE != product(conv.operand_types[0].shape[2:])
        else None
    )


def _dense_as(kind: TensorType, *, packed: bool) -> TensorType:
    return channels_last(kind.shape, kind.dtype) if packed else contiguous_type(kind.shape, kind.dtype)


def _groups(node: Node) -> Argument:
    position = 6
    return node.args[position] if len(node.args) > position else 1


def in_channels_last(graph: Graph, node: Node) -> Edit | None:
    """Run the convolution with channels last and copy the result back."""
    conv = _with_channels(graph, node)
    if conv is None or conv.operand_types[0].is_channels_last or conv.result.is_channels_last:
        return None
    x, weight = conv.packed(conv.x, 0, fp16=False), conv.packed(conv.weight, 1, fp16=False)
    result = conv.on_packed(x, weight, node.args[2] if len(node.args) > 2 else None, node.type.dtype)
    return conv.edit(
        conv.unpacked(result, fp16=False),
        "the library's fastest kernels use channels last, and it otherwise converts operands and result itself",
        "with channels last",
    )


def with_fp16_operands(graph: Graph, node: Node) -> Edit | None:
    """Scaled float16 operands, if the user's code runs in TF32."""
    conv = _with_channels(graph, node)
    return (
        on_fp16_operands(conv, FP16_REASON, "on scaled float16 operands with channels last")
        if conv is not None
        else None
    )


def on_fp16_operands(conv: Convolution, why: str, text: str) -> Edit | None:
    """The edit to scaled operands packed in float16, if the user's code runs in TF32."""
    graph, node = conv.chain.graph, conv.node
    if graph.convolution_mode(node.name) != "tf32" or node.type.dtype != "float32":
        return None
    terms = product(conv.operand_types[1].shape).divide_exactly(conv.result.shape[1])
    terms = conv.operand_types[1].numel if terms is None else terms
    summed = max(1, terms.value(graph.sizes))
    room = LARGEST_EXPONENT - math.ceil(math.log2(summed))
    room -= 0 if terms.is_constant else RESERVED_EXPONENT
    if room < MIN_EXPONENT_RANGE or (conv.transposed and _groups(node) != 1):
        return None
    packed: list[Ref] = []
    factors: list[Ref] = []
    for side, (ref, exponent, slice_dim) in enumerate(
        zip((conv.x, conv.weight), (room - room // 2, room // 2), _slice_dims(conv), strict=True)
    ):
        factor = _factor(conv.chain, ref, conv.operand_types[side], exponent, slice_dim)
        scaled = conv.chain.add("div.Tensor", (ref, factor), conv.operand_types[side])
        packed.append(conv.packed(scaled, side, fp16=True))
        factors.append(factor)
    result = conv.unpacked(conv.on_packed(packed[0], packed[1], None, "float16"), fp16=True)
    return conv.edit(_unscaled(conv, result, factors), why, text)


def with_split_operands(graph: Graph, node: Node) -> Edit | None:
    """Scaled operands as sums of two float16 tensors, and three products of these tensors."""
    conv = _with_channels(graph, node)
    if conv is None or any(kind.dtype != "float32" for kind in (*conv.operand_types, node.type)):
        return None
    if conv.transposed and _groups(node) != 1:
        return None
    parts: list[tuple[Ref, Ref]] = []
    factors: list[Ref] = []
    for side, (ref, slice_dim, name) in enumerate(
        zip((conv.x, conv.weight), _slice_dims(conv), ("input", "weight"), strict=True),
    ):
        factors.append(_factor(conv.chain, ref, conv.operand_types[side], SPLIT_EXPONENT, slice_dim))
        scaled = conv.chain.add("div.Tensor", (ref, factors[-1]), conv.operand_types[side])
        parts.append(_high_and_low(conv, scaled, side, name))
    return conv.edit(
        _unscaled(conv, conv.on_split(*parts), factors),
        "scaled operands become sums of two float16 tensors for tensor cores, with 22 of 24 bits and no more memory; three "
        "products are summed on tensor cores for each block of channels, and the blocks on fp32 units",
        "on operands split into two float16 parts",
    )


def _slice_dims(conv: Convolution) -> tuple[int, int]:
    """The dimension of each operand whose slices have separate factors: samples and output channels."""
    return 0, 1 if conv.transposed else 0


def _high_and_low(conv: Convolution, scaled: Ref, side: int, name: str) -> tuple[Ref, Ref]:
    """Two channels-last float16 tensors whose sum is ``scaled`` except for the last two of its 24 bits."""
    chain = conv.chain
    low = chain.add(LOW_PART, (scaled,), conv.operand_types[side])
    packed: list[Ref] = []
    for value, part in ((scaled, "high"), (low, "low")):
        packed.append(conv.packed(value, side, fp16=True))
        chain.nodes[-1] = replace(chain.nodes[-1], variable=f"{name}_{part}")
    return packed[0], packed[1]


def _unscaled(conv: Convolution, value: Ref, factors: Sequence[Ref]) -> Ref:
    """A convolution's result times its operands' factors, plus the bias, which is not scaled."""
    chain, kind, args = conv.chain, conv.result, conv.node.args
    per_channel = tuple(size if d == 1 else ONE for d, size in enumerate(kind.shape))
    value = chain.add("mul.Tensor", (value, factors[0]), kind)
    shaped_factor = chain.add(
        "reshape.default", (factors[1], numbers(per_channel)), contiguous_type(per_channel, "float32")
    )
    value = chain.add("mul.Tensor", (value, shaped_factor), kind)
    bias = args[2] if len(args) > 2 else None
    if isinstance(bias, Ref):
        shaped_bias = chain.add(
            "reshape.default", (bias, numbers(per_channel)), contiguous_type(per_channel, "float32")
        )
        value = chain.add("add.Tensor", (value, shaped_bias), kind)
    return value


def _factor(chain: Chain, ref: Ref, kind: TensorType, exponent: int, dim: int) -> Ref:
    """A power of two per slice along ``dim``; divided by it, the slice's largest element is below ``2 ** exponent``.

    The division fuses into the packing copy, which is memory-bound; multiplications are kept for the result. Slices that are
    all zero, or contain an infinity or NaN, are not scaled.
    """
    shape = tuple(size if d == dim else ONE for d, size in enumerate(kind.shape))
    factor_type, dims = contiguous_type(shape, "float32"), tuple(d for d in range(len(shape)) if d != dim)
    size = chain.add("abs.default", (ref,), kind)
    largest = chain.add("amax.default", (size, dims, True), factor_type)
    clamped = chain.add("clamp.default", (largest, 2.0**-100, 2.0**100), factor_type)
    power = chain.add("floor.default", (chain.add("log2.default", (clamped,), factor_type),), factor_type)
    # The logarithm may be rounded up to the next integer, so reserve one more power.
    scale_exponent = chain.add("sub.Tensor", (power, float(exponent - 2)), factor_type)
    scale = chain.add("exp2.default", (scale_exponent,), factor_type)
    is_usual = chain.add("eq.Tensor", (clamped, largest), TensorType(shape, "bool", factor_type.stride))
    one = chain.add("full_like.default", (largest, 1.0), factor_type)
    return chain.add("where.self", (is_usual, scale, one), factor_type)


LAYOUTS = (AlgebraRule("channels-last", in_channels_last, "A copy in another memory layout has the same values."),)
REDUCED_PRECISION = (
    AlgebraRule(
        "fp16-operands",
        with_fp16_operands,
        "Scaling by powers of two is exact, and a convolution is linear in each sample and in each output channel's weights; "
        "float16 rounds scaled values to as many bits as TF32 does.",
        changes_rounding=True,
    ),
    AlgebraRule(
        "split-operands",
        with_split_operands,
        "Scaling by powers of two is exact, and a convolution is linear in each operand: (h + l) * (h' + l') is the sum of four "
        "products, of which only l * l', at most 2 ** -22 of a term, is omitted, as are the last bits of l and l'.",
        changes_rounding=True,
    ),
)
