"""Converts the assumptions of a trace about sizes to Python conditions over named sizes. Runs in workers.

Torch records a guard wherever a size decides something. Guards of the user's code decide what it computes, so all of them
become conditions. They are recorded when the code asks, because torch does not record what it already assumes: that a size is
more than 1, or that two sizes differ. Guards of torch's code mostly decide how torch computes, which kernels need not know.
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

from mtmc_lsp.capture.worker.passes.non_polynomial_sizes import is_polynomial, with_reduced_divisions
from mtmc_lsp.core.sizes import Size, rename_symbols

LIBRARY_FOLDERS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))
FORWARDING_FILES = (torch.__file__, __file__)
"""Files between the code that asks a question and the code that records it."""
OPERATORS = {
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
"""Python operators for the classes of torch's symbolic sizes."""
DIVISIONS = ("FloorDiv", "CleanDiv", "Mod", "PythonMod", "IntTrueDiv", "FloatTrueDiv")
FUNCTIONS = {"Max": "max", "Min": "min", "Not": "not "}


@dataclass(frozen=True)
class Guard:
    """An assumption about sizes that a trace makes."""

    expression: Any
    is_asked: bool
    """Whether the user's code asked for it, and not torch."""
    line: int
    """Line in the target's file; 0 for other files."""
    is_direct: bool = False
    """Whether the user's code asked directly, and not a torch function that it calls."""
    is_number: bool = False
    """Whether a size became a plain number, which is a constant in the trace."""


@dataclass(frozen=True)
class Question:
    """A question that code asked about a symbolic size, and the answer."""

    expression: Any
    answer: bool | int | float
    file: str
    """File of the code that asked."""
    line: int
    """Line in the target's file that led to the question; 0 if none did."""
    guards: tuple[str, ...] = ()
    """The guards that torch recorded for it."""

    @property
    def is_number(self) -> bool:
        """Whether the answer is a number, which is a constant in the trace."""
        return not isinstance(self.answer, bool)


