"""Put generated code into a file and take it out again, leaving every other byte alone.

What is put in is recognised by three marks: ``# mtmc: begin NAME`` and ``# mtmc: end NAME`` around the block above the target
(imports that the file lacks stand first in it), and a trailing ``# mtmc`` on the dispatch statement.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from tree_sitter import Node

from mtmc_lsp.core.errors import FileChanged, Location, RequestError, TargetUnsupported
from mtmc_lsp.core.run import GeneratedCode
from mtmc_lsp.core.workload import Target
from mtmc_lsp.source.syntax import field, line_of, parse, text_of
from mtmc_lsp.source.targets import Definition, find_definition

BEGIN, END, DISPATCH = "# mtmc: begin", "# mtmc: end", "  # mtmc: dispatch"
BOM = b"\xef\xbb\xbf"
BOUND = {"import torch": "torch", "import triton": "triton", "import triton.language as tl": "tl"}


def compose(text: bytes, target: Target, code: GeneratedCode) -> bytes:
    """``text`` with the generated code in place; all other bytes are as they were.

    Raises:
        RequestError: a name that the code needs means something else in the file.
    """
    definition = find_definition(text, target.path, target.qualname)
    newline = b"\r\n" if b"\r\n" in text else b"\n"
    at_body, dispatch = _dispatch(text, definition, code.dispatch, newline)
    at_block = _block_start(text, definition.node)
    imports = _missing_imports(text, target.path, code.imports, at_block)
    lines = [
        f"{BEGIN} {target.qualname}",
        *imports,
        *([""] * 2 if imports else []),
        *code.block.rstrip("\n").split("\n"),
    ]
    lines += [f"{END} {target.qualname}", "", "", ""]
    block = newline.join(line.encode() for line in lines)
    return text[:at_block] + block + text[at_block:at_body] + dispatch + text[at_body:]


def strip_generated(text: bytes, qualname: str) -> bytes:
    """The exact inverse of :func:`compose`; text without generated code comes back as it is."""
    name = re.escape(qualname.encode())
    newline = rb"(?:\r\n|\n)"
    block = re.compile(
        rb"# mtmc: begin " + name + newline + rb".*?# mtmc: end " + name + newline + newline + newline, re.DOTALL
    )
    stripped, count = block.subn(b"", text, count=1)
    if not count:
        return text
    # The dispatch line of this target is the first one after its definition.
    start = _definition_offset(stripped, qualname)
    pattern = re.compile(
        rb"[ \t]*if [^\r\n]*" + re.escape(DISPATCH.encode()) + newline + rb"[ \t]+return [^\r\n]*" + newline
    )
    return stripped[:start] + pattern.sub(b"", stripped[start:], count=1)


def _definition_offset(text: bytes, qualname: str) -> int:
    try:
        return find_definition(text, "", qualname).node.start_byte
    except RequestError:
        return 0


def _outermost(node: Node) -> Node:
    """The top-level statement that holds ``node``."""
    while node.parent is not None and node.parent.parent is not None:
        node = node.parent
    return node


def _block_start(text: bytes, node: Node) -> int:
    """Where the block goes: above the top-level statement and the comment lines that touch it."""
    top = _outermost(node)
    start = top.start_byte
    at_line_start = start == 0 or text[start - 1 : start] == b"\n" or text[:start] == BOM
    if not at_line_start:
        raise TargetUnsupported("the target does not start a line", where=Location("", line_of(node)))
    start = top.start_byte
    while start > 0:
        previous = text.rfind(b"\n", 0, start - 1) + 1
        line = text[previous:start].strip()
        if not line.startswith(b"#") or line.startswith((b"#!", BOM + b"#!")) or line.startswith(BEGIN.encode()):
            break
        if re.match(rb"#.*coding[:=]", line) or line.startswith(END.encode()):
            break
        start = previous
    return max(start, len(BOM) if text.startswith(BOM) else 0)


def _dispatch(text: bytes, definition: Definition, dispatch: str, newline: bytes) -> tuple[int, bytes]:
    """Offset and bytes of the dispatch statement: first in the body, after the docstring, indented as the body is."""
    function = _function(definition)
    body = field(function, "body")
    assert body is not None
    statements = [child for child in body.named_children if child.type != "comment"]
    first = statements[0]
    if first.start_point[0] == function.start_point[0] or _shares_line(text, first):
        raise TargetUnsupported(
            f"{definition.target.qualname} has its body on the line of its header",
            where=Location(definition.target.path, definition.target.start_line),
            remedy="Put the body on lines of its own.",
        )
    is_docstring = (
        first.type == "expression_statement" and first.named_children[:1] and first.named_children[0].type == "string"
    )
    anchor = statements[1] if is_docstring and len(statements) > 1 else first
    if is_docstring and len(statements) == 1:
        raise TargetUnsupported("the target has no body", where=Location(definition.target.path, line_of(first)))
    start = text.rfind(b"\n", 0, anchor.start_byte) + 1
    indent = text[start : anchor.start_byte]
    if indent.strip():
        raise TargetUnsupported(
            f"two statements share line {line_of(anchor)}",
            where=Location(definition.target.path, line_of(anchor)),
            remedy="Put each statement on a line of its own.",
        )
    step = b"\t" if indent.endswith(b"\t") else b"    "
    lines = dispatch.rstrip("\n").split("\n")
    lines[0] += DISPATCH
    rendered = b""
    for line in lines:
        inner = line[4:] if line.startswith("    ") else line
        rendered += indent + (step if inner is not line else b"") + inner.encode() + newline
    return start, rendered


def _shares_line(text: bytes, node: Node) -> bool:
    start = text.rfind(b"\n", 0, node.start_byte) + 1
    return bool(text[start : node.start_byte].strip())


def _function(definition: Definition) -> Node:
    """The function that runs: for a module class its ``forward``."""
    node = definition.node
    if node.type == "function_definition":
        return node
    body = field(node, "body")
    for child in body.children if body else []:
        inner = field(child, "definition") if child.type == "decorated_definition" else child
        name = field(inner, "name") if inner is not None and inner.type == "function_definition" else None
        if inner is not None and name is not None and text_of(name) == "forward":
            return inner
    raise TargetUnsupported(
        f"{definition.target.qualname} has no forward of its own",
        where=Location(definition.target.path, definition.target.start_line),
        remedy="Choose the class that defines forward.",
    )


def _missing_imports(text: bytes, path: str, imports: tuple[str, ...], before: int) -> list[str]:
    """Imports that are not made at module level above the block.

    Raises:
        RequestError: one of the names is bound to something else.
    """
    bound: dict[str, tuple[str, int]] = {}
    for node in parse(text).children:
        if node.start_byte >= before:
            break
        if node.type in ("import_statement", "import_from_statement"):
            statement = text_of(node)
            for name in _bound_names(node):
                bound[name] = (statement, line_of(node))
        elif node.type in ("function_definition", "class_definition"):
            own = field(node, "name")
            if own is not None:
                bound[text_of(own)] = ("", line_of(node))
    missing = []
    for statement in imports:
        name = BOUND[statement]
        if name not in bound:
            missing.append(statement)
        elif not _is_same_import(statement, *bound[name][:1]):
            raise RequestError(
                f"the name {name!r} means something else here",
                where=Location(path, bound[name][1]),
                remedy="Rename it.",
            )
    return missing


def _bound_names(node: Node) -> list[str]:
    names = []
    for child in node.named_children:
        if child.type == "aliased_import":
            alias = field(child, "alias")
            names.append(text_of(alias) if alias else "")
        elif child.type == "dotted_name" and child != field(node, "module_name"):
            names.append(text_of(child).split(".")[0])
    return names


def _is_same_import(statement: str, existing: str) -> bool:
    module = statement.split()[1]
    if " as " in statement:
        return module in existing or "from triton import language as tl" in existing
    return bool(re.search(rf"\b{re.escape(module)}\b", existing))


def unified_diff(before: str, after: str, path: str) -> str:
    """What changed, as ``diff -u`` shows it; empty where nothing did."""
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}")
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def write_if_unchanged(path: Path, expected_sha256: str, new_bytes: bytes, backup_folder: Path) -> Path:
    """Replace a file in one step, unless it changed on disk since it was read; the old bytes are kept first.

    Returns:
        Where the old bytes are kept.

    Raises:
        FileChanged: the file no longer has that hash; nothing is written.
    """
    real = Path(os.path.realpath(path))
    current = real.read_bytes()
    digest = hashlib.sha256(current).hexdigest()
    if digest != expected_sha256:
        raise FileChanged(
            "the file changed on disk since it was read, so nothing was written",
            where=Location(str(path)),
            remedy="Run the command again on the file as it is now.",
        )
    backup_folder.mkdir(parents=True, exist_ok=True)
    backup = backup_folder / f"{real.name}.{digest[:12]}"
    backup.write_bytes(current)
    handle, temporary = tempfile.mkstemp(dir=real.parent, prefix=f".{real.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(new_bytes)
            stream.flush()
            os.fsync(stream.fileno())
        shutil.copymode(real, temporary)
        os.replace(temporary, real)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return backup
