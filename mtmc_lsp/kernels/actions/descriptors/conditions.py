"""What must hold of the arguments of a launch, so that descriptors can describe its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts
from mtmc_lsp.kernels.actions.descriptors.tiles import Tile
from mtmc_lsp.kernels.actions.numbers import value_of
from mtmc_lsp.source.syntax import field, text_of

ALIGNMENT = 16
"""Multiple of elements that strides and starts must be: 16 bytes for each type."""
MOST_DEPTH = 3
"""How far names in an address are replaced by their values."""
SIMPLE = r'args\["\w+"\]'


def conditions_of(facts: Facts, tile: Tile) -> list[str] | None:
    """What must hold of the arguments of a launch; None if the text does not tell, or it does not hold on the workload."""
    strides = tuple(reversed(tile.strides)) if tile.is_swapped else tile.strides
    starts = _factors(facts, tile.base, tile.pointer, MOST_DEPTH)
    last_dimension = 0 if tile.is_swapped else 1
    inner = tile.block[last_dimension]
    for place in (tile.offsets[last_dimension], *(advance[1 + last_dimension] for advance in tile.advances)):
        factors = _factors(facts, place, "", MOST_DEPTH)
        starts = starts + factors if starts is not None and factors is not None else None
    if starts is None or strides[1].type not in ("identifier", "integer"):
        return None
    one, row, last = value_of(strides[1], facts), value_of(strides[0], facts), _of_arguments(facts, text_of(strides[1]))
    width, stride = _of_arguments(facts, text_of(inner)), _of_arguments(facts, text_of(strides[0]))
    if one not in (1, None) or (row is not None and row % ALIGNMENT) or not (last and width and stride):
        return None
    found = [f'args["{tile.pointer}"].data_ptr() % {ALIGNMENT} == 0']
    found += [] if text_of(strides[1]) == "1" else [f"{last} == 1"]
    for text in (stride, *starts):
        if text.isdigit():
            if int(text) % ALIGNMENT:
                return None
        else:
            found.append(f"{text if re.fullmatch(SIMPLE, text) else f'({text})'} % {ALIGNMENT} == 0")
    return [*found, f'{width} * args["{tile.pointer}"].element_size() >= {ALIGNMENT}']


def _factors(facts: Facts, node: Node, pointer: str, depth: int) -> list[str] | None:
    """What each term of an address is a multiple of, by the arguments; None if a term is a multiple of nothing that is known."""
    if node.type == "parenthesized_expression":
        return _factors(facts, node.named_children[0], pointer, depth)
    operator = text_of(field(node, "operator")) if node.type == "binary_operator" else ""
    left, right = field(node, "left"), field(node, "right")
    if operator in ("+", "-") and left is not None and right is not None:
        one, two = (_factors(facts, item, pointer, depth) for item in (left, right))
        return None if one is None or two is None else one + two
    name, kernel = text_of(node), facts.site.kernel
    if name == pointer:
        return []
    values = kernel.values.get(name, ())
    if node.type == "identifier" and name not in kernel.parameters:
        return _factors(facts, values[0], pointer, depth - 1) if depth and len(values) == 1 else None
    known = [text for factor in _product(node) if (text := _of_arguments(facts, text_of(factor)))]
    return [" * ".join(known)] if known else None


def _product(node: Node) -> Iterator[Node]:
    """The factors of a product."""
    if node.type == "parenthesized_expression":
        inner = node.named_children[0]
        yield from (
            _product(inner) if inner.type != "binary_operator" or text_of(field(inner, "operator")) == "*" else [node]
        )
        return
    left, right = field(node, "left"), field(node, "right")
    if node.type == "binary_operator" and text_of(field(node, "operator")) == "*" and left and right:
        yield from _product(left)
        yield from _product(right)
    else:
        yield node


def _of_arguments(facts: Facts, text: str) -> str:
    """An expression of parameters as one of the arguments of a launch; empty if it contains anything else."""
    parameters, pointers = facts.site.kernel.parameters, facts.site.pointers
    names = re.findall(r"[A-Za-z_]\w*", text)
    if not re.fullmatch(r"[\w\s*+()-]+", text) or any(
        name not in parameters or name in pointers or name in facts.site.kernel.values for name in names
    ):
        return ""
    return re.sub(r"[A-Za-z_]\w*", lambda match: f'args["{match[0]}"]', text)


def joined(groups: Sequence[Sequence[str]]) -> list[str]:
    """The conditions of all tensors, those of the same form in one line."""
    single = list(dict.fromkeys(condition for group in groups for condition in group))
    forms: dict[str, list[str]] = {}
    for condition in single:
        matched = re.fullmatch(r'args\["(\w+)"\](.*)', condition)
        key = f"args[name]{matched[2]}" if matched is not None and "args" not in matched[2] else ""
        forms.setdefault(key or condition, []).append(matched[1] if matched is not None and key else "")
    return [
        form
        if not form.startswith("args[name]")
        else form.replace("name", f'"{names[0]}"', 1)
        if len(names) == 1
        else f"all({form} for name in ({', '.join(chr(34) + name + chr(34) for name in names)}))"
        for form, names in forms.items()
    ]
