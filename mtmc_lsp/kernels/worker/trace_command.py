"""Calls a launcher under the interpreter and observes its kernels. Runs in workers."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mtmc_lsp.capture.worker.arguments.values import uninitialised
from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.core.workload import Workload, WorkloadSource
from mtmc_lsp.kernels.messages import CaseTrace, Fault, FaultKind, TraceAnswer, TraceCase, TraceRequest
from mtmc_lsp.kernels.worker.cuda_on_cpu import source_on_cpu, stand_in_for_cuda
from mtmc_lsp.kernels.worker.hooks import observing
from mtmc_lsp.kernels.worker.launch_call import can_be_distinct, case_call, kernel_call
from mtmc_lsp.kernels.worker.memory import Memory
from mtmc_lsp.kernels.worker.observer import Observer
from mtmc_lsp.kernels.worker.results import difference, tensors_of
from mtmc_lsp.verify.worker.interpreter import prepare_interpreter
from mtmc_lsp.verify.worker.run_target import poison_new_memory, use_one_thread

MISSING = re.compile(r"NotImplementedError\(?[:\s]*['\"]*(\w+) not supported")
"""The interpreter's exception for an operation that only a GPU has, as inline assembly; also inside that of a called function."""
OUTSIDE = "Did you forget to add @triton.jit"
"""What functions of libdevice raise under the interpreter that are not implemented there."""
TOO_LONG = "the call takes too long under the interpreter"

_modules: dict[str, Any] = {}
_numbers = count()
_results: dict[tuple[str, str], list[torch.Tensor] | None] = {}
"""Results of original texts by text and case: every candidate is compared with them."""
MOST_RESULTS = 64


def trace(request: TraceRequest) -> TraceAnswer:
    """Observe the call on each case."""
    use_one_thread()
    prepare_interpreter()
    stand_in_for_cuda()
    if not request.most_programs:
        poison_new_memory()
    try:
        module = _module(request.workload, request.source)
        expected = _module(request.workload, request.original or request.source)
    except Exception as error:
        return TraceAnswer((), f"{type(error).__name__}: {error}")
    return TraceAnswer(tuple(_traced(module, expected, request, case) for case in request.cases))


def _module(workload: Workload, text: str) -> Any:
    if text not in _modules:
        _modules[text] = load_user_module(workload.target.path, source_on_cpu(text), f"traced_kernels_{next(_numbers)}")
    return _modules[text]


def _traced(module: Any, expected: Any, request: TraceRequest, case: TraceCase) -> CaseTrace:
    observer, result = _observed(module, request, case, fills_lanes=True)
    if observer.is_too_long and isinstance(result, Exception):
        return CaseTrace(case, refusal=TOO_LONG, steps=observer.steps)
    if isinstance(result, Exception):
        return _failed(observer, result, module, case)
    if _races_by_indices(observer, module, request, case):
        distinct = replace(case, has_distinct_integers=True)
        trace = _traced(module, expected, request, distinct)
        if not any(fault.kind is FaultKind.RACE for fault in trace.faults):
            return trace
    results = tensors_of(result)
    faults = list(observer.faults.values())
    if _depends_on_undefined(observer, module, request, case, result):
        detail = "the result depends on lanes that the mask leaves undefined, since the load has no `other`"
        faults += [Fault(FaultKind.UNDEFINED_LANES, line, name, detail) for name, line in sorted(observer.undefined)]
    if (not faults or request.compares_faulty) and not request.most_programs:
        faults += _wrong_values(expected, request, case, results, observer.kernel)
    return CaseTrace(case, tuple(faults), "", observer.accesses, tuple(observer.launches), observer.steps)


def _depends_on_undefined(observer: Observer, module: Any, request: TraceRequest, case: TraceCase, result: Any) -> bool:
    """Whether a call gives other results where lanes outside a mask hold other values."""
    if not observer.undefined or request.most_programs:
        return False
    _, other = _observed(module, request, case, fills_lanes=False)
    return not isinstance(other, Exception) and bool(difference(tensors_of(result), tensors_of(other)))


def _races_by_indices(observer: Observer, module: Any, request: TraceRequest, case: TraceCase) -> bool:
    """Whether programs store to one element, and equal integers among the arguments may be why.

    A reference decides what equal indices give. Without one, the caller may rule them out, as for slots of a cache.
    """
    if request.reference is not None or case.has_distinct_integers or request.workload.source is WorkloadSource.SCRIPT:
        return False
    if request.most_programs or not any(fault.kind is FaultKind.RACE for fault in observer.faults.values()):
        return False
    return can_be_distinct(_call(module, request.workload, case), request.workload, case)


