"""PyTorch expressions that compute each element of a result from one element of a tensor, as Triton expressions."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mtmc_lsp.codegen.kernel.formulas import REPEATS_OPERAND, render
from mtmc_lsp.codegen.kernel.snippets import Code

FLOAT32 = "float32"
FUNCTIONS: Mapping[str, Callable[[float], float]] = {
    "relu": lambda x: max(x, 0.0),
    "sigmoid": lambda x: 1.0 / (1.0 + math.exp(-x)),
    "silu": lambda x: x / (1.0 + math.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1.0 + math.erf(x / math.sqrt(2.0))),
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "log": math.log,
    "log2": math.log2,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1.0 / math.sqrt(x),
    "abs": abs,
    "neg": lambda x: -x,
    "square": lambda x: x * x,
    "reciprocal": lambda x: 1.0 / x,
    "sin": math.sin,
    "cos": math.cos,
    "erf": math.erf,
    "floor": lambda x: float(math.floor(x)),
    "ceil": lambda x: float(math.ceil(x)),
}
"""Functions of PyTorch, by their names in ``torch`` and as methods, with their values for Python numbers."""
ACTIVATIONS = frozenset({"relu", "sigmoid", "silu", "gelu"})
"""Those that ``torch.nn.functional`` has."""
NO_METHODS = frozenset({"silu", "gelu"})
EXACT = frozenset({"relu", "abs", "neg", "floor", "ceil"})
"""Functions that do not round, so that 16-bit values need no conversion."""
OPERATORS: Mapping[type[ast.operator], tuple[str, Callable[[float, float], float]]] = {
    ast.Add: ("add", lambda a, b: a + b),
    ast.Sub: ("sub", lambda a, b: a - b),
    ast.Mult: ("mul", lambda a, b: a * b),
    ast.Div: ("div", lambda a, b: a / b),
}
WIDE = ("torch.float", "torch.float32")


@dataclass(frozen=True)
class Elementwise:
    """An expression of one element ``x`` of a tensor."""

    code: Code
    at: Callable[[float], float]
    """The value for a number; raises ValueError, ZeroDivisionError or OverflowError where there is none."""
    operations: int = 0
    is_exact: bool = True
    """Whether no operation rounds."""
    widens: bool = False
    """Whether the result is float32 whatever the tensor's type is."""
    repeats: bool = False
    """Whether the Triton expression uses the element several times."""
    is_number: bool = False

    def text(self, element: str, language: str, *, is_sum: bool = False) -> str:
        """The Triton expression of an element.

        Args:
            language: ``triton.language`` as the file names it.
            is_sum: whether the element is an expression that needs brackets as an operand.
        """
        text = self.code.text if language == "tl" else self.code.text.replace("tl.", f"{language}.")
        if is_sum:
            # The only argument, and the first one, of a call need none.
            for end in (")", ","):
                text = text.replace(f"({ELEMENT}{end}", f"({element}{end}")
            element = f"({element})"
        return text.replace(ELEMENT, element)

    def keeps(self, value: str) -> bool:
        """Whether the expression of a number, as ``0.0``, is the number itself."""
        try:
            number = float(ast.literal_eval(value))
            return self.at(number) == number
        except (ValueError, SyntaxError, TypeError, ZeroDivisionError, OverflowError):
            return False


ELEMENT = "\0"
"""Stands for the element in the text of an expression."""


def elementwise(text: str, tensor: str, imports: Mapping[str, str]) -> Elementwise | None:
    """A PyTorch expression of one tensor, as ``torch.relu(x) * 2``; None if it is more than that.

    Args:
        tensor: its name.
        imports: names of the file to what they import.
    """
    try:
        return _parsed(ast.parse(f"({text})", mode="eval").body, tensor, imports)
    except (SyntaxError, ValueError, KeyError):
        return None


