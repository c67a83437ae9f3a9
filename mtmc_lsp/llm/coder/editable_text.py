"""Splits generated code into the part that a model may edit (kernels and launcher) and the part that it may not.

The guard, the dispatch statement, the launcher's signature and the operator are always generated. So an answer cannot
change when its kernels run, and cannot write outside the generated regions of the user's file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from mtmc_lsp.codegen.kernel.snippets import call_text, def_lines
from mtmc_lsp.codegen.module.direct_launches import (
    DIRECT_LAUNCHES,
    NAME,
    launched_directly,
    without_direct_launches,
)
from mtmc_lsp.core.run import GeneratedCode


@dataclass(frozen=True)
class EditableCode:
    """Generated code, split into editable and fixed parts."""

    text: str
    """The editable source: device functions, kernels and the launcher."""
    launcher: str
    """The launcher's name."""
    tensors: tuple[str, ...]
    """The launcher's tensor parameters, in order."""
    guard: str
    """Source of the guard and the functions it calls."""
    operator: str
    """Source of the custom operator; empty if outputs alias each other, because then no operator is possible."""
    code: GeneratedCode


def split_code(code: GeneratedCode) -> EditableCode:
    """Split the generated code of a candidate."""
    tree = ast.parse(code.block)
    editable: list[str] = []
    guard: list[str] = []
    operator = ""
    name = ""
    tensors: tuple[str, ...] = ()
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            # The guard keeps state of its helpers in module variables.
            guard.append(ast.get_source_segment(code.block, node) or "")
            continue
        source = source_of(code.block, node)
        if any(isinstance(item, ast.Call) for item in node.decorator_list):
            operator = source
        elif node.name.endswith("_launch"):
            name = node.name
            tensors = tuple(arg.arg for arg in node.args.args[: len(node.args.args) - len(node.args.defaults)])
            editable.append(without_direct_launches(source))
        elif any(ast.unparse(item).startswith("triton.") for item in node.decorator_list):
            editable.append(source)
        else:
            guard.append(source)
    return EditableCode("\n\n\n".join(editable) + "\n", name, tensors, "\n\n\n".join(guard), operator, code)


def assemble_code(editable: EditableCode, text: str, unchanged: Collection[str] = ()) -> GeneratedCode:
    """The generated code with ``text`` as its editable part. ``text`` must parse and define the launcher.

    Functions in ``unchanged`` keep their original source exactly, including comments and formatting.
    """
    tree = ast.parse(text)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    launcher = next(node for node in functions if node.name == editable.launcher)
    launched = launched_kernels(launcher)
    kernels = [node.name for node in functions if node.name in launched]
    original_sources = {
        node.name: source_of(editable.text, node)
        for node in functions_of(editable.text).values()
        if node.name in unchanged
    }
    sources = [original_sources.get(node.name) or source_of(text, node) for node in functions if node is not launcher]
    lines = text.splitlines()
    body = lines[launcher.body[0].lineno - 1 : launcher.end_lineno]
    header = def_lines(editable.launcher, [*editable.tensors, *map(launched_directly, kernels)])
    # Code whose launcher launched no kernel before lacks the helper.
    helper = [] if f"class {NAME}:" in editable.guard else [DIRECT_LAUNCHES]
    parts = [*sources, editable.guard, *helper, "\n".join([*header, *body])]
    if editable.operator:
        parts.append(_operator(editable, kernels))
    return replace(editable.code, block="\n\n\n".join(part.strip("\n") for part in parts) + "\n")


def functions_of(text: str) -> dict[str, ast.FunctionDef]:
    """The top-level functions in ``text`` by name."""
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def launched_kernels(function: ast.FunctionDef) -> set[str]:
    """Names of kernels that ``function`` launches: ``name[grid](...)``."""
    return {
        node.func.value.id
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)
    }


def source_of(text: str, node: ast.FunctionDef) -> str:
    """Source of a function with its decorators and the comments above them."""
    lines = text.splitlines()
    first = min([node.lineno, *(item.lineno for item in node.decorator_list)]) - 1
    while first > 0 and lines[first - 1].startswith("#"):
        first -= 1
    return "\n".join(lines[first : node.end_lineno])


def _operator(editable: EditableCode, kernels: list[str]) -> str:
    header = re.split(r"^    return ", editable.operator, maxsplit=1, flags=re.MULTILINE)[0]
    arguments = [*editable.tensors, *(f"wrap_triton({kernel})" for kernel in kernels)]
    return f"{header}    return {call_text(editable.launcher, arguments, '    ')}"
