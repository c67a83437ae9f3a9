"""Decomposes operations into simpler ones. Runs in workers.

Most of them are several kernels in eager code anyway. After decomposition, each part can be fused with its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from mtmc_lsp.capture.worker.passes.draws import draw_decompositions
from mtmc_lsp.capture.worker.passes.einsum import einsum_with_fallback

BY_TORCH = frozenset(
    "einsum tensordot outer kron dot vdot inner chain_matmul linalg_multi_dot bilinear addr trace "
    "cosine_similarity cosine_embedding_loss triplet_margin_loss hinge_embedding_loss margin_ranking_loss "
    "poisson_nll_loss soft_margin_loss pairwise_distance cdist "
    "broadcast_tensors tile repeat_interleave meshgrid pixel_shuffle pixel_unshuffle channel_shuffle rot90 diff take_along_dim "
    "hstack vstack dstack column_stack fliplr flipud one_hot "
    "nansum count_nonzero std_mean isclose prelu glu logit frac logaddexp logaddexp2 heaviside xlogy deg2rad rad2deg sinc "
    "special_entr special_xlog1py special_xlogy special_logit special_sinc special_ndtr special_log_ndtr special_multigammaln "
    "mvlgamma float_power isneginf isposinf row_stack linspace "
    "fft_fftshift fft_ifftshift grid_sampler affine_grid_generator "
    "trapezoid cumulative_trapezoid linalg_norm linalg_matrix_norm nanmean aminmax block_diag "
    "gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell multi_margin_loss".split()
)
"""Operations with a decomposition in PyTorch."""

NONE, MEAN, SUM = 0, 1, 2
"""ATen's codes for the reduction of a loss."""


@lru_cache(maxsize=1)
def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decomposition of each decomposed operation."""
    torch_table = torch.export.default_decompositions()
    table = {
        op: function
        for op, function in torch_table.items()
        if str(op).split(".")[1] in BY_TORCH and "out" not in str(op)
    }
    aten = torch.ops.aten
    table[aten.cross_entropy_loss.default] = _cross_entropy
    table[aten.nll_loss_nd.default] = _nll
    if aten.einsum.default in table:
        table[aten.einsum.default] = einsum_with_fallback(table[aten.einsum.default])
    table[aten.dist.default] = _dist
    table[aten.addmv.default] = _addmv
    table[aten.addbmm.default] = _addbmm
    table[aten.eye.default] = table[aten.eye.m] = _eye
    table[aten._trilinear.default] = _trilinear
    table[aten.ldexp.Tensor] = _ldexp
    table[aten.grid_sampler_2d.default] = _grid_sampler
    table[aten._thnn_fused_gru_cell.default] = fused_gru_cell
    table[aten._thnn_fused_lstm_cell.default] = fused_lstm_cell
    return {**table, **draw_decompositions()}


BILINEAR = ([1, 3], [0], [1, 2], [2, 3])
"""The dimensions that ``bilinear`` expands its first input, weight and second input by, and those that it sums over."""


def _trilinear(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    *dims: list[int],
    unroll_dim: int = 1,
) -> Any:
    """``sum_j (sum_i x[m, i] * weight[o, i, j]) * y[m, j]``, in torch's order.

    A product of the weight with all pairs of ``x`` and ``y`` would be NaN for an infinite ``y`` where torch's result is infinite.
    """
    if tuple(dims[:4]) != BILINEAR:
        return NotImplemented
    return ((x @ weight) * y).sum(-1).t()


def fused_gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    state: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator of ``gru_cell`` on a GPU, in float32, rounded once. Returns the state and the tensors for backward."""
    from_input = _biased(input_gates, input_bias).chunk(3, 1)
    recurrent = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    before = wide(state)
    reset, update = (torch.sigmoid(a + b) for a, b in zip(from_input[:2], recurrent[:2], strict=True))
    new = torch.tanh(from_input[2] + reset * recurrent[2])
    after = new + update * (before - new)
    saved = torch.cat([reset, update, new, before, recurrent[2]], 1)
    return after.to(state.dtype), saved.to(state.dtype)


def fused_lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    memory: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator of ``lstm_cell`` on a GPU, in float32, rounded once. Returns state, memory and tensors for backward."""
    gates = _biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)
    enter, forget, new, leave = gates.chunk(4, 1)
    enter, forget, new, leave = enter.sigmoid(), forget.sigmoid(), new.tanh(), leave.sigmoid()
    after = forget * wide(memory) + enter * new
    saved = torch.cat([enter, forget, new, leave], 1)
    return (leave * after.tanh()).to(memory.dtype), after.to(memory.dtype), saved.to(memory.dtype)


def _biased(gates: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return wide(gates) if bias is None else wide(gates) + wide(bias)


def wide(x: torch.Tensor) -> torch.Tensor:
    """The tensor in the dtype in which torch computes: float32 instead of 16 bits."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _ldexp(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    return x * torch.pow(2.0, exponent)


BILINEAR_SAMPLES, NEAREST_SAMPLES = 0, 1
ZEROS, BORDER = 0, 1
"""ATen's codes for the interpolation and the padding of ``grid_sample``; 2 reflects at the border."""