@contextlib.contextmanager
def recording_questions(path: str) -> Iterator[list[Question]]:
    """Record questions about sizes during a trace, and every conversion of a size to a plain number."""
    questions: list[Question] = []
    originals: list[tuple[type, str, Any]] = [
        (torch.SymBool, "__bool__", torch.SymBool.__bool__),
        (SymNode, "guard_int", SymNode.guard_int),
        (SymNode, "guard_float", SymNode.guard_float),
    ]

    def recording(original: Any) -> Any:
        def answered(self: Any, *location: Any) -> Any:
            node = getattr(self, "node", self)
            expression = getattr(node, "_expr", None)
            if not isinstance(expression, sympy.Basic) or not expression.free_symbols:
                return original(self, *location)
            before = len(node.shape_env.guards)
            answer = original(self, *location)
            guards = tuple(str(guard.expr) for guard in node.shape_env.guards[before:])
            questions.append(Question(expression, answer, *_asker(path), guards))
            return answer

        return answered

    for owner, name, original in originals:
        setattr(owner, name, recording(original))
    try:
        yield questions
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _asker(path: str) -> tuple[str, int]:
    """The file of the code that asks, and the line in the target's file that led to the question."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in FORWARDING_FILES:
        frame = frame.f_back
    file = frame.f_code.co_filename if frame is not None else ""
    while frame is not None and frame.f_code.co_filename != path:
        frame = frame.f_back
    return file, frame.f_lineno if frame is not None else 0


class _NotExpressible(Exception):
    """An expression contains something other than operators and named sizes."""


def guards_of(placeholders: Sequence[torch.fx.Node], questions: Sequence[Question], path: str) -> list[Guard]:
    """The guards of an exported program."""
    for node in placeholders:
        environment = getattr(getattr(node.meta["val"], "fake_mode", None), "shape_env", None)
        if environment is not None:
            user_questions = [question for question in questions if question.is_number or _is_user_file(question.file)]
            recorded = {text for question in user_questions for text in question.guards}
            others = [guard for guard in environment.guards if str(guard.expr) not in recorded]
            answered = [_guard_of_question(question, environment) for question in user_questions]
            return [*answered, *(_convert_guard(guard, environment, path) for guard in others)]
    return []


def _in_units(expression: Any, environment: Any) -> Any:
    """An expression with ``2 * h`` for each size that torch has found to be twice another one."""
    multiples = {
        symbol: value
        for symbol, value in environment.replacements.items()
        if value.free_symbols and not value.is_Symbol and is_polynomial(value)
    }
    return with_reduced_divisions(expression.xreplace(multiples))


def _guard_of_question(question: Question, environment: Any) -> Guard:
    # Sizes may have been replaced by other sizes or by numbers since the question.
    expression = with_reduced_divisions(environment.replace(question.expression))
    if not question.is_number and not question.answer:
        expression = sympy.Not(expression)
    return Guard(expression, is_asked=True, line=question.line, is_direct=True, is_number=question.is_number)


def _convert_guard(guard: Any, environment: Any, path: str) -> Guard:
    location: Any = getattr(guard.sloc, "framework_loc", None)
    file = str(getattr(location, "filename", ""))
    if not _is_user_file(file):
        # An equality of two sizes has made them one size, and then always holds.
        expression = environment.replace(guard.expr) if isinstance(guard.expr, sympy.Eq) else guard.expr
        return Guard(_in_units(expression, environment), is_asked=False, line=0)
    return Guard(
        with_reduced_divisions(environment.replace(guard.expr)),
        is_asked=True,
        line=location.lineno if file == path else 0,
    )


def _is_user_file(file: str) -> bool:
    return file.endswith(".py") and not file.startswith(LIBRARY_FOLDERS)


def condition(guard: Guard, names: Mapping[str, str], sizes: Container[str]) -> str | None:
    """The Python condition of a guard; empty if it always holds, ``None`` if Python cannot express it.

    Args:
        names: symbol to size name.
        sizes: names of the sizes of inputs.
    """
    size_names = {str(symbol): names.get(str(symbol), "") for symbol in guard.expression.free_symbols}
    if not size_names or not all(name in sizes for name in size_names.values()):
        # Its sizes have become constants.
        return ""
    if guard.is_number:
        return None
    if not guard.is_asked and isinstance(guard.expression, sympy.Eq):
        return _equality(guard.expression, size_names)
    if not guard.is_asked:
        return _library_condition(str(guard.expression), size_names)
    if _is_trivial(guard.expression, 1 if guard.is_direct else 2):
        return ""
    try:
        return _user_condition(guard.expression, size_names)
    except _NotExpressible:
        return None


def equal_factors(guards: Iterable[Guard], values: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Pairs of symbols that an equality of products suggests to be equal, such as batch and length of logits and labels.

    The equality alone would allow other factors, which nobody uses.

    Args:
        values: the workload's value of each symbol.
    """
    for guard in guards:
        if not isinstance(guard.expression, sympy.Eq):
            continue
        left, right = (list(sympy.Mul.make_args(sympy.factor(side))) for side in guard.expression.args)
        for factor in left if min(len(left), len(right)) > 1 else ():
            pairs = ((other, _equal_symbols(factor, other, values)) for other in right)
            other, symbols = next((pair for pair in pairs if pair[1]), (None, None))
            if symbols is not None:
                right.remove(other)
                yield symbols


def _equal_symbols(factor: Any, other: Any, values: Mapping[str, int]) -> tuple[str, str] | None:
    """The symbols of two factors that are equal if these are, such as those of ``s0 - 1`` and ``s1 - 1``."""
    if len(factor.free_symbols) != 1 or len(other.free_symbols) != 1:
        return None
    (symbol,), (other_symbol,) = factor.free_symbols, other.free_symbols
    values_agree = str(symbol) in values and values[str(symbol)] == values.get(str(other_symbol))
    return (str(symbol), str(other_symbol)) if values_agree and factor.subs(symbol, other_symbol) == other else None


def _equality(expression: Any, size_names: Mapping[str, str]) -> str:
    """The condition of an equality that torch needs; empty if it always holds, or if its sides are not polynomials."""
    if not all(is_polynomial(side) for side in expression.args):
        return ""
    left, right = (Size.parse(rename_symbols(str(side), size_names)) for side in expression.args)
    return "" if left == right else f"{left} == {right}"


