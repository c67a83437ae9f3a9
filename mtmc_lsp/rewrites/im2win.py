"""Convolutions with few channels on an input in im2win layout (Im2win, arXiv 2306.14316).

Implicit GEMM iterates over the kernel positions and over the channels at each of them. With three channels, at most three
contiguous numbers share one address computation. Im2win first rewrites the input: row ``i`` holds, for each column, all values
that output row ``i`` reads in this column, with the rows of the kernel contiguous for each channel:

    Iw[n, i, w, (c, r)] = I[n, c, i * step + r * dilation - padding, w - padding]

The window of an output position is then one contiguous run that starts at its first column, and the convolution has a kernel of
height 1 over as many channels as a column has numbers. Runs of neighbouring positions overlap, so the buffer is
``kernel_height / step`` times the input; stored windows (im2col) would be ``kernel_height * kernel_width / (step * step)``
times the input. In 3D all dimensions except the last are handled like this; a 1D convolution only has the last.

The rows of a kernel are padded to a multiple of four, or of eight if that adds little. Then a thread loads several numbers at
once and no load crosses the end of a run, for any number of channels. The padding is 0 in the input and in the weights.

*Legal* for batched, dense convolutions that are neither transposed nor grouped, with constant arguments and dilation 1 along the
last dimension (otherwise the run has gaps). An infinity or NaN meets the same weights as before and nothing else. An input that
already has this layout is skipped. In 16-bit dtypes the values are the same; if the user's float32 convolution runs in TF32, the
operands are scaled and rounded to float16 as they are stored (:mod:`mtmc_lsp.rewrites.convolution_layout`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from mtmc_lsp.core.dtypes import is_low_precision
from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.lower.convolution import STORED_COPY
from mtmc_lsp.rewrites.convolution_layout import (
    FP16_REASON,
    ONE,
    Convolution,
    channels_last,
    convolution,
    on_fp16_operands,
)
from mtmc_lsp.rewrites.graph_editing import AlgebraRule, Edit, base_name, constants_of, contiguous_type, numbers

ROW_MULTIPLES = ((8, 6), (4, 1))
"""Pairs of a multiple to which rows are padded, and the minimum number of rows per padding row.

Eight 2-byte numbers are 16 bytes, the largest load of a thread; four are half of that. Padding rows are stored, loaded and
multiplied like the others.
"""
IM2WIN_REASON = (
    "with few channels, windows are loaded one number at a time, each with an address computation; in im2win layout they are "
    "contiguous, so threads load many numbers at once"
)


@dataclass(frozen=True)
class _Form:
    """Arguments of a convolution, one number per spatial dimension."""

    kernel_sizes: tuple[int, ...]
    steps: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    dilations: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Number of kernel positions, without the last dimension."""
        return prod(self.kernel_sizes[:-1])

    @property
    def padded_rows(self) -> int:
        """Rows including padding."""
        paddings = ((-self.rows % unit, least) for unit, least in ROW_MULTIPLES)
        return self.rows + next((padding for padding, least in paddings if padding * least <= self.rows), 0)


