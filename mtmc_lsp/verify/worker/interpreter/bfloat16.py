"""Bfloat16 in Triton's interpreter, rounded as on a GPU. Needs only torch and triton: reproductions include this text.

The interpreter stores bfloat16 as the 16 bits of an unsigned integer and then calculates with these integers. Here each operation
is computed in float32 and rounded to the nearest bfloat16, ties to even. For sums, products and quotients this is the correctly
rounded result, since float32 has more than twice as many bits of precision.
"""

from __future__ import annotations

from typing import Any

NAME = "bf16"
"""Triton's name of the type."""


_bfloat16_patched: list[Any] = []


def patch_bfloat16(replace: Any = setattr) -> None:
    """Make operations, casts, products, reductions and atomic additions of bfloat16 calculate with its values.

    Args:
        replace: sets an attribute of a class to another function.
    """
    from triton.runtime import interpreter

    if interpreter in _bfloat16_patched:
        return
    _bfloat16_patched.append(interpreter)
    _patch_elementwise(interpreter, replace)
    _patch_casts(interpreter, replace)
    _patch_products(interpreter, replace)
    _patch_atomic_addition(interpreter, replace)
    _patch_reductions(interpreter, replace)


def _is_bfloat16(handle: Any) -> bool:
    """Whether the handle has bfloat16 values: the interpreter also gives the results of comparisons their operands' type."""
    return bool(handle.dtype.scalar.name == NAME and handle.data.dtype == "uint16")


def _wide(handle: Any) -> Any:
    """The values as float32; arrays of other types as they are."""
    import numpy

    if not _is_bfloat16(handle):
        return handle.data
    return (handle.data.astype(numpy.uint32) << 16).view(numpy.float32)


def _narrow(values: Any) -> Any:
    """The bits of the nearest bfloat16 values, ties to even.

    Args:
        values: an array of float32 or float64.
    """
    import numpy

    single = values
    if values.dtype != numpy.float32:
        with numpy.errstate(over="ignore"):
            # An index makes an array of a number.
            single = values.astype(numpy.float32)[...]
    bits = single.view(numpy.uint32)
    if values.dtype == numpy.float64:
        # Rounding twice is wrong where the first rounding gives a tie.
        tie = (bits & 0xFFFF == 0x8000) & (single != values)
        bits = numpy.where(tie, numpy.where(numpy.abs(values) > numpy.abs(single), bits + 1, bits - 1), bits)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(numpy.uint16)
    is_nan = numpy.isnan(single)
    return numpy.where(is_nan, numpy.uint16(0x7FC0), rounded) if is_nan.any() else rounded[...]


def _patch_elementwise(interpreter: Any, replace: Any) -> None:
    import numpy

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    binary, ternary, unary, fma = builder.binary_op, builder.ternary_op, builder.unary_op, builder.create_fma

    def rounded(result: Any, kind: Any) -> Any:
        return handle(result if result.dtype == numpy.bool_ else _narrow(result), kind)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar.name != NAME:
            return binary(self, lhs, rhs, op)
        return rounded(op(_wide(lhs), _wide(rhs)), lhs.dtype.scalar)

    def ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        if other.dtype.scalar.name != NAME or op is numpy.where:
            return ternary(self, lhs, rhs, other, op)
        return rounded(op(_wide(lhs), _wide(rhs), _wide(other)), other.dtype.scalar)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        if arg.dtype.scalar.name != NAME:
            return unary(self, arg, op)
        return rounded(op(_wide(arg)), arg.dtype.scalar)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.dtype.scalar.name != NAME:
            return fma(self, x, y, z)
        return rounded(_wide(x).astype(numpy.float64) * _wide(y) + _wide(z), z.dtype.scalar)

    replace(builder, "binary_op", binary_op)
    replace(builder, "ternary_op", ternary_op)
    replace(builder, "unary_op", unary_op)
    replace(builder, "create_fma", create_fma)


