"""How the user's own float32 convolutions run on a GPU: PyTorch allows TF32 there, and the library decides for each whether to.

It is asked, not guessed: each convolution of the workload is run on its own operands with TF32 allowed and with it forbidden.
Where both give the same, full float32 is what the user has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtmc_lsp.core.graph import Graph, Node

ROUNDED = 2e-5
"""Relative distance of two results from which on one of them is TF32's, whose operands are rounded to 11 bits (about 3e-4 on
an H200); two algorithms in float32 are about 1e-6 apart."""


def convolution_modes(run: Callable[[], object], graph: Graph) -> dict[str, str]:
    """Node to ``ieee`` or ``tf32`` for every float32 convolution, as the library runs it on this device.

    Args:
        run: calls the target on the workload's inputs.
        graph: of the target.

    Returns:
        Nothing where TF32 is not allowed, where there are no such convolutions, or where the calls are not the graph's nodes.
    """
    nodes = [node for node in graph.nodes if node.op.startswith("aten.conv")]
    if graph.fp32_convolution != "tf32" or not any(_is_float32(node) for node in nodes):
        return {}
    asking = _Asking()
    # Whatever cannot be asked is taken as it was before: allowed to run in TF32.
    with contextlib.suppress(RuntimeError, torch.OutOfMemoryError), torch.no_grad(), asking:
        run()
    shapes = [tuple(size.value(graph.sizes) for size in node.type.shape) for node in nodes]
    # One sample without a batch dimension is run with one.
    if len(shapes) != len(asking.seen) or not all(
        seen in (shape, (1, *shape)) for shape, (seen, _) in zip(shapes, asking.seen, strict=True)
    ):
        return {}
    return {node.name: mode for node, (_, mode) in zip(nodes, asking.seen, strict=True) if mode}


def _is_float32(node: Node) -> bool:
    return node.type.dtype == "float32"


class _Asking(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """Notes the shape of each convolution's result, and its mode where it is float32."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[int, ...], str]] = []
        self._modes: dict[Hashable, str] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ == "convolution":
            mode = ""
            if result.dtype == torch.float32:
                key = _key(args)
                if key not in self._modes:
                    self._modes[key] = _mode(function, args, result)
                mode = self._modes[key]
            self.seen.append((tuple(result.shape), mode))
        return result


def _key(args: Any) -> Hashable:
    """What the library chooses by: sizes, strides and numbers."""
    return tuple((tuple(item.shape), item.stride()) if isinstance(item, torch.Tensor) else str(item) for item in args)


def _mode(function: Any, args: Any, allowed: torch.Tensor) -> str:
    """How a convolution runs whose result with TF32 allowed is ``allowed``; empty where the results say nothing."""
    with _full_float32():
        exact = function(*args)
    size = float(torch.linalg.vector_norm(exact))
    distance = float(torch.linalg.vector_norm(exact.sub_(allowed)))
    if not size > 0.0 or not distance < float("inf"):
        return ""
    return "tf32" if distance > ROUNDED * size else "ieee"


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    """Convolutions without TF32, as far as PyTorch is asked."""
    cudnn = torch.backends.cudnn
    place: Any = cudnn
    name, full = "allow_tf32", cast(Any, False)
    try:
        before = cudnn.allow_tf32
    except RuntimeError:
        # The user set it by the newer names, and the older one may no longer be asked.
        place, name, full = cudnn.conv, "fp32_precision", "ieee"
        before = place.fp32_precision
    setattr(place, name, full)
    try:
        yield
    finally:
        setattr(place, name, before)
