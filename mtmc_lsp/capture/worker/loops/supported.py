"""Which operations the body of a kept loop may contain: those that a kernel can run step by step."""

from __future__ import annotations

import torch

from mtmc_lsp.core.loop import Loop

REDUCTIONS = frozenset(
    "sum mean amax amin prod logsumexp softmax log_softmax _softmax _log_softmax max min any all linalg_vector_norm norm var std "
    "layer_norm rms_norm".split()
)
"""Reductions that a body may contain."""
MOVING = frozenset(
    "clone copy _to_copy to expand view reshape permute transpose t unsqueeze squeeze select slice alias detach "
    "select_scatter slice_scatter full full_like zeros zeros_like ones ones_like scalar_tensor fill where masked_fill "
    "contiguous _unsafe_view cat split unsafe_split chunk split_with_sizes type_as lift_fresh_copy __and__ __or__ __xor__".split()
)
"""Operations that move or create values, which a body may contain."""
PRODUCTS = frozenset("mm bmm matmul addmm baddbmm linear".split())
"""Matrix products, which a body may contain."""
SHIFTS = frozenset("stack pad constant_pad_nd flip roll cumsum cumprod".split())
"""Operations that combine or move elements of a row. A body may contain them if a program instance holds a whole row."""


def runs_step_by_step(op: str) -> bool:
    """Whether a kernel can run an operation in each iteration; for :data:`SHIFTS`, that depends on the shape."""
    namespace, name, overload = op.split(".")
    operator = getattr(getattr(torch.ops.aten, name, None), overload, None) if namespace == "aten" else None
    if operator is not None and torch.Tag.pointwise in operator.tags:
        return True
    return name in REDUCTIONS | MOVING | PRODUCTS


def multiplies_once(loop: Loop) -> bool:
    """Whether an iteration can be one launch: it has no sums besides products, and no product waits for another one."""
    after: set[str] = set()
    for node in loop.nodes:
        waits = any(ref.name in after for ref in node.inputs())
        if node.word in REDUCTIONS | SHIFTS or (waits and node.word in PRODUCTS):
            return False
        if waits or node.word in PRODUCTS:
            after.add(node.name)
    return True
