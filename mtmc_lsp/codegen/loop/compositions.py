"""The updates of a scan over time steps in Triton: their components, neutral elements, and how two of them are composed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtmc_lsp.codegen.kernel.snippets import literal
from mtmc_lsp.core.dtypes import compute_dtype, integer_range, is_float
from mtmc_lsp.ir.loops.scan import Recurrence, ScanKind

MATRIX_NAMES = ("m11", "m12", "m21", "m22", "v1", "v2")


@dataclass(frozen=True)
class Composition:
    """How the updates of one form are stored, composed and applied."""

    names: tuple[str, ...]
    """Of the components."""
    function: str
    """The device function that composes two updates: the earlier one first."""
    neutral: tuple[float, ...]
    """The components of an update that changes nothing; an infinite one becomes the limit of an integer's range."""
    applied: tuple[str, ...]
    """The states after an update: over the components and ``s0``, ``s1``, the states before it."""
    may_overflow: bool = False
    """Whether composed coefficients may be infinite or NaN where one step after another would give numbers."""


COMPOSITIONS = {
    ScanKind.SHIFT: Composition(("a", "b"), "_latest", (1.0, 0.0), ("tl.where({a} == 0, {b}, {s0})",)),
    ScanKind.SUM: Composition(("b",), "_add", (0.0,), ("{s0} + {b}",), may_overflow=True),
    ScanKind.PRODUCT: Composition(("a",), "_multiply", (1.0,), ("{a} * {s0}",), may_overflow=True),
    ScanKind.AFFINE: Composition(("a", "b"), "_affine", (1.0, 0.0), ("{a} * {s0} + {b}",), may_overflow=True),
    ScanKind.LOGIC: Composition(("a", "b"), "_and_or", (1.0, 0.0), ("{a} & {s0} | {b}",)),
    ScanKind.MAX: Composition(("k",), "_max_nan", (float("-inf"),), ("_max_nan({s0}, {k})",)),
    ScanKind.MIN: Composition(("k",), "_min_nan", (float("inf"),), ("_min_nan({s0}, {k})",)),
    ScanKind.MAX_PLUS: Composition(
        ("d", "k"), "_max_plus", (0.0, float("-inf")), ("_max_nan({s0} + {d}, {k})",), may_overflow=True
    ),
    ScanKind.MIN_PLUS: Composition(
        ("d", "k"), "_min_plus", (0.0, float("inf")), ("_min_nan({s0} + {d}, {k})",), may_overflow=True
    ),
    ScanKind.LOG_ADD_EXP: Composition(
        ("d", "k"), "_log_add_exp_plus", (0.0, float("-inf")), ("_log_add_exp({s0} + {d}, {k})",), may_overflow=True
    ),
    ScanKind.MATRIX: Composition(
        MATRIX_NAMES,
        "_affine_2x2",
        (1.0, 0.0, 0.0, 1.0, 0.0, 0.0),
        ("{m11} * {s0} + {m12} * {s1} + {v1}", "{m21} * {s0} + {m22} * {s1} + {v2}"),
        may_overflow=True,
    ),
}


def composition_of(item: Recurrence) -> Composition:
    """The composition of a recurrence's updates."""
    return COMPOSITIONS[item.kind]


def scan_dtype(item: Recurrence) -> str:
    """The dtype of the components: booleans are scanned as integers."""
    dtype = compute_dtype(item.states[0].type.dtype)
    if item.is_wide:
        return "float64"
    return "int32" if dtype == "bool" else dtype


def number_text(value: float, dtype: str) -> str:
    """A component that is a number."""
    if is_float(dtype):
        return literal(float(value))
    low, high = integer_range(dtype)
    return literal(low if value == float("-inf") else high if value == float("inf") else int(value))


def neutral_texts(item: Recurrence) -> list[str]:
    """The components of an update that changes nothing."""
    return [number_text(value, scan_dtype(item)) for value in composition_of(item).neutral]


def applied_texts(item: Recurrence, components: Sequence[str], states: Sequence[str]) -> list[str]:
    """The states after an update."""
    form = composition_of(item)
    names = dict(zip(form.names, components, strict=True)) | {f"s{i}": name for i, name in enumerate(states)}
    return [text.format(**names) for text in form.applied]


def composed_texts(item: Recurrence, earlier: Sequence[str], later: Sequence[str]) -> str:
    """The call that composes two updates."""
    return f"{composition_of(item).function}({', '.join((*earlier, *later))})"
