"""Properties of dtypes. A dtype is written as its torch name without ``torch.``: ``"float32"``."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of the dtypes that generated kernels support."""

UNSUPPORTED_ITEMSIZE: dict[str, int] = {
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
"""Bytes per element of other dtypes. Operations on them stay in torch."""


COMPLEX: dict[str, str] = {"complex64": "float32", "complex128": "float64"}
"""The dtype of the parts of complex dtypes that parameters and buffers may have."""


def itemsize(dtype: str) -> int:
    """Bytes per element; 4 for an unknown dtype."""
    return ITEMSIZE.get(dtype) or UNSUPPORTED_ITEMSIZE.get(dtype, 4)


SHORT: dict[str, str] = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u8": "uint8",
    "bool": "bool",
}
"""Short names as written in directives, mapped to full names."""


def short_dtype(dtype: str) -> str:
    """The short name of a dtype; a dtype without one as it is."""
    return next((short for short, full in SHORT.items() if full == dtype), dtype)


TOLERANCE: dict[str, float] = {
    "float64": 1e-10,
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 2e-2,
    "float8_e4m3fn": 1e-1,
    "float8_e5m2": 2e-1,
}
"""Upper limit of the accepted relative L2 error, whatever the reference's error is."""

EPSILON: dict[str, float] = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
}
"""Machine epsilon: the spacing of numbers at 1."""

MAX_FINITE: dict[str, float] = {
    "float64": 1.7976931348623157e308,
    "float32": 3.4028234663852886e38,
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}
"""Largest finite number."""


def integer_range(dtype: str) -> tuple[int, int]:
    """Smallest and largest value of an integer or bool dtype."""
    bits = 1 if dtype == "bool" else 8 * ITEMSIZE[dtype]
    return (0, 2**bits - 1) if dtype in ("bool", "uint8") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def round_to_dtype(number: float, dtype: str) -> float:
    """Round ``number`` to float16 or bfloat16; other dtypes return it unchanged."""
    if dtype not in ("float16", "bfloat16") or number != number or abs(number) == float("inf"):
        return number
    if dtype == "float16":
        # Numbers from halfway to the next power of two upwards round to infinity.
        return (
            struct.unpack("e", struct.pack("e", number))[0] if abs(number) < 65520 else math.copysign(math.inf, number)
        )
    bits = struct.unpack("I", struct.pack("f", number))[0]
    bits += 0x7FFF + (bits >> 16 & 1)
    return float(struct.unpack("f", struct.pack("I", bits & 0xFFFF0000))[0])


def round_to_float32(number: float) -> float:
    """Round ``number`` to float32; infinite if it is too large."""
    try:
        return float(struct.unpack("f", struct.pack("f", number))[0])
    except OverflowError:
        return math.copysign(math.inf, number)


def is_float(dtype: str) -> bool:
    """Whether ``dtype`` is a floating point type."""
    return dtype in EPSILON


def is_integer(dtype: str) -> bool:
    """Whether it is an integer dtype that generated kernels support; bool is none."""
    return dtype in ITEMSIZE and dtype != "bool" and not is_float(dtype)


def is_low_precision(dtype: str) -> bool:
    """Whether ``dtype`` is a float narrower than float32, whose arithmetic is done in float32."""
    return is_float(dtype) and ITEMSIZE[dtype] < 4


def compute_dtype(dtype: str) -> str:
    """The dtype in which elementwise arithmetic on ``dtype`` is done, as in PyTorch's kernels."""
    return "float32" if is_low_precision(dtype) else dtype


POINTER_TYPES = {
    "float64": "*fp64",
    "float32": "*fp32",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e5m2": "*fp8e5",
    "int64": "*i64",
    "int32": "*i32",
    "int16": "*i16",
    "int8": "*i8",
    "uint8": "*u8",
    "bool": "*u1",
}
"""Torch dtype to the pointer type in a Triton signature."""


@dataclass(frozen=True)
class PrecisionSettings:
    """Settings of the user's process that decide in which precision torch computes. The defaults are torch's."""

    float32_products: str = "ieee"
    """``tf32`` if float32 matrix products may run in TF32, else ``ieee``."""
    float32_convolutions: str = "tf32"
    """The same for cuDNN: convolutions and recurrent layers."""
    reduced_float16_sums: bool = True
    """Whether products of float16 may add partial sums in float16."""
    reduced_bfloat16_sums: bool = True
    """The same for bfloat16."""
    deterministic: bool = False
    """Whether operations without a deterministic implementation raise."""
    autocast: str = ""
    """The dtype of the caller's autocast; empty without autocast."""
    autocast_cache: bool = True
    """Whether autocast keeps the casts of weights until its region ends."""

    @property
    def words(self) -> Iterator[str]:
        """The settings that are not torch's defaults, as short phrases."""
        if self.autocast:
            yield f"autocast {short_dtype(self.autocast)}{'' if self.autocast_cache else ' without a cache'}"
        if self.float32_products == "tf32":
            yield "TF32 products"
        if self.float32_convolutions == "ieee":
            yield "convolutions without TF32"
        full = [
            name
            for name, is_reduced in (("f16", self.reduced_float16_sums), ("bf16", self.reduced_bfloat16_sums))
            if not is_reduced
        ]
        if full:
            yield f"{' and '.join(full)} products with float32 sums"
        if self.deterministic:
            yield "deterministic algorithms"
