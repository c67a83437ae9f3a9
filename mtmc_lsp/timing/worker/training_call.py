"""What one timed call is: the target alone, or for training its forward and backward pass."""

from __future__ import annotations

from typing import Any

import torch

from mtmc_lsp.capture.worker.calls import Call
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.timing.worker.clock import Run
from mtmc_lsp.verify.worker.run_target import flatten, trained_tensor


def run_of(capture: Capture, call: Call, values: list[Any], inputs: dict[str, torch.Tensor]) -> Run:
    """A function that makes one call. With a backward pass, it returns the results and the gradients.

    The gradients of the results are ones, as of a sum. They are created once, because training code gets them from the
    operations that follow.

    Args:
        inputs: the tensors of the call; those that are trained get gradients.
    """
    forward = call.bound(values)
    backward = capture.graph.backward
    if backward is None:
        return forward
    leaves = [trained_tensor(capture, name, inputs, call.instance) for name in backward.gradients]
    upstream: list[torch.Tensor] = []

    def both() -> list[Any]:
        # Gradient mode is thread-local, and each caller times without gradients.
        with torch.enable_grad():
            results = flatten(forward())
            outputs = [each for each in results if isinstance(each, torch.Tensor) and each.requires_grad]
            if not upstream:
                upstream.extend(torch.ones_like(each, memory_format=torch.contiguous_format) for each in outputs)
            gradients = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
        return [*(each.detach() if isinstance(each, torch.Tensor) else each for each in results), *gradients]

    return both