def _grid_sampler(x: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, align_corners: bool) -> Any:
    """Samples at computed positions. Samples outside of the image are 0, also if an element of the image is infinite."""
    if mode not in (BILINEAR_SAMPLES, NEAREST_SAMPLES) or 1 in x.shape[2:]:
        return NotImplemented
    height, width = x.shape[2:]
    positions = wide(grid)
    column = _source_position(positions[..., 0], width, padding, align_corners)
    row = _source_position(positions[..., 1], height, padding, align_corners)

    def sample(at_row: torch.Tensor, at_column: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        inside = (at_row >= 0) & (at_row < height) & (at_column >= 0) & (at_column < width)
        index = torch.where(inside, at_row, 0).long() * width + torch.where(inside, at_column, 0).long()
        index = index.reshape(x.shape[0], 1, -1).expand(-1, x.shape[1], -1)
        value = wide(x).reshape(x.shape[0], x.shape[1], height * width).gather(2, index)
        value = value.reshape(*x.shape[:2], *grid.shape[1:3])
        return torch.where(inside.unsqueeze(1), value if weight is None else value * weight.unsqueeze(1), 0.0)

    if mode == NEAREST_SAMPLES:
        return sample(row.round(), column.round(), None).to(x.dtype)
    top, left = row.floor(), column.floor()
    bottom, right = top + 1, left + 1
    total = sample(top, left, (right - column) * (bottom - row)) + sample(top, right, (column - left) * (bottom - row))
    total = total + sample(bottom, left, (right - column) * (row - top))
    total = total + sample(bottom, right, (column - left) * (row - top))
    if grid.device.type == "cpu" and padding == ZEROS:
        # On a CPU, torch multiplies elements outside by weights that are NaN for infinite positions.
        total = torch.where((column.isfinite() & row.isfinite()).unsqueeze(1), total, float("nan"))
    return total.to(x.dtype)


def _source_position(coordinate: torch.Tensor, size: Any, padding: int, align_corners: bool) -> torch.Tensor:
    """The position in the image of a coordinate from -1 to 1, moved into the image unless samples outside are 0."""
    # The coordinate is not added to 1 first: that would round small ones.
    position = (coordinate * (size - 1 if align_corners else size) + (size - 1)) / 2
    if padding == ZEROS:
        return position
    if padding != BORDER:
        low, span = (0.0, size - 1) if align_corners else (-0.5, size)
        distance = (position - low).abs()
        rest, is_odd = torch.fmod(distance, span), torch.floor(distance / span) % 2 == 1
        position = torch.where(is_odd, span - rest, rest) + low
    return torch.where(position == position, position, 0.0).clamp(0, size - 1)


def _dist(x: torch.Tensor, y: torch.Tensor, p: float = 2) -> torch.Tensor:
    return torch.linalg.vector_norm(x - y, p)


def _eye(
    rows: Any,
    columns: Any = None,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Any:
    """Equal row and column numbers.

    PyTorch's decomposition counts in the shortest dtype that is long enough, such as uint16, in which no ``arange`` runs.
    """
    if layout not in (None, torch.strided) or pin_memory:
        return NotImplemented
    row_numbers = torch.arange(rows, device=device)
    column_numbers = row_numbers if columns is None else torch.arange(columns, device=device)
    return (row_numbers.unsqueeze(-1) == column_numbers).to(dtype or torch.get_default_dtype())


def _addmv(addend: torch.Tensor, matrix: torch.Tensor, vector: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _with_addend(addend, matrix @ vector, beta, alpha)


def _addbmm(addend: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """A sum of batched products is one product whose reduction runs over the batch, too."""
    rows, columns = left.shape[1], right.shape[2]
    return _with_addend(addend, left.permute(1, 0, 2).reshape(rows, -1) @ right.reshape(-1, columns), beta, alpha)


def _with_addend(addend: torch.Tensor, product: torch.Tensor, beta: Any, alpha: Any) -> torch.Tensor:
    """``beta * addend + alpha * product``. For ``beta == 0`` the addend is ignored, even if it is NaN."""
    return alpha * product if beta == 0 else beta * addend + alpha * product


def _cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: Any = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Loss per sample, followed by its sum or mean: a row reduction and a full reduction."""
    if reduction == NONE:
        return NotImplemented
    losses = torch.ops.aten.cross_entropy_loss.default(x, target, weight, NONE, ignore_index, label_smoothing)
    if reduction == SUM:
        return losses.sum()
    if target.dtype == x.dtype:
        return losses.sum() / losses.numel()
    return losses.sum() / _total_weight(target, weight, ignore_index, x.dtype)


def _nll(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: Any = -100,
) -> torch.Tensor:
    """Gather per sample, followed by the sum or mean."""
    dim = 1 if x.dim() > 1 else 0
    is_counted = target != ignore_index
    safe = torch.where(is_counted, target, 0)
    losses = -torch.gather(x, dim, safe.unsqueeze(dim)).squeeze(dim)
    if weight is not None:
        losses = losses * torch.index_select(weight, 0, safe.reshape(-1)).reshape(safe.shape)
    losses = torch.where(is_counted, losses, 0.0)
    if reduction == NONE:
        return losses
    return losses.sum() if reduction == SUM else losses.sum() / _total_weight(target, weight, ignore_index, x.dtype)


def _total_weight(
    target: torch.Tensor, weight: torch.Tensor | None, ignore_index: Any, dtype: torch.dtype
) -> torch.Tensor:
    """Total weight of the samples that are not ignored."""
    is_counted = target != ignore_index
    if weight is None:
        return is_counted.sum().to(dtype)
    sample_weights = torch.index_select(weight, 0, torch.where(is_counted, target, 0).reshape(-1)).reshape(target.shape)
    return torch.where(is_counted, sample_weights, 0.0).sum()
