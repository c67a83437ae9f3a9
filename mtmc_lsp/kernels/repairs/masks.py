"""Repairs of masks: missing masks, wrong bounds, wrong comparisons, missing dimensions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.kernels.messages import FaultKind
from mtmc_lsp.kernels.repairs.site import ATOMICS, MEMORY, Edit, Repair, Site, appended, repair, replaced
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.syntax import field, text_of, walk

OUTSIDE = (FaultKind.READ_OUTSIDE, FaultKind.WRITE_OUTSIDE)
ANY_WRONG = (*OUTSIDE, FaultKind.WRONG_VALUES, FaultKind.NOT_WRITTEN, FaultKind.RACE)
MOST_BOUNDS, MOST_MASKS = 4, 12
"""Limits for the bounds of each dimension, and for the masks of one access, that are tried."""
COMPARISONS = {"<": ("<=",), "<=": ("<",), ">": (">=",), ">=": (">",), "==": ()}


def mask_repairs(site: Site) -> Iterator[Repair]:
    """Masks for accesses without one, and other masks."""
    for name, call in site.kernel.calls:
        pointer = argument(call, 0, "pointer") if name in (*MEMORY, *ATOMICS) else None
        mask = argument(call, 1 if name == "load" else 2, "mask")
        if pointer is None or argument(call, 99, "boundary_check") is not None:
            continue
        masks = _possible_masks(site, call, pointer)
        for rank, text in enumerate(masks):
            if mask is None:
                for other in _fillings(site, name, call):
                    edit = appended(call, f"mask={text}{other}")
                    yield repair(f"Add the mask {text}", call, ANY_WRONG, edit, rank=rank)
                continue
            values = site.kernel.values.get(text_of(mask), ())
            defined = values[0] if len(values) == 1 else mask
            if text not in (text_of(mask), text_of(defined)):
                rank += 10 * (text_of(defined) not in text)
                yield repair(f"Use the mask {text}", call, ANY_WRONG, replaced(defined, text), rank=rank)
                if defined is not mask:
                    yield repair(f"Use the mask {text}", call, ANY_WRONG, replaced(mask, text), rank=rank + 1)
                both = f"({text_of(mask)}) & ({text})"
                yield repair(f"Add {text} to the mask", call, ANY_WRONG, replaced(mask, both), rank=rank + 5)


def _fillings(site: Site, name: str, call: Node) -> list[str]:
    """Arguments that give lanes outside a new mask a value."""
    if name != "load" or argument(call, 2, "other") is not None:
        return [""]
    lowest = [', other=float("-inf")'] if any(used in ("max", "maximum") for used, _ in site.kernel.calls) else []
    return [", other=0.0", *lowest]


def _possible_masks(site: Site, call: Node, pointer: Node) -> list[str]:
    """Masks that fit the blocks in a pointer: names of masks before the call, then comparisons with possible bounds."""
    named = [name for name, end in site.masks if end < call.start_byte]
    terms = site.terms(pointer)
    choices = [[(text_of(term), bound) for bound in site.bounds_of(term)[:MOST_BOUNDS]] for term in terms]
    texts = []
    for combination in itertools.product(*choices) if choices else ():
        parts = [f"{term} < {bound}" for term, bound in combination]
        texts.append(parts[0] if len(parts) == 1 else " & ".join(f"({part})" for part in parts))
    if len(choices) > 1:
        texts += [f"{term} < {bound}" for options in choices for term, bound in options[:2]]
    return [*dict.fromkeys([*named, *texts])][:MOST_MASKS]


def comparison_repairs(site: Site) -> Iterator[Repair]:
    """Other comparisons and bounds in the masks of a kernel."""
    for node in walk(site.kernel.body):
        if node.type != "comparison_operator" or len(node.named_children) != 2:
            continue
        operator = next((child for child in node.children if not child.is_named), None)
        right = node.named_children[1]
        if operator is None:
            continue
        for other in COMPARISONS.get(text_of(operator), ()):
            title = f"Compare with {other} instead of {text_of(operator)}"
            yield repair(title, node, ANY_WRONG, Edit(operator.start_byte, operator.end_byte, other), rank=1)
        left = node.named_children[0]
        for bound in dict.fromkeys([*site.bounds_of(left), *site.numbers]):
            if bound != text_of(right) and not _is_stride(bound):
                title = f"Compare {text_of(left)} with {bound}"
                yield repair(title, node, ANY_WRONG, replaced(right, bound), rank=3)
        if right.type == "binary_operator":
            size = field(right, "left")
            if size is not None:
                title = f"Compare with {text_of(size)}"
                yield repair(title, node, ANY_WRONG, replaced(right, text_of(size)), rank=2)


def swapped_bounds(site: Site) -> Iterator[Repair]:
    """Bounds of two dimensions that are swapped."""
    comparisons = [
        node for node in walk(site.kernel.body) if node.type == "comparison_operator" and len(node.named_children) == 2
    ]
    for index, first in enumerate(comparisons):
        for second in comparisons[index + 1 :]:
            one, two = first.named_children[1], second.named_children[1]
            if text_of(one) != text_of(two):
                title = f"Swap the bounds {text_of(one)} and {text_of(two)}"
                edits = (replaced(one, text_of(two)), replaced(two, text_of(one)))
                yield repair(title, first, ANY_WRONG, *edits, rank=2)


def _is_stride(name: str) -> bool:
    return "stride" in name.lower()


def loop_repairs(site: Site) -> Iterator[Repair]:
    """Loops that leave out the last block: ``range(0, n // BLOCK)``, or a step of another size."""
    kinds = (FaultKind.WRONG_VALUES, FaultKind.NOT_WRITTEN, FaultKind.READ_OUTSIDE, FaultKind.WRITE_OUTSIDE)
    kernel = site.kernel
    for node in walk(kernel.body):
        right = field(node, "right") if node.type == "for_statement" else None
        if right is None or right.type != "call" or not text_of(field(right, "function")).endswith("range"):
            continue
        for item in walk(right):
            left, divisor = field(item, "left"), field(item, "right")
            is_floor = item.type == "binary_operator" and text_of(field(item, "operator")) == "//"
            if is_floor and left is not None and divisor is not None:
                new = f"tl.cdiv({text_of(left)}, {text_of(divisor)})"
                yield repair("Round the number of blocks up", node, kinds, replaced(item, new))
        arguments = field(right, "arguments")
        items = arguments.named_children if arguments is not None else []
        for position, item in enumerate(items):
            names = site.numbers if position < 2 else [p.name for p in kernel.parameters.values() if p.is_constexpr]
            for name in names:
                if text_of(item) not in (name, "0"):
                    title = f"Use {name} instead of {text_of(item)} in the loop"
                    yield repair(title, node, kinds, replaced(item, name), rank=5)
