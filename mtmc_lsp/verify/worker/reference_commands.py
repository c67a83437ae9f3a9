"""Commands of the reference process: create inputs and compute the expected results. Runs in workers."""

from __future__ import annotations

import ast
from typing import Any

import torch

from mtmc_lsp.capture.worker.calls import build_call, init_arguments, user_error
from mtmc_lsp.core.errors import Location, RequestError, TargetRaises
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.gpu_lock import let_timings_pass
from mtmc_lsp.process.protocol import NoAnswer
from mtmc_lsp.process.worker.tensor_ipc import export_, is_large, release
from mtmc_lsp.verify.cases import ALIASED, FLOAT64
from mtmc_lsp.verify.error_limits import Draws
from mtmc_lsp.verify.messages import (
    CaseRequest,
    ConstructorAnswer,
    ConstructorRequest,
    OracleAnswer,
    OracleRequest,
    ReferenceAnswer,
    ReferenceRequest,
    ShareInputsRequest,
    UnshareInputsRequest,
)
from mtmc_lsp.verify.worker.comparison.draws import least_draws
from mtmc_lsp.verify.worker.expectations import expected_of
from mtmc_lsp.verify.worker.inputs import make_inputs
from mtmc_lsp.verify.worker.instances import original_of
from mtmc_lsp.verify.worker.observation.library_work import LibraryWork
from mtmc_lsp.verify.worker.oracle_runs.limits import Attempt
from mtmc_lsp.verify.worker.oracle_runs.tensors import in_float64
from mtmc_lsp.verify.worker.reference_cache import comparison_device, in_memory, keep_attempt, load, store
from mtmc_lsp.verify.worker.run_target import (
    copies,
    device_for,
    module_of,
    outcome,
    release_gpu_memory,
    run_case,
    target_source,
    use_one_thread,
)
from mtmc_lsp.verify.worker.values.layouts import other_layout, stated_values


def constructor(request: ConstructorRequest) -> ConstructorAnswer:
    """The constructor arguments that ``get_init_inputs`` returns."""
    capture = request.capture
    module = module_of(capture, target_source(request.user_source, capture), None)
    text = repr(list(init_arguments(module) or ([], {})))
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise RequestError(
            "get_init_inputs() returns values that cannot be sent to the candidate's process",
            where=Location(capture.workload.target.path),
            remedy="Let it return numbers, strings, and lists of these.",
        ) from None
    return ConstructorAnswer(text)


def compute_reference(request: ReferenceRequest) -> ReferenceAnswer:
    """Create the inputs of a case, and run the user's code and its float64 oracle on them.

    The inputs go to a file for the candidate process; large ones stay in GPU memory until they are shared. What does not fit
    into memory is computed again when it is needed.
    """
    use_one_thread()
    data = request.data
    module, inputs = inputs_of(data)
    let_timings_pass()
    least = least_draws(data.call.graph, data.case.sizes, finds_trivial=data.is_first)
    wanted = Draws.ALL if data.case.has_all_draws else least
    attempt = Attempt()
    expected = expected_results(data, module, inputs, wanted, attempt, defers_oracle=request.defers_oracle)
    if data.is_first:
        _require_numbers(data.capture, outcome(expected))
    operations = _operations(data, module, inputs) if request.counts_operations else 0.0
    large = data.shares_memory and is_large(inputs)
    if not large or request.shares_inputs:
        export_(inputs, data.inputs, in_memory=large)
    store(data.inputs, inputs, or_file=False)
    store(request.expected, expected, or_file=not large)
    keep_attempt(request.expected, attempt, data.inputs)
    has_oracle = expected["has_oracle"]
    del inputs, expected, attempt
    release_gpu_memory()
    return ReferenceAnswer(has_oracle, large, operations)


def compute_oracle(request: OracleRequest) -> OracleAnswer:
    """Compute the oracle that was left out. A case that is not in memory gets it when results need it."""
    use_one_thread()
    data, key = request.data, request.expected
    if not (in_memory(key) and in_memory(data.inputs)):
        return OracleAnswer(True)
    expected = load(key, comparison_device())
    if expected["is_deferred"]:
        inputs = load(data.inputs, comparison_device())
        # Trivial answers are sought in the workload's case.
        wanted = least_draws(data.call.graph, data.case.sizes, finds_trivial=data.is_first)
        expected = with_oracle(data, key, inputs, expected, wanted)
    has_oracle = bool(expected["has_oracle"])
    del expected
    release_gpu_memory()
    return OracleAnswer(has_oracle)


