"""Configurations that are not worth compiling: the compiled kernel is the same, or its tiles need too many registers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts
from mtmc_lsp.kernels.repairs.site import sites_of, with_helpers
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.syntax import text_of, walk

THREADS = 32
"""Threads of a warp."""
PRODUCTS = ("dot", "dot_scaled")
MOST_ELEMENTS, MOST_OF_PRODUCT = 64, 128
"""Elements of a tile for each thread up to which fewer warps than now are tried. With more of them, a kernel spills, and its
compilation takes long: 16 s for 4,096 elements, 1.5 s for 512."""


def stages_matter(facts: Facts) -> bool:
    """Whether the option ``num_stages`` changes the compiled kernel.

    Triton pipelines loops with a product by it. Other loops need ``tl.range(..., num_stages=N)``: their code is the same with
    each value of the option.
    """
    sites = sites_of("kernel.py", facts.site.text)
    names = with_helpers(sites, [facts.name])
    kernels = [site.kernel for site in sites if site.kernel.name in names]
    has_loop = any(node.type == "for_statement" for kernel in kernels for node in walk(kernel.body))
    return has_loop and any(name in PRODUCTS for kernel in kernels for name, _ in kernel.calls)


def is_spread(facts: Facts, blocks: Mapping[str, object], warps: int, present: int) -> bool:
    """Whether warps are not fewer than now, or enough for the largest tile.

    Args:
        blocks: sizes that differ from the present ones.
        present: the warps of a configuration that the author chose.
    """
    has_product = any(name in PRODUCTS for name, _ in facts.site.kernel.calls)
    most = MOST_OF_PRODUCT if has_product else MOST_ELEMENTS
    return warps >= present or tile_elements(facts, blocks) <= most * THREADS * warps


def tile_elements(facts: Facts, blocks: Mapping[str, object]) -> int:
    """Elements of the largest tile, estimated from its ranges; 0 if the constants do not tell them."""
    constants = {**facts.constants, **blocks}
    ends = {text_of(end): end for name, call in facts.site.kernel.calls if name == "arange" and (end := _end(call))}
    sizes = sorted(
        (value for text, node in ends.items() if isinstance(value := constants.get(text, _number(node)), int)),
        reverse=True,
    )
    has_tiles = any(
        node.type == "subscript" and any(child.type == "none" for child in node.named_children)
        for node in walk(facts.site.kernel.body)
    )
    return math.prod(sizes[: 2 if has_tiles else 1]) if sizes else 0


def _end(call: Node) -> Node | None:
    return argument(call, 1, "end")


def _number(node: Node) -> int | None:
    text = text_of(node)
    return int(text) if node.type == "integer" and text.isdigit() else None
