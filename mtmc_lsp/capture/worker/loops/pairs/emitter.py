"""Real operations that replace one node of a traced graph, and pairs of their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from mtmc_lsp.capture.worker.loops.iteration import known

aten = torch.ops.aten

PART = "part"
"""In the metadata of a node: whether it is the real or the imaginary part of a value (``re`` or ``im``)."""
Part = Any
"""A node with a real value, a number, or ``None`` for 0."""


class Pair(NamedTuple):
    """The real and the imaginary part of a complex value."""

    re: Part
    im: Part


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the parts of a complex value."""
    return dtype.to_real() if dtype.is_complex else dtype


def value_of(item: Any) -> Any:
    """The fake tensor, size or other value of a node, or of the nodes in an argument."""
    return tree_map(lambda part: part.meta.get("val") if isinstance(part, torch.fx.Node) else part, item)


def is_node(item: Any) -> bool:
    """Whether a part is a node, and no number."""
    return isinstance(item, torch.fx.Node)


@dataclass(frozen=True)
class Emitter:
    """Adds nodes before a node, with its line."""

    mode: FakeTensorMode
    at: torch.fx.Node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """A node for a call."""
        with self.at.graph.inserting_before(self.at):
            node = self.at.graph.call_function(target, args, kwargs)
        node.meta["val"] = self.value(node)
        if "stack_trace" in self.at.meta:
            node.meta["stack_trace"] = self.at.meta["stack_trace"]
        return node

    def value(self, node: torch.fx.Node) -> Any:
        """The value of a call, without data."""
        assert callable(node.target)
        with self.mode, torch.no_grad():
            if node.target is aten.complex.default:
                # Torch's function for values without data makes symbolic sizes constant.
                part = value_of(node.args[0])
                return torch.empty_like(part, dtype=part.dtype.to_complex())
            return node.target(*value_of(node.args), **value_of(node.kwargs))

    # Arithmetic of parts ------------------------------------------------------------------------------------------

    def add(self, a: Part, b: Part) -> Part:
        """``a + b``."""
        if a is None or b is None:
            return a if b is None else b
        if not is_node(a) and not is_node(b):
            return a + b
        return self(aten.add.Tensor, a, b) if is_node(a) else self(aten.add.Tensor, b, a)

    def sub(self, a: Part, b: Part) -> Part:
        """``a - b``."""
        if b is None:
            return a
        if a is None:
            return self.neg(b)
        if not is_node(a):
            return self(aten.rsub.Scalar, b, a) if is_node(b) else a - b
        return self(aten.sub.Tensor, a, b)

    def neg(self, a: Part) -> Part:
        """``-a``."""
        if a is None:
            return None
        return self(aten.neg.default, a) if is_node(a) else -a

    def mul(self, a: Part, b: Part) -> Part:
        """``a * b``."""
        if a is None or b is None:
            return None
        if not is_node(a) and not is_node(b):
            return a * b
        return self(aten.mul.Tensor, a, b) if is_node(a) else self(aten.mul.Tensor, b, a)

    def div(self, a: Part, b: Part) -> Part:
        """``a / b``."""
        if a is None:
            return None
        if not is_node(a):
            return self.mul(a, self(aten.reciprocal.default, b)) if is_node(b) else a / b
        return self(aten.div.Tensor, a, b)

    def zeros_like(self, part: torch.fx.Node, **kwargs: Any) -> torch.fx.Node:
        """Zeros in the shape of a part."""
        return self(aten.zeros_like.default, part, **kwargs)

    def fitted(self, pair: Pair, like: torch.Tensor) -> Pair:
        """A pair whose parts are nodes with the shape of a complex value, and its dtype."""
        dtype, base = real_dtype(like.dtype), next((part for part in pair if is_node(part)), None)
        parts: list[Part] = []
        for part in pair:
            if not is_node(part):
                if part is None and base is not None and same_shape(base, like):
                    # It stays 0, so that products with it are left out.
                    parts.append(None)
                    continue
                part = self.filled(part or 0.0, like, base)
            elif not same_shape(part, like):
                other = next(item for item in pair if is_node(item) and item is not part)
                part = self(aten.add.Tensor, part, self.zeros_like(other))
            if part.meta["val"].dtype != dtype:
                part = self(aten._to_copy.default, part, dtype=dtype)
            parts.append(part)
        return Pair(*parts)

    def filled(self, number: float, like: torch.Tensor, base: torch.fx.Node | None) -> torch.fx.Node:
        """A part that is a number everywhere."""
        dtype = real_dtype(like.dtype)
        if base is not None:
            return self(aten.full_like.default, base, number, dtype=dtype)
        return self(aten.full.default, list(like.shape), number, dtype=dtype, device=like.device)

    def both(self, pair: Pair) -> Pair:
        """A pair without parts that are left out because they are 0."""
        re, im = pair
        return Pair(self._or_zeros(re, im), self._or_zeros(im, re))

    def _or_zeros(self, part: Part, other: Part) -> Part:
        if part is not None:
            return part
        return self.zeros_like(other) if is_node(other) else 0.0


def same_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two values have the same strides for all sizes."""
    return all(known(a == b) for a, b in zip(one.stride(), other.stride(), strict=True))


def same_shape(node: torch.fx.Node, like: torch.Tensor) -> bool:
    """Whether a node has the shape of a value for all sizes."""
    shape = node.meta["val"].shape
    return len(shape) == like.dim() and all(known(a == b) for a, b in zip(shape, like.shape, strict=True))