@dataclass(frozen=True)
class _Im2winConvolution(Convolution):
    """A convolution with its input and its weights in im2win layout."""

    form: _Form

    def packed(self, value: Ref, side: int, fp16: bool) -> Ref:
        """A copy of an operand in im2win layout, viewed as a channels-last image or volume."""
        chain, dtype = self.chain, "float16" if fp16 else self.operand_types[side].dtype
        value, kind = self._in_columns(*(self._columns(value) if side == 0 else self._factors(value)), side)
        kind = contiguous_type(kind.shape, dtype)
        if fp16:
            value = chain.add("_to_copy.default", (value,), kind, dtype=dtype, memory_format="torch.contiguous_format")
        else:
            value = chain.add(STORED_COPY, (value,), kind)
        order = (0, len(kind.shape) - 1, *range(1, len(kind.shape) - 1))
        viewed = chain.add("permute.default", (value, order), channels_last(tuple(kind.shape[d] for d in order), dtype))
        chain.nodes[-1] = replace(chain.nodes[-1], variable=("input_windows", "weight_windows")[side])
        return viewed

    def _columns(self, value: Ref) -> tuple[Ref, TensorType]:
        """A view of the input as ``[batch, outputs..., columns, channels, rows of the kernel...]``."""
        form, chain, shape, dtype = self.form, self.chain, self.operand_types[0].shape, self.operand_types[0].dtype
        kind = contiguous_type(shape, dtype)
        if self.operand_types[0].is_channels_last:
            value = chain.add("clone.default", (value,), kind, memory_format="torch.contiguous_format")
        if any((*form.before, *form.after)):
            padded_shape = (a + size + b for a, size, b in zip(form.before, shape[2:], form.after, strict=True))
            kind = contiguous_type((*shape[:2], *padded_shape), dtype)
            amounts = [n for pair in zip(reversed(form.before), reversed(form.after), strict=True) for n in pair]
            value = chain.add("constant_pad_nd.default", (value, tuple(amounts), 0.0), kind)
        leading = len(form.kernel_sizes) - 1
        for i in range(leading):
            value, kind = self._windows(value, kind, i)
        rank = len(kind.shape)
        return self._permuted(value, kind, (0, *range(2, rank - leading), 1, *range(rank - leading, rank)))

    def _windows(self, value: Ref, kind: TensorType, i: int) -> tuple[Ref, TensorType]:
        """Windows along spatial dimension ``i``; the window elements are a new last dimension."""
        form, dim = self.form, i + 2
        window_size, step = form.dilations[i] * (form.kernel_sizes[i] - 1) + 1, kind.stride[dim]
        shape = [*kind.shape, Size.of(window_size)]
        shape[dim] = self.result.shape[dim]
        stride = [*kind.stride, step]
        stride[dim] = step * form.steps[i]
        kind = TensorType(tuple(shape), kind.dtype, tuple(stride))
        value = self.chain.add("unfold.default", (value, dim, window_size, form.steps[i]), kind)
        if form.dilations[i] == 1:
            return value, kind
        kind = TensorType(
            (*shape[:-1], Size.of(form.kernel_sizes[i])), kind.dtype, (*stride[:-1], step * form.dilations[i])
        )
        return self.chain.add("slice.Tensor", (value, len(shape) - 1, 0, window_size, form.dilations[i]), kind), kind

    def _factors(self, value: Ref) -> tuple[Ref, TensorType]:
        """A view of the weights as ``[outputs, columns of the kernel, channels, rows of the kernel...]``."""
        last = len(self.operand_types[1].shape) - 1
        return self._permuted(value, self.operand_types[1], (0, last, *range(1, last)))

    def _permuted(self, value: Ref, kind: TensorType, order: tuple[int, ...]) -> tuple[Ref, TensorType]:
        permuted = TensorType(tuple(kind.shape[d] for d in order), kind.dtype, tuple(kind.stride[d] for d in order))
        return self.chain.add("permute.default", (value, order), permuted), permuted

    def _in_columns(self, value: Ref, permuted: TensorType, side: int) -> tuple[Ref, TensorType]:
        """A dense copy with padded rows: ``[batch, outputs..., columns, numbers of a column]``."""
        form, chain, dtype = self.form, self.chain, permuted.dtype
        value = chain.add(
            "clone.default", (value,), contiguous_type(permuted.shape, dtype), memory_format="torch.contiguous_format"
        )
        end = len(permuted.shape) - len(form.kernel_sizes)
        shape = (*permuted.shape[: end + 1], Size.of(form.rows))
        if shape != permuted.shape:
            value = chain.add("reshape.default", (value, numbers(shape)), contiguous_type(shape, dtype))
        if form.padded_rows > form.rows:
            shape = (*shape[:-1], Size.of(form.padded_rows))
            value = chain.add(
                "constant_pad_nd.default",
                (value, (0, form.padded_rows - form.rows), 0.0),
                contiguous_type(shape, dtype),
            )
        # Weights have height 1, and so do inputs of 1D convolutions.
        height = (ONE,) * max(1, len(form.kernel_sizes) - 1) if side == 1 or self.is_1d else permuted.shape[1 : end - 1]
        shape = (shape[0], *height, permuted.shape[end - 1], shape[-2] * form.padded_rows)
        return chain.add("reshape.default", (value, numbers(shape)), contiguous_type(shape, dtype)), contiguous_type(
            shape, dtype
        )

    def _call(self, x: Ref, weight: Ref, bias: Argument, kind: TensorType, prefix: str = "", **low: Argument) -> Ref:
        spatial = max(2, len(self.form.kernel_sizes))
        name = base_name(self.node).replace("conv1d", "conv2d")
        steps = (*(1,) * (spatial - 1), self.form.steps[-1])
        args = (x, weight, bias, steps, (0,) * spatial, (1,) * spatial, 1)
        return self.chain.add(f"{prefix}{name}.default", args, kind, **low)


