"""Patches of Triton's interpreter where it differs from a GPU. Needs only torch and triton: reproductions include this text."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

SAME_NAME = (
    "abs floor ceil trunc sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh asin acos atan asinh acosh "
    "atanh atan2 hypot erf erfc erfinv lgamma pow fmod copysign nextafter"
).split()
OTHER_NAME = {
    "rint": "round", "nearbyint": "round", "div_rn": "div", "add_rn": "add", "sub_rn": "sub", "mul_rn": "mul",
    "sqrt_rn": "sqrt", "rsqrt_rn": "rsqrt", "fast_expf": "exp", "fast_logf": "log", "fast_log2f": "log2", "fast_sinf": "sin",
    "fast_cosf": "cos", "fast_tanf": "tan", "fast_tanhf": "tanh", "fast_powf": "pow", "fast_dividef": "div",
    "normcdf": "special.ndtr", "normcdfinv": "special.ndtri", "erfcx": "special.erfcx", "cyl_bessel_i0": "special.i0",
    "cyl_bessel_i1": "special.i1", "llrint": "round", "rcp_rn": "reciprocal",
}  # fmt: skip
"""libdevice functions, with the torch functions that compute the same."""
WRITTEN_OUT = ("round", "exp10", "fma")
"""Those that torch computes by several functions."""
LIBDEVICE = ("triton.language.extra.libdevice", "triton.language.extra.cuda.libdevice")


_patched: list[Any] = []


def patch_interpreter(replace: Any = setattr) -> None:
    """Fix differences that correct kernels run into; call it before their modules are imported.

    Args:
        replace: sets an attribute of a module or class to another function.
    """
    from triton.runtime import interpreter

    if interpreter in _patched:
        return
    _patched.append(interpreter)
    _splat_booleans(interpreter, replace)
    # Other versions of Triton lack some of these internals. A kernel that needs such a patch then fails with an error.
    for patch in (
        _pass_float_arguments,
        _round_to_float8,
        _scan_in_steps,
        _exchange_floats,
        _define_libdevice,
        _choose_first_config,
        _accept_launches_as_compiled,
        _read_scalars_as_integers,
        _ignore_nan_in_extremes,
        _make_tiles_of_masks,
        _accept_other_names,
    ):
        with contextlib.suppress(AttributeError, ImportError):
            patch(interpreter, replace)


def _splat_booleans(interpreter: Any, replace: Any) -> None:
    """Broadcast the result of a scalar comparison to a tile of booleans.

    The interpreter gives it the operands' type, so that ``(loaded_float != 0) & mask`` would be an operation on floats.
    """
    import numpy

    original = interpreter.InterpreterBuilder.create_splat

    def create_splat(self: Any, kind: Any, value: Any) -> Any:
        if value.data.dtype == numpy.bool_:
            truth = numpy.full(kind.shape, value.data, dtype=numpy.bool_)
            return interpreter.TensorHandle(truth, interpreter.tl.int1)
        return original(self, kind, value)

    replace(interpreter.InterpreterBuilder, "create_splat", create_splat)


def _pass_float_arguments(interpreter: Any, replace: Any) -> None:
    """Pass float arguments of kernels as scalars of Triton, not as Python numbers: float64 where annotated, else float32."""
    import numpy

    original, tl = interpreter._implicit_cvt, interpreter.tl
    call = interpreter.GridExecutor.__call__

    class Double(float):
        """A float argument whose parameter is annotated as float64."""

    def _implicit_cvt(arg: Any) -> Any:
        if isinstance(arg, float):
            name, kind = ("float64", tl.float64) if isinstance(arg, Double) else ("float32", tl.float32)
            return tl.tensor(interpreter.TensorHandle(numpy.array([arg], dtype=name), kind), kind)
        return original(arg)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        annotations = getattr(self.fn, "__annotations__", {})
        wide = {name for name, kind in annotations.items() if str(kind) in ("fp64", "tl.float64")}
        passed = [
            Double(arg) if name in wide and isinstance(arg, float) else arg
            for name, arg in zip(self.arg_names, args, strict=False)
        ]
        return call(self, *passed, *args[len(passed) :], **kwargs)

    replace(interpreter, "_implicit_cvt", _implicit_cvt)
    replace(interpreter.GridExecutor, "__call__", __call__)


def _round_to_float8(interpreter: Any, replace: Any) -> None:
    """Make casts to float8 round to nearest and saturate, and keep NaN in casts from it.

    The interpreter converts 1.97 to 1, and the NaN of float8e4nv to 480.
    """
    import numpy
    import torch

    original, tl = interpreter._convert_float, interpreter.tl
    float8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
    wider = {tl.float16: torch.float16, tl.float32: torch.float32}

    def _convert_float(value: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source in float8 and target in wider:
            narrow = torch.from_numpy(numpy.array(value, dtype=numpy.uint8)).view(float8[source])
            return narrow.to(wider[target]).numpy()
        truncates = rounding is interpreter._ir.ROUNDING_MODE.RTZ
        if target not in float8 or source not in (tl.float16, tl.float32) or truncates:
            return original(value, source, target, rounding)
        wide = torch.from_numpy(numpy.array(value, dtype=numpy.float32))
        largest = torch.finfo(float8[target]).max
        return wide.clamp(-largest, largest).to(float8[target]).view(torch.uint8).numpy()

    replace(interpreter, "_convert_float", _convert_float)


def _scan_in_steps(interpreter: Any, replace: Any) -> None:
    """Compute running sums and products as a GPU does, in steps of 1, 2, 4, ...: one after the other, rounding adds up."""
    import numpy

    def stepwise(operation: Any, original: Any) -> Any:
        def scan(self: Any, input: Any) -> Any:
            data = input.handle.data
            if not numpy.issubdtype(data.dtype, numpy.floating):
                return original(self, input)
            step, length = 1, data.shape[self.axis]
            while step < length:
                later = [slice(None)] * data.ndim
                earlier = list(later)
                later[self.axis], earlier[self.axis] = slice(step, None), slice(None, -step)
                following = data.copy()
                following[tuple(later)] = operation(data[tuple(later)], data[tuple(earlier)])
                data, step = following, 2 * step
            return [self.to_tensor(data, input.dtype)]

        return scan

    scans = interpreter.ScanOps
    replace(scans, "cumsum", stepwise(numpy.add, scans.cumsum))
    replace(scans, "cumprod", stepwise(numpy.multiply, scans.cumprod))


def _exchange_floats(interpreter: Any, replace: Any) -> None:
    """Let ``tl.atomic_xchg`` take floats, as a GPU does: their bits are exchanged as integers."""
    import numpy

    builder, handle, exchange = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter._ir.ATOMIC_OP.XCHG
    original = builder.create_atomic_rmw

    def create_atomic_rmw(self: Any, operation: Any, ptr: Any, val: Any, *rest: Any) -> Any:
        kind = val.data.dtype
        if operation != exchange or not numpy.issubdtype(kind, numpy.floating):
            return original(self, operation, ptr, val, *rest)
        bits = handle(val.data.view(f"int{8 * kind.itemsize}"), getattr(interpreter.tl, f"int{8 * kind.itemsize}"))
        return handle(original(self, operation, ptr, bits, *rest).data.view(kind), val.dtype.scalar)

    replace(builder, "create_atomic_rmw", create_atomic_rmw)


def _define_libdevice(interpreter: Any, replace: Any) -> None:
    """Implement libdevice functions, which the interpreter lacks, by torch."""
    import torch

    def rounded(value: Any) -> Any:
        # In C, halves are rounded away from zero.
        return torch.copysign(torch.floor(value.abs() + 0.5), value)

    written_out = {"round": rounded, "exp10": lambda value: torch.pow(10.0, value), "fma": lambda a, b, c: a * b + c}
    names = {**{name: name for name in SAME_NAME}, **OTHER_NAME}
    for module_name in LIBDEVICE:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(module_name)
            for name, path in names.items():
                function: Any = torch
                for part in path.split("."):
                    function = getattr(function, part)
                if hasattr(module, name):
                    replace(module, name, _by_torch(interpreter, function))
            for name, function in written_out.items():
                if hasattr(module, name):
                    replace(module, name, _by_torch(interpreter, function))


def _by_torch(interpreter: Any, function: Any) -> Any:
    import numpy
    import torch

    tl = interpreter.tl

    def call(*args: Any, **_: Any) -> Any:
        values = [arg.value if isinstance(arg, tl.constexpr) else arg for arg in args]
        kinds = [value.dtype for value in values if isinstance(value, tl.tensor)]
        arrays = [v.handle.data if isinstance(v, tl.tensor) else numpy.array([v], dtype=numpy.float32) for v in values]
        computed = function(*(torch.from_numpy(numpy.ascontiguousarray(array)) for array in arrays))
        result = computed.to(torch.from_numpy(arrays[0]).dtype).numpy()
        is_block = any(isinstance(value, tl.tensor) and value.type.is_block() for value in values)
        kind = tl.block_type(kinds[0], list(result.shape)) if is_block else kinds[0]
        return tl.tensor(interpreter.TensorHandle(result, kinds[0]), kind)

    return call


def _choose_first_config(interpreter: Any, replace: Any) -> None:
    """Make the autotuner choose its first configuration: times in the interpreter are meaningless."""
    from triton.runtime.autotuner import Autotuner

    replace(Autotuner, "_bench", lambda self, *args, config, **meta: [1.0, 1.0, 1.0])
    replace(Autotuner, "check_disk_cache", lambda self, key, configs, bench: bench() or False)


def _accept_launches_as_compiled(interpreter: Any, replace: Any) -> None:
    """Recognise annotations that are text, as ``BLOCK: "tl.constexpr"``, and grids that are lists, as a launch on a GPU does."""
    original = interpreter.GridExecutor.__init__

    def __init__(self: Any, fn: Any, *args: Any, **kwargs: Any) -> None:
        original(self, fn, *args, **kwargs)
        texts = getattr(fn, "__annotations__", {})
        constants = [name for name, kind in texts.items() if isinstance(kind, str) and "constexpr" in kind]
        self.constexprs = list(dict.fromkeys([*self.constexprs, *constants]))
        # A launch also takes a list.
        grid = self.grid
        self.grid = (lambda meta: tuple(grid(meta))) if callable(grid) else tuple(grid)

    replace(interpreter.GridExecutor, "__init__", __init__)


def _read_scalars_as_integers(interpreter: Any, replace: Any) -> None:
    """Let loops count to a loaded value: scalars are arrays of one element, which numpy 2.4 and later do not convert."""
    original = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    replace(interpreter, "_patch_lang_tensor", _patch_lang_tensor)


def _ignore_nan_in_extremes(interpreter: Any, replace: Any) -> None:
    """Let ``tl.maximum`` and ``tl.minimum`` return the other operand for NaN, as on a GPU; Triton 3.6 returns NaN."""
    import numpy

    builder = interpreter.InterpreterBuilder
    replace(builder, "create_maxnumf", lambda self, lhs, rhs: self.binary_op(lhs, rhs, numpy.fmax))
    replace(builder, "create_minnumf", lambda self, lhs, rhs: self.binary_op(lhs, rhs, numpy.fmin))


def _make_tiles_of_masks(interpreter: Any, replace: Any) -> None:
    """Make the masks of block pointers and descriptors tiles, as all others are; Triton 3.6 to 3.8 give arrays."""
    for name in ("BlockPointerHandle", "TensorDescHandle"):
        handle = getattr(interpreter, name, None)
        if handle is not None:
            replace(handle, "materialize_pointers", _with_tile(interpreter, handle.materialize_pointers))


def _with_tile(interpreter: Any, original: Any) -> Any:
    def materialize_pointers(self: Any, offsets: Any) -> Any:
        pointers, masks = original(self, offsets)
        is_tile = isinstance(masks, interpreter.TensorHandle)
        return pointers, masks if is_tile else interpreter.TensorHandle(masks, interpreter.tl.int1)

    return materialize_pointers


def _accept_other_names(interpreter: Any, replace: Any) -> None:
    """Let kernels call functions of ``triton.language`` by names of their file: ``exp = tl.math.exp``, ``from ... import load``.

    The interpreter replaces attributes of ``triton.language`` alone, for the time of a launch.
    """
    tl, original = interpreter.tl, interpreter.InterpretedFunction.rewrite

    def forwarded(place: Any, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(place, name)(*args, **kwargs)

        return call

    def rewrite(self: Any) -> Any:
        names = self.fn.__globals__
        for name, value in [*names.items()]:
            known, home = getattr(value, "__name__", ""), getattr(value, "__module__", "")
            places = [tl, tl.math] if tl.core.is_builtin(value) else []
            # A file may load its copy of libdevice, as versions of Triton have it in different places.
            places += [importlib.import_module(home)] if home in LIBDEVICE else []
            place = next((item for item in places if hasattr(item, known)), None)
            if place is not None:
                names[name] = forwarded(place, known)
        return original(self)

    replace(interpreter.InterpretedFunction, "rewrite", rewrite)
