"""Recognises offsets of blocks, ``start + tl.arange(0, BLOCK)``, and masks that bound them by a length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tree_sitter import Node

from mtmc_lsp.kernels.repairs.site import Site
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.lint.linear import ARANGE, Term, linear
from mtmc_lsp.source.syntax import field, text_of


@dataclass(frozen=True)
class BlockOffsets:
    """``start + tl.arange(0, block)``."""

    block: str
    start: Term
    """The start of the block: ``("BLOCK", "pid")``, or the variable of a loop with the block as its step; empty for 0."""


@dataclass(frozen=True)
class LoopSteps:
    """A loop over the blocks of a length."""

    variable: str
    length: str
    block: str
    counts_blocks: bool
    """Whether the variable is the number of the block, and not its first element."""


def loop_steps(loop: Node, site: Site) -> LoopSteps | None:
    """``for k in range(0, tl.cdiv(K, BLOCK))`` and ``for k in range(0, K, BLOCK)``; None for other loops."""
    variable, steps = field(loop, "left"), field(loop, "right")
    if variable is None or steps is None or variable.type != "identifier" or steps.type != "call":
        return None
    if text_of(field(steps, "function")) not in ("range", "tl.range"):
        return None
    items = [argument(steps, position, "") for position in range(3)]
    given = [_resolved(item, site) for item in items if item is not None]
    if len(given) == 3 and text_of(given[0]) == "0" and all(item.type == "identifier" for item in given[1:]):
        return LoopSteps(text_of(variable), text_of(given[1]), text_of(given[2]), counts_blocks=False)
    if len(given) == 2 and text_of(given[0]) != "0":
        return None
    count = given[-1] if given and len(given) < 3 else None
    length, block = (argument(count, 0, "x"), argument(count, 1, "div")) if count is not None else (None, None)
    if count is None or not text_of(field(count, "function")).endswith("cdiv") or length is None or block is None:
        return None
    if length.type != "identifier" or block.type != "identifier":
        return None
    return LoopSteps(text_of(variable), text_of(length), text_of(block), counts_blocks=True)


def _resolved(node: Node, site: Site) -> Node:
    """The value of a name that is assigned once to a call; other nodes as they are."""
    values = site.kernel.values.get(text_of(node), ()) if node.type == "identifier" else ()
    return values[0] if len(values) == 1 and values[0].type == "call" else node


def block_offsets(terms: Mapping[Term, int]) -> BlockOffsets | None:
    """The block that a sum of terms is; None if it is another expression."""
    blocks = [term[0].partition(":")[2] for term in terms if len(term) == 1 and term[0].startswith(f"{ARANGE}:")]
    rest = [term for term in terms if not (len(term) == 1 and term[0].startswith(f"{ARANGE}:"))]
    if len(blocks) != 1 or len(rest) > 1 or any(count != 1 for count in terms.values()):
        return None
    if not blocks[0].isidentifier():
        return None
    return BlockOffsets(blocks[0], rest[0] if rest else ())


def bounded_by(comparison: Node, site: Site, length: str) -> BlockOffsets | None:
    """The block that a mask ``offsets < length`` bounds, also as ``offsets < length - start``; None for other masks."""
    left, right = comparison.named_children[0], comparison.named_children[-1]
    operators = [child for child in comparison.children if not child.is_named]
    if len(comparison.named_children) != 2 or [text_of(item) for item in operators] != ["<"]:
        return None
    one, other = linear(left, site.kernel), linear(right, site.kernel)
    if one is None or other is None:
        return None
    total = Counter(one)
    for term, count in other.items():
        total[term] -= count
    if total.pop((length,), 0) != -1:
        return None
    return block_offsets({term: count for term, count in total.items() if count})


def is_start_of(offsets: BlockOffsets, steps: LoopSteps) -> bool:
    """Whether the offsets are the block of an iteration."""
    if offsets.block != steps.block:
        return False
    start = tuple(sorted((steps.variable, steps.block))) if steps.counts_blocks else (steps.variable,)
    return offsets.start == start


def conjuncts(mask: Node) -> Iterator[Node]:
    """The parts of ``a & b & c``."""
    if mask.type == "parenthesized_expression":
        yield from conjuncts(mask.named_children[0])
    elif mask.type == "binary_operator" and text_of(field(mask, "operator")) == "&":
        for child in mask.named_children:
            yield from conjuncts(child)
    else:
        yield mask
