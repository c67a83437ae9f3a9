"""Tensors from jaxtyping annotations: ``x: Float[Tensor, "batch dim"]``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import TensorSpec
from mtmc_lsp.source.workload.directive_syntax import JAXTYPING
from mtmc_lsp.source.workload.signatures import Parameter

IMPRECISE_DTYPES = frozenset({"Float", "Int", "Integer", "Shaped", "Num", "Inexact"})
"""jaxtyping names that do not specify the bit width."""

MAX_ASSUMED_SIZE = 256
"""Value of a named dimension without a value, unless a tensor becomes too large."""
MAX_ASSUMED_ELEMENTS = 2**26
"""Maximum number of elements of a tensor with assumed sizes."""

ANNOTATION = re.compile(r"(?:\w+\.)*(\w+)\[\s*[\w.]*Tensor\s*,\s*[rf]?[\"'](.*)[\"']\s*,?\s*\]", re.DOTALL)


@dataclass(frozen=True)
class AnnotatedTensor:
    """The tensor described by an annotation."""

    spec: TensorSpec
    assumed: tuple[str, ...] = ()
    """Sentences about what the annotation does not specify."""


def annotated_tensor(parameter: Parameter) -> AnnotatedTensor | None:
    """The tensor that a parameter's annotation describes; None for other annotations and for invalid ones."""
    match = ANNOTATION.fullmatch(_strip_optional(parameter.annotation))
    if match is None or match[1] not in JAXTYPING:
        return None
    dtype = JAXTYPING[match[1]]
    assumed = []
    if match[1] in IMPRECISE_DTYPES:
        assumed.append(f"{parameter.name} is assumed to be {dtype}: {match[1]} does not specify the bit width")
    shape: list[str] = []
    for dimension in match[2].split():
        dimension_text = dimension.split("=")[-1].lstrip("#?")
        if dimension_text == "...":
            assumed.append(f"{parameter.name} is assumed to have no dimensions for `...` in its annotation")
        elif dimension_text.startswith(("*", "_")):
            name = dimension_text.lstrip("*_") or f"{parameter.name}_size"
            assumed.append(f"{parameter.name} is assumed to have one dimension, {name}, for {dimension}")
            shape.append(name)
        else:
            shape.append(dimension_text)
    try:
        return AnnotatedTensor(TensorSpec(tuple(Size.parse(dimension) for dimension in shape), dtype), tuple(assumed))
    except (ValueError, SyntaxError, ZeroDivisionError):
        return None


def _strip_optional(annotation: str) -> str:
    """Remove surrounding quotes, ``Optional[...]`` and ``| None``."""
    text = annotation.strip()
    if len(text) > 1 and text[0] in "\"'" and text[-1] == text[0]:
        text = text[1:-1].strip()
    text = re.sub(r"\s*\|\s*None$", "", text)
    optional = re.fullmatch(r"(?:\w+\.)*Optional\[(.*)\]", text, re.DOTALL)
    return optional[1].strip() if optional else text


def assumed_sizes(shapes: Iterable[tuple[Size, ...]], known_sizes: dict[str, int]) -> dict[str, int]:
    """A value for every size without a value: the largest power of two for which all tensors stay within the limit."""
    all_shapes = list(shapes)
    unknown = sorted({name for shape in all_shapes for size in shape for name in size.symbols()} - set(known_sizes))
    value = MAX_ASSUMED_SIZE
    while value > 4 and any(
        _elements(shape, known_sizes, unknown, value) > MAX_ASSUMED_ELEMENTS for shape in all_shapes
    ):
        value //= 2
    return dict.fromkeys(unknown, value)


def _elements(shape: tuple[Size, ...], known_sizes: dict[str, int], unknown: list[str], value: int) -> int:
    result = 1
    for size in shape:
        result *= size.value({**known_sizes, **dict.fromkeys(unknown, value)})
    return result
