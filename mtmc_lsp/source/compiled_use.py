"""Whether the user's file compiles a target with ``torch.compile``, so that compiled code is what the user runs today."""

from __future__ import annotations

import ast


def is_compiled_in_file(source: str, qualname: str) -> bool:
    """Whether the file passes the target, its class or an instance of it to ``torch.compile`` or calls ``.compile()`` on it.

    A decorator on the target does not count: then every call of the target, also the one that is timed as eager mode, runs
    compiled code.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return False
    names = {qualname.partition(".")[0]}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_instance_of(node.value, names):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(_compiles(call, names) for call in calls)


def _is_instance_of(value: ast.expr, names: set[str]) -> bool:
    """Whether an expression constructs an object of one of the names, perhaps moved or changed by methods: ``Net().cuda()``."""
    while isinstance(value, ast.Call):
        if isinstance(value.func, ast.Name):
            return value.func.id in names
        value = value.func.value if isinstance(value.func, ast.Attribute) else value.func
    return False


def _compiles(call: ast.Call, names: set[str]) -> bool:
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr == "compile":
        if isinstance(function.value, ast.Name) and function.value.id == "torch":
            return bool(call.args) and _is_one_of(call.args[0], names)
        return _is_one_of(function.value, names)
    return (
        isinstance(function, ast.Name)
        and function.id == "compile"
        and bool(call.args)
        and _is_one_of(call.args[0], names)
    )


def _is_one_of(value: ast.expr, names: set[str]) -> bool:
    return (isinstance(value, ast.Name) and value.id in names) or _is_instance_of(value, names)
