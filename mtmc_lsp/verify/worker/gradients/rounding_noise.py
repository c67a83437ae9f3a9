"""Random rounding errors in each operation of the user's code, forward and backward. Runs in workers.

The float64 oracle cannot show how large the terms of a gradient are that cancels: its backward pass has no rounding, and the
reference's rounding errors may cancel, too. Random errors of the size of a rounding (Parker's Monte Carlo arithmetic) do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtmc_lsp.capture.worker.passes.gradients import backward_decompositions

EXACT = frozenset(
    "abs alias amax amin argmax argmin as_strided bernoulli cat chunk clamp clamp_max clamp_min clone constant_pad_nd contiguous "
    "copy detach diagonal dropout empty empty_like empty_strided expand eye fill flip floor full full_like gather "
    "index index_select lift_fresh masked_fill max maximum min minimum narrow neg new_empty new_empty_strided new_full new_ones "
    "new_zeros ones ones_like permute rand rand_like randn randn_like relu repeat reshape roll round scalar_tensor select "
    "select_backward set sign slice slice_backward sort split split_with_sizes squeeze stack t threshold_backward to topk "
    "transpose tril triu trunc unbind unfold unsafe_view unsqueeze view where zero zeros zeros_like".split()
)
"""ATen operations without rounding: they move, choose or create values."""
SUMS = frozenset(
    "mm bmm addmm baddbmm addbmm mv addmv dot vdot sum mean convolution convolution_backward embedding_dense_backward "
    "index_add index_put scatter_add scatter_reduce cumsum var std var_mean linalg_vector_norm norm logsumexp".split()
)
"""ATen operations that add elements up: noise of the operands shows what cancels in the sum."""
NORMALIZATIONS = frozenset(
    "native_layer_norm native_group_norm native_batch_norm native_batch_norm_legit native_batch_norm_legit_no_training "
    "cudnn_batch_norm miopen_batch_norm batch_norm_with_update batch_norm_no_update".split()
)
"""ATen operations that subtract a mean from their first operand: its noise shows what cancels. The other operands have none,
because the running statistics are changed in place."""

SATURATING = frozenset(("gelu",))
"""Functions that multiply their operand by a factor such as ``1 + tanh(...)``. The factor cancels, so their error is that of the
operand."""

LARGEST = 0.25
"""The largest relative noise. It changes no sign."""


class RoundingNoise(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """Changes each computed floating-point number by a few units in the last place of its dtype.

    Zeros stay zeros, so an element that a mask sets to 0 has no noise, except results of :data:`SATURATING` functions. Operators
    of the backward pass are decomposed, because values may cancel within one.
    """

    def __init__(self, seed: int, units: float = 1, *, is_opposite: bool = False) -> None:
        """Create the mode for one run, with noise of up to ``units`` units in the last place, and at most :data:`LARGEST`.

        Args:
            is_opposite: whether the noise has the other sign than another run's with the same seed.
        """
        super().__init__()
        self._seed = seed
        self._units, self._sign = units, -1.0 if is_opposite else 1.0
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        decomposition = _decompositions().get(function)
        if decomposition is not None:
            with self:
                return decomposition(*args, **kwargs)
        name = function.overloadpacket.__name__.strip("_")
        is_in_place = function._schema.is_mutable
        name = name.removesuffix("_") if is_in_place else name
        if name in EXACT or not _computes_with_floats(args):
            return function(*args, **kwargs)
        written = [i for i, argument in enumerate(function._schema.arguments[: len(args)]) if argument.is_write]
        if name in SUMS:
            args = [value if i in written else self._noisy(value) for i, value in enumerate(args)]
        elif name in NORMALIZATIONS:
            args = [self._noisy(args[0]), *args[1:]]
        result = function(*args, **kwargs)
        for value in (args[i] for i in written):
            if isinstance(value, torch.Tensor) and _is_float(value):
                value.copy_(self._noisy(value))
        if any(returned.alias_info is not None for returned in function._schema.returns):
            return result
        if isinstance(result, (tuple, list)):
            return type(result)(self._noisy(value) for value in result)
        if name in SATURATING:
            return self._noisy(result) + (self._noisy(args[0]) - args[0]).nan_to_num(nan=0.0)
        return self._noisy(result)

    def _noisy(self, value: Any) -> Any:
        """A tensor with noise; other values as they are."""
        if not isinstance(value, torch.Tensor) or not _is_float(value):
            return value
        if value.device not in self._generators:
            self._generators[value.device] = torch.Generator(value.device).manual_seed(self._seed)
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        noise = torch.empty_like(value, dtype=wide).uniform_(-1.0, 1.0, generator=self._generators[value.device])
        size = min(self._units * torch.finfo(value.dtype).eps, LARGEST)
        return noise.mul_(self._sign * size).add_(1.0).mul_(value).to(value.dtype)


def _is_float(value: torch.Tensor) -> bool:
    return bool(value.is_floating_point() and value.dtype.itemsize > 1)


def _computes_with_floats(args: Any) -> bool:
    """Whether an operand is a tensor of floats, directly or in a list."""
    return any(
        _computes_with_floats(value)
        if isinstance(value, (list, tuple))
        else isinstance(value, torch.Tensor) and value.is_floating_point()
        for value in args
    )


@lru_cache(maxsize=1)
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Operators of the backward pass as simpler ones."""
    table = backward_decompositions()
    return {op: function for op, function in table.items() if "_backward" in str(op)}
