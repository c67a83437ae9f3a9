"""Runs of statements of a target, as regions: what each reads and sets, and what cuts it before anything is captured."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from mtmc_lsp.capture.regions.liveness import (
    NONE,
    Liveness,
    Names,
    definitely_set,
    leaves_run,
    names_read,
    names_set,
    parameters_of,
)
from mtmc_lsp.capture.regions.statements import Function, Statements, function_at, suites_of
from mtmc_lsp.core.workload import CodeRegion, Target, TargetKind

READS_VALUES = frozenset({"item", "tolist", "numpy"})
"""Methods of tensors that return Python values."""
NOT_MOVABLE = (ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Delete, ast.AsyncFor, ast.AsyncWith)
OPERATIONS = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare, ast.AugAssign, ast.Subscript)


@dataclass(frozen=True)
class Cut:
    """A statement that is in no region."""

    statement: ast.stmt
    line: int
    reason: str
    """What the line does, as the rest of a sentence that begins with it: ``prints``."""


@dataclass(frozen=True)
class Run:
    """Consecutive statements of one suite."""

    statements: tuple[ast.stmt, ...]
    ends_function: bool
    """Whether its last statement is the end of the function."""

    @property
    def returns(self) -> bool:
        """Whether each way through it ends the function."""
        return self.ends_function or isinstance(self.statements[-1], ast.Return)


class Runs:
    """The runs of a target's body."""

    def __init__(self, target: Target, text: str) -> None:
        """Analyse the body.

        Args:
            text: the target's file without generated code.

        Raises:
            ValueError: the body cannot be found or has a form without regions.
        """
        self.function = _body_of(target, text)
        self.statements = Statements(self.function, text.splitlines(keepends=True))
        self._lines = text.splitlines()
        self._liveness = Liveness(self.function)
        self._set = definitely_set(self.function)
        self._sizes = size_statements(self.function)
        parameters = [*self.function.args.posonlyargs, *self.function.args.args]
        self._receiver = {parameters[0].arg} if parameters and target.kind is not TargetKind.FUNCTION else set()

    def whole(self) -> Run:
        """The whole body without its docstring."""
        body = self.function.body
        skip = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        return Run(tuple(body[skip:]), True)

    def obvious_cut(self, run: Run) -> Cut | None:
        """The first statement that can be in no region, or in none that continues after the run."""
        for statement in run.statements:
            for node in ast.walk(statement):
                if isinstance(node, NOT_MOVABLE):
                    kind = type(node).__name__.lower()
                    return Cut(statement, getattr(node, "lineno", statement.lineno), f"contains {kind}")
            # Whether statements inside it run is known only after a call.
            for node in ast.walk(statement) if not any(suites_of(statement)) else ():
                reason = _reason(node)
                if reason:
                    return Cut(statement, getattr(node, "lineno", statement.lineno), reason)
            jumps = [item for item in leaves_run(statement) if not (run.returns and isinstance(item, ast.Return))]
            if jumps:
                return Cut(statement, jumps[0].lineno, "leaves the statements around it early")
        return None

    def parts(self, run: Run, cut: ast.stmt) -> list[Run]:
        """What is left of a run without a statement: the runs before and after it, and the suites inside it."""
        index = run.statements.index(cut)
        before, after = run.statements[:index], run.statements[index + 1 :]
        inside = [Run(tuple(suite), False) for suite in suites_of(cut)]
        rest = [Run(before, False), *inside, Run(after, run.ends_function)]
        return [part for part in rest if part.statements]

    def is_worthwhile(self, run: Run) -> bool:
        """Whether a run may compute something, and starts and ends with a line."""
        first, last = run.statements[0], run.statements[-1]
        alone = not self._lines[first.lineno - 1].encode()[: first.col_offset].strip()
        rest = self._lines[(last.end_lineno or 0) - 1].encode()[last.end_col_offset or 0 :].strip()
        computes = any(isinstance(node, OPERATIONS) for item in run.statements for node in ast.walk(item))
        return computes and alone and (not rest or rest.startswith(b"#"))

    def region(self, run: Run, number: int = 1) -> CodeRegion:
        """The run as a region."""
        first, last = run.statements[0], run.statements[-1]
        names = dict.fromkeys(name for item in run.statements for name in _in_order(item))
        assigned = NONE.union(*map(names_set, run.statements))
        live = assigned & self._liveness.after[last]
        outputs = frozenset() if run.returns else live
        inside = self._inside(run)
        read = self._liveness.inputs(run.statements, outputs) - self._receiver
        sizes = self._repeated(read, self._set[first], inside)
        if sizes:
            read = self._liveness.inputs([*sizes, *run.statements], outputs) - self._receiver
        order = dict.fromkeys(
            [*(item.arg for item in ast.walk(self.function.args) if isinstance(item, ast.arg)), *names]
        )
        return CodeRegion(
            number,
            self.statements.numbers[first],
            self.statements.numbers[last],
            first.lineno,
            last.end_lineno or last.lineno,
            tuple(name for name in order if name in read),
            tuple(name for name in names if name in outputs),
            tuple(self.statements.numbers[item] for item in sizes),
            run.returns,
            any(_writes(item) for item in self.statements.all if item not in inside),
        )

    def _repeated(self, read: Names, available: Names, inside: set[ast.stmt]) -> list[ast.stmt]:
        """The statements outside the run that compute those of its inputs which are sizes, in source order."""
        chosen: list[ast.stmt] = []
        for statement in reversed(self._sizes):
            assigned = names_set(statement)
            if assigned & read and assigned <= available and statement not in inside:
                chosen.insert(0, statement)
                read = (read - assigned) | names_read(statement)
        return chosen

    def unset_input(self, run: Run, region: CodeRegion) -> Cut | None:
        """The first statement that reads a variable which may be unset before the run."""
        missing = frozenset(region.inputs) - self._set[run.statements[0]]
        return self.reader_of(run, missing, "reads a variable that is set only under a condition") if missing else None

    def reader_of(self, run: Run, names: frozenset[str], reason: str) -> Cut:
        """A cut at the first statement that reads or sets one of the variables."""
        for statement in run.statements:
            if (NONE.union(*map(names_read, [statement])) | names_set(statement)) & names:
                return Cut(statement, statement.lineno, reason)
        return Cut(run.statements[0], run.statements[0].lineno, reason)

    def trimmed(self, run: Run, is_plain: Callable[[ast.stmt, str], bool]) -> Run | None:
        """The run without statements at its ends that compute with numbers and other constants only; ``None`` if none is left.

        Args:
            is_plain: whether a variable is neither a tensor nor contains one, where a statement runs.
        """
        statements = list(run.statements)

        def computes_nothing(node: ast.stmt) -> bool:
            if node in self._sizes:
                return True
            simple = isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Pass))
            # A list that it creates may get tensors later.
            other = any(
                isinstance(item, (ast.Call, ast.Attribute, ast.List, ast.Dict, ast.Set)) for item in ast.walk(node)
            )
            return simple and not other and all(is_plain(node, name) for name in names_read(node))

        while statements and computes_nothing(statements[0]):
            statements.pop(0)
        while statements and computes_nothing(statements[-1]) and not run.returns:
            statements.pop()
        return Run(tuple(statements), run.ends_function) if statements else None

    def changes_in_loop(self, run: Run) -> Names:
        """The variables that a loop around the run sets."""
        first = run.statements[0]
        loops = (node for node in self.statements.all if isinstance(node, (ast.For, ast.While)))
        around = [loop for loop in loops if any(node is first for node in ast.walk(loop)) and loop is not first]
        return NONE.union(*(names_set(loop) for loop in around))

    def _inside(self, run: Run) -> set[ast.stmt]:
        return {node for item in run.statements for node in ast.walk(item) if isinstance(node, ast.stmt)}


