"""The conditions of a generated guard in terms of the target's parameters, read from the guard's text."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping

from mtmc_lsp.capture.accesses import STORES, is_attribute_name

TENSORS = "tensors"
"""The guard's variable for all tensors of the call."""
DISPATCH = "# mtmc: dispatch"
"""The mark at the end of the first line of a dispatch statement."""
ACCEPTED = "_are_like_accepted("
"""The start of a condition that stands for all others of the tensors."""
SUFFIX = "_fits"
"""The end of the name of every generated guard."""
MODULE = "user_module"
"""The variable of generated code in another file for the module of the user's file."""
COMMON = (
    MODULE, "_up_to_date", "_is_plain_gpu_call", "_accept(", "_is_unchanged_module", "_are_unchanged_modules", "_has_class(",
    "_has_captured_hooks", "_do_not_overlap", "type(self)", "not torch.is_autocast_enabled", "is_grad_enabled", ".numel() > 0",
)  # fmt: skip
"""Parts of conditions that every guard has; of these only a summary is shown."""


class Origins:
    """What the local variables of a guard hold, in terms of the target's parameters."""

    def __init__(self, known: Mapping[str, ast.expr] | None = None) -> None:
        self._known = dict(known or {})
        self.tensors: list[str] = []
        """The tensors of the call, in the guard's order."""

    def with_variable(self, name: str, origin: str) -> Origins:
        """These, and the variable of a loop."""
        inner = Origins({**self._known, name: ast.parse(origin, mode="eval").body})
        inner.tensors = self.tensors
        return inner

    def note(self, node: ast.AST) -> None:
        """Note the variables that an expression or a statement assigns."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.NamedExpr):
                self._known[inner.target.id] = self._readable(inner.value)
        if isinstance(node, ast.Assign):
            self._assign(node.targets[0], node.value)

    def text(self, node: ast.expr) -> str:
        """An expression as the user would write it."""
        return ast.unparse(self._readable(node))

    def _readable(self, node: ast.expr) -> ast.expr:
        readable = _Readable(self._known).visit(copy.deepcopy(node))
        assert isinstance(readable, ast.expr)
        return readable

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name) and target.id == MODULE:
            # The user's names are shown without it.
            return
        if isinstance(target, ast.Name) and target.id == TENSORS and isinstance(value, ast.Tuple):
            self.tensors = [self.text(item) for item in value.elts]
        elif isinstance(target, ast.Name):
            self._known[target.id] = self._readable(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for name, item in zip(target.elts, value.elts, strict=True):
                self._assign(name, item)


class _Readable(ast.NodeTransformer):
    """Replaces local variables by what they hold, and fast accesses by attributes."""

    def __init__(self, origins: Mapping[str, ast.expr]) -> None:
        self._origins = origins

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._origins.get(node.id, node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == MODULE:
            return ast.Name(node.attr, ast.Load())
        return self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        readable: ast.AST = self.visit(node.value)
        return readable

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        name = next((item.value for item in node.args if isinstance(item, ast.Constant)), None)
        if isinstance(function, ast.Name) and function.id == "getattr" and isinstance(name, str):
            return _member(node.args[0], name)
        if isinstance(function, ast.Attribute) and function.attr == "get" and isinstance(name, str):
            store = function.value
            if isinstance(store, ast.Attribute) and store.attr in STORES:
                return _member(store.value, name)
        # A tensor in a plain attribute is moved to the device of the arguments.
        return function.value if isinstance(function, ast.Attribute) and function.attr == "to" else node


def _member(owner: ast.expr, name: str) -> ast.expr:
    if name.isdigit():
        return ast.Subscript(owner, ast.Constant(int(name)), ast.Load())
    if not is_attribute_name(name):
        return ast.Subscript(owner, ast.Constant(name), ast.Load())
    return ast.Attribute(owner, name, ast.Load())


def loop_of(condition: ast.expr) -> tuple[ast.expr, str, ast.expr] | None:
    """The condition, variable and iterable of ``all([... for t in tensors])``; ``None`` for any other expression."""
    if not (isinstance(condition, ast.Call) and isinstance(condition.func, ast.Name) and condition.func.id == "all"):
        return None
    generator = condition.args[0]
    assert isinstance(generator, (ast.GeneratorExp, ast.ListComp))
    target = generator.generators[0].target
    assert isinstance(target, ast.Name)
    return generator.elt, target.id, generator.generators[0].iter


def tested(statement: ast.stmt) -> ast.expr | None:
    """The condition that a statement of a guard tests; ``None`` for an assignment."""
    if isinstance(statement, ast.If) and isinstance(statement.test, ast.UnaryOp):
        return statement.test.operand
    if isinstance(statement, ast.Return) and statement.value is not None:
        return statement.value.test if isinstance(statement.value, ast.IfExp) else statement.value
    return None


def conditions_in(block: str) -> tuple[str, ...]:
    """The conditions of the guards in a generated block that other guards do not have, in terms of the parameters.

    Empty if the block does not parse.
    """
    try:
        tree = ast.parse(block)
    except SyntaxError:
        return ()
    guards = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.endswith(SUFFIX)]
    return tuple(dict.fromkeys(text for guard in guards for text in _specific(guard)))


def _specific(guard: ast.FunctionDef) -> Iterator[str]:
    origins = Origins()
    for statement in guard.body:
        origins.note(statement)
        condition = tested(statement)
        for term in _terms(condition) if condition is not None else ():
            for part, inner in _parts(term, origins):
                if not any(text in ast.unparse(part) for text in COMMON):
                    yield inner.text(part)


def _parts(term: ast.expr, origins: Origins) -> Iterator[tuple[ast.expr, Origins]]:
    """A condition; instead of one on all tensors of the call, its parts for each tensor."""
    loop = loop_of(term)
    if loop is None:
        yield term, origins
        return
    for tensor in origins.tensors:
        for part in _terms(loop[0]):
            yield part, origins.with_variable(loop[1], tensor)


def _terms(condition: ast.expr) -> Iterator[ast.expr]:
    if isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.And):
        for term in condition.values:
            yield from _terms(term)
    elif isinstance(condition, ast.BoolOp) and ast.unparse(condition.values[0]).startswith(ACCEPTED):
        yield from _terms(condition.values[-1])
    else:
        yield condition
