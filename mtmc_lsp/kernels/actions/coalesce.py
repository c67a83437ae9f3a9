"""*Coalesce*: neighbouring lanes access neighbouring elements, by another order of the index."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts, Proposal, assignment_of, uses
from mtmc_lsp.kernels.actions.fusion.launches import LANES
from mtmc_lsp.kernels.repairs.site import Site, replaced
from mtmc_lsp.source.lint.kernel import argument, names_in
from mtmc_lsp.source.lint.linear import linear
from mtmc_lsp.source.syntax import field, line_of, text_of, walk


@dataclass(frozen=True)
class _Split:
    """``fast = index % inner`` and ``slow = index // inner``."""

    index: str
    inner: str
    fast: str
    slow: str
    remainder: Node
    quotient: Node


def swapped_index(facts: Facts) -> Iterator[Proposal]:
    """A flat index whose remainder runs along the distant elements: ``row = index % M; column = index // M``.

    Legal if the kernel computes by lanes, each access is masked by ``index < M * N``, and the index is used for nothing else:
    another order of the index is a permutation of the lanes. It is proposed if more accesses then run along neighbouring
    elements.
    """
    site = facts.site
    calls = [field(node, "function") for node in walk(site.kernel.body) if node.type == "call"]
    if not all(site.kernel.triton_name(each) in LANES or text_of(each).endswith(".to") for each in calls):
        return
    split = _split(site)
    outer = _outer(site, split) if split is not None else ""
    if split is None or not outer:
        return
    now, then = _neighbouring(site, split.fast), _neighbouring(site, split.slow)
    if then <= now:
        return
    yield Proposal(
        "coalesce",
        facts.name,
        f"Let neighbouring lanes run along {split.slow}",
        (replaced(split.remainder, f"{split.index} // {outer}"), replaced(split.quotient, f"{split.index} % {outer}")),
        line_of(split.remainder),
        f"{split.fast} is {text_of(split.remainder)}, so that neighbouring lanes access elements that are {outer} apart",
        facts.memory_us(facts.moved),
        facts.moved,
        facts.moved,
    )


def _split(site: Site) -> _Split | None:
    """The only division of an index into a remainder and a quotient."""
    parts: dict[tuple[str, str], dict[str, tuple[str, Node]]] = {}
    for statement in site.kernel.body.named_children:
        pair = assignment_of(statement)
        operator = text_of(field(pair[1], "operator")) if pair is not None else ""
        if pair is None or pair[1].type != "binary_operator" or operator not in ("%", "//"):
            continue
        left, right = field(pair[1], "left"), field(pair[1], "right")
        if left is None or right is None or left.type != "identifier" or right.type != "identifier":
            return None
        parts.setdefault((text_of(left), text_of(right)), {})[operator] = (text_of(pair[0]), pair[1])
    if len(parts) != 1:
        return None
    (index, inner), both = next(iter(parts.items()))
    if both.keys() != {"%", "//"} or inner not in site.kernel.parameters:
        return None
    names = (index, both["%"][0], both["//"][0])
    if any(len(site.kernel.values.get(name, ())) != 1 for name in names) or len(set(names)) != 3:
        return None
    return _Split(index, inner, names[1], names[2], both["%"][1], both["//"][1])


def _outer(site: Site, split: _Split) -> str:
    """The number of values of the quotient, by the mask of all accesses; empty if they differ or the index is used otherwise."""
    outer = set()
    masks: list[Node] = []
    for name, call in site.accesses:
        mask = argument(call, 1 if name == "load" else 2, "mask")
        values = site.kernel.values.get(text_of(mask), ()) if mask is not None and mask.type == "identifier" else ()
        mask = values[0] if len(values) == 1 else mask
        factors = _bound(site, mask, split) if mask is not None else None
        if mask is None or factors is None:
            return ""
        outer.add(factors)
        masks.append(mask)
    allowed = [*masks, split.remainder, split.quotient]
    for node in walk(site.kernel.body):
        is_use = node.type == "identifier" and text_of(node) == split.index
        if is_use and not any(each.start_byte <= node.start_byte < each.end_byte for each in allowed):
            statement = next(
                (s for s in site.kernel.body.named_children if s.start_byte <= node.start_byte < s.end_byte), None
            )
            pair = assignment_of(statement) if statement is not None else None
            if pair is None or pair[0] != node:
                return ""
    return outer.pop() if len(outer) == 1 else ""


def _bound(site: Site, mask: Node, split: _Split) -> str | None:
    """``N`` of a mask ``index < M * N``."""
    if mask.type != "comparison_operator" or len(mask.named_children) != 2 or split.index not in uses(mask):
        return None
    operator = next((text_of(child) for child in mask.children if not child.is_named), "")
    left, right = mask.named_children
    terms = linear(right, site.kernel)
    if operator != "<" or text_of(left) != split.index or terms is None or len(terms) != 1:
        return None
    (factors, count) = next(iter(terms.items()))
    others = [factor for factor in factors if factor != split.inner]
    is_product = count == 1 and len(factors) == 2 and len(others) == 1 and others[0] in site.kernel.parameters
    return others[0] if is_product else None


def _neighbouring(site: Site, name: str) -> int:
    """The number of accesses whose offset grows by one with a part of the index."""
    pointers = [argument(call, 0, "pointer") for _, call in site.accesses]
    known = [
        linear(pointer, site.kernel) for pointer in pointers if pointer is not None and _mentions(site, pointer, name)
    ]
    return sum(terms is not None and terms.get((name,), 0) == 1 for terms in known)


def _mentions(site: Site, pointer: Node, name: str) -> bool:
    return any(name in names_in(source) for source in site.kernel.sources(pointer))
