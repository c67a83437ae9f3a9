"""What a trace takes for granted of the sizes, as conditions in Python over their names. Runs in workers.

Torch notes a guard wherever a size decides something, with the place that asked. What the user's own code asked for decides
what it computes, so it is said in full. What torch itself asked for mostly decides how it gets there: that sizes differ,
say, or are no 1, which kernels need not know.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch

NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
BETWEEN = {
    "Add": " + ",
    "Mul": " * ",
    "FloorDiv": " // ",
    "CleanDiv": " // ",
    "Mod": " % ",
    "PythonMod": " % ",
    "IntTrueDiv": " / ",
    "FloatTrueDiv": " / ",
    "FloatPow": " ** ",
    "PowByNatural": " ** ",
    "Pow": " ** ",
    "BitwiseFn_bitwise_and": " & ",
    "BitwiseFn_bitwise_or": " | ",
    "Equality": " == ",
    "Unequality": " != ",
    "StrictGreaterThan": " > ",
    "GreaterThan": " >= ",
    "StrictLessThan": " < ",
    "LessThan": " <= ",
    "And": " and ",
    "Or": " or ",
}
"""Operators of Python by the classes of torch's symbolic sizes; operands that are no names or numbers are in parentheses."""
FUNCTIONS = {"Max": "max", "Min": "min", "Not": "not "}


@dataclass(frozen=True)
class Guard:
    """Something that holds of the sizes of a trace."""

    expression: Any
    is_asked: bool
    """Whether the user's code asked, and not torch in what that calls."""
    line: int
    """Of the target's file; 0 for any other."""


class _Unsayable(Exception):
    """An expression is made of more than operators and named sizes."""


def guards_of(placeholders: Sequence[torch.fx.Node], path: str) -> list[Guard]:
    """The guards of an exported program; ``path`` is the target's file."""
    for node in placeholders:
        environment = getattr(getattr(node.meta["val"], "fake_mode", None), "shape_env", None)
        if environment is not None:
            return [_guard(guard, environment, path) for guard in environment.guards]
    return []


def _guard(guard: Any, environment: Any, path: str) -> Guard:
    place: Any = getattr(guard.sloc, "framework_loc", None)
    file = str(getattr(place, "filename", ""))
    if not file.endswith(".py") or file.startswith(NOT_THE_USERS):
        return Guard(guard.expr, is_asked=False, line=0)
    # Sizes may have become others, or numbers, after it was asked.
    return Guard(environment.replace(guard.expr), is_asked=True, line=place.lineno if file == path else 0)


def condition(guard: Guard, names: Mapping[str, str], sizes: Container[str]) -> str | None:
    """What a guard asks of the named sizes: empty where that is nothing, None where it cannot be said.

    Args:
        guard: the guard.
        names: our name of each symbol.
        sizes: the names that are sizes of the inputs.
    """
    own = {str(symbol): names.get(str(symbol), "") for symbol in guard.expression.free_symbols}
    if not own or not all(name in sizes for name in own.values()):
        # It speaks of what is a constant by now.
        return ""
    if not guard.is_asked:
        return _of_torchs_own(str(guard.expression), own)
    if _is_about_one(guard.expression):
        return ""
    try:
        return _python(guard.expression, own)
    except _Unsayable:
        return None


def _of_torchs_own(text: str, own: Mapping[str, str]) -> str:
    unequal = re.fullmatch(r"Ne\((\w+), (\d{1,9})\)", text)
    if unequal is not None and unequal[1] in own and int(unequal[2]) > 1:
        return f"{own[unequal[1]]} != {unequal[2]}"
    if text.startswith(("Ne(", "Eq(")) or any(text.endswith(end) for end in (">= 2", "> 1", ">= 1", "> 0", ">= 0")):
        return ""
    if any(operator in text for operator in ("<", ">")) and not any(c in text for c in "(&|"):
        return "".join(own.get(word, word) for word in re.split(r"([A-Za-z_]\w*)", text))
    return ""


def _is_about_one(expression: Any) -> bool:
    """Whether it only says that one size is at least 2, or none of 0 and 1: what is so at 1 is seen apart (``branches.py``)."""
    if len(expression.args) != 2 or not expression.args[0].is_Symbol or not expression.args[1].is_Integer:
        return False
    least = {"GreaterThan": 2, "StrictGreaterThan": 1, "Unequality": 1}.get(type(expression).__name__)
    return least is not None and int(expression.args[1]) <= least


def _python(expression: Any, own: Mapping[str, str]) -> str:
    if expression.is_Symbol:
        return own[str(expression)]
    if expression.is_Integer:
        return str(int(expression))
    if expression.is_Rational:
        return f"{int(expression.p)} / {int(expression.q)}"
    if expression.is_Float:
        return repr(float(expression))
    kind = type(expression).__name__
    if kind == "ToFloat":
        return _python(expression.args[0], own)
    if kind in FUNCTIONS:
        return f"{FUNCTIONS[kind]}({', '.join(_python(part, own) for part in expression.args)})"
    if kind not in BETWEEN:
        raise _Unsayable
    # Terms with sizes come first, as people write them.
    parts = sorted(expression.args, key=lambda part: part.is_Number) if kind == "Add" else expression.args
    return BETWEEN[kind].join(_operand(part, own) for part in parts)


def _operand(part: Any, own: Mapping[str, str]) -> str:
    text = _python(part, own)
    return text if re.fullmatch(r"[\w.]+", text) or isinstance(part, (sympy.Max, sympy.Min)) else f"({text})"