def _parsed(node: ast.expr, tensor: str, imports: Mapping[str, str]) -> Elementwise:
    if isinstance(node, ast.Name) and node.id == tensor:
        return Elementwise(Code(ELEMENT, FLOAT32), lambda x: x)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        number = float(node.value)  # type: ignore[arg-type]
        return Elementwise(Code(repr(number), FLOAT32), lambda _: number, is_number=True)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _applied("neg", _parsed(node.operand, tensor, imports))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, exponent = _parsed(node.left, tensor, imports), _parsed(node.right, tensor, imports)
        names = {"2.0": "square", "0.5": "sqrt", "-0.5": "rsqrt", "-1.0": "reciprocal"}
        return _applied(names[exponent.code.text], base)
    if isinstance(node, ast.BinOp):
        return _combined(
            *OPERATORS[type(node.op)], _parsed(node.left, tensor, imports), _parsed(node.right, tensor, imports)
        )
    if isinstance(node, ast.Call):
        return _called(node, tensor, imports)
    raise ValueError("no elementwise expression")


def _called(node: ast.Call, tensor: str, imports: Mapping[str, str]) -> Elementwise:
    if node.keywords:
        raise ValueError("options")
    path = _path(node.func, imports)
    if path.startswith("torch."):
        module, _, name = path.rpartition(".")
        is_known = name in FUNCTIONS and (
            module == "torch" or (module == "torch.nn.functional" and name in ACTIVATIONS)
        )
        if not is_known or len(node.args) != 1:
            raise ValueError("another function")
        return _applied(name, _parsed(node.args[0], tensor, imports))
    if not isinstance(node.func, ast.Attribute):
        raise ValueError("another function")
    name, operand = node.func.attr, _parsed(node.func.value, tensor, imports)
    is_wide = name == "to" and len(node.args) == 1 and _path(node.args[0], imports) in WIDE
    if is_wide or (name == "float" and not node.args):
        converted = Code(f"{operand.code.at(100)}.to(tl.float32)", FLOAT32)
        return replace(operand, code=converted, operations=operand.operations + 1, widens=True)
    if node.args or name not in FUNCTIONS or name in NO_METHODS:
        raise ValueError("another method")
    return _applied(name, operand)


def _path(node: ast.expr, imports: Mapping[str, str]) -> str:
    """``torch.nn.functional.relu`` for ``F.relu``."""
    head, _, rest = ast.unparse(node).partition(".")
    return ".".join(part for part in (imports.get(head, ""), rest) if part)


def _applied(name: str, operand: Elementwise) -> Elementwise:
    if operand.is_number:
        if name != "neg":
            raise ValueError("a number")
        number = -operand.at(0.0)
        return replace(operand, code=Code(repr(number), FLOAT32, precedence=80), at=lambda _: number)
    if name in REPEATS_OPERAND and name != "relu" and operand.operations:
        raise ValueError("the formula would repeat a computation")
    if name == "relu":
        # It uses the element once, and NaN stays NaN.
        text, precedence = render("maximum", [operand.code, Code("0.0", FLOAT32)], {}, FLOAT32)
    else:
        text, precedence = render(name, [operand.code], {}, FLOAT32)
    function, inner = FUNCTIONS[name], operand.at
    return replace(
        operand,
        code=Code(text, FLOAT32, precedence=precedence),
        at=lambda x: function(inner(x)),
        operations=operand.operations + 1,
        is_exact=operand.is_exact and name in EXACT,
        repeats=operand.repeats or (name in REPEATS_OPERAND and name != "relu"),
    )


def _combined(
    name: str, function: Callable[[float, float], float], left: Elementwise, right: Elementwise
) -> Elementwise:
    if left.is_number and right.is_number:
        raise ValueError("numbers")
    text, precedence = render(name, [left.code, right.code], {}, FLOAT32)
    one, other = left.at, right.at
    return Elementwise(
        Code(text, FLOAT32, precedence=precedence),
        lambda x: function(one(x), other(x)),
        left.operations + right.operations + 1,
        is_exact=False,
        widens=left.widens or right.widens,
        repeats=left.repeats or right.repeats or not (left.is_number or right.is_number),
    )
