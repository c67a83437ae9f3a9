"""Tensors from jaxtyping annotations: ``x: Float[Tensor, "batch dim"]``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import TensorSpec
from mtmc_lsp.source.workload.directive_syntax import JAXTYPING
from mtmc_lsp.source.workload.signatures import Parameter

VAGUE = frozenset({"Float", "Int", "Integer", "Shaped", "Num", "Inexact"})
"""jaxtyping names that leave the width open."""

LARGEST_SIZE = 256
"""Assumed for a named dimension that nothing gives a value, unless that makes a tensor too large."""
LARGEST_TENSOR = 2**26
"""Elements of the largest tensor that assumed sizes may make."""

ANNOTATION = re.compile(r"(?:\w+\.)*(\w+)\[\s*[\w.]*Tensor\s*,\s*[rf]?[\"'](.*)[\"']\s*,?\s*\]", re.DOTALL)


@dataclass(frozen=True)
class Annotated:
    """What an annotation tells of a tensor."""

    spec: TensorSpec
    assumed: tuple[str, ...] = ()
    """Sentences on what it leaves open."""


def annotated_tensor(parameter: Parameter) -> Annotated | None:
    """The tensor that a parameter is annotated as; None for another annotation, or one that cannot be read."""
    match = ANNOTATION.fullmatch(_bare(parameter.annotation))
    if match is None or match[1] not in JAXTYPING:
        return None
    dtype = JAXTYPING[match[1]]
    assumed = []
    if match[1] in VAGUE:
        assumed.append(f"{parameter.name} is assumed to be {dtype}: {match[1]} leaves the width open")
    shape: list[str] = []
    for word in match[2].split():
        plain = word.split("=")[-1].lstrip("#?")
        if plain == "...":
            assumed.append(f"{parameter.name} is assumed to have no dimension where its annotation says ...")
        elif plain.startswith(("*", "_")):
            name = plain.lstrip("*_") or f"{parameter.name}_size"
            assumed.append(f"{parameter.name} is assumed to have one dimension, {name}, for {word}")
            shape.append(name)
        else:
            shape.append(plain)
    try:
        return Annotated(TensorSpec(tuple(Size.parse(word) for word in shape), dtype), tuple(assumed))
    except (ValueError, SyntaxError, ZeroDivisionError):
        return None


def _bare(annotation: str) -> str:
    """Without quotes around the whole, ``Optional[...]`` and ``| None``."""
    text = annotation.strip()
    if len(text) > 1 and text[0] in "\"'" and text[-1] == text[0]:
        text = text[1:-1].strip()
    text = re.sub(r"\s*\|\s*None$", "", text)
    optional = re.fullmatch(r"(?:\w+\.)*Optional\[(.*)\]", text, re.DOTALL)
    return optional[1].strip() if optional else text


def assumed_sizes(shapes: Iterable[tuple[Size, ...]], known: dict[str, int]) -> dict[str, int]:
    """A value for every size of the shapes that has none: a power of two that keeps the tensors within bounds."""
    all_shapes = list(shapes)
    unknown = sorted({name for shape in all_shapes for size in shape for name in size.symbols()} - set(known))
    value = LARGEST_SIZE
    while value > 4 and any(_elements(shape, known, unknown, value) > LARGEST_TENSOR for shape in all_shapes):
        value //= 2
    return dict.fromkeys(unknown, value)


def _elements(shape: tuple[Size, ...], known: dict[str, int], unknown: list[str], value: int) -> int:
    result = 1
    for size in shape:
        result *= size.value({**known, **dict.fromkeys(unknown, value)})
    return result
