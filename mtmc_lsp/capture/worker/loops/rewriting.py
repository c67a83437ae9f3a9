"""Rewrites the loops of a function, so that a trace can run the body of a loop once for all iterations.

``for t in range(T): h = a[t] * h`` becomes::

    loop = LOOPS.loop(line, LOOPS.range(T), ("h",), ("t",))
    for t in loop:
        (h,) = loop.enter(locals())
        h = a[t] * h
        loop.leave(locals())
    (h, t) = loop.results(locals())

:mod:`mtmc_lsp.capture.worker.loops.keeping` decides at run time whether the loop runs its body once, or iterates as before.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import copy
import math
from collections.abc import Collection, Iterator, Sequence
from types import CodeType, FunctionType

from mtmc_lsp.capture.worker.loops.statements.appends import (
    CHANGING,
    LastItems,
    append_of,
    ends_of,
    is_last_item,
    lists_of,
    subscripted,
)
from mtmc_lsp.capture.worker.loops.statements.forms import (
    LOOP_VARIABLE,
    AppendedItems,
    ListCalls,
    local_lists,
    uses,
    without_continue,
)
from mtmc_lsp.capture.worker.loops.statements.names import assigned_names, walk
from mtmc_lsp.capture.worker.loops.statements.prefilled import assigned_ranges, is_range, prefilled, prefilled_values
from mtmc_lsp.capture.worker.loops.statements.while_statements import COUNTER, as_for
from mtmc_lsp.capture.worker.regions.region_function import definition_of

LOOPS = "_mtmc_loops_"
"""The name in ``builtins`` under which rewritten code finds :class:`mtmc_lsp.capture.worker.loops.keeping.Keeper`."""
ITERATORS = ("range", "reversed", "zip", "enumerate")
NUMBERS = ("float", "int", "min", "max", "abs", "round")
"""Builtins that a body may call with the number of the iteration; likewise the functions of ``math``."""


def rewritten_code(function: FunctionType, first_line: int = 0) -> CodeType | None:
    """The code of ``function`` with rewritten loops; ``None`` if it has no loop that could be kept, or no source.

    Args:
        first_line: is added to the lines by which loops are known, so that those of several files differ.
    """
    try:
        definition, _ = definition_of(function)
    except (ValueError, OSError, SyntaxError):
        return None
    hidden = assigned_names(definition.body) | {
        item.arg for item in ast.walk(definition.args) if isinstance(item, ast.arg)
    }
    hidden |= {
        name
        for name in (*ITERATORS, *NUMBERS)
        if function.__globals__.get(name, getattr(builtins, name)) is not getattr(builtins, name)
    }
    modules = {name for name, value in function.__globals__.items() if value is math} - hidden
    rewriter = _Rewriter(hidden, modules, first_line)
    rewriter.ranges = assigned_ranges(definition.body, hidden)
    rewriter.suite(definition.body)
    if not rewriter.count:
        return None
    definition.decorator_list = []
    if "list" not in hidden and "list" not in function.__globals__:
        listed = ast.parse(f"{LOOPS}.listed", mode="eval").body
        definition.body = [ListCalls(listed).visit(statement) for statement in definition.body]
    try:
        code = _compiled(function, definition)
    except (SyntaxError, ValueError):
        return None
    return code if code is not None and code.co_freevars == function.__code__.co_freevars else None


def _compiled(function: FunctionType, definition: ast.FunctionDef | ast.AsyncFunctionDef) -> CodeType | None:
    """The code of a changed definition, in scopes that give it the free variables and the class of ``function``."""
    free = [name for name in function.__code__.co_freevars if name != "__class__"]
    owner = function.__qualname__.rpartition(".")[0].rpartition(".")[2]
    outer = ast.parse(f"def scope({', '.join(free)}):\n class {owner if owner.isidentifier() else '_'}:\n  pass")
    scope = outer.body[0]
    assert isinstance(scope, ast.FunctionDef) and isinstance(scope.body[0], ast.ClassDef)
    definition.args.defaults = [ast.Constant(None) for _ in definition.args.defaults]
    definition.args.kw_defaults = [ast.Constant(None) if item else None for item in definition.args.kw_defaults]
    definition.returns = None
    for item in ast.walk(definition.args):
        if isinstance(item, ast.arg):
            item.annotation = None
    scope.body[0].body = [definition]
    ast.fix_missing_locations(outer)
    future = function.__code__.co_flags & __future__.annotations.compiler_flag
    module = compile(outer, function.__code__.co_filename, "exec", future, dont_inherit=True)
    return next((code for code in _codes(module) if code.co_name == definition.name), None)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


class _Rewriter:
    """Rewrites the loops of one function."""

    def __init__(self, hidden: set[str], modules: set[str], first_line: int) -> None:
        self.first_line = first_line
        self.hidden = hidden
        """Names that are not the builtins of that name."""
        self.modules = modules
        """Names of the module ``math``."""
        self.ranges: set[str] = set()
        """Variables that hold a range for a loop."""
        self.count = 0

    def suite(self, statements: list[ast.stmt]) -> None:
        """Rewrite the loops of a suite and of the suites inside it, in place."""
        changed: list[ast.stmt] = []
        for statement in statements:
            if isinstance(statement, ast.For):
                statement.body = without_continue(statement.body)
            for _, value in ast.iter_fields(statement):
                if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                    if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                        self.suite(value)
                elif isinstance(value, list) and value and isinstance(value[0], ast.ExceptHandler):
                    for handler in value:
                        self.suite(handler.body)
            if isinstance(statement, ast.While) and (counted := as_for(statement, LOOPS)) is not None:
                before, loop, after = counted
                if (lists := lists_of(loop)) is not None:
                    _locate(before, loop)
                    _locate(after, loop)
                    changed += [before, *self._with_last_items(loop), *self._kept(loop, lists), after]
                    continue
            if isinstance(statement, ast.While):
                self.count += 1
                passing = ast.parse(f"{LOOPS}.passing({self.first_line + statement.lineno})").body[0]
                _locate(passing, statement)
                statement.body.insert(0, passing)
            read, stored = self._with_appended_items(statement) if isinstance(statement, ast.For) else ([], [])
            lists = lists_of(statement) if isinstance(statement, ast.For) else None
            if isinstance(statement, ast.Assign) and is_range(statement.value, self.hidden):
                target = statement.targets[0]
                if isinstance(target, ast.Name) and target.id in self.ranges:
                    statement.value = self._iterable(statement.value)
                    ast.fix_missing_locations(statement)
            if "range" not in self.hidden:
                self._with_filled_lists(statement)
            changed += read
            if isinstance(statement, ast.For) and lists is not None:
                changed += self._with_last_items(statement)
                changed += self._kept(statement, lists)
            elif isinstance(statement, ast.For):
                self.count += 1
                line = ast.copy_location(ast.Constant(self.first_line + statement.lineno), statement.iter)
                statement.iter = _call("unrolling", [line, statement.iter], [], statement.iter)
                ast.fix_missing_locations(statement)
                changed.append(statement)
            else:
                changed.append(statement)
            changed += stored
        statements[:] = changed

    @staticmethod
    def _with_filled_lists(statement: ast.stmt) -> None:
        """Let a loop fill the lists that a statement creates: ``outs = [None] * T``."""
        values = prefilled_values(statement)
        replaced = {id(value): _call("filled_list", list(prefilled(value) or ()), [], value) for value in values}
        if isinstance(statement, ast.Assign) and values:
            if id(statement.value) in replaced:
                statement.value = replaced[id(statement.value)]
            elif isinstance(statement.value, ast.Tuple):
                statement.value.elts = [replaced.get(id(item), item) for item in statement.value.elts]
            ast.fix_missing_locations(statement)

    def _with_appended_items(self, loop: ast.For) -> tuple[list[ast.stmt], list[ast.stmt]]:
        """Make variables hold the lists of a container to which the loop appends (``outs["h"].append(x)``).

        Returns the statements before and after the loop that read and store these lists.
        """
        forms = AppendedItems(self.hidden)
        body = [forms.visit(statement) for statement in copy.deepcopy(loop.body)]
        containers = {item.value.id for item in forms.variables.values() if isinstance(item.value, ast.Name)}
        if uses(body, containers) or containers & assigned_names([loop]):
            return [], []
        original, loop.body = loop.body, body
        if lists_of(loop) is None:
            loop.body = original
            return [], []
        self.hidden |= forms.variables.keys()
        before, after = [], []
        for name, item in forms.variables.items():
            container = ast.unparse(item.value)
            before += ast.parse(f"{name} = {ast.unparse(item)}").body
            after += ast.parse(f"{LOOPS}.store({container}, {ast.unparse(item.slice)}, {name})").body
        for statement in (*before, *after):
            _locate(statement, loop)
        return before, after

    def _with_last_items(self, loop: ast.For) -> list[ast.stmt]:
        """Replace reads of what was appended last (``outs[-1]``) by a variable, which the loop then carries.

        Returns the statements before the loop that give the variables their values.
        """
        nodes = list(walk(loop.body))
        local = local_lists(loop.body)
        ends = {name: end for name, end in ends_of(nodes).items() if name not in local}
        before: list[ast.stmt] = []
        for name in sorted({node.value.id for node in nodes if is_last_item(node, ends)}):  # type: ignore[attr-defined]
            variable = f"last_{name}"
            while variable in self.hidden:
                variable = f"_{variable}"
            self.hidden.add(variable)
            before += ast.parse(f"{variable} = {LOOPS}.last({name}, {ends[name]})").body
            module = LastItems({name: ends[name]}, variable).visit(ast.Module(loop.body, []))
            loop.body = module.body
        for statement in before:
            _locate(statement, loop)
        return before

    def _kept(self, loop: ast.For, lists: tuple[str, ...]) -> list[ast.stmt]:
        self.count += 1
        targets = sorted(assigned_names([loop.target]))
        assigned = {name for name in assigned_names(loop.body) if not name.startswith((LOOP_VARIABLE, COUNTER))}
        written = sorted(subscripted(loop.body) - set(targets) - assigned)
        carried = sorted((assigned | set(written)) - set(targets) - set(lists))
        variable = f"{LOOP_VARIABLE}{loop.lineno}_{loop.col_offset}_"
        names = ", ".join(repr(tuple(item)) for item in (carried, targets, lists, written))
        before = ast.parse(f"{variable} = {LOOPS}.loop({self.first_line + loop.lineno}, 0, {names})").body
        assert isinstance(before[0], ast.Assign) and isinstance(before[0].value, ast.Call)
        before[0].value.args[1] = self._iterable(loop.iter)
        loop.iter = ast.Name(variable, ast.Load())
        enter = _assignment(carried, f"{variable}.enter(locals())")
        leave = ast.parse(f"{variable}.leave(locals())").body
        loop.body = [*enter, *(_with_appends(item, variable, lists) for item in loop.body), *leave]
        after = _assignment([*carried, *targets, *lists], f"{variable}.results(locals())")
        _check_objects(loop.body, {*lists, *local_lists(loop.body)})
        numbers = _Numbers(set(NUMBERS) - self.hidden, self.modules)
        loop.body = [numbers.visit(item) for item in loop.body]
        for statement in (*before, *enter, *leave, *after):
            _locate(statement, loop)
        return [*before, loop, *after]

    def _iterable(self, expression: ast.expr) -> ast.expr:
        """The expression of an iterable, with calls that make it lazy."""
        if isinstance(expression, ast.Call):
            function = expression.func
            if isinstance(function, ast.Name) and function.id in ITERATORS and function.id not in self.hidden:
                if function.id != "range":
                    expression.args = (
                        [self._iterable(expression.args[0]), *expression.args[1:]]
                        if (function.id == "enumerate" and expression.args)
                        else [self._iterable(item) for item in expression.args]
                    )
                return _call(function.id, expression.args, expression.keywords, expression)
            if isinstance(function, ast.Attribute) and function.attr in ("unbind", "split"):
                return _call(function.attr, [function.value, *expression.args], expression.keywords, expression)
        if isinstance(expression, ast.Starred):
            return expression
        return _call("of", [expression], [], expression)


def _call(name: str, args: list[ast.expr], keywords: list[ast.keyword], at: ast.expr) -> ast.expr:
    function = ast.Attribute(ast.Name(LOOPS, ast.Load()), name, ast.Load())
    return ast.copy_location(ast.Call(function, args, keywords), at)


def _assignment(names: Sequence[str], value: str) -> list[ast.stmt]:
    target = f"({', '.join(names)},) = " if names else ""
    return ast.parse(f"{target}{value}").body


def _locate(statement: ast.stmt, like: ast.stmt) -> None:
    """Give parsed nodes the line of ``like``. Nodes of the user's file keep theirs: none of a loop is in line 1."""
    for node in ast.walk(statement):
        if getattr(node, "lineno", 0) == 1:
            ast.copy_location(node, like)
            node.__dict__["end_lineno"] = like.lineno
    ast.fix_missing_locations(statement)


