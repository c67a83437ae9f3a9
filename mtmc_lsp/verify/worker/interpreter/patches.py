"""Makes Triton's interpreter do what a GPU does where it does not. Needs only torch and triton: it is written into files, too."""

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
    "cyl_bessel_i1": "special.i1",
}  # fmt: skip
"""Functions of CUDA's mathematical library, and torch's of the same meaning."""


def patch_interpreter() -> None:
    """Mend what honest kernels run into; must come before their modules are imported."""
    from triton.runtime import interpreter

    if interpreter.InterpreterBuilder.create_splat.__module__ == __name__:
        return
    _spread_truth(interpreter)
    # Other versions have some of these otherwise, and what a kernel then runs into is said by the interpreter.
    for mend in (_pass_floats, _round_to_float8, _give_libdevice, _choose_configs):
        with contextlib.suppress(AttributeError, ImportError):
            mend(interpreter)


def _spread_truth(interpreter: Any) -> None:
    """The truth of a scalar comparison is spread over a tile as truth values.

    Of the operands' type, as the interpreter notes it, ``(loaded_float != 0) & mask`` would be an operation on floats.
    """
    import numpy

    original = interpreter.InterpreterBuilder.create_splat

    def create_splat(self: Any, kind: Any, value: Any) -> Any:
        if value.data.dtype == numpy.bool_:
            truth = numpy.full(kind.shape, value.data, dtype=numpy.bool_)
            return interpreter.TensorHandle(truth, interpreter.tl.int1)
        return original(self, kind, value)

    interpreter.InterpreterBuilder.create_splat = create_splat


def _pass_floats(interpreter: Any) -> None:
    """A float argument of a kernel is a float32 value there, with methods, not a number of Python's."""
    import numpy

    original, tl = interpreter._implicit_cvt, interpreter.tl

    def _implicit_cvt(arg: Any) -> Any:
        if isinstance(arg, float):
            return tl.tensor(interpreter.TensorHandle(numpy.array([arg], dtype=numpy.float32), tl.float32), tl.float32)
        return original(arg)

    interpreter._implicit_cvt = _implicit_cvt


def _round_to_float8(interpreter: Any) -> None:
    """Casts to eight bits round to the nearest, and end at the largest number: the interpreter makes 1.97 to 1."""
    import numpy
    import torch

    original, tl = interpreter._convert_float, interpreter.tl
    eight = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def _convert_float(value: Any, kind: Any, other: Any, rounding: Any) -> Any:
        if other not in eight or kind not in (tl.float16, tl.float32) or rounding is interpreter._ir.ROUNDING_MODE.RTZ:
            return original(value, kind, other, rounding)
        wide = torch.from_numpy(numpy.array(value, dtype=numpy.float32))
        end = torch.finfo(eight[other]).max
        return wide.clamp(-end, end).to(eight[other]).view(torch.uint8).numpy()

    interpreter._convert_float = _convert_float


def _give_libdevice(interpreter: Any) -> None:
    """Functions of CUDA's mathematical library, of which the interpreter has none, are torch's."""
    import torch

    names = {**{name: name for name in SAME_NAME}, **OTHER_NAME}
    for place in ("triton.language.extra.libdevice", "triton.language.extra.cuda.libdevice"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(place)
            for name, path in names.items():
                function: Any = torch
                for part in path.split("."):
                    function = getattr(function, part)
                if hasattr(module, name):
                    setattr(module, name, _by_torch(interpreter, function))


def _by_torch(interpreter: Any, function: Any) -> Any:
    import numpy
    import torch

    tl = interpreter.tl

    def call(*given: Any, **_: Any) -> Any:
        values = [g.value if isinstance(g, tl.constexpr) else g for g in given]
        kinds = [value.dtype for value in values if isinstance(value, tl.tensor)]
        arrays = [v.handle.data if isinstance(v, tl.tensor) else numpy.array([v], dtype=numpy.float32) for v in values]
        made = function(*(torch.from_numpy(numpy.ascontiguousarray(array)) for array in arrays))
        result = made.to(torch.from_numpy(arrays[0]).dtype).numpy()
        is_block = any(isinstance(value, tl.tensor) and value.type.is_block() for value in values)
        kind = tl.block_type(kinds[0], list(result.shape)) if is_block else kinds[0]
        return tl.tensor(interpreter.TensorHandle(result, kinds[0]), kind)

    return call


def _choose_configs(interpreter: Any) -> None:
    """Of the configurations that would be timed the first is taken: the interpreter has no times."""
    from triton.runtime.autotuner import Autotuner

    Autotuner._bench = lambda self, *args, config, **meta: [1.0, 1.0, 1.0]
    Autotuner.check_disk_cache = lambda self, key, configs, bench: bench() or False
