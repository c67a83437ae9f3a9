"""Speeds up ``torch.export`` without changing its results. Patches torch for the rest of the worker process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


def speed_up_export() -> None:
    """Cache the preparations that torch repeats for each decomposition of an exported program, and shorten slow traces."""
    import torch._export.utils
    import torch._subclasses.fake_impls
    import torch.export.exported_program

    program = torch.export.exported_program
    # In a torch version without these functions, the export is only slower.
    with contextlib.suppress(AttributeError):
        if program._override_composite_implicit_decomp.__module__ != __name__:
            _cache_overrides(program, torch._subclasses.fake_impls.op_implementations_dict)
            _collect_operators_once(program, torch._export.utils)
    with contextlib.suppress(AttributeError, ImportError):
        import torch._decomp.decompositions

        _describe_normalised_tensors(torch._decomp.decompositions)


def _describe_normalised_tensors(decompositions: Any) -> None:
    """Describe the results of a batch norm of inference on tensors without data, instead of tracing its arithmetic.

    Torch computes with a dozen tensors without data for each batch norm and trace: that was 10 % of the processor time in which
    EfficientNet-B0 was captured. Where the arithmetic itself is traced, it stays.
    """
    import torch
    from torch._prims_common import get_computation_dtype, is_contiguous_or_false
    from torch._subclasses.fake_tensor import FakeTensor

    original = decompositions.native_batch_norm_helper
    if original.__module__ == __name__:
        return
    modes = torch._C._TorchDispatchModeKey

    def is_described(given: Any, means: Any, variances: Any, others: tuple[Any, ...]) -> bool:
        tensors = [given, means, variances, *(other for other in others if other is not None)]
        if any(type(tensor) is not FakeTensor for tensor in tensors):
            return False
        is_traced = any(torch._C._get_dispatch_mode(mode) is not None for mode in (modes.PROXY, modes.FUNCTIONAL))
        if is_traced or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
            return False
        # Anything else might be an error, or have other strides.
        channels = given.shape[1] if given.dim() > 1 else None
        if type(channels) is not int or any(tuple(tensor.shape) != (channels,) for tensor in tensors[1:]):
            return False
        return bool(is_contiguous_or_false(given))

    def native_batch_norm_helper(
        input: Any,
        weight: Any,
        bias: Any,
        running_mean: Any,
        running_var: Any,
        training: bool,
        momentum: float,
        eps: float,
        functional: bool,
    ) -> tuple[Any, Any, Any, Any, Any]:
        if training or not is_described(input, running_mean, running_var, (weight, bias)):
            return original(  # type: ignore[no-any-return]  # torch is not typed here
                input, weight, bias, running_mean, running_var, training, momentum, eps, functional
            )
        dtype = get_computation_dtype(input.dtype)
        mean, variance = torch.empty_like(running_mean, dtype=dtype), torch.empty_like(running_var, dtype=dtype)
        if input.device.type == "cpu":
            saved = input.new_zeros((0,)), input.new_zeros((0,))
        else:
            saved = mean, torch.empty_like(variance)
        return torch.empty_like(input), *saved, mean, variance

    decompositions.native_batch_norm_helper = native_batch_norm_helper


def _collect_operators_once(program: Any, utils: Any) -> None:
    """Register operators in Python once per program, instead of once for each namespace."""
    original, materialize = program._collect_all_valid_cia_ops, utils._materialize_cpp_cia_ops

    def _collect_all_valid_cia_ops() -> Any:
        materialize()
        utils._materialize_cpp_cia_ops = lambda: None
        try:
            return original()
        finally:
            utils._materialize_cpp_cia_ops = materialize

    program._collect_all_valid_cia_ops = _collect_all_valid_cia_ops


def _cache_overrides(exported_program: Any, rules: dict[Any, Any]) -> None:
    """Reuse the kernels that prevent the decomposition of hundreds of operators.

    They are rebuilt when the set of operators changes, or when one of the operators has new kernels.
    """
    original = exported_program._override_composite_implicit_decomp
    cached_table: dict[Any, Any] = {}
    original_kernels: dict[Any, dict[Any, Any]] = {}
    overrides: dict[Any, tuple[dict[Any, Any], Any]] = {}

    @contextlib.contextmanager
    def _override_composite_implicit_decomp(table: Mapping[Any, Any]) -> Iterator[None]:
        if table == cached_table and all(op.py_kernels == original_kernels[op] and op not in rules for op in table):
            for op, (kernels, rule) in overrides.items():
                op.py_kernels.update(kernels)
                op._dispatch_cache.clear()
                rules[op] = rule
            try:
                yield
            finally:
                for op, kernels in original_kernels.items():
                    op.py_kernels.clear()
                    op.py_kernels.update(kernels)
                    op._dispatch_cache.clear()
                    rules.pop(op, None)
            return
        before = {op: dict(op.py_kernels) for op in table}
        # Torch does not replace an existing rule, but removes it at the end, so such a state cannot be restored.
        can_cache = not any(op in rules for op in table)
        with original(table):
            if can_cache:
                for cache in (cached_table, original_kernels, overrides):
                    cache.clear()
                cached_table.update(table)
                original_kernels.update(before)
                overrides.update({op: (dict(op.py_kernels), rules[op]) for op in table})
            yield

    exported_program._override_composite_implicit_decomp = _override_composite_implicit_decomp
