"""Convolutions of few channels on an input in the order of their windows (Im2win, arXiv 2306.14316).

A product of windows with weights walks the places of a window and the channels at each of them. With three channels that is three
numbers that lie together, at best, and address arithmetic for each. So the input is first written anew: row ``i`` holds, for each
column, what the output's row ``i`` reads there, for each channel the rows of the kernel side by side:

    Iw[n, i, w, (c, r)] = I[n, c, i * step + r * dilation - padding, w - padding]

The window of a place is then one dense run, which begins where its first column does, and the convolution one whose kernel is a
single row high, over as many channels as a column holds numbers. Runs of neighbours overlap, so that the buffer is
``kernel_height / step`` times the input, where windows written out would be ``kernel_height * kernel_width / (step * step)``
times it. Of volumes all dimensions but the last are taken so, and lines have the last alone.

The rows of a kernel are rounded up to a multiple of four, or of eight where that adds little, so that a thread loads several
numbers at once and no load crosses the end of a run, whatever the number of channels; what is added is 0 in the input and in the
weights.

*Legal* for convolutions of dense tensors with a batch, not transposed and in one group, whose numbers are known, with a dilation
of 1 along the last dimension (else the run has gaps). An infinity or NaN meets the weights that it met before and nothing else.
What is in this order already is left alone. In half precision the values are the same; where the user's own float32 convolution
runs TF32, the operands are scaled and rounded to float16 as they are written (:mod:`mtmc_lsp.rewrites.convolution_layout`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from mtmc_lsp.core.dtypes import is_half
from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.lower.convolution import STORED_COPY
from mtmc_lsp.rewrites.convolution_layout import (
    HALF_WHY,
    ONE,
    Convolution,
    channels_last,
    convolution,
    numbers,
    on_fp16_operands,
)
from mtmc_lsp.rewrites.graph_editing import AlgebraRule, Edit, base_name, dense, numbers_of

UNITS = ((8, 6), (4, 1))
"""Numbers that rows are rounded up to a multiple of, each with how many rows there must be for each that is added.

