"""Counts the arithmetic that torch's own operations do in a call. Runs in workers.

A candidate may let the library compute and launch a kernel for show. Operations are counted where torch dispatches them, so it
does not matter how the candidate calls them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mtmc_lsp.verify.worker.interpreter.hidden_mode import HiddenMode

WITHOUT_ARITHMETIC = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like new_zeros ones ones_like full full_like fill_ "
    "fill zero_ arange copy_ clone _to_copy resize_ set_ lift_fresh _local_scalar_dense cat stack constant_pad_nd".split()
)
"""Operations that allocate, fill or copy; views are recognised by their schema."""


class LibraryWork(HiddenMode):
    """Counts operations: two per multiply-add of a product, and one per element otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0.0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        packet = function.overloadpacket
        if packet in flop_registry:
            self.operations += _counted(flop_registry[packet], args, kwargs or {}, result)
        elif not function.is_view and packet.__name__ not in WITHOUT_ARITHMETIC:
            sizes = [leaf.numel() for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
            self.operations += max(sizes, default=0)
        return result


def _counted(count: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> float:
    """The operations of a call by PyTorch's formula. That of attention refuses grouped heads in PyTorch 2.11."""
    try:
        return float(count(*args, **kwargs, out_val=result))
    except AssertionError:
        query, key, value = args[:3]
        return float(2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1]))
