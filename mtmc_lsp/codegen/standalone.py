"""Rewrites generated code so that it uses no names of the user's file and works in a separate file.

The guard compares functions, classes and values of the user's file. An import of that file by the kernels' file would be
circular, and would run a script a second time. Instead the dispatch statement passes ``__name__``, and the guard looks the module
up at each call. ``torch.compile`` traces this lookup, but not ``globals()``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.core.run import GeneratedCode, Placement
from mtmc_lsp.guard.conditions import MODULE
from mtmc_lsp.source.imports import bindings, imported_names
from mtmc_lsp.source.line_wrapping import wrapped
from mtmc_lsp.source.sibling.scopes import BUILTINS, global_reads, parameters, read_on_import
from mtmc_lsp.source.syntax import parse, parse_with_recovery

LOOK_UP = "_user_module"
LOOK_UP_SOURCE = f'''def {LOOK_UP}(name, *needed):
    """The module of the user's file; None if the program runs the file in a way that leaves it without these names."""
    import sys

    module = sys.modules.get(name)
    return module if all([hasattr(module, item) for item in needed]) else None
'''
NAME = "module_name"
"""The guard's parameter for the name of the user's module."""
IN_FILE = 'Leave out place = "sibling", so that the kernels go into the file itself.'


@dataclass
class _Part:
    """A top-level function of generated code."""

    node: ast.FunctionDef
    reads: list[ast.Name]
    """Where it reads global names."""
    foreign: list[ast.Name] = field(default_factory=list)
    """Those of ``reads`` that are names of the user's file."""


def placed(code: GeneratedCode, place: Placement, text: bytes) -> GeneratedCode:
    """The code for a place.

    Args:
        text: the user's file.

    Raises:
        TargetUnsupported: the code uses names of the user's file in a way that needs the file itself.
    """
    code = replace(code, place=place)
    return standalone(code, text) if place is Placement.SIBLING else code


def standalone(code: GeneratedCode, text: bytes) -> GeneratedCode:
    """The code without names of the user's file ``text``; unchanged if it has none.

    Raises:
        TargetUnsupported: a name is used where the module cannot be looked up: in a kernel, or when the file is imported.
    """
    tree = ast.parse(code.block)
    known = {
        name for item in code.imports for child in parse(item.encode()).children for name, _ in imported_names(child)
    }
    known |= {binding.name for binding in bindings(parse(code.block.encode()))}
    users = {binding.name for binding in bindings(parse_with_recovery(text)[0])}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    parts = {node.name: _Part(node, list(global_reads(node.body, parameters(node)))) for node in functions}
    for part in parts.values():
        part.foreign = [name for name in part.reads if _is_foreign(name.id, known, users)]
    outside = [name.id for name in read_on_import(tree) if _is_foreign(name.id, known, users)]
    needing = _needing(parts)
    if outside or needing & {part.node.name for part in parts.values() if _is_compiled(part.node)}:
        name = (outside or [item.id for part in parts.values() for item in part.foreign])[0]
        raise _cannot(f"a kernel uses {name!r} of the file")
    if not needing:
        return code
    if re.search(rf"\b{MODULE}\b", code.block):
        raise _cannot(f"it uses the name {MODULE!r}")
    entries = needing & {name.id for name in ast.walk(ast.parse(code.dispatch)) if isinstance(name, ast.Name)}
    entries |= {
        name.id for _, dispatch in code.regions for name in ast.walk(ast.parse(dispatch)) if isinstance(name, ast.Name)
    } & needing
    edits = _Edits(code.block)
    for name in needing:
        _rewrite(parts[name], needing, edits, is_entry=name in entries)
    guard = next((node for node in functions if node.name in entries), None)
    if guard is not None:
        edits.insert(min([guard.lineno, *(item.lineno for item in guard.decorator_list)]), 0, f"{LOOK_UP_SOURCE}\n\n")
    return replace(
        code,
        block=wrapped(edits.text()),
        dispatch=_with_name(code.dispatch, entries),
        regions=tuple((region, _with_name(dispatch, entries)) for region, dispatch in code.regions),
    )


def _is_foreign(name: str, known: Collection[str], users: Collection[str]) -> bool:
    is_builtin = name in BUILTINS or (name.startswith("__") and name.endswith("__"))
    return name not in known and (name in users or not is_builtin)


def _needing(parts: dict[str, _Part]) -> set[str]:
    """The functions that read names of the user's file, directly or through functions that they call."""
    needing = {name for name, part in parts.items() if part.foreign}
    while True:
        callers = {name for name, part in parts.items() if needing & {item.id for item in part.reads}} - needing
        if not callers:
            return needing
        needing |= callers


def _is_compiled(node: ast.FunctionDef) -> bool:
    """Whether Triton compiles it, or an operator fixes its signature."""
    return any(re.match(r"triton|wrap_triton", ast.unparse(item)) for item in node.decorator_list)


# The new text --------------------------------------------------------------------------------------------------------


class _Edits:
    """Insertions into a text, at positions of its syntax tree."""

    def __init__(self, text: str) -> None:
        self._data = text.encode()
        self._starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._insertions: list[tuple[int, str]] = []

    def insert(self, line: int, column: int, text: str) -> None:
        """Insert before a position: a line from 1, and a column in bytes."""
        self._insertions.append((self._starts[line - 1] + column, text))

    def insert_in_call(self, call: ast.Call, text: str) -> None:
        """Add a last positional argument to a call without arguments by name."""
        if call.keywords:
            raise _cannot("it passes arguments by name")
        assert call.end_lineno is not None and call.end_col_offset is not None
        bracket = self._starts[call.end_lineno - 1] + call.end_col_offset - 1
        before = self._data[:bracket].rstrip()
        separator = "" if not call.args else " " if before.endswith(b",") else ", "
        self._insertions.append((len(before), f"{separator}{text}"))

    def text(self) -> str:
        """The text with all insertions."""
        data = self._data
        for offset, new in sorted(self._insertions, key=lambda item: item[0], reverse=True):
            data = data[:offset] + new.encode() + data[offset:]
        return data.decode()


def _rewrite(part: _Part, needing: Collection[str], edits: _Edits, *, is_entry: bool) -> None:
    """Read the names of the user's file from its module, which is a parameter or, in a guard, looked up by its name."""
    node, arguments = part.node, part.node.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults:
        raise _cannot(f"{node.name} reads names of the file")
    for name in part.foreign:
        edits.insert(name.lineno, name.col_offset, f"{MODULE}.")
    calls = [item for item in ast.walk(node) if isinstance(item, ast.Call) and isinstance(item.func, ast.Name)]
    called = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in needing]
    if len(called) != sum(name.id in needing for name in part.reads):
        raise _cannot(f"{node.name} passes a function that reads names of the file")
    for call in called:
        edits.insert_in_call(call, MODULE)
    parameter = NAME if is_entry else MODULE
    if any(argument.arg == parameter for argument in arguments.args):
        raise _cannot(f"an argument has the name {parameter!r}")
    if arguments.args:
        last = arguments.args[-1]
        assert last.end_lineno is not None and last.end_col_offset is not None
        edits.insert(last.end_lineno, last.end_col_offset, f", {parameter}")
    else:
        edits.insert(node.lineno, node.col_offset + len(f"def {node.name}("), parameter)
    if is_entry:
        first = node.body[0]
        is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        after = first.end_lineno if is_docstring else node.body[0].lineno - 1
        assert after is not None
        needed = "".join(f', "{name}"' for name in dict.fromkeys(sorted(item.id for item in part.foreign)))
        refused = "False" if node.returns is not None else "None"
        look_up = f"    {MODULE} = {LOOK_UP}({NAME}{needed})\n    if not {MODULE}:\n        return {refused}\n"
        edits.insert(after + 1, 0, look_up)


def _with_name(dispatch: str, entries: Collection[str]) -> str:
    """The dispatch statement that passes the name of its module to the functions that look the module up."""
    edits = _Edits(dispatch)
    tree = ast.parse(dispatch)
    calls = [item for item in ast.walk(tree) if isinstance(item, ast.Call) and isinstance(item.func, ast.Name)]
    looking_up = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in entries]
    names = [item for item in ast.walk(tree) if isinstance(item, ast.Name) and item.id in entries]
    if len(names) != len(looking_up):
        raise _cannot("its launcher reads names of the file")
    for call in looking_up:
        edits.insert_in_call(call, "__name__")
    return edits.text()


def _cannot(problem: str) -> TargetUnsupported:
    return TargetUnsupported(f"the generated code cannot stand in another file: {problem}", remedy=IN_FILE)
