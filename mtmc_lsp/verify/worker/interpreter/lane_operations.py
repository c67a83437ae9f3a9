"""Lets the interpreter's builder compute with the arrays of several programs. Runs in workers.

Most of its functions call numpy, which :class:`~mtmc_lsp.verify.worker.interpreter.lanes.Lanes` follows. Here are those that
call native code, create arrays, or access memory.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from mtmc_lsp.verify.worker.interpreter.accesses import Accesses, Positions, ProgramsDepend, WrongAccess
from mtmc_lsp.verify.worker.interpreter.lanes import Lanes, spread, values_of
from mtmc_lsp.verify.worker.interpreter.memory import Memories, Selection
from mtmc_lsp.verify.worker.interpreter.patches import LIBDEVICE, OTHER_NAME, SAME_NAME, WRITTEN_OUT

ELEMENTWISE = ("create_fma", "create_erf", "create_umulhi")
"""Functions that call native code for arrays of equal shape."""


class Programs:
    """The programs that run now."""

    index: tuple[Any, Any, Any] | None = None
    """Their indices in the grid, by dimension, if several run at once."""
    accesses: Accesses | None = None
    """Records what they load and store."""
    memories: Memories | None = None
    """The tensors of the launch."""
    positions: Positions | None = None
    """Records which threads store what, if races between them are to be refused."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        """Messages about wrong accesses that the results need not show."""

    def note_load(self, builder: Any, selection: Selection, mask: Any, *, is_wide: bool) -> None:
        """Refuse a load of what another thread of the program stored."""
        program = tuple(builder.grid_idx)
        if self.positions is not None and self.positions.load(program, selection, mask, is_wide=is_wide):
            self._refuse(self.positions.race(is_load=True))

    def note_store(
        self, builder: Any, selection: Selection, values: Any, mask: Any, *, is_wide: bool, is_repeated: bool
    ) -> None:
        """Note a store, or refuse it if another thread of the program stored another value."""
        if self.positions is None:
            return
        program = tuple(builder.grid_idx)
        if self.positions.store(program, selection, values, mask, is_wide=is_wide, is_repeated=is_repeated):
            self._refuse(self.positions.race(is_load=False))

    def note_unknown_store(self, addresses: Any, mask: Any, size: int) -> None:
        """Refuse a store that is partly inside the launch's tensors and partly outside."""
        if self.positions is None or self.memories is None:
            return
        if self.memories.crosses_end(addresses, mask, size):
            self._refuse(self.positions.outside())

    def _refuse(self, message: str) -> None:
        """Refuse the access that the kernel makes now; programs that run at once first run one after the other.

        Raises:
            ProgramsDepend: several programs run at once, or one whose stores are undone.
            WrongAccess: a program runs alone.
        """
        if self.accesses is not None:
            raise ProgramsDepend
        self.faults.append(message)
        raise WrongAccess(message)


programs = Programs()
_patched: list[Any] = []


def patch_lanes(replace: Callable[[Any, str, Any], None]) -> None:
    """Make the builder take arrays of several programs.

    Args:
        replace: sets an attribute of a module or class to another function.
    """
    from triton.runtime import interpreter

    if interpreter in _patched:
        return
    _patched.append(interpreter)
    builder = interpreter.InterpreterBuilder
    replace(builder, "create_get_program_id", _program_id(interpreter, builder.create_get_program_id))
    replace(builder, "create_masked_load", _masked_load(interpreter, builder.create_masked_load))
    replace(builder, "create_masked_store", _masked_store(interpreter, builder.create_masked_store))
    replace(builder, "create_splat", _splat(interpreter, builder.create_splat))
    for name in ELEMENTWISE:
        # Other versions of Triton lack some of them. Kernels that need them run one program after the other.
        with contextlib.suppress(AttributeError):
            replace(builder, name, _elementwise(interpreter, getattr(builder, name)))
    to_tensor = interpreter.ReduceScanOpInterface.to_tensor
    replace(interpreter.ReduceScanOpInterface, "to_tensor", _reduced(interpreter, to_tensor))
    replace(interpreter, "_convert_float", _converted(interpreter._convert_float))
    for module_name in LIBDEVICE:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(module_name)
            for name in (name for name in (*SAME_NAME, *OTHER_NAME, *WRITTEN_OUT) if hasattr(module, name)):
                replace(module, name, _of_libdevice(interpreter, getattr(module, name)))


def _of_libdevice(interpreter: Any, original: Any) -> Any:
    """A function of libdevice, which torch computes."""
    tl = interpreter.tl

    def call(*args: Any, **named: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, tl.tensor)]
        if not any(isinstance(arg.handle.data, Lanes) for arg in tensors):
            return original(*args, **named)
        # Torch wants arrays that can be written.
        arrays = map(numpy.array, spread([arg.handle.data for arg in tensors]))
        wide = [_tensor(interpreter, next(arrays), arg) if isinstance(arg, tl.tensor) else arg for arg in args]
        result = original(*wide, **named)
        lanes = Lanes(result.handle.data)
        is_block = any(arg.type.is_block() for arg in tensors)
        kind = tl.block_type(result.dtype, list(lanes.shape)) if is_block else result.dtype
        return tl.tensor(interpreter.TensorHandle(lanes, result.handle.dtype), kind)

    return call