Eight numbers of two bytes are 16 bytes, the most that a thread loads at once; four are half of that. What is added is written,
read and multiplied like the rest.
"""
WHY = (
    "windows of few channels are read number by number, each with an address of its own; in the order of the windows they are "
    "dense runs, of which threads load many numbers at once"
)


@dataclass(frozen=True)
class _Form:
    """A convolution's numbers, one for each spatial dimension."""

    kernel_sizes: tuple[int, ...]
    steps: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    dilations: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Places of a window but for those along the last dimension."""
        return prod(self.kernel_sizes[:-1])

    @property
    def held(self) -> int:
        """Rows, rounded up."""
        added = ((-self.rows % unit, least) for unit, least in UNITS)
        return self.rows + next((more for more, least in added if more * least <= self.rows), 0)


@dataclass(frozen=True)
class _Im2winConvolution(Convolution):
    """One whose input is written in the order of its windows, and whose weights follow it."""

    form: _Form

    def packed(self, value: Ref, side: int, half: bool) -> Ref:
        """A copy of an operand in the order of windows, shown as images (or volumes) with channels densest."""
        chain, dtype = self.chain, "float16" if half else self.kinds[side].dtype
        value, kind = self._in_columns(*(self._columns(value) if side == 0 else self._factors(value)), side)
        kind = dense(kind.shape, dtype)
        if half:
            value = chain.add("_to_copy.default", (value,), kind, dtype=dtype, memory_format="torch.contiguous_format")
        else:
            value = chain.add(STORED_COPY, (value,), kind)
        order = (0, len(kind.shape) - 1, *range(1, len(kind.shape) - 1))
        shown = chain.add("permute.default", (value, order), channels_last(tuple(kind.shape[d] for d in order), dtype))
        chain.nodes[-1] = replace(chain.nodes[-1], variable=("input_windows", "weight_windows")[side])
        return shown

    def _columns(self, value: Ref) -> tuple[Ref, TensorType]:
        """The input as ``[batch, places..., columns, channels, rows of the kernel...]``, a view."""
        form, chain, shape, dtype = self.form, self.chain, self.kinds[0].shape, self.kinds[0].dtype
        kind = dense(shape, dtype)
        if self.kinds[0].is_channels_last:
            value = chain.add("clone.default", (value,), kind, memory_format="torch.contiguous_format")
        if any((*form.before, *form.after)):
            longer = (a + size + b for a, size, b in zip(form.before, shape[2:], form.after, strict=True))
            kind = dense((*shape[:2], *longer), dtype)
            amounts = [n for pair in zip(reversed(form.before), reversed(form.after), strict=True) for n in pair]
            value = chain.add("constant_pad_nd.default", (value, tuple(amounts), 0.0), kind)
        outer = len(form.kernel_sizes) - 1
        for i in range(outer):
            value, kind = self._windows(value, kind, i)
        rank = len(kind.shape)
        return self._turned(value, kind, (0, *range(2, rank - outer), 1, *range(rank - outer, rank)))

    def _windows(self, value: Ref, kind: TensorType, i: int) -> tuple[Ref, TensorType]:
        """Windows along spatial dimension ``i``, whose places are a new last dimension."""
        form, dim = self.form, i + 2
        reach, step = form.dilations[i] * (form.kernel_sizes[i] - 1) + 1, kind.stride[dim]
        shape = [*kind.shape, Size.of(reach)]
        shape[dim] = self.result.shape[dim]
        stride = [*kind.stride, step]
        stride[dim] = step * form.steps[i]
        kind = TensorType(tuple(shape), kind.dtype, tuple(stride))
        value = self.chain.add("unfold.default", (value, dim, reach, form.steps[i]), kind)
        if form.dilations[i] == 1:
            return value, kind
        kind = TensorType(
            (*shape[:-1], Size.of(form.kernel_sizes[i])), kind.dtype, (*stride[:-1], step * form.dilations[i])
        )
        return self.chain.add("slice.Tensor", (value, len(shape) - 1, 0, reach, form.dilations[i]), kind), kind

    def _factors(self, value: Ref) -> tuple[Ref, TensorType]:
        """The weights as ``[outputs, columns of the kernel, channels, its rows...]``, a view."""
        last = len(self.kinds[1].shape) - 1
        return self._turned(value, self.kinds[1], (0, last, *range(1, last)))

    def _turned(self, value: Ref, kind: TensorType, order: tuple[int, ...]) -> tuple[Ref, TensorType]:
        turned = TensorType(tuple(kind.shape[d] for d in order), kind.dtype, tuple(kind.stride[d] for d in order))
        return self.chain.add("permute.default", (value, order), turned), turned

    def _in_columns(self, value: Ref, turned: TensorType, side: int) -> tuple[Ref, TensorType]:
        """A dense copy, rows rounded up: ``[batch, places..., columns, a column's numbers]``."""
        form, chain, dtype = self.form, self.chain, turned.dtype
        value = chain.add(
            "clone.default", (value,), dense(turned.shape, dtype), memory_format="torch.contiguous_format"
        )
        end = len(turned.shape) - len(form.kernel_sizes)
        shape = (*turned.shape[: end + 1], Size.of(form.rows))
        if shape != turned.shape:
            value = chain.add("reshape.default", (value, numbers(shape)), dense(shape, dtype))
        if form.held > form.rows:
            shape = (*shape[:-1], Size.of(form.held))
            value = chain.add("constant_pad_nd.default", (value, (0, form.held - form.rows), 0.0), dense(shape, dtype))
        # Weights are one row high, and so are lines.
        high = (ONE,) * max(1, len(form.kernel_sizes) - 1) if side == 1 or self.lines else turned.shape[1 : end - 1]
        shape = (shape[0], *high, turned.shape[end - 1], shape[-2] * form.held)
        return chain.add("reshape.default", (value, numbers(shape)), dense(shape, dtype)), dense(shape, dtype)

    def _of(self, x: Ref, weight: Ref, bias: Argument, kind: TensorType, prefix: str = "", **low: Argument) -> Ref:
        spatial = max(2, len(self.form.kernel_sizes))
        name = base_name(self.node).replace("conv1d", "conv2d")
        steps = (*(1,) * (spatial - 1), self.form.steps[-1])
        args = (x, weight, bias, steps, (0,) * spatial, (1,) * spatial, 1)
        return self.chain.add(f"{prefix}{name}.default", args, kind, **low)


def _form(node: Node, weight: TensorType) -> _Form | None:
    """A convolution's numbers, where it can run in the order of its windows."""
    spatial, args = len(weight.shape) - 2, node.args
    kernel_sizes = tuple(size.constant for size in weight.shape[2:] if size.is_constant)
    found = [numbers_of(args[at] if len(args) > at else 1, spatial) for at in (3, 5)]
    groups = args[6] if len(args) > 6 else 1
    steps, dilations = found
    if steps is None or dilations is None or len(kernel_sizes) != spatial or groups != 1:
        return None
    margin = args[4] if len(args) > 4 else 0
    if margin in ("same", "valid"):
        whole = [(margin == "same") * d * (k - 1) for d, k in zip(dilations, kernel_sizes, strict=True)]
        before = tuple(amount // 2 for amount in whole)
        after: tuple[int, ...] | None = tuple(amount - amount // 2 for amount in whole)
    else:
        after = numbers_of(margin, spatial)
        before = after or ()
    if after is None or (dilations[-1] != 1 and kernel_sizes[-1] > 1):
        return None
    return _Form(kernel_sizes, steps, before, after, dilations)


def _im2win_of(graph: Graph, node: Node) -> _Im2winConvolution | None:
    own = convolution(graph, node)
    form = _form(node, own.kinds[1]) if own is not None and not own.transposed else None
    if own is None or form is None or prod(form.kernel_sizes) == 1:
        return None
    if prod(form.kernel_sizes[:-1]) == 1 and own.kinds[0].is_channels_last:
        # A single row of dense channels is what it would become.
        return None
    return _Im2winConvolution(own.chain, own.node, own.x, own.weight, own.kinds, form)


def with_im2win(graph: Graph, node: Node) -> Edit | None:
    """A convolution in half precision with its input in the order of its windows."""
    own = _im2win_of(graph, node)
    if own is None or not all(is_half(kind.dtype) and kind.dtype == node.type.dtype for kind in own.kinds):
        return None
    x, weight = own.packed(own.x, 0, half=False), own.packed(own.weight, 1, half=False)
    result = own.of_packed(x, weight, node.args[2] if len(node.args) > 2 else None, node.type.dtype)
    return own.finished(own.unpacked(result, half=False), WHY, "with its input in the order of its windows")


def with_fp16_im2win(graph: Graph, node: Node) -> Edit | None:
    """One on scaled float16 operands, where the user's own code runs TF32, in the order of its windows."""
    own = _im2win_of(graph, node)
    if own is None or any(kind.dtype != "float32" for kind in own.kinds):
        return None
    return on_fp16_operands(
        own, f"{WHY}; {HALF_WHY}", "on scaled float16 operands, its input in the order of its windows"
    )


RULES = (
    AlgebraRule(
        "im2win",
        with_im2win,
        "Each number of a window meets the weight that it met before, in one dense run; what is added to it is 0 times 0.",
    ),
    AlgebraRule(
        "im2win-fp16",
        with_fp16_im2win,
        "As im2win, on operands scaled by powers of two, which is exact; float16 rounds what is scaled to as many bits as "
        "TF32 does.",
        changes_rounding=True,
    ),
)