def size_statements(function: Function) -> list[ast.stmt]:
    """The statements of the body that assign sizes of arguments to variables which nothing else assigns, in source order."""
    stored = [
        node.id for node in ast.walk(function) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    ]
    counts = Counter([*stored, *parameters_of(function)])
    known = {name for name in parameters_of(function) if counts[name] == 1}
    sizes: set[str] = set()
    statements: list[ast.stmt] = []
    for statement in function.body:
        if isinstance(statement, ast.Assign) and _is_size(statement.value, known, sizes):
            assigned = names_set(statement)
            targets = [item for node in statement.targets for item in getattr(node, "elts", [node])]
            if all(isinstance(item, ast.Name) for item in targets) and all(counts[name] == 1 for name in assigned):
                statements.append(statement)
                sizes |= assigned
    return statements


def _is_size(node: ast.expr, arguments: set[str], sizes: set[str]) -> bool:
    """Whether an expression is a size of an argument, several of them, or arithmetic of sizes."""
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if isinstance(node, ast.Name):
        return node.id in sizes
    if isinstance(node, ast.BinOp):
        return _is_size(node.left, arguments, sizes) and _is_size(node.right, arguments, sizes)
    if isinstance(node, ast.Tuple):
        return all(_is_size(item, arguments, sizes) for item in node.elts)
    if isinstance(node, ast.Subscript):
        return _is_shape(node.value, arguments)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id == "len" and all(isinstance(item, ast.Name) and item.id in arguments for item in node.args)
    return _is_shape(node, arguments)