def _observed(module: Any, request: TraceRequest, case: TraceCase, *, fills_lanes: bool) -> tuple[Observer, Any]:
    """The observed call, and its result or the exception that it raised."""
    call = _call(module, request.workload, case, has_values=not request.most_programs)
    inputs = tensors_of(call.values)
    observer = Observer(
        Memory(inputs), fills_lanes=fills_lanes, most_programs=request.most_programs, most_steps=request.most_steps
    )
    try:
        # A test of the file may call backward().
        keeps_gradients = request.workload.source is WorkloadSource.SCRIPT
        with observing(observer), torch.set_grad_enabled(keeps_gradients):
            returned = call.run()
    except Exception as error:
        return observer, error
    results = tensors_of(tree_leaves(returned))
    if not request.most_programs:
        observer.finish(results)
    return observer, [*results, *inputs]


def _call(module: Any, workload: Workload, case: TraceCase, *, has_values: bool = True) -> Any:
    if not has_values:
        # Gigabytes of memory that nothing touches cost nothing; only indices need values.
        indices = [path for path, tensor in workload.tensors.items() if "int" in tensor.dtype]
        return kernel_call(module, workload, "cpu", case.sizes, values=False, read=indices, blank=uninitialised)
    return case_call(module, workload, "cpu", case)


def _failed(observer: Observer, error: Exception, module: Any, case: TraceCase) -> CaseTrace:
    """The outcome of a call that raised: the launcher may refuse inputs by a statement of its text."""
    cause = error.__cause__ or error
    file = getattr(module, "__spec__").origin  # noqa: B009 - modules have no such attribute for mypy
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    frames += [frame for frame in traceback.extract_tb(cause.__traceback__) if frame.filename == file]
    line = frames[-1].lineno or 0 if frames else 0
    text = f"{type(cause).__name__}: {cause}".splitlines()[0]
    unable = MISSING.search(str(cause)) or MISSING.search(text)
    if unable is not None:
        return CaseTrace(case, refusal=f"line {line}: Triton's interpreter has no {unable[1]}", steps=observer.steps)
    if observer.kernel and OUTSIDE in text:
        refusal = f"line {line}: Triton's interpreter has no counterpart of this function"
        return CaseTrace(case, refusal=refusal, steps=observer.steps)
    is_stated = bool(frames) and (frames[-1].line or "").strip().startswith(("raise", "assert"))
    if is_stated and not observer.launches:
        return CaseTrace(case, refusal=text)
    earlier = [fault for fault in observer.faults.values() if fault.kind is not FaultKind.NOT_WRITTEN]
    return CaseTrace(case, (*earlier, Fault(FaultKind.RAISES, line, observer.kernel, text)))


def _wrong_values(
    expected: Any, request: TraceRequest, case: TraceCase, results: Sequence[torch.Tensor], kernel: str
) -> list[Fault]:
    """The difference from the reference, or from the original text."""
    if request.reference is not None:
        wanted = _reference_results(expected, request.reference, case, wide=False)
        precise = _reference_results(expected, request.reference, case, wide=True)
    elif request.original:
        wanted, precise = _original_results(expected, request, case), None
    else:
        return []
    if wanted is None:
        # The reference, or the original kernel, does not accept these inputs.
        return []
    found = difference(results, wanted, precise)
    return [Fault(FaultKind.WRONG_VALUES, 0, kernel, found)] if found else []


def _original_results(module: Any, request: TraceRequest, case: TraceCase) -> list[torch.Tensor] | None:
    """The results of the text as it stands; None if it raises, or shows a fault and faulty results are not compared."""
    key = (request.original, f"{case}{request.compares_faulty}")
    if key not in _results:
        observer, other = _observed(module, request, case, fills_lanes=True)
        is_sound = not isinstance(other, Exception)
        if is_sound and not request.compares_faulty:
            is_sound = not observer.faults and not _depends_on_undefined(observer, module, request, case, other)
        if len(_results) == MOST_RESULTS:
            _results.clear()
        _results[key] = tensors_of(other) if is_sound else None
    return _results[key]


def _reference_results(module: Any, workload: Workload, case: TraceCase, *, wide: bool) -> list[torch.Tensor] | None:
    """The results of the reference, and its arguments after the call; None if it raises.

    Args:
        wide: whether floating-point arguments are float64.
    """
    call = _call(module, workload, case)
    values = [
        value.double() if wide and isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for value in call.values
    ]
    try:
        with torch.no_grad():
            returned = call.run(values)
    except Exception:  # user code raises anything
        return None
    return tensors_of([*tree_leaves(returned), *values])
