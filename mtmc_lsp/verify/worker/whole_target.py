"""Calls a whole target with regions, in the user's file and in a version of it. Runs in workers.

The regions are verified one by one, on many cases. This call tests what is around them: that each gets the right variables and
that the statements after it find its results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from mtmc_lsp.capture.worker.calls import build_call
from mtmc_lsp.core.dtypes import TOLERANCE
from mtmc_lsp.core.workload import Workload
from mtmc_lsp.process.worker.failures import classify
from mtmc_lsp.verify.messages import WholeTargetAnswer, WholeTargetRequest
from mtmc_lsp.verify.worker.interpreter import prepare_interpreter
from mtmc_lsp.verify.worker.run_target import device_for, flatten, is_interpreted, module_of, use_one_thread

SEEDS = (0, 1)
FEW = 1e-3
"""Fraction of the elements of a value that may differ."""
LEAST = 1e-30
SMALL = 32
"""Largest named size under the interpreter, if the target accepts it."""


def compare_whole_target(request: WholeTargetRequest) -> WholeTargetAnswer:
    """Compare the results of both files, and what they write into arguments, on the workload with several seeds."""
    if is_interpreted():
        use_one_thread()
        prepare_interpreter()
    capture = request.capture
    device = device_for(capture, "")
    workload = request.workload
    plain = module_of(capture, request.user_source, None)
    try:
        version = module_of(capture, request.user_source, request.text)
    except Exception as error:
        return WholeTargetAnswer(f"the file raises {type(error).__name__} when it is imported: {error}")
    sizes = workload.sizes
    if is_interpreted():
        small = {name: min(size, SMALL) for name, size in sizes.items()}
        sizes = small if _accepts(plain, workload, device, small) else sizes
    for seed in SEEDS:
        try:
            expected = _results(plain, workload, device, sizes, seed)
            again = _results(plain, workload, device, sizes, seed, call_seed=seed + len(SEEDS))
        except Exception as error:
            return WholeTargetAnswer(skipped=f"your code raises {type(error).__name__} with seed {seed}: {error}")
        if _difference(expected, again):
            return WholeTargetAnswer(skipped="it draws random numbers")
        try:
            results = _results(version, workload, device, sizes, seed)
        except Exception as error:
            if classify(error).is_out_of_memory:
                return WholeTargetAnswer(skipped="there is too little memory for both files")
            return WholeTargetAnswer(f"the version raises {type(error).__name__} with seed {seed}: {error}")
        difference = _difference(expected, results)
        if difference:
            return WholeTargetAnswer(f"{difference} with seed {seed}")
    return WholeTargetAnswer(calls=len(SEEDS))


def _accepts(module: Any, workload: Workload, device: str, sizes: Mapping[str, int]) -> bool:
    try:
        _results(module, workload, device, sizes, SEEDS[0])
    except Exception:
        return False
    return True


def _results(
    module: Any, workload: Workload, device: str, sizes: Mapping[str, int], seed: int, *, call_seed: int | None = None
) -> list[Any]:
    """The results of a call, followed by the tensors that it may update: arguments, parameters and buffers.

    Args:
        seed: of the inputs.
        call_seed: for torch's random numbers in the call; by default ``seed``.
    """
    call = build_call(module, replace(workload, state=()), device, sizes, seed)
    torch.manual_seed(seed if call_seed is None else call_seed)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        returned = call.run()
    arguments = [value for value in call.values if isinstance(value, torch.Tensor)]
    held = list(call.instance.state_dict().values()) if call.instance is not None else []
    return [*flatten(returned), *arguments, *held]


def _difference(expected: list[Any], results: list[Any]) -> str:
    """What differs, as a clause; empty if nothing does."""
    if len(expected) != len(results):
        return f"{len(results)} values are returned instead of {len(expected)}"
    for number, (one, other) in enumerate(zip(expected, results, strict=True), 1):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                return f"value {number} has shape {list(other.shape)} and dtype {other.dtype}"
            if difference := _tensor_difference(one.detach(), other.detach()):
                return f"value {number} {difference}"
        elif repr(one) != repr(other):
            return f"value {number} is {other!r:.40} instead of {one!r:.40}"
    return ""


def _tensor_difference(expected: torch.Tensor, result: torch.Tensor) -> str:
    """How a tensor differs, as a clause; empty if it does not.

    Rounding may choose another branch or index for a few elements, which the verification of the regions does not allow.
    """
    few = int(expected.numel() * FEW)
    if not expected.is_floating_point():
        return "differs" if int((expected != result).sum()) > few else ""
    a, b = expected.double(), result.double()
    finite = a.isfinite() & b.isfinite()
    if int((a.isfinite() != b.isfinite()).sum()) > few:
        return "is not finite in other places"
    a, b = a[finite], b[finite]
    distance = (a - b).abs()
    if few:
        distance = distance.sort().values[: len(distance) - few]
    error = float(torch.linalg.vector_norm(distance) / (torch.linalg.vector_norm(a) + LEAST))
    return f"has relative error {error:.2g}" if error > TOLERANCE[str(expected.dtype).removeprefix("torch.")] else ""
