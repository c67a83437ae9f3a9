"""The user's file and the file with its kernels: one text while it is optimised, two when it is written.

The kernels' file begins with a line of ours. Only the blocks in it, and the marked imports that they share, are ever replaced.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.core.errors import Location, RequestError, SourceSyntaxError
from mtmc_lsp.core.run import GeneratedCode
from mtmc_lsp.core.workload import Target
from mtmc_lsp.source.blocks import Span, block_code, find_block, framed, newline_of, remove_block, with_gap
from mtmc_lsp.source.compose import edited, insert_block, own_dispatches, same_code, strip_generated
from mtmc_lsp.source.dispatch.marks import generated_part
from mtmc_lsp.source.dispatch.regions import Edit
from mtmc_lsp.source.entry_points import MAIN
from mtmc_lsp.source.import_lines import is_used, marked_import_edit, without_unused_imports
from mtmc_lsp.source.imports import bindings, check_names_are_free, missing_imports
from mtmc_lsp.source.sibling.scopes import free_names
from mtmc_lsp.source.sibling.statement import find_kernel_import, with_kernel_import
from mtmc_lsp.source.syntax import parse
from mtmc_lsp.source.targets import find_target

SUFFIX = "_kernels"
HEADER = "# mtmc: Triton kernels of"
"""The start of the first line of a file of kernels."""
HEADER_END = ". Only the code between begin and end marks is replaced."
IN_FILE = 'Rename it, or leave out place = "sibling", so that the kernels go into the file itself.'


@dataclass(frozen=True)
class FilePair:
    """The texts of the two files."""

    user: bytes
    kernels: bytes | None
    """None if there is no such file."""


def kernels_path(path: Path) -> Path:
    """``NAME_kernels.py`` beside ``NAME.py``."""
    return path.with_name(f"{path.stem}{SUFFIX}.py")


def check_kernels_file(path: Path, kernels: bytes | None) -> None:
    """Refuse a file of kernels that the user wrote.

    Args:
        path: the user's file.

    Raises:
        RequestError: the file beside it does not begin with our line, or is not UTF-8.
    """
    if kernels is None or not kernels.strip():
        return
    where = Location(str(kernels_path(path)))
    if not kernels.startswith(HEADER.encode()):
        raise RequestError(
            "exists and was not written by mtmc, so the kernels cannot go there", where=where, remedy=IN_FILE
        )
    try:
        kernels.decode("utf-8")
    except UnicodeDecodeError:
        raise RequestError("is not UTF-8", where=where, remedy="Save it as UTF-8.") from None


def module_of_kernels(path: Path, package: str, text: bytes) -> str:
    """The module from which the user's file imports its kernels: ``model_kernels``, ``.model_kernels``.

    Args:
        path: the user's file.
        package: the package of the file; empty if it is in none.
        text: the user's file.

    Raises:
        RequestError: no import statement can name the module, or none works in all ways in which the file runs.
    """
    name = f"{path.stem}{SUFFIX}"
    if not name.isidentifier() or keyword.iskeyword(name):
        problem = f"{name}.py cannot be imported: its name is no identifier"
        raise RequestError(problem, where=Location(str(path)), remedy=IN_FILE)
    imported = [item for item in bindings(parse(text)) if item.module]
    relative = {item.name for item in imported if item.module.startswith(".")}
    both_ways = next((item for item in imported if item.is_fallback and item.name in relative), None)
    if relative and both_ways is None:
        return f".{name}"
    if not package and both_ways is None:
        return name
    top = package.split(".")[0]
    if both_ways is None and any(item.module.split(".")[0] == top for item in imported):
        return f"{package}.{name}"
    main = MAIN.search(text)
    if both_ways is not None or main is not None:
        line = both_ways.line if both_ways is not None else text.count(b"\n", 0, main.start() if main else 0) + 1
        raise RequestError(
            f"is imported from a package and also runs as a script, so no import of {name} works in both",
            where=Location(str(path), line),
            remedy=f'Import something of {top!r} by its full name, or leave out place = "sibling".',
        )
    return f".{name}"


def block_of(text: bytes, qualname: str) -> tuple[str, Span] | None:
    """The generated block of a target, and the name in its marks."""
    return next(((name, span) for name in same_code(qualname) if (span := find_block(text, name)) is not None), None)


# Splitting -----------------------------------------------------------------------------------------------------------


def separated(text: bytes, qualname: str, path: Path, package: str, kernels: bytes | None) -> FilePair:
    """Move the block of a target from the user's file into the file of kernels.

    Args:
        text: the user's file with the block.
        path: of the user's file.
        package: see :func:`module_of_kernels`.
        kernels: the present file of kernels, if any. A block of this target in it is replaced.

    Raises:
        RequestError: the file of kernels is the user's own, cannot be imported, or uses one of the names for something else.
    """
    check_kernels_file(path, kernels)
    found = block_of(text, qualname)
    if found is None:
        raise ValueError(f"{qualname} has no generated code")
    name, span = found
    code = block_code(text, name) or ""
    present = find_kernel_import(text)
    dispatches = b"\n".join(generated_part(text, mark) for mark in own_dispatches(text, qualname))
    names = {item for item in _defined(code) if re.search(rb"\b" + item.encode() + rb"\b", dispatches)}
    module = module_of_kernels(path, package, text)
    if present is not None and present.module.rpartition(".")[2] != module.rpartition(".")[2]:
        old, new = (f"{item.rpartition('.')[2]}.py" for item in (present.module, module))
        raise RequestError(
            f"imports the kernels of other targets from {old}; those of {qualname} would go to {new}",
            where=Location(str(path), text.count(b"\n", 0, present.start) + 1),
            remedy=f"Rename {old} to {new}, here too.",
        )
    user = without_unused_imports(remove_block(text, span))
    imports = _imports(text, code)
    unknown = free_names(code) - {name for item in imports for name in _defined(item)}
    if unknown:
        # A step of an earlier run, with another place in the settings.
        raise RequestError(
            f"the kernels of {qualname} use {sorted(unknown)[0]!r} of this file",
            where=Location(str(path)),
            remedy='Run mtmc optimize again with place = "sibling".',
        )
    # Few files with PyTorch code lack `import torch`, which a dispatch statement may need.
    used = tuple(statement for statement in imports if is_used(statement.encode(), dispatches))
    plain = strip_generated(text, qualname)
    missing = missing_imports(parse(plain), str(path), used, len(plain))
    # The dispatch statements are below all imports, so the same edits apply to the text with them.
    edits = marked_import_edit(plain, missing, newline_of(text))
    user, plain = edited(user, edits), edited(plain, edits)
    names |= set(present.names if present is not None else ())
    user = with_kernel_import(user, module, sorted(names), plain)
    return FilePair(user, _with_block(kernels, name, code, imports, path, newline_of(text)))


def _defined(code: str) -> set[str]:
    return {binding.name for binding in bindings(parse(code.encode()))}


def _imports(text: bytes, code: str) -> tuple[str, ...]:
    """The imports of a file that code in it uses, each as a statement."""
    imported = {item.name: item.module for item in reversed(bindings(parse(text))) if item.module}
    plain: list[str] = []
    members: dict[str, list[str]] = {}
    for name in sorted(free_names(code) & imported.keys()):
        owner, _, last = imported[name].rpartition(".")
        if name == imported[name]:
            plain.append(f"import {name}")
        elif name == last:
            members.setdefault(owner, []).append(name)
        else:
            plain.append(f"import {imported[name]} as {name}")
    return (*sorted(plain), *(f"from {owner} import {', '.join(names)}" for owner, names in sorted(members.items())))


def _with_block(
    kernels: bytes | None, name: str, code: str, imports: Sequence[str], path: Path, newline: bytes
) -> bytes:
    """The file of kernels with a block at its end."""
    where = str(kernels_path(path))
    present = without_block(kernels, name) if kernels is not None else None
    if present is None or not present.strip():
        lines = [f"{HEADER} {path.name}{HEADER_END}", ""]
        present = newline.join(line.encode() for line in [*lines, ""])
    root = parse(present)
    check_names_are_free(root, where, code)
    missing = missing_imports(root, where, tuple(imports), len(present))
    end = len(present)
    # Of two insertions at the same offset, the last one comes first in the text.
    block = with_gap(present, end, framed(name, (), code, newline), newline)
    return edited(present, [Edit(end, end, block), *_import_edits(present, missing, newline)])


def _import_edits(text: bytes, statements: list[str], newline: bytes) -> list[Edit]:
    edits = marked_import_edit(text, statements, newline)
    # Imports at the end of a new file need no empty lines, since the block brings them.
    return [edit if edit.start < len(text) else edit._replace(new=edit.new.rstrip() + newline) for edit in edits]


def without_block(kernels: bytes, qualname: str) -> bytes | None:
    """The file of kernels without those of a target; None if nothing is left in it."""
    found = block_of(kernels, qualname)
    if found is None:
        return kernels
    rest = without_unused_imports(remove_block(kernels, found[1]), has_gap=False)
    first, _, others = rest.partition(b"\n")
    return rest if others.strip() or not first.startswith(HEADER.encode()) else None


# Joining -------------------------------------------------------------------------------------------------------------


def joined(pair: FilePair, target: Target) -> bytes:
    """The user's file with the block of a target in it; unchanged if the target uses no block of the file of kernels.

    Raises:
        SourceSyntaxError: the block does not parse.
    """
    present = find_kernel_import(pair.user)
    found = block_of(pair.kernels, target.qualname) if pair.kernels is not None else None
    if present is None or found is None or pair.kernels is None:
        return pair.user
    code = block_code(pair.kernels, found[0]) or ""
    dispatches = b"\n".join(generated_part(pair.user, mark) for mark in own_dispatches(pair.user, target.qualname))
    if not present.names_in(dispatches):
        return pair.user
    others = [name for name in present.names if name not in present.names_in(dispatches)]
    try:
        imports = _imports(pair.kernels, code)
    except SyntaxError as error:
        raise SourceSyntaxError(
            f"the kernels of {target.qualname} do not parse: {error.msg}",
            where=Location(str(kernels_path(Path(target.path)))),
            remedy="Undo the edit, or run mtmc optimize --apply again.",
        ) from None
    user = with_kernel_import(pair.user, present.module, others)
    return insert_block(user, find_target(user, target.path, target.qualname), GeneratedCode(imports, code, ""))
