"""Verification commands, run in workers: the reference and its oracle in one process, the candidate in another."""

from __future__ import annotations

import ast
import os
from typing import Any

import torch

from mtmc_lsp.capture.worker.calls import build_call, user_error
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process import sandbox
from mtmc_lsp.process.worker.failures import classify
from mtmc_lsp.process.worker.tensor_ipc import give, is_large, take, withdraw
from mtmc_lsp.process.worker_process import RESULTS, SCRATCH
from mtmc_lsp.verify.worker.comparison.compare import compare_case
from mtmc_lsp.verify.worker.determinism import differing, not_explained
from mtmc_lsp.verify.worker.expectations import expected_of, in_float64
from mtmc_lsp.verify.worker.inputs import laid_out, make_inputs, other_layout, reusing
from mtmc_lsp.verify.worker.interpreter.patches import mend_interpreter
from mtmc_lsp.verify.worker.interpreter.speedups import hasten_interpreter
from mtmc_lsp.verify.worker.reference_cache import in_memory, is_there, keep, kept, own_device
from mtmc_lsp.verify.worker.run_target import (
    LaunchCount,
    capture_of,
    device_for,
    is_interpreted,
    module_of,
    outcome,
    plain,
    poison_new_memory,
    run_again,
    settled,
    target_source,
    use_one_thread,
)

MUCH_RESERVED = 1 << 30
"""Bytes that a process may hold back for its next case."""


def reference(request: dict[str, Any]) -> dict[str, Any]:
    """Make a case's inputs, run the user's code and its float64 oracle on them.

    The inputs go to a file, from where the candidate's process takes them; what is expected stays here. With
    ``handed``, large inputs are not written but offered when they are asked for, and what has no room is computed again.

    Returns:
        ``coarse``: whether float64 did not fit beside the rest, so that the user's own results are all there is.
        ``large``: whether :func:`offer` gives the inputs.
    """
    use_one_thread()
    inputs, expected = _referred(request)
    large = bool(request.get("handed")) and is_large(inputs)
    if not large:
        give(inputs, request["inputs"], in_memory=False)
    keep(request["inputs"], inputs, or_file=False)
    keep(request["expected"], expected, or_file=not large)
    coarse = expected["coarse"]
    del inputs, expected
    release()
    return {"coarse": coarse, "large": large}


def offer(request: dict[str, Any]) -> dict[str, Any]:
    """Offer a case's large inputs to another process: under ``to``, else to the candidate's until its results were compared."""
    path = request["inputs"]
    inputs = kept(path, own_device()) if in_memory(path) else _inputs(request)[2]
    give(inputs, request.get("to", path), in_memory=True)
    return {}


def take_back(request: dict[str, Any]) -> dict[str, Any]:
    """End an offer."""
    withdraw(request["to"])
    return {}


def _inputs(request: dict[str, Any]) -> tuple[Any, Capture, dict[str, torch.Tensor]]:
    """The user's module, what was captured of it, and a case's inputs."""
    capture = capture_of(request)
    widened, case = bool(request["widened"]), request["case"]
    device = device_for(capture, case["kind"])
    module = module_of(capture, target_source(request, capture), None, widened)
    if request.get("init"):
        _construct_with(module, request["init"])
    given = case["distribution"] == "given"
    start = build_call(
        module, capture.workload, device, _case_sizes(capture, case), values=given, construct=reusing(capture)
    )
    inputs = make_inputs(capture, start, case["sizes"], case["distribution"], case["seed"], device, widened)
    if case["kind"] == "float64":
        inputs = {name: in_float64(tensor) for name, tensor in inputs.items()}
    if case.get("layout"):
        inputs = other_layout(inputs, [a.input for a in capture.arguments if a.input in inputs], case["layout"])
    return module, capture, inputs


