"""Checks of access patterns: which elements neighbouring lanes of a block access."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Finding, Severity, finding_at
from mtmc_lsp.source.lint.kernel import Kernel, argument, names_in
from mtmc_lsp.source.lint.linear import ARANGE, Term, linear
from mtmc_lsp.source.syntax import field, text_of, walk


def uncoalesced_access(kernel: Kernel) -> Iterator[Finding]:
    """A load or store of a block in which no dimension runs along neighbouring elements."""
    sizes = _sizes(kernel)
    for name, call in kernel.calls:
        pointer = argument(call, 0, "pointer") if name in ("load", "store") else None
        terms = linear(pointer, kernel) if pointer is not None else None
        lanes = [term for term in terms or () if any(factor.startswith(f"{ARANGE}:") for factor in term)]
        factors = [next((factor for factor in term if factor in sizes), "") for term in lanes]
        if terms is None or not lanes or not all(factors):
            continue
        action = "read" if name == "load" else "write"
        message = (
            f"neighbouring lanes {action} elements that are `{factors[-1]}` apart, so that each lane needs a memory transaction; "
            "let one dimension of the block run along neighbouring elements"
        )
        yield finding_at("uncoalesced-access", Severity.HINT, call, message)


def _sizes(kernel: Kernel) -> set[str]:
    """Parameters that are more than 1: bounds of offsets, and compile-time constants. Strides may be 1."""
    bounds = {
        name
        for node in walk(kernel.body)
        if node.type == "comparison_operator" and len(node.named_children) == 2
        for name in names_in(node.named_children[1])
    }
    return {
        name
        for name, parameter in kernel.parameters.items()
        if "stride" not in name.lower() and (parameter.is_constexpr or name in bounds)
    }


def missed_vectorization(kernel: Kernel) -> Iterator[Finding]:
    """An offset with a modulo along neighbouring elements: the compiler cannot load several elements by one instruction."""
    seen = set()
    for name, call in kernel.calls:
        pointer = argument(call, 0, "pointer") if name in ("load", "store") else None
        for node in _terms(kernel, pointer) if pointer is not None else ():
            wrapped = _wrapped(kernel, node)
            if wrapped is not None and wrapped.start_byte not in seen:
                seen.add(wrapped.start_byte)
                text = " ".join(text_of(wrapped).split())
                message = (
                    f"the compiler cannot prove that the elements of `{text}` are neighbours, so it accesses them one by one; "
                    "skip the modulo where blocks divide the size, as mtmc optimize does, or mask the access instead"
                )
                yield finding_at("missed-vectorization", Severity.HINT, wrapped, message)


def _terms(kernel: Kernel, node: Node, depth: int = 6) -> Iterator[Node]:
    """The terms of a pointer expression, without those that are products: ``offsets[None, :]``."""
    while node.type in ("parenthesized_expression", "subscript"):
        node = node.named_children[0]
    if node.type == "binary_operator" and text_of(field(node, "operator")) == "+":
        for child in node.named_children:
            yield from _terms(kernel, child, depth)
        return
    yield node
    values = kernel.values.get(text_of(node), ()) if node.type == "identifier" else ()
    if depth and len(values) == 1:
        yield from _terms(kernel, values[0], depth - 1)


def _wrapped(kernel: Kernel, node: Node) -> Node | None:
    """A term ``block % size``."""
    is_modulo = node.type == "binary_operator" and text_of(field(node, "operator")) == "%"
    left, right = field(node, "left"), field(node, "right")
    if not is_modulo or left is None or right is None or kernel.is_block(right):
        return None
    inner: Counter[Term] | None = linear(left, kernel)
    lanes = [term for term in inner or () if any(factor.startswith(f"{ARANGE}:") for factor in term)]
    return node if lanes and all(len(term) == 1 for term in lanes) else None
