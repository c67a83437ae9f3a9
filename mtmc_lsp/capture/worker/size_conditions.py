"""What a trace takes for granted of the sizes, as conditions in Python over their names. Runs in workers.

Torch notes a guard wherever a size decides something, with the place that asked. What the user's own code asked for decides
what it computes, so it is said in full: it is noted as it asks, for torch notes nothing that it takes to be so already, as
that a size is more than 1, or that two differ. What torch itself asked for mostly decides how it gets there: that sizes
differ, say, or are no 1, which kernels need not know.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.fx.experimental.sym_node import SymNode

from mtmc_lsp.core.sizes import rename_symbols

NOT_THE_USERS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))
PASSING = (torch.__file__, __file__)
"""Files through which a question goes on its way from who asks."""
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
"""Operators of Python by the classes of torch's symbolic sizes."""
DIVISIONS = ("FloorDiv", "CleanDiv", "Mod", "PythonMod", "IntTrueDiv", "FloatTrueDiv")
FUNCTIONS = {"Max": "max", "Min": "min", "Not": "not "}


@dataclass(frozen=True)
class Guard:
    """Something that holds of the sizes of a trace."""

    expression: Any
    is_asked: bool
    """Whether the user's code asked, and not torch in what that calls."""
    line: int
    """Of the target's file; 0 for any other."""
    is_direct: bool = False
    """Whether it was the user's code itself, and not what one of its calls does inside torch."""
    is_number: bool = False
    """Whether a size became a plain number, which the trace has as a constant."""


@dataclass(frozen=True)
class Question:
    """What code asked of a symbolic size, and was told."""

    expression: Any
    answer: bool | int | float
    file: str
    """Whose code asked."""
    line: int
    """Of the target's file, which led there; 0 where none did."""
    guards: tuple[str, ...] = ()
    """What torch noted of it."""

    @property
    def is_number(self) -> bool:
        """Whether the answer is a number, which the trace has as a constant."""
        return not isinstance(self.answer, bool)


