"""Replaces functions of Triton's interpreter while an observer looks on. Runs in workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy
import torch

from mtmc_lsp.kernels.worker.observer import Observer
from mtmc_lsp.verify.worker.interpreter.operators import through_the_builder


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let an observer see all launches in this context."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, new: Any) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    load, store, plain_load, plain_store = (
        getattr(builder, f"create_{name}") for name in ("masked_load", "masked_store", "load", "store")
    )
    rmw, dot, convert, call = (
        builder.create_atomic_rmw,
        builder.create_dot,
        interpreter._implicit_cvt,
        executor.__call__,
    )
    swap = builder.create_atomic_cas
    binary, unary = builder.binary_op, builder.unary_op

    def unmasked(original: Any) -> Any:
        def operation(this: Any, *args: Any) -> Any:
            observer.has_mask = False
            try:
                return original(this, *args)
            finally:
                observer.has_mask = True

        return operation

    def converted(value: Any) -> Any:
        result = convert(value)
        if isinstance(value, torch.Tensor):
            result.handle.data = numpy.array([observer.memory.address(value, "")], dtype=numpy.uint64)
        return result

    def multiplied(this: Any, a: Any, b: Any, *args: Any) -> Any:
        observer.worked(2.0 * a.data.size * b.data.shape[-1])
        return dot(this, a, b, *args)

    def binary_op(this: Any, a: Any, b: Any, operation: Any) -> Any:
        if a.dtype.scalar.is_floating():
            observer.worked(float(max(a.data.size, b.data.size)))
        return binary(this, a, b, operation)

    def unary_op(this: Any, a: Any, operation: Any) -> Any:
        if a.dtype.scalar.is_floating():
            observer.worked(float(a.data.size))
        return unary(this, a, operation)

    def masked_load(this: Any, pointer: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        # Loads by a descriptor name their options.
        return observer.load(partial(load, **named), this, pointer, _handle(mask), other, rest)

    def masked_store(this: Any, pointer: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return observer.store(partial(store, **named), this, pointer, value, _handle(mask), rest)

    replace(builder, "create_masked_load", masked_load)
    replace(builder, "create_masked_store", masked_store)
    replace(builder, "create_load", unmasked(plain_load))
    replace(builder, "create_store", unmasked(plain_store))
    replace(builder, "create_atomic_rmw", lambda b, k, p, v, m, *rest: observer.atomic(rmw, b, k, p, v, m, rest))
    replace(builder, "create_atomic_cas", lambda b, p, c, v, *rest: observer.swap(swap, b, p, c, v, rest))
    replace(builder, "create_dot", multiplied)
    replace(builder, "binary_op", binary_op)
    replace(builder, "unary_op", unary_op)
    replace(interpreter, "_implicit_cvt", converted)
    replace(executor, "__call__", lambda e, *args, **kwargs: observer.launched(call, e, args, kwargs))
    try:
        with through_the_builder():
            yield
    finally:
        for owner, name, old in reversed(replaced):
            setattr(owner, name, old)


def _handle(mask: Any) -> Any:
    """The mask of an access; that of a descriptor is an array in Triton 3.6."""
    from triton import language
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(mask, language.int1) if isinstance(mask, numpy.ndarray) else mask
