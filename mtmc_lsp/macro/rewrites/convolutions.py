"""Operands of convolutions in the order, and in the precision, in which tensor cores take them.

``channels_last`` copies both operands so that channels lie densest, and the result back: the library then runs its own kernels
without bringing the layouts into order itself, and what is around the convolution reads and writes any layout, so the copies
become part of its neighbours' kernels. Each element keeps its value.

``half_operands`` does so in float16 where the user's own convolution runs TF32. Both formats keep 10 bits of a significand;
what float16 lacks is range, so each sample and each output channel's weights are first scaled by a power of two, and the result
is scaled back in float32. The scales are chosen so that no sum of products reaches float16's largest number (nor with up to
sixteen times the workload's channels, where those are not constant).

``split_operands`` keeps all bits: each scaled operand is packed as the sum of two float16 tensors, which are as large as the
float32 tensor together, and one kernel sums three products of them: high * high, low * high and high * low.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.macro.lower.convolutions import LOW_HALF, SPLIT
from mtmc_lsp.macro.rewrites.editing import AlgebraRule, Edit, base_name, dense, made, uses_other_outputs

FORMATS = {4: "torch.channels_last", 5: "torch.channels_last_3d"}
"""Rank to the name of the layout; PyTorch has none for lines."""
LARGEST_EXPONENT = 15
"""Sums of products stay below two to this, and so below float16's largest number."""
SPARE = 4
"""Powers of two left for more channels than the workload has."""
LEAST_ROOM = -6
"""With less room than this, much of what is small would be rounded to float16's subnormal numbers."""
SPLIT_EXPONENT = 12
"""Split operands stay below two to this: sums are float32, and low halves of all but tiny elements are no subnormal numbers."""
ONE = Size.of(1)


@dataclass
class _Chain:
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


def _convolution(graph: Graph, node: Node, ranks: Collection[int] = FORMATS) -> tuple[TensorType, TensorType] | None:
    """The types of the operands of a convolution that tensor cores compute, dense in one of the two layouts."""
    name = base_name(node)
    if name not in {f"{kind}{rank - 2}d" for kind in ("conv", "conv_transpose") for rank in ranks} or node.kwargs:
        return None
    x, weight = node.args[:2]
    if not isinstance(x, Ref) or not isinstance(weight, Ref) or uses_other_outputs(graph, node):
        return None
    kind, own = graph.type_of(x), graph.type_of(weight)
    per_channel = own.shape[1] == ONE and _groups(node) != 1
    if len(kind.shape) not in ranks or len(kind.shape) != len(own.shape) or per_channel:
        return None
    # One channel, or one place, lies the same either way.
    places = product(kind.shape[2:])
    orderly = all(item == _dense_as(item, packed=item.is_channels_last) for item in (kind, node.type))
    return (kind, own) if orderly and kind.shape[1] != ONE and places != ONE else None


def _dense_as(kind: TensorType, *, packed: bool) -> TensorType:
    return channels_last(kind.shape, kind.dtype) if packed else dense(kind.shape, kind.dtype)


def _groups(node: Node) -> Argument:
    position = 6
    return node.args[position] if len(node.args) > position else 1


def in_channels_last(graph: Graph, node: Node) -> Edit | None:
    """Both operands and the result with their channels densest, and a copy of the result as it was."""
    kinds = _convolution(graph, node)
    if kinds is None or kinds[0].is_channels_last or node.type.is_channels_last:
        return None
    chain, layout = _Chain(node, graph), FORMATS[len(node.type.shape)]
    packed = [
        chain.add("clone.default", (ref,), channels_last(kind.shape, kind.dtype), memory_format=layout)
        for ref, kind in zip(node.args[:2], kinds, strict=True)
    ]
    result = chain.add(
        node.op.removeprefix("aten."), (*packed, *node.args[2:]), channels_last(node.type.shape, node.type.dtype)
    )
    back = chain.add("clone.default", (result,), node.type, memory_format="torch.contiguous_format")
    return _finished(
        chain,
        back,
        "the library computes it with channels densest, and otherwise brings operands and result into that order itself",
        f"run the {base_name(node)} with channels last",
    )