@contextlib.contextmanager
def noting_questions(path: str) -> Iterator[list[Question]]:
    """Note what the user's code asks of sizes while it is traced, and where any code makes plain numbers of them.

    Args:
        path: the target's file.
    """
    asked: list[Question] = []
    originals: list[tuple[type, str, Any]] = [
        (torch.SymBool, "__bool__", torch.SymBool.__bool__),
        (SymNode, "guard_int", SymNode.guard_int),
        (SymNode, "guard_float", SymNode.guard_float),
    ]

    def noting(original: Any) -> Any:
        def answered(self: Any, *place: Any) -> Any:
            node = getattr(self, "node", self)
            expression = getattr(node, "_expr", None)
            if not isinstance(expression, sympy.Basic) or not expression.free_symbols:
                return original(self, *place)
            before = len(node.shape_env.guards)
            answer = original(self, *place)
            noted = tuple(str(guard.expr) for guard in node.shape_env.guards[before:])
            asked.append(Question(expression, answer, *_asker(path), noted))
            return answer

        return answered

    for owner, name, original in originals:
        setattr(owner, name, noting(original))
    try:
        yield asked
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _asker(path: str) -> tuple[str, int]:
    """The file of the code that asks, and the line of the target's file that led there."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in PASSING:
        frame = frame.f_back
    file = frame.f_code.co_filename if frame is not None else ""
    while frame is not None and frame.f_code.co_filename != path:
        frame = frame.f_back
    return file, frame.f_lineno if frame is not None else 0


class _Unsayable(Exception):
    """An expression is made of more than operators and named sizes."""


def guards_of(placeholders: Sequence[torch.fx.Node], questions: Sequence[Question], path: str) -> list[Guard]:
    """The guards of an exported program.

    Args:
        placeholders: its inputs.
        questions: what was asked while it was traced.
        path: the target's file.
    """
    for node in placeholders:
        environment = getattr(getattr(node.meta["val"], "fake_mode", None), "shape_env", None)
        if environment is not None:
            said = [question for question in questions if question.is_number or _is_the_users(question.file)]
            noted = {text for question in said for text in question.guards}
            others = [guard for guard in environment.guards if str(guard.expr) not in noted]
            answered = [_answered(question, environment) for question in said]
            return [*answered, *(_guard(guard, environment, path) for guard in others)]
    return []


def _answered(question: Question, environment: Any) -> Guard:
    # Sizes may have become others, or numbers, after it was asked.
    expression = environment.replace(question.expression)
    if not question.is_number and not question.answer:
        expression = sympy.Not(expression)
    return Guard(expression, is_asked=True, line=question.line, is_direct=True, is_number=question.is_number)


def _guard(guard: Any, environment: Any, path: str) -> Guard:
    place: Any = getattr(guard.sloc, "framework_loc", None)
    file = str(getattr(place, "filename", ""))
    if not _is_the_users(file):
        return Guard(guard.expr, is_asked=False, line=0)
    return Guard(environment.replace(guard.expr), is_asked=True, line=place.lineno if file == path else 0)


def _is_the_users(file: str) -> bool:
    return file.endswith(".py") and not file.startswith(NOT_THE_USERS)


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
    if guard.is_number:
        return None
    if not guard.is_asked:
        return _of_torchs_own(str(guard.expression), own)
    if _is_about_one(guard.expression, 1 if guard.is_direct else 2):
        return ""
    try:
        return _said(guard.expression, own)
    except _Unsayable:
        return None


def strongest(conditions: Iterable[str]) -> list[str]:
    """Each condition once, and of ``T > 2`` and ``T > 3``, which a loop over the rows asks, the last alone.

    Of two sizes with one name it is known that they are equal, so ``T <= T`` is left out.
    """
    found: dict[str, None] = dict.fromkeys(text for text in conditions if not re.fullmatch(r"(.+) [<>=]= \1", text))
    bounds: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for text in found:
        if bound := re.fullmatch(r"(\w+) (>|>=|<|<=) (\d+)", text):
            bounds.setdefault((bound[1], bound[2]), []).append((int(bound[3]), text))
    for (_, operator), own in bounds.items():
        _, strong = max(own) if ">" in operator else min(own)
        for _, text in own:
            if text != strong:
                del found[text]
    return list(found)


def _of_torchs_own(text: str, own: Mapping[str, str]) -> str:
    unequal = re.fullmatch(r"Ne\((\w+), (\d{1,9})\)", text)
    if unequal is not None and unequal[1] in own and int(unequal[2]) > 1:
        return f"{own[unequal[1]]} != {unequal[2]}"
    if text.startswith(("Ne(", "Eq(")) or any(text.endswith(end) for end in (">= 2", "> 1", ">= 1", "> 0", ">= 0")):
        return ""
    if any(operator in text for operator in ("<", ">")) and not any(c in text for c in "(&|"):
        return rename_symbols(text, own)
    return ""


def _is_about_one(expression: Any, least: int) -> bool:
    """Whether it only says that one size is ``least``, or more than a smaller number.

    Every size is at least 1, and what is so at 1 in what torch's operations do is seen apart (``branches.py``).
    """
    if not expression.is_Relational:
        return False
    expression = expression.canonical
    if not expression.args[0].is_Symbol or not expression.args[1].is_Integer:
        return False
    above = {"GreaterThan": 0, "StrictGreaterThan": 1, "Unequality": 1}.get(type(expression).__name__)
    return above is not None and int(expression.args[1]) + above <= least


def _said(expression: Any, own: Mapping[str, str]) -> str:
    """An expression in Python, that is false where it would divide by zero: there the target itself raises the error."""
    found = [atom for atom in sympy.preorder_traversal(expression) if type(atom).__name__ in DIVISIONS]
    divisors = [atom.args[1] for atom in found if not atom.args[1].is_positive]
    zeros = [f"{_python(divisor, own)} != 0" for divisor in dict.fromkeys(divisors)]
    # Without the parentheses that Python needs none of.
    return ast.unparse(ast.parse(" and ".join([*zeros, f"({_python(expression, own)})"]), mode="eval"))


def _python(expression: Any, own: Mapping[str, str]) -> str:
    """An expression in Python, whose operands are in parentheses."""
    if expression.is_Symbol:
        return own[str(expression)]
    if expression.is_Integer:
        return f"({int(expression)})"
    if expression.is_Rational:
        return f"({int(expression.p)} / {int(expression.q)})"
    if expression.is_Float:
        return f"({float(expression)!r})"
    kind = type(expression).__name__
    if kind == "ToFloat":
        return _python(expression.args[0], own)
    if kind in FUNCTIONS:
        return f"{FUNCTIONS[kind]}({', '.join(_python(part, own) for part in expression.args)})"
    if kind not in BETWEEN:
        raise _Unsayable
    if kind == "Add":
        # Terms with sizes come first, as people write them.
        first, *others = sorted(expression.args, key=lambda part: (part.is_Number, _is_less(part)))
        signed = [f" - {_python(-part, own)}" if _is_less(part) else f" + {_python(part, own)}" for part in others]
        return f"({_python(first, own)}{''.join(signed)})"
    return f"({BETWEEN[kind].join(_python(part, own) for part in expression.args)})"


def _is_less(term: Any) -> bool:
    """Whether a term of a sum is taken away."""
    return bool(term.as_coeff_Mul()[0].is_negative)
