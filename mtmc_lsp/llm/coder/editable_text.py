"""What a model may edit of a target's generated code: its kernels and its launcher. The rest is framed by ourselves.

The guard, the dispatch statement, the launcher's signature and the operator stay ours, so that no answer can choose when
its kernels run, or step out of the place in the user's file that belongs to us.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from mtmc_lsp.codegen.kernel.snippets import LINE, call_text
from mtmc_lsp.core.run import GeneratedCode


@dataclass(frozen=True)
class Sheet:
    """Generated code, taken apart."""

    text: str
    """Helpers, kernels and the launcher: what is edited."""
    launcher: str
    """The launcher's name."""
    tensors: tuple[str, ...]
    """The launcher's tensor parameters, in order."""
    guard: str
    """The guard with what it calls."""
    operator: str
    """Empty where the results alias, so that there can be none."""
    code: GeneratedCode


def taken_apart(code: GeneratedCode) -> Sheet:
    """The sheet of a candidate's generated code."""
    tree = ast.parse(code.block)
    editable: list[str] = []
    guard: list[str] = []
    operator = ""
    name = ""
    tensors: tuple[str, ...] = ()
    for node in tree.body:
        assert isinstance(node, ast.FunctionDef), ast.dump(node)
        source = source_of(code.block, node)
        if any(isinstance(item, ast.Call) for item in node.decorator_list):
            operator = source
        elif node.name.endswith("_launch"):
            name = node.name
            tensors = tuple(arg.arg for arg in node.args.args[: len(node.args.args) - len(node.args.defaults)])
            editable.append(source)
        elif node.decorator_list:
            editable.append(source)
        else:
            guard.append(source)
    return Sheet("\n\n\n".join(editable) + "\n", name, tensors, "\n\n\n".join(guard), operator, code)


def put_together(sheet: Sheet, text: str, kept: Collection[str] = ()) -> GeneratedCode:
    """The generated code with ``text``, which parses and defines the launcher, in place of the sheet's own.

    Functions in ``kept``, which ``text`` has unchanged, stay character by character as they were.
    """
    tree = ast.parse(text)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    launcher = next(node for node in functions if node.name == sheet.launcher)
    launched = launched_kernels(launcher)
    kernels = [node.name for node in functions if node.name in launched]
    own = {node.name: source_of(sheet.text, node) for node in functions_of(sheet.text).values() if node.name in kept}
    before = [own.get(node.name) or source_of(text, node) for node in functions if node is not launcher]
    lines = text.splitlines()
    body = lines[launcher.body[0].lineno - 1 : launcher.end_lineno]
    head = _head(sheet.launcher, [*sheet.tensors, *(f"{kernel}={kernel}" for kernel in kernels)])
    parts = [*before, sheet.guard, "\n".join([*head, *body])]
    if sheet.operator:
        parts.append(_operator(sheet, kernels))
    return replace(sheet.code, block="\n\n\n".join(part.strip("\n") for part in parts) + "\n")


def functions_of(text: str) -> dict[str, ast.FunctionDef]:
    """The functions of a sheet's text by their names."""
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def launched_kernels(function: ast.FunctionDef) -> set[str]:
    """Names that are launched: ``name[grid](...)``."""
    return {
        node.func.value.id
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)
    }


def source_of(text: str, node: ast.FunctionDef) -> str:
    """A function with its decorators and the comments that stand on them."""
    lines = text.splitlines()
    first = min([node.lineno, *(item.lineno for item in node.decorator_list)]) - 1
    while first > 0 and lines[first - 1].startswith("#"):
        first -= 1
    return "\n".join(lines[first : node.end_lineno])


def _head(name: str, parameters: list[str]) -> list[str]:
    one_line = f"def {name}({', '.join(parameters)}):"
    return [one_line] if len(one_line) <= LINE else [f"def {name}(", *(f"    {item}," for item in parameters), "):"]


def _operator(sheet: Sheet, kernels: list[str]) -> str:
    kept = re.split(r"^    return ", sheet.operator, maxsplit=1, flags=re.MULTILINE)[0]
    arguments = [*sheet.tensors, *(f"wrap_triton({kernel})" for kernel in kernels)]
    return f"{kept}    return {call_text(sheet.launcher, arguments, '    ')}"