def with_half_operands(graph: Graph, node: Node) -> Edit | None:
    """Scaled float16 operands where the user's own code runs TF32."""
    kinds = _convolution(graph, node)
    if kinds is None or graph.fp32_convolution != "tf32" or node.type.dtype != "float32":
        return None
    terms = product(kinds[1].shape).divide_exactly(node.type.shape[1])
    terms = kinds[1].numel if terms is None else terms
    summed = max(1, terms.value(graph.sizes))
    room = LARGEST_EXPONENT - math.ceil(math.log2(summed))
    room -= 0 if terms.is_constant else SPARE
    transposed = "transpose" in base_name(node)
    if room < LEAST_ROOM or (transposed and _groups(node) != 1):
        return None
    chain, layout = _Chain(node, graph), FORMATS[len(node.type.shape)]
    exponents = (room - room // 2, room // 2)
    packed: list[Ref] = []
    factors: list[Ref] = []
    for ref, kind, exponent, kept in zip(node.args[:2], kinds, exponents, (0, 1 if transposed else 0), strict=True):
        assert isinstance(ref, Ref)
        factor = _factor(chain, ref, kind, exponent, kept)
        scaled = chain.add("mul.Tensor", (ref, factor), kind)
        half = channels_last(kind.shape, "float16")
        packed.append(chain.add("_to_copy.default", (scaled,), half, dtype="float16", memory_format=layout))
        factors.append(factor)
    kind = node.type
    result = chain.add(
        node.op.removeprefix("aten."), (*packed, None, *node.args[3:]), channels_last(kind.shape, "float16")
    )
    order = layout if kind.is_channels_last else "torch.contiguous_format"
    wide = chain.add("_to_copy.default", (result,), kind, dtype="float32", memory_format=order)
    value = _unscaled(chain, wide, factors)
    return _finished(
        chain,
        value,
        "your own code runs it in TF32, whose significands are as short as float16's: scaled float16 operands take half the "
        "memory and run at twice the rate",
        f"run the {base_name(node)} on scaled float16 operands with channels last",
    )


def with_split_operands(graph: Graph, node: Node) -> Edit | None:
    """Scaled operands as sums of two float16 tensors, and three products of these."""
    kinds = _convolution(graph, node, (3, *FORMATS))
    if kinds is None or any(kind.dtype != "float32" for kind in (*kinds, node.type)):
        return None
    transposed = "transpose" in base_name(node)
    if transposed and _groups(node) != 1:
        return None
    chain, kind = _Chain(node, graph), node.type
    halves: list[tuple[Ref, Ref]] = []
    factors: list[Ref] = []
    for ref, own, kept, name in zip(
        node.args[:2], kinds, (0, 1 if transposed else 0), ("input", "weight"), strict=True
    ):
        assert isinstance(ref, Ref)
        factors.append(_factor(chain, ref, own, SPLIT_EXPONENT, kept))
        halves.append(_high_and_low(chain, chain.add("mul.Tensor", (ref, factors[-1]), own), own, name))
    (x, x_low), (weight, weight_low) = halves
    args = (x, weight, None, *node.args[3:])
    product_of_halves = chain.add(
        f"{SPLIT}{node.op.removeprefix('aten.')}", args, kind, x_low=x_low, weight_low=weight_low
    )
    value = _unscaled(chain, product_of_halves, factors)
    return _finished(
        chain,
        value,
        "tensor cores take scaled operands as sums of two float16 tensors, which keep 22 of 24 bits in as much memory; three "
        "products of halves are summed, each block of channels by itself and the blocks by fp32 units",
        f"run the {base_name(node)} on operands split into float16 halves",
    )


def _high_and_low(chain: _Chain, scaled: Ref, kind: TensorType, name: str) -> tuple[Ref, Ref]:
    """Two float16 tensors whose sum is ``scaled`` but for the last two of its 24 bits, with channels densest."""
    layout = FORMATS.get(len(kind.shape), "torch.contiguous_format")
    packed = channels_last(kind.shape, "float16") if len(kind.shape) in FORMATS else dense(kind.shape, "float16")
    rest = chain.add(LOW_HALF, (scaled,), kind)
    found: list[Ref] = []
    for value, part in ((scaled, "high"), (rest, "low")):
        found.append(chain.add("_to_copy.default", (value,), packed, dtype="float16", memory_format=layout))
        chain.nodes[-1] = replace(chain.nodes[-1], variable=f"{name}_{part}")
    return found[0], found[1]


def _unscaled(chain: _Chain, value: Ref, factors: Sequence[Ref]) -> Ref:
    """A convolution's result divided by its operands' factors, and with the bias, which no factor is for."""
    node, kind = chain.like, chain.like.type
    per_channel = tuple(size if d == 1 else ONE for d, size in enumerate(kind.shape))
    value = chain.add("div.Tensor", (value, factors[0]), kind)
    shaped = chain.add("reshape.default", (factors[1], _numbers(per_channel)), dense(per_channel, "float32"))
    value = chain.add("div.Tensor", (value, shaped), kind)
    bias = node.args[2] if len(node.args) > 2 else None
    if isinstance(bias, Ref):
        spread = chain.add("reshape.default", (bias, _numbers(per_channel)), dense(per_channel, "float32"))
        value = chain.add("add.Tensor", (value, spread), kind)
    return value


def _numbers(shape: tuple[Size, ...]) -> tuple[Argument, ...]:
    return tuple(size.constant if size.is_constant else size for size in shape)


def _factor(chain: _Chain, ref: Ref, kind: TensorType, exponent: int, kept: int) -> Ref:
    """A power of two per slice along ``kept``, which brings the slice's largest element below two to ``exponent``.

    Slices that are all 0, or hold an infinity or NaN, are left as they are.
    """
    shape = tuple(size if d == kept else ONE for d, size in enumerate(kind.shape))
    small, dims = dense(shape, "float32"), tuple(d for d in range(len(shape)) if d != kept)
    size = chain.add("abs.default", (ref,), kind)
    top = chain.add("amax.default", (size, dims, True), small)
    usual = chain.add("clamp.default", (top, 2.0**-100, 2.0**100), small)
    power = chain.add("floor.default", (chain.add("log2.default", (usual,), small),), small)
    # The logarithm may be rounded up to the next power, so there is one of slack.
    wanted = chain.add("rsub.Scalar", (power, float(exponent - 2)), small)
    scale = chain.add("exp2.default", (wanted,), small)
    same = chain.add("eq.Tensor", (usual, top), TensorType(shape, "bool", small.stride))
    one = chain.add("full_like.default", (top, 1.0), small)
    return chain.add("where.self", (same, scale, one), small)


def _finished(chain: _Chain, result: Ref, why: str, text: str) -> Edit:
    nodes = (*chain.nodes[:-1], replace(chain.nodes[-1], variable=chain.like.variable))
    return Edit(chain.like.name, result, nodes, why, text)


LAYOUTS = (
    AlgebraRule("channels-last", in_channels_last, "A copy has the same values, whatever the order they lie in."),
)
NARROW = (
    AlgebraRule(
        "half-operands",
        with_half_operands,
        "Scaling by powers of two is exact, and a convolution is linear in each sample and in each output channel's weights; "
        "float16 rounds what is scaled to as many bits as TF32 does.",
    ),
    AlgebraRule(
        "split-operands",
        with_split_operands,
        "Scaling by powers of two is exact, and a convolution is linear in each operand: (h + l) * (h' + l') is the sum of four "
        "products, of which l * l' alone, at most 2 ** -22 of a term, is left out, as are the last bits of l and l'.",
    ),
)