def _referred(request: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A case's inputs and what is expected of them."""
    module, capture, inputs = _inputs(request)
    case = request["case"]
    try:
        return inputs, expected_of(module, capture, inputs, device_for(capture, case["kind"]), case)
    except Exception as error:
        raise user_error(error, capture.workload.target, f"on {case['label']}") from error


def release() -> None:
    """Give memory that nothing holds any more back to the GPU: other processes need it."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > MUCH_RESERVED:
        torch.cuda.empty_cache()


def _construct_with(module: Any, init: str) -> None:
    """From now on the file's own function gives these constructor arguments."""
    made = ast.literal_eval(init)
    module.get_init_inputs = lambda: made


def _case_sizes(capture: Capture, case: dict[str, Any]) -> dict[str, int]:
    """Sizes of the throw-away arguments that a call is built with, unless they are the case's own."""
    sizes = dict(capture.workload.sizes)
    if case["distribution"] != "given":
        sizes = {name: min(value, 4) for name, value in sizes.items()}
    return sizes


def candidate(request: dict[str, Any]) -> dict[str, Any]:
    """Run a candidate on a case's inputs; its results go to a file, what else was seen comes back."""
    capture = capture_of(request)
    case = request["case"]
    device = device_for(capture, case["kind"])
    left = os.path.join(os.environ[SCRATCH], RESULTS)
    poison_new_memory()
    if is_interpreted():
        use_one_thread()
        mend_interpreter()
        hasten_interpreter()
    try:
        module = module_of(capture, target_source(request, capture), request["source"], bool(request["widened"]))
    except Exception as error:
        return candidate_failure("compile_error", error)
    withdraw(left)
    loaded = take(request["inputs"], device)
    inputs = {name: _with_layout_of(tensor, capture, name, case["sizes"]) for name, tensor in loaded.items()}
    first: dict[str, Any] | None = None
    unlike, calls = set[int](), int(request["repeats"])
    launches = LaunchCount()
    with launches.counting():
        for _ in range(calls):
            try:
                run = run_again(module, capture, inputs, device, case)
                run = settled(run, device)
            except Exception as error:
                return candidate_failure("runtime_error", error)
            if first is None:
                first = run
            else:
                unlike |= differing(outcome(first), outcome(run))
    assert first is not None
    found = {**first, "results": [plain(result) for result in first["results"]]}
    del run, inputs, loaded
    give(found, left, in_memory=bool(request.get("handed")))
    del first, found
    release()
    return {"status": "ran", "launches": launches.count // calls, "differing": sorted(unlike)}


def candidate_failure(status: str, error: Exception) -> dict[str, Any]:
    """The answer for a candidate that raised: its status, the kind of failure and the reason in words."""
    kind = classify(error)
    reason = f"{type(error).__name__}: {str(error)[:600]}"
    if kind.is_out_of_memory:
        reason = f"it ran out of memory, which is limited: {reason}"
    elif isinstance(error, PermissionError) and sandbox.active != sandbox.Isolation():
        reason = f"{reason}; candidates may write to no files, open no sockets and start no processes"
    return {"status": status, "reason": reason, "failure": kind.value}


def _with_layout_of(tensor: torch.Tensor, capture: Capture, name: str, sizes: dict[str, int]) -> torch.Tensor:
    kind = next(item.type for item in capture.graph.inputs if item.name == name)
    strides = [size.value(sizes) for size in kind.stride]
    return tensor if list(tensor.stride()) == strides or not tensor.numel() else laid_out(tensor, strides)


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """Compare a candidate's results with the reference's and the oracle's; in the reference's process."""
    inputs, want, seen = compared(request)
    found = compare_case(inputs, want, seen, request["precision"])
    found["differing"] = unexplained(request, inputs, want)
    release()
    return found


def unexplained(request: dict[str, Any], inputs: dict[str, torch.Tensor], want: dict[str, Any]) -> list[int]:
    """Which of the candidate's results that differ from call to call the user's own code gives alike each time."""
    if not request["differing"]:
        return []
    capture = capture_of(request)
    module = module_of(capture, target_source(request, capture), None, bool(request["widened"]))
    return not_explained(request["differing"], module, capture, inputs, want, request["case"])


def compared(request: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """A case's inputs, what is expected and what a candidate gave; what was not kept is computed again."""
    withdraw(request["inputs"])
    if not is_there(request["expected"]):
        inputs, want = _referred(request)
    else:
        want = kept(request["expected"], own_device())
        inputs = kept(request["inputs"], own_device()) if is_there(request["inputs"]) else _inputs(request)[2]
    # What was computed on the CPU is compared there.
    devices = {t.device.type for t in outcome(want) if isinstance(t, torch.Tensor)}
    device = devices.pop() if devices else own_device()
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    return inputs, want, take(request["results"], device)
