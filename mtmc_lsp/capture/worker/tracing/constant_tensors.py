"""Values of the tensors that the target computes from numbers alone, such as ``torch.arange(2, x.dim())``.

A trace has no values, so ``.tolist()`` or ``if`` on such a tensor would count as a choice by data. Each operation on small
constants is therefore also computed, outside the trace, and reads of its result get that value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from mtmc_lsp.capture.worker.literal_tensors import MAX_LITERAL_ELEMENTS
from mtmc_lsp.capture.worker.side_effects import RANDOM_OPS

FACTORIES = frozenset(
    {torch.arange, torch.eye, torch.full, torch.linspace, torch.ones, torch.tensor, torch.zeros}
    | {torch.as_tensor, torch.scalar_tensor, torch.tril_indices, torch.triu_indices}
)
"""Functions whose result depends on their arguments alone."""
READS = frozenset(
    {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__int__}
    | {torch.Tensor.__float__, torch.Tensor.__index__, torch.equal, torch.allclose}
)
"""Functions that return values of their tensors as Python objects."""


class ConstantTensors:
    """The constants of one trace, each with its value."""

    def __init__(self) -> None:
        # Keys are compared by identity: `==` of tensors is elementwise.
        self._values = WeakIdKeyDictionary()
        self._overwritten: set[int] = set()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of torch and follow its constants; a read of a constant returns its value."""
        if func not in FACTORIES and not self._values:
            return func(*args, **kwargs)
        args = tree_map(self._with_numbers, args)
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        constant = (bool(tensors) or func in FACTORIES) and all(self._has_value(leaf) for leaf in leaves)
        if constant and func in READS:
            return self._computed(func, args, kwargs)
        result = func(*args, **kwargs)
        if constant and func is torch.Tensor.__iter__:
            items = [*result]
            self._remember(items, self._computed(torch.Tensor.unbind, args, kwargs))
            return iter(items)
        results = [result] if isinstance(result, torch.Tensor) else result
        if constant and _is_small(results) and not any(word in _name(func) for word in RANDOM_OPS):
            computed = self._computed(func, args, kwargs)
            self._remember(results, [computed] if isinstance(result, torch.Tensor) else computed)
        elif _writes(func, kwargs):
            self._overwritten |= {_memory(self._values[item]) for item in tensors if item in self._values}
        return result

    def _has_value(self, leaf: Any) -> bool:
        if isinstance(leaf, torch.Tensor):
            return leaf in self._values and _memory(self._values[leaf]) not in self._overwritten
        parts = (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)
        return not any(isinstance(part, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) for part in parts)

    def _with_numbers(self, leaf: Any) -> Any:
        """A slice with the values of constants as its bounds; anything else as it is."""
        if not isinstance(leaf, slice):
            return leaf
        bounds = (leaf.start, leaf.stop, leaf.step)
        return slice(
            *(self._values[b].item() if isinstance(b, torch.Tensor) and self._has_value(b) else b for b in bounds)
        )

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The function's result on the values, outside the trace."""

        def value(leaf: Any) -> Any:
            return self._values[leaf] if isinstance(leaf, torch.Tensor) else leaf

        values, named = tree_map(value, args), tree_map(value, dict(kwargs))
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            return func(*values, **named)

    def _remember(self, results: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
        for result, value in zip(results, values, strict=True):
            self._values[result] = value


def _is_small(results: Any) -> bool:
    """Whether the results are small tensors of a trace, the only ones without values."""
    return isinstance(results, (list, tuple)) and all(
        isinstance(item, torch.Tensor)
        and type(item) is not torch.Tensor
        and all(isinstance(size, int) for size in item.shape)
        and item.numel() <= MAX_LITERAL_ELEMENTS
        for item in results
    )


def _writes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the function may write into a tensor that it gets."""
    name = _name(func)
    is_in_place = name.endswith("_") and not name.endswith("__")
    return (
        is_in_place or name == "__setitem__" or name.startswith("__i") or "out" in kwargs or bool(kwargs.get("inplace"))
    )


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", ""))


def _memory(value: torch.Tensor) -> int:
    """Identifies the memory, which views share."""
    return int(value.untyped_storage().data_ptr())
