"""Statements of a loop in the forms that the rewriting knows: without ``continue``, and with appends to variables."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence

LOOP_VARIABLE = "_mtmc_loop_"
"""How the names of variables that hold loops begin."""


def without_continue(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """``if c: A; continue`` before ``B`` as ``if c: A`` and ``else: B``. A ``continue`` in another place stays."""
    result = list(body)
    if len(result) > 1 and isinstance(result[-1], ast.Continue):
        result.pop()
    for i, statement in enumerate(result):
        if not isinstance(statement, ast.If):
            continue
        rest = result[i + 1 :]
        if isinstance(statement.body[-1], ast.Continue):
            statement.body = statement.body[:-1] or [ast.copy_location(ast.Pass(), statement)]
            statement.orelse = without_continue([*statement.orelse, *rest])
        elif statement.orelse and isinstance(statement.orelse[-1], ast.Continue):
            statement.body = without_continue([*statement.body, *rest])
            statement.orelse = statement.orelse[:-1]
        else:
            continue
        return result[: i + 1]
    return result


class AppendedItems(ast.NodeTransformer):
    """Writes appends as ``name.append(x)``: those of ``name += [x]`` and of ``outs["h"].append(x)``."""

    def __init__(self, taken: Collection[str]) -> None:
        self._taken = taken
        self.variables: dict[str, ast.Subscript] = {}
        """The items that lists are read from, by the variable that holds the list during the loop."""

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        """``name += [x]``."""
        value = node.value
        if not isinstance(node.op, ast.Add) or not isinstance(node.target, ast.Name) or not isinstance(value, ast.List):
            return node
        if len(value.elts) != 1 or isinstance(value.elts[0], ast.Starred):
            return node
        call = ast.Call(ast.Attribute(ast.Name(node.target.id, ast.Load()), "append", ast.Load()), value.elts, [])
        return ast.fix_missing_locations(ast.copy_location(ast.Expr(call), node))

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        """``outs["h"].append(x)``."""
        call = node.value
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "append":
            return node
        item = call.func.value
        if (
            isinstance(item, ast.Subscript)
            and isinstance(item.value, ast.Name)
            and isinstance(item.slice, ast.Constant)
        ):
            call.func.value = ast.copy_location(ast.Name(self._variable(item), ast.Load()), item)
        return node

    def _variable(self, item: ast.Subscript) -> str:
        text = ast.unparse(item)
        known = (name for name, other in self.variables.items() if ast.unparse(other) == text)
        name = next(known, "")
        if not name:
            name = "list_" + "".join(c if c.isalnum() else "_" for c in text)
            while name in self._taken or name in self.variables:
                name = f"_{name}"
            self.variables[name] = item
        return name


def uses(body: Sequence[ast.stmt], names: Collection[str]) -> bool:
    """Whether a body reads or writes one of these variables."""
    nodes = (node for statement in body for node in ast.walk(statement))
    return any(isinstance(node, ast.Name) and node.id in names for node in nodes)


def local_lists(body: Sequence[ast.stmt]) -> set[str]:
    """The lists that each iteration creates: the first statement that contains the variable assigns a list display to it."""
    seen: set[str] = set()
    result: set[str] = set()
    for statement in body:
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.List) and len(statement.targets) == 1:
            target = statement.targets[0]
            if isinstance(target, ast.Name) and target.id not in seen:
                result.add(target.id)
        seen |= names
    return result


def changes_only(call: ast.AST, lists: Collection[str]) -> bool:
    """Whether a call of a method changes one of these lists: ``name.append(x)``, also as rewritten in an inner loop."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    owner = call.func.value
    if not isinstance(owner, ast.Name):
        return False
    if owner.id.startswith(LOOP_VARIABLE):
        first = call.args[0] if call.args else None
        return isinstance(first, ast.Constant) and first.value in lists
    return owner.id in lists


class ListCalls(ast.NodeTransformer):
    """Writes ``list(items)`` as a call that leaves the list of a kept loop as it is."""

    def __init__(self, function: ast.expr) -> None:
        self._function = function

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """``list(reversed(outs))``."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "list" and len(node.args) == 1 and not node.keywords:
            node.func = ast.copy_location(self._function, node.func)
        return ast.fix_missing_locations(node)
