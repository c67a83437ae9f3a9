"""Determines how float32 convolutions run on a GPU. PyTorch allows TF32 for them, and cuDNN decides for each convolution.

The decision is measured: each convolution of the workload runs with TF32 allowed and with TF32 forbidden. If both results are
equal, it runs in full float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtmc_lsp.core.graph import Graph

TF32_ERROR = 2e-5
"""Relative difference above which one result is from TF32, which rounds operands to 11 bits (about 3e-4 on
an H200). Two float32 algorithms differ by about 1e-6."""


def convolution_modes(run: Callable[[], object], graph: Graph) -> dict[str, str]:
    """Node name to ``ieee`` or ``tf32`` for every float32 convolution, as observed on this device.

    Args:
        run: calls the target on the workload's inputs.

    Returns:
        Empty if TF32 is not allowed, if there are no such convolutions, or if the calls do not match the nodes.
    """
    nodes = [node for node in graph.nodes if node.op.startswith("aten.conv")]
    if graph.fp32_convolution != "tf32" or not any(node.type.dtype == "float32" for node in nodes):
        return {}
    recorder = _ModeRecorder()
    # If the measurement fails, convolutions count as before: allowed to run in TF32.
    with contextlib.suppress(RuntimeError, torch.OutOfMemoryError), torch.no_grad(), recorder:
        run()
    shapes = [tuple(size.value(graph.sizes) for size in node.type.shape) for node in nodes]
    # A sample without a batch dimension runs with one.
    if len(shapes) != len(recorder.calls) or not all(
        shape_seen in (shape, (1, *shape)) for shape, (shape_seen, _) in zip(shapes, recorder.calls, strict=True)
    ):
        return {}
    return {node.name: mode for node, (_, mode) in zip(nodes, recorder.calls, strict=True) if mode}


class _ModeRecorder(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """Records the shape of each convolution's result, and its mode if it is float32."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[tuple[int, ...], str]] = []
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
            self.calls.append((tuple(result.shape), mode))
        return result


def _key(args: Any) -> Hashable:
    """The properties that the library's choice depends on: sizes, strides and numbers."""
    return tuple((tuple(item.shape), item.stride()) if isinstance(item, torch.Tensor) else str(item) for item in args)


def _mode(function: Any, args: Any, allowed: torch.Tensor) -> str:
    """The mode of a convolution with the result ``allowed`` if TF32 is allowed; empty if the values do not tell."""
    with _full_float32():
        exact = function(*args)
    norm = float(torch.linalg.vector_norm(exact))
    distance = float(torch.linalg.vector_norm(exact.sub_(allowed)))
    if not norm > 0.0 or not distance < float("inf"):
        return ""
    return "tf32" if distance > TF32_ERROR * norm else "ieee"


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    """Forbid TF32 for convolutions."""
    cudnn = torch.backends.cudnn
    owner: Any = cudnn
    name, value = "allow_tf32", cast(Any, False)
    try:
        before = cudnn.allow_tf32
    except RuntimeError:
        # The user set it through the newer attribute, and torch does not allow reading the older one then.
        owner, name, value = cudnn.conv, "fp32_precision", "ieee"
        before = owner.fp32_precision
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