def with_oracle(
    data: CaseRequest, key: str, inputs: dict[str, torch.Tensor], expected: dict[str, Any], wanted: Draws
) -> dict[str, Any]:
    """The expected results with the oracle that was left out, which are kept under ``key`` from now on."""
    module, attempt = _module(data), Attempt()
    if data.case.layout == ALIASED:
        # Tensors that come from a cache need not be one tensor any more.
        inputs = inputs_of(data)[1]
    found = expected_results(data, module, inputs, wanted, attempt, known=expected)
    store(key, found, or_file=False)
    keep_attempt(key, attempt, data.inputs)
    return found


def _operations(data: CaseRequest, module: Any, inputs: dict[str, torch.Tensor]) -> float:
    """The arithmetic operations of torch in one more call of the user's code."""
    work, case = LibraryWork(), data.case
    run_case(module, data.call, copies(inputs), device_for(data.call, case.kind), work, case.seed, case.kind, before={})
    return work.operations


def share_inputs(request: ShareInputsRequest) -> NoAnswer:
    """Share the inputs of a case through GPU memory."""
    path = request.data.inputs
    inputs = load(path, comparison_device()) if in_memory(path) else inputs_of(request.data)[1]
    export_(inputs, request.path, in_memory=True)
    return NoAnswer()


def unshare_inputs(request: UnshareInputsRequest) -> NoAnswer:
    """Free shared inputs."""
    release(request.path)
    return NoAnswer()


def inputs_of(data: CaseRequest) -> tuple[Any, dict[str, torch.Tensor]]:
    """The user's module and the inputs of a case."""
    capture, case = data.call, data.case
    device = device_for(capture, case.kind)
    module = _module(data)
    # Nothing calls the instance: its tensors are read.
    start = build_call(
        module, capture.workload, device, _call_sizes(data), values=_is_given(data), construct=original_of
    )
    let_timings_pass()
    inputs = make_inputs(capture, start, case.sizes, case.distribution, case.seed, device)
    if case.kind == FLOAT64:
        inputs = {name: in_float64(tensor) for name, tensor in inputs.items()}
    names = [leaf.input for leaf in capture.leaves if leaf.input in inputs]
    return module, other_layout(inputs, names, case.layout, stated_values(capture))


def _module(data: CaseRequest) -> Any:
    """The user's module."""
    module = module_of(data.call, target_source(data.user_source, data.call), None)
    if data.init:
        _set_constructor_arguments(module, data.init)
    return module


def expected_results(
    data: CaseRequest,
    module: Any,
    inputs: dict[str, torch.Tensor],
    wanted: Draws,
    attempt: Attempt | None = None,
    *,
    known: dict[str, Any] | None = None,
    defers_oracle: bool = False,
) -> dict[str, Any]:
    """The expected results on these inputs, with the ``wanted`` draws of rounding; see :func:`expected_of`."""
    capture, case = data.call, data.case
    try:
        return expected_of(
            module,
            capture,
            inputs,
            device_for(capture, case.kind),
            case,
            is_first=data.is_first,
            wanted=wanted,
            attempt=attempt,
            known=known,
            defers_oracle=defers_oracle,
        )
    except Exception as error:
        raise user_error(error, capture.workload.target, f"on {case.text(capture.graph)}") from error


def _require_numbers(capture: Capture, results: list[Any]) -> None:
    """Refuse a workload on which the user's code returns only NaN: any kernel would be as right as any other.

    Raises:
        TargetRaises: it does; most often because random inputs are outside the function's domain.
    """
    values = [r for r in results if isinstance(r, torch.Tensor) and r.is_floating_point() and r.numel()]
    if values and all(bool(value.isnan().all()) for value in values):
        target = capture.workload.target
        raise TargetRaises(
            f"{target.qualname} returns only NaN on the workload's inputs, so nothing can be compared",
            where=Location(target.path, target.start_line),
            remedy="Name the range of its inputs in the directive, for example x=f32[N]@0.001..1.",
        )


def _set_constructor_arguments(module: Any, init: str) -> None:
    """Let ``get_init_inputs`` of the user's module return other arguments."""
    arguments = ast.literal_eval(init)
    module.get_init_inputs = lambda: arguments


def _is_given(data: CaseRequest) -> bool:
    return data.case.distribution == "given"


def _call_sizes(data: CaseRequest) -> dict[str, int]:
    """Sizes of the temporary arguments with which a call is built: small ones, unless their values are used."""
    sizes = dict(data.call.workload.sizes)
    return sizes if _is_given(data) else {name: min(value, 4) for name, value in sizes.items()}
