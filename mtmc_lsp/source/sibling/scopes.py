"""Which global names a piece of Python reads: an approximation of Python's scopes that is exact for generated code."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence

BUILTINS = frozenset(dir(builtins))


def free_names(text: str) -> set[str]:
    """The names that a module reads and neither defines nor finds among the builtins."""
    tree = ast.parse(text)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    reads = [name.id for node in functions for name in global_reads(node.body, parameters(node))]
    reads += [name.id for name in read_on_import(tree)]
    assigned = {
        item.id
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for item in ast.walk(node)
        if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
    }
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assigned |= {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}
    defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))} | assigned
    return {name for name in reads if name not in defined and name not in BUILTINS and not name.startswith("__")}


def read_on_import(tree: ast.Module) -> Iterator[ast.Name]:
    """The global names that the code reads outside its functions: when it is imported, or in methods of its classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            annotations = [item.annotation for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            read = [*node.decorator_list, *arguments.defaults, *arguments.kw_defaults, *annotations, node.returns]
            yield from global_reads([item for item in read if item is not None])
        else:
            yield from global_reads([node])


def parameters(function: ast.FunctionDef | ast.Lambda) -> frozenset[str]:
    """The names of a function's parameters."""
    arguments = function.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    return frozenset(item.arg for item in every if item is not None)


def global_reads(statements: Sequence[ast.AST], outer: frozenset[str] = frozenset()) -> Iterator[ast.Name]:
    """Where statements read names that are neither in ``outer`` nor assigned in them; functions have scopes of their own."""
    local = set(outer)
    inner: list[ast.FunctionDef | ast.Lambda] = []
    reads: list[ast.Name] = []
    pending = list(statements)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            inner.append(node)
            pending += node.args.defaults
            if isinstance(node, ast.FunctionDef):
                local.add(node.name)
                pending += node.decorator_list
            continue
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                reads.append(node)
            else:
                local.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            local |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            local.add(node.name)
        pending += ast.iter_child_nodes(node)
    yield from (name for name in reads if name.id not in local)
    for function in inner:
        body = function.body if isinstance(function.body, list) else [function.body]
        yield from global_reads(body, frozenset(local) | parameters(function))
