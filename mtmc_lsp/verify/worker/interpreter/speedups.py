"""Makes Triton's interpreter quicker without changing what it computes. Runs in workers, after which it holds for the process."""

from __future__ import annotations

import contextlib
from typing import Any


def speed_up_interpreter() -> None:
    """What the interpreter does again and again for the same answer, or for one element after the other, it does once."""
    from triton.runtime import interpreter

    if interpreter.ReduceOps.generic_reduce.__module__ == __name__:
        return
    for step in (_combine_halves, _look_up_types, _remember_shapes, _enter_once, _take_operators_as_they_are):
        # A Triton that is built otherwise is only slower.
        with contextlib.suppress(AttributeError, ImportError):
            step(interpreter)


def _look_up_types(interpreter: Any) -> None:
    """The numpy type of a Triton type, of which every operation asks several, comes from a table."""
    original = interpreter._get_np_dtype
    table: dict[str, Any] = {}

    def numpy_type(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in table:
            table[name] = original(kind)
        return table[name]

    interpreter._get_np_dtype = numpy_type


def _remember_shapes(interpreter: Any) -> None:
    """The type of a tile is worked out once for each type of element and shape."""
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

    block.__init__ = __init__

    tensor = interpreter.tl.tensor
    make_tensor = tensor.__init__
    alike: dict[str, dict[str, Any]] = {}

    def __init__of_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name in alike:
            self.__dict__.update(alike[type.name], handle=handle, type=type)
            return
        make_tensor(self, handle, type)
        alike[type.name] = {name: value for name, value in vars(self).items() if name not in ("handle", "type")}

    tensor.__init__ = __init__of_tensor


def _enter_once(interpreter: Any) -> None:
    """A function that a kernel calls finds the language as the kernel's launch left it, instead of preparing it anew."""
    original = interpreter._patch_lang
    builtin = interpreter.tl.core.is_builtin

    def prepared(function: Any) -> Any:
        languages = [v for v in function.__globals__.values() if v is interpreter.tl or v is interpreter.tl.core]
        ready = languages and not any(builtin(one.load) or builtin(one.tensor.__add__) for one in languages)
        return interpreter._LangPatchScope() if ready else original(function)

    interpreter._patch_lang = prepared


def _take_operators_as_they_are(_: Any) -> None:
    """An operator's source is not searched for the kernels that it launches: only compiled ones would be found there.

    ``torch.compile`` asks for them alone. The search reads the file again for each function, and imports a part of the compiler.
    """
    import torch._library.triton

    torch._library.triton.get_inner_triton_kernels  # noqa: B018  (a torch that has none is left as it is)
    torch._library.triton.get_inner_triton_kernels = lambda _: []


def _combine_halves(interpreter: Any) -> None:
    """Reductions and scans by a function of the kernel's own combine halves of a tile at a time.

    The interpreter calls that function for one element after the other, which makes seconds of a few thousand elements.
    Operands keep their order, so the function need be associative only, as Triton asks of it.
    """
    import numpy

    tl = interpreter.tl

    def combined(ops: Any, tensors: Any, first: list[Any], second: list[Any]) -> list[Any]:
        """The function's results on two lists of arrays, in the tensors' types."""
        types = [tensor.dtype for tensor in tensors]
        operands = [ops.to_tensor(part, kind) for part, kind in zip([*first, *second], [*types, *types], strict=True)]
        made = ops.combine_fn.fn(*operands)
        made = made if isinstance(made, tuple) else (made,)
        values = [one.handle.data if isinstance(one, tl.tensor) else one for one in made]
        return [
            numpy.broadcast_to(value, part.shape).astype(part.dtype) for value, part in zip(values, first, strict=True)
        ]

    def generic_reduce(self: Any, given: Any) -> list[Any]:
        tensors, axis = self.unravel(given, self.axis)
        parts = [tensor.handle.data for tensor in tensors]
        while parts[0].shape[axis] > 1:
            first, second = ([_along(part, axis, slice(i, None, 2)) for part in parts] for i in (0, 1))
            parts = combined(self, tensors, first, second)
        if not self.keep_dims:
            parts = [part.item() if self.axis is None else part.squeeze(axis) for part in parts]
        elif self.axis is None:
            parts = [part.reshape([1] * given[0].handle.data.ndim) for part in parts]
        return [self.to_tensor(part, tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]

    def generic_scan(self: Any, given: Any) -> list[Any]:
        parts = [tensor.handle.data for tensor in given]
        step = 1
        while step < parts[0].shape[self.axis]:
            # Sizes must stay powers of two, so the first elements are combined with the last, and taken back.
            made = combined(self, given, [numpy.roll(part, step, self.axis) for part in parts], parts)
            for part, new in zip(parts, made, strict=True):
                _along(new, self.axis, slice(0, step))[...] = _along(part, self.axis, slice(0, step))
            parts, step = made, 2 * step
        return [self.to_tensor(part, tensor.dtype) for part, tensor in zip(parts, given, strict=True)]

    interpreter.ReduceOps.generic_reduce, interpreter.ScanOps.generic_scan = generic_reduce, generic_scan


def _along(part: Any, axis: int, which: slice) -> Any:
    return part[(slice(None),) * (axis % part.ndim) + (which,)]
