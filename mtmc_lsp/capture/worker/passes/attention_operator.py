"""Keeps attention a single operator in traces below autograd, where torch would choose a library's kernel. Runs in workers.

During the trace, calls of ``scaled_dot_product_attention`` run a custom operator with the same arguments, which appears in the
graph as ATen's. Its operands get the casts of autocast.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mtmc_lsp.capture.worker.passes.aten_aliases import ATTENTION, SINGLE

SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, *, "
    "float? scale=None, bool enable_gqa=False) -> Tensor"
)


@lru_cache(maxsize=1)
def _library() -> torch.library.Library:
    library = torch.library.Library(SINGLE, "DEF")
    library.define(f"{ATTENTION}{SCHEMA}")
    library.impl(ATTENTION, torch.ops.aten.scaled_dot_product_attention.default, "CompositeExplicitAutograd")
    return library


class SingleAttention(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """While entered, attention without dropout is a single operation."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if function is not torch.nn.functional.scaled_dot_product_attention or named.get("dropout_p") or len(args) > 4:
            return function(*args, **named)
        _library()
        operator = getattr(torch.ops, SINGLE).scaled_dot_product_attention
        return operator(*map(_cast, args), **{name: _cast(value) for name, value in named.items()})


def _cast(value: Any) -> Any:
    """An operand as autocast passes it to attention."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == torch.float64:
        return value
    device = value.device.type
    return value.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else value
