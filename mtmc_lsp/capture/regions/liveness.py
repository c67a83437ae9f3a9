"""Which local variables a run of statements takes as inputs, and which of its results later statements read.

Both analyses are conservative. A variable that may be read later is live. A variable that may be unset is not definitely set.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from mtmc_lsp.capture.regions.statements import SCOPES, Function

Names = frozenset[str]
NONE: Names = frozenset()
TRY: tuple[type[ast.Try], ...] = (ast.Try, getattr(ast, "TryStar", ast.Try))
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def names_read(node: ast.AST) -> Names:
    """The variables of the function that an expression or a simple statement may read, also in nested functions."""
    if isinstance(node, ast.Name):
        return frozenset({node.id}) if not isinstance(node.ctx, ast.Store) else NONE
    if isinstance(node, ast.AugAssign):
        return _reads_of(ast.iter_child_nodes(node)) | names_set(node)
    if isinstance(node, COMPREHENSIONS):
        bound = frozenset().union(*(_stored(item.target) for item in node.generators))
        return names_read(node.generators[0].iter) | (_reads_of(ast.iter_child_nodes(node)) - bound)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        arguments = node.args
        outside = [*arguments.defaults, *(item for item in arguments.kw_defaults if item is not None)]
        outside += [] if isinstance(node, ast.Lambda) else node.decorator_list
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        parameters = {item.arg for item in ast.walk(arguments) if isinstance(item, ast.arg)}
        return _reads_of(outside) | (_reads_of(body) - parameters)
    return _reads_of(ast.iter_child_nodes(node))


def _reads_of(nodes: Iterable[ast.AST]) -> Names:
    return NONE.union(*(names_read(node) for node in nodes))


def _stored(node: ast.AST) -> Names:
    return frozenset(
        item.id for item in ast.walk(node) if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
    )


def names_set(node: ast.AST) -> Names:
    """The variables of the function that an expression or a simple statement sets."""
    if isinstance(node, ast.Name):
        return frozenset({node.id}) if isinstance(node.ctx, ast.Store) else NONE
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return frozenset({node.name})
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return frozenset((item.asname or item.name).partition(".")[0] for item in node.names)
    if isinstance(node, (ast.MatchAs, ast.MatchStar, ast.ExceptHandler)) and node.name:
        return frozenset({node.name}) | NONE.union(*map(names_set, ast.iter_child_nodes(node)))
    if isinstance(node, ast.MatchMapping) and node.rest:
        return frozenset({node.rest}) | NONE.union(*map(names_set, ast.iter_child_nodes(node)))
    if isinstance(node, ast.Lambda):
        return NONE
    if isinstance(node, COMPREHENSIONS):
        # Only `:=` sets a variable of the function.
        walrus = (item.target for item in ast.walk(node) if isinstance(item, ast.NamedExpr))
        return NONE.union(*map(_stored, walrus))
    return NONE.union(*map(names_set, ast.iter_child_nodes(node)))


def parameters_of(function: Function) -> Names:
    """The names of a function's parameters."""
    return frozenset(item.arg for item in ast.walk(function.args) if isinstance(item, ast.arg))


def local_names(function: Function) -> Names:
    """All local variables of a function."""
    return parameters_of(function) | NONE.union(*map(names_set, function.body))


@dataclass(frozen=True)
class _Jumps:
    """What is live where a statement may continue other than at the next one."""

    at_break: Names = NONE
    at_continue: Names = NONE
    at_exception: Names = NONE
    at_return: Names = NONE


