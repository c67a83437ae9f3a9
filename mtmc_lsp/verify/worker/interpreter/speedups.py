"""Makes Triton's interpreter faster with the same results. Runs in workers and affects the whole process."""

from __future__ import annotations

import contextlib
from typing import Any

from mtmc_lsp.verify.worker.interpreter.operand_types import speed_up_operands
from mtmc_lsp.verify.worker.interpreter.stand_in import stand_in

_sped_up: list[Any] = []


def speed_up_interpreter() -> None:
    """Cache what the interpreter computes repeatedly, and vectorise what it computes element by element."""
    from triton.runtime import interpreter

    if interpreter in _sped_up:
        return
    _sped_up.append(interpreter)
    for step in (
        _vectorise_reductions,
        _cache_numpy_types,
        _cache_tile_types,
        _reuse_language_patch,
        _skip_kernel_search,
        _vectorise_erf,
        speed_up_operands,
    ):
        # Other versions of Triton lack some of these internals and are only slower.
        with contextlib.suppress(AttributeError, ImportError):
            step(interpreter)


def _cache_numpy_types(interpreter: Any) -> None:
    """Cache the numpy type of each Triton type, which every operation looks up several times."""
    original = interpreter._get_np_dtype
    cache: dict[str, Any] = {}

    def numpy_type(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in cache:
            cache[name] = original(kind)
        return cache[name]

    interpreter._get_np_dtype = stand_in(numpy_type, original)


def _cache_tile_types(interpreter: Any) -> None:
    """Compute the type of a tile once for each element type and shape."""
    block, constexpr = interpreter.tl.block_type, interpreter.tl.constexpr
    original = block.__init__
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def __init__(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(size.value if isinstance(size, constexpr) else size for size in shape))
        if key in known:
            self.__dict__.update(known[key], element_ty=element_ty)
            return
        original(self, element_ty, shape)
        known[key] = vars(self).copy()

    block.__init__ = stand_in(__init__, original)

    tensor = interpreter.tl.tensor
    make_tensor = tensor.__init__
    fields_of_type: dict[str, tuple[Any, Any, Any]] = {}

    def __init__of_tensor(self: Any, handle: Any, type: Any) -> None:
        fields = fields_of_type.get(type.name)
        if fields is not None:
            # This is faster than an update of its dictionary.
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = fields
            return
        make_tensor(self, handle, type)
        if vars(self).keys() == {"handle", "type", "shape", "numel", "dtype"}:
            fields_of_type[type.name] = self.shape, self.numel, self.dtype

    tensor.__init__ = stand_in(__init__of_tensor, make_tensor)


def _reuse_language_patch(interpreter: Any) -> None:
    """Patch ``triton.language`` once per launch, instead of again for each function that the kernel calls."""
    original = interpreter._patch_lang
    builtin = interpreter.tl.core.is_builtin
    modules: dict[int, list[tuple[str, Any]]] = {}

    def prepared(function: Any) -> Any:
        names = function.__globals__
        # Modules have hundreds of names, and functions are called by each program.
        known = modules.get(id(names))
        if known is None or any(names.get(name) is not module for name, module in known):
            known = [(n, v) for n, v in names.items() if v is interpreter.tl or v is interpreter.tl.core]
            modules[id(names)] = known
        ready = known and not any(builtin(one.load) or builtin(one.tensor.__add__) for _, one in known)
        return interpreter._LangPatchScope() if ready else original(function)

    interpreter._patch_lang = stand_in(prepared, original)


def _skip_kernel_search(_: Any) -> None:
    """Do not search an operator's source for the kernels that it launches: only ``torch.compile`` needs them.

    The search reads the file again for each function, and imports a part of the compiler.
    """
    import torch._library.triton

    search = torch._library.triton.get_inner_triton_kernels
    torch._library.triton.get_inner_triton_kernels = stand_in(lambda _: [], search)


def _vectorise_erf(interpreter: Any) -> None:
    """Compute the error function of a tile by torch, in float64, instead of once for each element."""
    import torch

    original = interpreter.InterpreterBuilder.create_erf

    def create_erf(self: Any, arg: Any) -> Any:
        data = torch.erf(torch.from_numpy(arg.data.astype("float64"))).numpy().astype(arg.data.dtype)
        return interpreter.TensorHandle(data, arg.dtype.scalar)

    interpreter.InterpreterBuilder.create_erf = stand_in(create_erf, original)


def _vectorise_reductions(interpreter: Any) -> None:
    """Run reductions and scans with a custom function on halves of a tile at a time.

    The interpreter calls the function for each element, which takes seconds for a few thousand elements. The order of the
    operands is preserved, so the function must only be associative, which Triton requires anyway.
    """
    import numpy

    tl = interpreter.tl

    def combined(ops: Any, tensors: Any, first: list[Any], second: list[Any]) -> list[Any]:
        """The function's results on two lists of arrays, in the tensors' types."""
        types = [tensor.dtype for tensor in tensors]
        operands = [ops.to_tensor(part, kind) for part, kind in zip([*first, *second], [*types, *types], strict=True)]
        results = ops.combine_fn.fn(*operands)
        results = results if isinstance(results, tuple) else (results,)
        values = [result.handle.data if isinstance(result, tl.tensor) else result for result in results]
        return [
            numpy.broadcast_to(value, part.shape).astype(part.dtype) for value, part in zip(values, first, strict=True)
        ]

    def generic_reduce(self: Any, inputs: Any) -> list[Any]:
        tensors, axis = self.unravel(inputs, self.axis)
        parts = [tensor.handle.data for tensor in tensors]
        while parts[0].shape[axis] > 1:
            first, second = ([_along(part, axis, slice(i, None, 2)) for part in parts] for i in (0, 1))
            parts = combined(self, tensors, first, second)
        if not self.keep_dims:
            parts = [part.item() if self.axis is None else part.squeeze(axis) for part in parts]
        elif self.axis is None:
            parts = [part.reshape([1] * inputs[0].handle.data.ndim) for part in parts]
        return [self.to_tensor(part, tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]

    def generic_scan(self: Any, inputs: Any) -> list[Any]:
        parts = [tensor.handle.data for tensor in inputs]
        step = 1
        while step < parts[0].shape[self.axis]:
            # Sizes must stay powers of two, so the first elements are combined with the last, and then restored.
            shifted = combined(self, inputs, [numpy.roll(part, step, self.axis) for part in parts], parts)
            for part, new in zip(parts, shifted, strict=True):
                _along(new, self.axis, slice(0, step))[...] = _along(part, self.axis, slice(0, step))
            parts, step = shifted, 2 * step
        return [self.to_tensor(part, tensor.dtype) for part, tensor in zip(parts, inputs, strict=True)]

    reduction, scan = interpreter.ReduceOps, interpreter.ScanOps
    reduction.generic_reduce = stand_in(generic_reduce, reduction.generic_reduce)
    scan.generic_scan = stand_in(generic_scan, scan.generic_scan)


def _along(part: Any, axis: int, elements: slice) -> Any:
    return part[(slice(None),) * (axis % part.ndim) + (elements,)]