def strongest(conditions: Iterable[str]) -> list[str]:
    """Remove duplicates and implied conditions: of ``T > 2`` and ``T > 3``, only the latter remains.

    Sizes with one name are equal, so ``T <= T`` is removed.
    """
    result: dict[str, None] = dict.fromkeys(text for text in conditions if not re.fullmatch(r"(.+) [<>=]= \1", text))
    bounds: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for text in result:
        if bound := re.fullmatch(r"(\w+) (>|>=|<|<=) (\d+)", text):
            bounds.setdefault((bound[1], bound[2]), []).append((int(bound[3]), text))
    for (_, operator), bounds_of_size in bounds.items():
        _, strong = max(bounds_of_size) if ">" in operator else min(bounds_of_size)
        for _, text in bounds_of_size:
            if text != strong:
                del result[text]
    return list(result)


def _library_condition(text: str, size_names: Mapping[str, str]) -> str:
    unequal = re.fullmatch(r"Ne\((\w+), (\d{1,9})\)", text)
    if unequal is not None and unequal[1] in size_names and int(unequal[2]) > 1:
        return f"{size_names[unequal[1]]} != {unequal[2]}"
    if text.startswith(("Ne(", "Eq(")) or any(text.endswith(end) for end in (">= 2", "> 1", ">= 1", "> 0", ">= 0")):
        return ""
    if any(operator in text for operator in ("<", ">")) and not any(c in text for c in "(&|"):
        return rename_symbols(text, size_names)
    return ""


def _is_trivial(expression: Any, least: int) -> bool:
    """Whether the expression only says that a size is at least ``least``, or a weaker bound.

    Every size is at least 1. The special cases of torch for size 1 are handled in ``size_branches.py``.
    """
    if not expression.is_Relational:
        return False
    expression = expression.canonical
    if not expression.args[0].is_Symbol or not expression.args[1].is_Integer:
        return False
    offset = {"GreaterThan": 0, "StrictGreaterThan": 1, "Unequality": 1}.get(type(expression).__name__)
    return offset is not None and int(expression.args[1]) + offset <= least


def _user_condition(expression: Any, size_names: Mapping[str, str]) -> str:
    """A Python expression that is false for zero divisors, so that the original code runs and raises its error."""
    divisions = [atom for atom in sympy.preorder_traversal(expression) if type(atom).__name__ in DIVISIONS]
    divisors = [atom.args[1] for atom in divisions if not atom.args[1].is_positive]
    zeros = [f"{_python(divisor, size_names)} != 0" for divisor in dict.fromkeys(divisors)]
    # Removes redundant parentheses.
    return ast.unparse(ast.parse(" and ".join([*zeros, f"({_python(expression, size_names)})"]), mode="eval"))


def _python(expression: Any, size_names: Mapping[str, str]) -> str:
    """A Python expression with all operands in parentheses."""
    if expression.is_Symbol:
        return size_names[str(expression)]
    if expression.is_Integer:
        return f"({int(expression)})"
    if expression.is_Rational:
        return f"({int(expression.p)} / {int(expression.q)})"
    if expression.is_Float:
        return f"({float(expression)!r})"
    class_name = type(expression).__name__
    if class_name == "ToFloat":
        return _python(expression.args[0], size_names)
    if class_name in FUNCTIONS:
        return f"{FUNCTIONS[class_name]}({', '.join(_python(part, size_names) for part in expression.args)})"
    if class_name not in OPERATORS:
        raise _NotExpressible
    if class_name == "Add":
        # Terms with sizes come first, as is usual.
        first, *others = sorted(expression.args, key=lambda part: (part.is_Number, _is_subtracted(part)))
        signed = [
            f" - {_python(-part, size_names)}" if _is_subtracted(part) else f" + {_python(part, size_names)}"
            for part in others
        ]
        return f"({_python(first, size_names)}{''.join(signed)})"
    return f"({OPERATORS[class_name].join(_python(part, size_names) for part in expression.args)})"


def _is_subtracted(term: Any) -> bool:
    """Whether a term of a sum is negative."""
    return bool(term.as_coeff_Mul()[0].is_negative)