@dataclass
class Liveness:
    """Live variables after each statement of a function, by a backward pass."""

    function: Function
    after: dict[ast.stmt, Names] = field(default_factory=dict)
    """The variables that may be read after each statement, before they are set again."""

    def __post_init__(self) -> None:
        self._locals = local_names(self.function)
        nested = (node for node in ast.walk(self.function) if isinstance(node, SCOPES) and node is not self.function)
        self._captured = NONE.union(*(names_read(node) for node in nested)) & self._locals
        """Nested functions may read these at any time."""
        self.before(self.function.body, NONE)

    def inputs(self, run: Sequence[ast.stmt], outputs: Names) -> Names:
        """The variables that a run of statements reads from before it, if ``outputs`` are read after it."""
        alone = copy.copy(self)
        alone.after, alone._captured = {}, NONE
        return alone.before(run, outputs)

    def before(self, suite: Sequence[ast.stmt], live: Names, jumps: _Jumps | None = None) -> Names:
        """The variables that are live before a suite, from those after it."""
        jumps = jumps or _Jumps()
        for statement in reversed(suite):
            live = live | self._captured | jumps.at_exception
            self.after[statement] = self.after.get(statement, NONE) | live
            live = self._before_statement(statement, live, jumps) & self._locals
        return live | jumps.at_exception

    def _before_statement(self, node: ast.stmt, live: Names, jumps: _Jumps) -> Names:
        if isinstance(node, (ast.Return, ast.Raise)):
            return names_read(node) | (jumps.at_return if isinstance(node, ast.Return) else jumps.at_exception)
        if isinstance(node, ast.Break):
            return jumps.at_break
        if isinstance(node, ast.Continue):
            return jumps.at_continue
        if isinstance(node, ast.If):
            branches = self.before(node.body, live, jumps) | self.before(node.orelse, live, jumps)
            return (branches - names_set(node.test)) | names_read(node.test)
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            return self._before_loop(node, live, jumps)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            return _through(node.items, self.before(node.body, live, jumps))
        if isinstance(node, TRY):
            return self._before_try(node, live, jumps)
        if isinstance(node, ast.Match):
            cases = [(self.before(case.body, live, jumps), case) for case in node.cases]
            inside = NONE.union(*((names - names_set(case.pattern)) | names_read(case) for names, case in cases))
            return live | inside | names_read(node.subject)
        return (live - names_set(node)) | names_read(node)

    def _before_loop(self, node: ast.For | ast.AsyncFor | ast.While, live: Names, jumps: _Jumps) -> Names:
        after = self.before(node.orelse, live, jumps)
        header = node.test if isinstance(node, ast.While) else node.target
        again = after
        while True:
            inside = replace(jumps, at_break=live, at_continue=again)
            body = self.before(node.body, again, inside)
            read = names_read(header) if isinstance(node, ast.While) else NONE
            merged = again | (body - names_set(header)) | read
            if merged == again:
                break
            again = merged
        return again | (names_read(node.iter) if not isinstance(node, ast.While) else NONE)

    def _before_try(self, node: ast.Try, live: Names, jumps: _Jumps) -> Names:
        if node.finalbody:
            # The statements of `finally` run on the way to each end.
            ends = (jumps.at_break, jumps.at_continue, jumps.at_exception, jumps.at_return)
            jumps = _Jumps(*(self.before(node.finalbody, names) for names in ends))
            live = self.before(node.finalbody, live)
        caught = NONE.union(
            *((self.before(item.body, live, jumps) - {item.name}) | _read_by_handler(item) for item in node.handlers)
        )
        body_after = self.before(node.orelse, live, jumps)
        return self.before(node.body, body_after, replace(jumps, at_exception=jumps.at_exception | caught))


def _read_by_handler(handler: ast.ExceptHandler) -> Names:
    return names_read(handler.type) if handler.type is not None else NONE


def _through(items: Sequence[ast.withitem], live: Names) -> Names:
    for item in reversed(items):
        live = (live - (names_set(item.optional_vars) if item.optional_vars else NONE)) | names_read(item.context_expr)
    return live


def definitely_set(function: Function) -> dict[ast.stmt, Names]:
    """For each statement, the variables that are set whenever it runs."""
    before: dict[ast.stmt, Names] = {}
    everything = local_names(function)

    def through(suite: Iterable[ast.stmt], names: Names) -> Names:
        """The variables that are set after a suite; all of them if it never ends."""
        for node in suite:
            before[node] = before[node] & names if node in before else names
            names = after(node, names)
        return names

    def after(node: ast.stmt, names: Names) -> Names:
        if isinstance(node, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
            return everything
        if isinstance(node, ast.If):
            names |= names_set(node.test)
            return through(node.body, names) & through(node.orelse, names)
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            header = node.test if isinstance(node, ast.While) else node.target
            through(node.body, names | names_set(header))
            through(node.orelse, names)
            return names
        if isinstance(node, (ast.With, ast.AsyncWith)):
            return through(node.body, names.union(*map(names_set, node.items)))
        if isinstance(node, ast.Delete):
            return names - frozenset(item.id for item in ast.walk(node) if isinstance(item, ast.Name))
        if isinstance(node, ast.Match):
            for case in node.cases:
                through(case.body, names | names_set(case.pattern))
            return names
        if isinstance(node, TRY):
            ends = [through(node.orelse, through(node.body, names))]
            ends += [through(item.body, names | {item.name or ""}) for item in node.handlers]
            through(node.finalbody, names)
            return everything.intersection(*ends)
        return names | names_set(node)

    through(function.body, parameters_of(function))
    return before


def leaves_run(statement: ast.stmt) -> Iterator[ast.stmt]:
    """The statements in ``statement`` that continue outside of it: ``return``, and ``break`` or ``continue`` of an outer loop."""

    def walk(node: ast.AST, *, in_loop: bool) -> Iterator[ast.stmt]:
        if isinstance(node, ast.Return) or (isinstance(node, (ast.Break, ast.Continue)) and not in_loop):
            yield node
        if isinstance(node, SCOPES):
            return
        for name, value in ast.iter_fields(node):
            inside = in_loop or (isinstance(node, (ast.For, ast.AsyncFor, ast.While)) and name == "body")
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, in_loop=inside)

    return walk(statement, in_loop=False)