class _Numbers(ast.NodeTransformer):
    """Lets functions of numbers take the number of the iteration: ``LOOPS.call(float, t)`` for ``float(t)``."""

    def __init__(self, names: set[str], modules: set[str]) -> None:
        self._names, self._modules = names, modules

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Call the function through the loop."""
        self.generic_visit(node)
        function = node.func
        is_builtin = isinstance(function, ast.Name) and function.id in self._names
        is_math = isinstance(function, ast.Attribute) and ast.unparse(function.value) in self._modules
        return _call("call", [function, *node.args], node.keywords, node) if is_builtin or is_math else node


def _check_objects(body: Sequence[ast.stmt], lists: Collection[str]) -> None:
    """Let a run refuse methods of Python containers: ``LOOPS.object(average).update(x)``."""
    for node in (item for statement in body for item in ast.walk(statement)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            owner = node.func.value
            if isinstance(owner, ast.Name) and not owner.id.startswith(LOOP_VARIABLE) and owner.id not in lists:
                node.func.value = _call("object", [owner], [], owner)
                ast.fix_missing_locations(node)


def _with_appends(statement: ast.stmt, variable: str, lists: Collection[str]) -> ast.stmt:
    """The statement with its appends to these lists as calls of the loop."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Expr) and (appended := append_of(node)) is not None and appended.list in lists:
            items = ast.Name(appended.list, ast.Load())
            arguments = [ast.Constant(appended.list), items, appended.value, ast.Constant(appended.end == 0)]
            function = ast.Attribute(ast.Name(variable, ast.Load()), "append", ast.Load())
            node.value = ast.copy_location(ast.Call(function, arguments, []), node.value)
            ast.fix_missing_locations(node)
    return statement