def _tensor(interpreter: Any, array: Any, like: Any) -> Any:
    """An array of all programs as one tile."""
    tl = interpreter.tl
    kind = tl.block_type(like.dtype, list(array.shape))
    return tl.tensor(interpreter.TensorHandle(array, like.handle.dtype), kind)


def _program_id(interpreter: Any, original: Any) -> Any:
    def create_get_program_id(self: Any, axis: int) -> Any:
        if programs.index is None:
            return original(self, axis)
        values = programs.index[axis]
        is_same = bool((values == values[0]).all())
        data = values[:1] if is_same else Lanes(values[:, None])
        return interpreter.TensorHandle(data, interpreter.tl.int32)

    return create_get_program_id


def _masked_load(interpreter: Any, original: Any) -> Any:
    handle = interpreter.TensorHandle

    def create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        if programs.memories is None:
            return original(self, ptrs, mask, other, *rest, **named)
        given = [ptrs, mask] if other is None else [ptrs, mask, other]
        arrays, is_wide = _arrays(given)
        kind = ptrs.get_element_ty()
        selection = programs.memories.select(arrays[0], arrays[1], max(1, kind.primitive_bitwidth // 8))
        if programs.accesses is not None:
            programs.accesses.load(selection, arrays[1], is_wide=is_wide)
        if selection is not None:
            programs.note_load(self, selection, arrays[1], is_wide=is_wide)
            dtype = interpreter._get_np_dtype(kind)
            data = selection.load(arrays[1], arrays[2] if other is not None else None, dtype)
        else:
            operands = [handle(array, operand.dtype) for array, operand in zip(arrays, given, strict=True)]
            data = original(self, *operands, *(() if other is not None else (None,)), *rest, **named).data
        return handle(Lanes(data) if is_wide else data, kind)

    return create_masked_load


def _masked_store(interpreter: Any, original: Any) -> Any:
    handle = interpreter.TensorHandle

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        if programs.memories is None:
            return original(self, ptrs, value, mask, *rest, **named)
        given = [ptrs, value, mask]
        arrays, is_wide = _arrays(given)
        selection = programs.memories.select(arrays[0], arrays[2], int(arrays[1].itemsize))
        is_repeated = True
        if programs.accesses is not None:
            is_repeated = programs.accesses.store(selection, arrays[1], arrays[2], is_wide=is_wide)
        if selection is not None:
            programs.note_store(self, selection, arrays[1], arrays[2], is_wide=is_wide, is_repeated=is_repeated)
            selection.store(arrays[1], arrays[2])
            return None
        programs.note_unknown_store(arrays[0], arrays[2], int(arrays[1].itemsize))
        shuffled = programs.memories.shuffled(arrays)
        operands = [handle(array, operand.dtype) for array, operand in zip(shuffled, given, strict=True)]
        return original(self, *operands, *rest, **named)

    return create_masked_store


def _arrays(operands: Sequence[Any]) -> tuple[list[Any], bool]:
    """The arrays of operands, and whether they are those of several programs."""
    arrays = [operand.data for operand in operands]
    is_wide = any(isinstance(array, Lanes) for array in arrays)
    return (spread(arrays), True) if is_wide else (arrays, False)


def _splat(interpreter: Any, original: Any) -> Any:
    def create_splat(self: Any, kind: Any, value: Any) -> Any:
        lanes = value.data
        if not isinstance(lanes, Lanes):
            return original(self, kind, value)
        shape = [int(size) for size in kind.shape]
        array = lanes.values.reshape(len(lanes.values), *(1,) * len(shape))
        # Comparisons give booleans with the operands' type.
        dtype = interpreter.tl.int1 if lanes.dtype == numpy.bool_ else value.dtype.scalar
        data = numpy.broadcast_to(array, (len(array), *shape))
        return interpreter.TensorHandle(Lanes(data), dtype)

    return create_splat


def _elementwise(interpreter: Any, original: Any) -> Any:
    handle = interpreter.TensorHandle

    def operation(self: Any, *operands: Any) -> Any:
        if not any(isinstance(operand.data, Lanes) for operand in operands):
            return original(self, *operands)
        arrays = spread([operand.data for operand in operands])
        result = original(self, *(handle(a, o.dtype) for a, o in zip(arrays, operands, strict=True)))
        return handle(Lanes(result.data), result.dtype)

    return operation


def _reduced(interpreter: Any, original: Any) -> Any:
    def to_tensor(self: Any, ret: Any, dtype: Any) -> Any:
        if not isinstance(ret, Lanes) or ret.ndim:
            return original(self, ret, dtype)
        data = Lanes(ret.values[:, None].astype(interpreter._get_np_dtype(dtype)))
        return interpreter.tl.core.tensor(interpreter.TensorHandle(data, dtype.scalar), dtype)

    return to_tensor


def _converted(original: Any) -> Any:
    def _convert_float(value: Any, *rest: Any) -> Any:
        converted = original(values_of(value), *rest)
        return Lanes(converted) if isinstance(value, Lanes) else converted

    return _convert_float