def _is_shape(node: ast.expr, arguments: set[str]) -> bool:
    """Whether an expression is ``x.shape``, ``x.size()`` or ``x.size(0)`` of an argument."""
    if isinstance(node, ast.Call):
        constant = all(isinstance(item, (ast.Constant, ast.UnaryOp)) for item in node.args) and not node.keywords
        return constant and _is_attribute(node.func, "size", arguments)
    return _is_attribute(node, "shape", arguments)


def _is_attribute(node: ast.expr, name: str, arguments: set[str]) -> bool:
    owner = node.value if isinstance(node, ast.Attribute) and node.attr == name else None
    return isinstance(owner, ast.Name) and owner.id in arguments


def has_dispatch(target: Target, region: CodeRegion, text: str) -> bool:
    """Whether a version of the file has generated code for a region."""
    statements = Statements(_body_of(target, text), text.splitlines(keepends=True))
    return any(item not in statements.numbers for item in statements.run(region.first, region.last))


def _body_of(target: Target, text: str) -> Function:
    """The function that the target runs: for a module class its ``forward``."""
    if target.kind is not TargetKind.MODULE:
        function = function_at(text, target.qualname.rpartition(".")[2], target.start_line)
    else:
        kinds = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
        methods = [item for kind in kinds if kind.lineno == target.start_line for item in kind.body]
        function = next((m for m in methods if isinstance(m, ast.FunctionDef) and m.name == "forward"), None)
    if function is None or isinstance(function, ast.AsyncFunctionDef):
        raise ValueError(f"{target.qualname} has no body in line {target.start_line}")
    return function


def _reason(node: ast.AST) -> str:
    """Why a statement with this node is in no region; empty if nothing is wrong."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "print":
            return "prints"
        if isinstance(node.func, ast.Attribute) and node.func.attr in READS_VALUES and not node.args:
            return f"reads values of a tensor by .{node.func.attr}()"
    return ""


def _in_order(node: ast.AST) -> list[str]:
    """The names in a statement, in source order."""
    return [item.id for item in ast.walk(node) if isinstance(item, ast.Name)]


def _writes(node: ast.stmt) -> bool:
    """Whether a statement, without those inside it, may write into a tensor in place."""
    for item in ast.walk(node):
        if isinstance(item, ast.AugAssign):
            return True
        if isinstance(item, (ast.Subscript, ast.Attribute)) and isinstance(item.ctx, ast.Store):
            return True
        if isinstance(item, ast.Call):
            name = item.func.attr if isinstance(item.func, ast.Attribute) else ""
            if (name.endswith("_") and not name.startswith("_")) or any(k.arg == "out" for k in item.keywords):
                return True
    return False
