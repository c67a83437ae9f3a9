"""Finds ``torch.logaddexp`` in the primitives of a loop's body."""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.ir.primitives import Prim


def log_add_exp_operands(prims: Mapping[str, Prim], prim: Prim) -> tuple[str, str] | None:
    """The operands of a ``logaddexp``, from PyTorch's decomposition of it; ``None`` for other primitives."""

    def inputs(name: str, fn: str) -> tuple[str, ...]:
        return prims[name].inputs if prims[name].fn == fn else ()

    outer = prim.inputs if prim.fn == "where" else ()
    total = inputs(outer[2], "add") if outer else ()
    larger = inputs(total[0], "where") if total else ()
    if not larger or inputs(larger[0], "ge") != larger[1:] or outer[1] != larger[1]:
        return None
    first, second = larger[1:]
    equal = inputs(outer[0], "logical_and")
    power = inputs(total[1], "log1p")
    difference = inputs(power[0], "exp") if power else ()
    terms = inputs(difference[0], "sub") if difference else ()
    if not terms or terms[1] != total[0] or inputs(terms[0], "where") != (larger[0], second, first):
        return None
    return (first, second) if equal and inputs(equal[1], "eq") == (first, second) else None
