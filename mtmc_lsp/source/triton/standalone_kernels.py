"""Extract the Triton kernels of a file, so that they can be compiled without running its other code.

Importing a file may have side effects: it may look for a GPU, load data, or run benchmarks. Analysing a kernel's resources needs
none of that.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.chunks import Chunk
from mtmc_lsp.source.lint import context_of
from mtmc_lsp.source.lint.kernel import kernels_in
from mtmc_lsp.source.outline import Outline
from mtmc_lsp.source.syntax import field, parse, text_of, walk

IMPORTS = ("import_statement", "import_from_statement", "try_statement")


def standalone_kernels(outline: Outline) -> str:
    """The file's imports, its constants, and its kernels with ``@triton.jit`` as their only decorator."""
    kernels = context_of(outline).kernels
    return "".join(part for chunk in outline.chunks for part in _parts(outline, chunk, kernels))


def _parts(outline: Outline, chunk: Chunk, kernels: frozenset[str]) -> Iterator[str]:
    root = parse(chunk.text)
    for node in root.children:
        if node.type in IMPORTS and _only_imports(node):
            # An import that fails here may not be needed by any kernel.
            yield f"try:\n{textwrap.indent(text_of(node), '    ')}\nexcept Exception:\n    pass\n"
        elif node.type == "expression_statement" and _is_constant(node):
            yield f"try:\n{textwrap.indent(text_of(node), '    ')}\nexcept NameError:\n    pass\n"
    if kernels and b"jit" in chunk.text:
        for kernel in kernels_in(root, context_of(outline)):
            jit = next((text_of(item) for item in kernel.decorators if "jit" in text_of(item)), "")
            if kernel.node.parent is not None and kernel.node.parent.parent == root:
                # Options of the decorator refer to functions, for example for profilers, that are not extracted.
                yield f"\n\n{jit.partition('(')[0]}\n{text_of(kernel.node)}\n\n\n"


def _only_imports(node: Node) -> bool:
    """Whether a statement only imports, and in the case of ``try`` contains no calls."""
    return node.type != "try_statement" or not any(item.type == "call" for item in walk(node))


def _is_constant(statement: Node) -> bool:
    """Whether it is like ``SIZE = 64``, ``LOG2E: tl.constexpr = 1.44`` or ``exp = tl.exp``: no call other than ``constexpr``."""
    inner = statement.named_children[0] if statement.named_children else None
    if inner is None or inner.type != "assignment":
        return False
    calls = (item for item in walk(inner) if item.type == "call")
    return all(text_of(field(call, "function")).endswith("constexpr") for call in calls)