def _patch_casts(interpreter: Any, replace: Any) -> None:
    import numpy

    builder, handle, tl = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter.tl
    cast, float_cast = builder.cast_impl, builder.create_fp_to_fp

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar.name, dst_type.scalar.name
        if NAME not in (source, target):
            return cast(self, src, dst_type)
        values = _wide(src)
        if target == NAME:
            data = _narrow(values if values.dtype == numpy.float64 else values.astype(numpy.float32))
        else:
            data = values.astype(interpreter._get_np_dtype(dst_type))
        return handle(data, dst_type.scalar)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        source, target = src.dtype.scalar.name, dst_type.scalar.name
        truncates = rounding == interpreter._ir.ROUNDING_MODE.RTZ
        if target == NAME and source in ("fp16", "fp32", "fp64"):
            if not truncates:
                return cast_impl(self, src, dst_type)
            bits = src.data.astype(numpy.float32).view(numpy.uint32) >> 16
            return handle(bits.astype(numpy.uint16), dst_type.scalar)
        if source != NAME:
            return float_cast(self, src, dst_type, rounding)
        if target == "fp16" and not truncates:
            return cast_impl(self, src, dst_type)
        return float_cast(self, cast_impl(self, src, tl.float32), dst_type, rounding)

    def get_bf16(self: Any, value: float) -> Any:
        return handle(_narrow(numpy.array([value], dtype=numpy.float64)), tl.bfloat16)

    replace(builder, "cast_impl", cast_impl)
    replace(builder, "create_fp_to_fp", create_fp_to_fp)
    if hasattr(builder, "get_bf16"):
        replace(builder, "get_bf16", get_bf16)
    else:
        builder.get_bf16 = get_bf16


def _patch_products(interpreter: Any, replace: Any) -> None:
    builder, handle, tl = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter.tl
    original = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (handle(_wide(side), tl.float32) if _is_bfloat16(side) else side for side in (a, b))
        return original(self, a, b, *rest)

    replace(builder, "create_dot", create_dot)


def _patch_atomic_addition(interpreter: Any, replace: Any) -> None:
    import numpy

    builder, handle, memory = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter._interpreter
    original = builder.create_atomic_rmw

    def create_atomic_rmw(self: Any, operation: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        """Element by element: several may have the same address. Triton has no other atomic operation for bfloat16."""
        if not _is_bfloat16(val):
            return original(self, operation, ptr, val, mask, *rest)
        before = numpy.zeros(val.data.shape, dtype=numpy.uint16)
        one: Any = numpy.ones(1, dtype=bool)
        nothing: Any = numpy.zeros(1, dtype=numpy.uint16)
        for index in numpy.ndindex(before.shape):
            if mask.data[index]:
                # The builder's loads and stores take other arguments in each version of Triton.
                address = ptr.data[index].reshape(1)
                before[index] = memory.load(address, one, nothing, nothing.dtype)[0]
                old, added = (handle(data[index].reshape(1), val.dtype) for data in (before, val.data))
                memory.store(address, self.binary_op(old, added, numpy.add).data, one)
        return handle(before, val.dtype.scalar)

    replace(builder, "create_atomic_rmw", create_atomic_rmw)


def _patch_reductions(interpreter: Any, replace: Any) -> None:
    """Sums are rounded at each addition, as kernels compute them; maxima and minima compare values."""
    tl = interpreter.tl
    reduction, scan = interpreter.ReduceOps, interpreter.ScanOps
    reduce, scan_all = reduction.apply_impl, scan.apply_impl
    stepwise = (tl.standard._sum_combine, tl.standard._prod_combine)

    def apply_to_reduction(self: Any, inputs: Any) -> Any:
        if not _is_bfloat16(inputs[0].handle):
            return reduce(self, inputs)
        extremes = ("_elementwise_max", "_elementwise_min")
        if not any(self.combine_fn is getattr(tl.standard, name) for name in extremes):
            return self.generic_reduce(inputs)
        result = reduce(self, (self.to_tensor(_wide(inputs[0].handle), tl.float32),))
        data = _narrow(result.handle.data)
        return self.to_tensor(data if result.type.is_block() else data.item(), tl.bfloat16)

    def apply_to_scan(self: Any, inputs: Any) -> Any:
        if not _is_bfloat16(inputs[0].handle) or self.combine_fn not in stepwise:
            return scan_all(self, inputs)
        tensors = [self.to_tensor(_flipped(i.handle.data, self), i.dtype) for i in inputs]
        return [self.to_tensor(_flipped(r.handle.data, self), r.dtype) for r in self.generic_scan(tensors)]

    replace(reduction, "apply_impl", apply_to_reduction)
    replace(scan, "apply_impl", apply_to_scan)


def _flipped(data: Any, scan: Any) -> Any:
    import numpy

    return numpy.ascontiguousarray(numpy.flip(data, axis=scan.axis)) if scan.reverse else data