def _form(node: Node, weight: TensorType) -> _Form | None:
    """The arguments of a convolution that supports im2win; ``None`` for others."""
    spatial, args = len(weight.shape) - 2, node.args
    kernel_sizes = tuple(size.constant for size in weight.shape[2:] if size.is_constant)
    both = [constants_of(args[position] if len(args) > position else 1, spatial) for position in (3, 5)]
    groups = args[6] if len(args) > 6 else 1
    steps, dilations = both
    if steps is None or dilations is None or len(kernel_sizes) != spatial or groups != 1:
        return None
    padding = args[4] if len(args) > 4 else 0
    if padding in ("same", "valid"):
        total = [(padding == "same") * d * (k - 1) for d, k in zip(dilations, kernel_sizes, strict=True)]
        before = tuple(amount // 2 for amount in total)
        after: tuple[int, ...] | None = tuple(amount - amount // 2 for amount in total)
    else:
        after = constants_of(padding, spatial)
        before = after or ()
    if after is None or (dilations[-1] != 1 and kernel_sizes[-1] > 1):
        return None
    return _Form(kernel_sizes, steps, before, after, dilations)


def _im2win_of(graph: Graph, node: Node) -> _Im2winConvolution | None:
    conv = convolution(graph, node)
    form = _form(node, conv.operand_types[1]) if conv is not None and not conv.transposed else None
    if conv is None or form is None or prod(form.kernel_sizes) == 1:
        return None
    if prod(form.kernel_sizes[:-1]) == 1 and conv.operand_types[0].is_channels_last:
        # A single row with contiguous channels already has this layout.
        return None
    return _Im2winConvolution(conv.chain, conv.node, conv.x, conv.weight, conv.operand_types, form)


def with_im2win(graph: Graph, node: Node) -> Edit | None:
    """A convolution in a 16-bit dtype with its input in im2win layout."""
    conv = _im2win_of(graph, node)
    if conv is None or not all(
        is_low_precision(kind.dtype) and kind.dtype == node.type.dtype for kind in conv.operand_types
    ):
        return None
    x, weight = conv.packed(conv.x, 0, fp16=False), conv.packed(conv.weight, 1, fp16=False)
    result = conv.on_packed(x, weight, node.args[2] if len(node.args) > 2 else None, node.type.dtype)
    return conv.edit(conv.unpacked(result, fp16=False), IM2WIN_REASON, "with its input in im2win layout")


def with_fp16_im2win(graph: Graph, node: Node) -> Edit | None:
    """A convolution on scaled float16 operands in im2win layout, if the user's code runs in TF32."""
    conv = _im2win_of(graph, node)
    if conv is None or any(kind.dtype != "float32" for kind in conv.operand_types):
        return None
    return on_fp16_operands(
        conv, f"{IM2WIN_REASON}; {FP16_REASON}", "on scaled float16 operands, with its input in im2win layout"
    )


REWRITES = (
    AlgebraRule(
        "im2win",
        with_im2win,
        "Each number of a window meets the same weight as before, in one contiguous run; the padding adds 0 times 0.",
    ),
    AlgebraRule(
        "im2win-fp16",
        with_fp16_im2win,
        "As im2win, on operands scaled by powers of two, which is exact; float16 rounds scaled values to as many bits as TF32 "
        "does.",
        changes_rounding=True,
    ),
)
