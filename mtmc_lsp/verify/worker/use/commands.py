"""Commands of the use script: the reference's results, the candidate's, and the comparison. Runs in workers."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

from mtmc_lsp.capture.worker.calls import user_error
from mtmc_lsp.core.errors import MtmcError, TensorSharingFailed
from mtmc_lsp.process.gpu_lock import let_timings_pass
from mtmc_lsp.process.worker.kernel_compilation import compiling_unshared
from mtmc_lsp.process.worker.tensor_ipc import export_, import_, release
from mtmc_lsp.verify.messages import (
    CandidateAnswer,
    JudgeUseRequest,
    UseChecks,
    UseReferenceRequest,
    UseRequest,
    UseScript,
)
from mtmc_lsp.verify.use.uses import Use
from mtmc_lsp.verify.worker.candidate_commands import set_up_process
from mtmc_lsp.verify.worker.observation.failures import MAX_ERROR_CHARACTERS
from mtmc_lsp.verify.worker.oracle_runs.tf32 import TF32_ERROR
from mtmc_lsp.verify.worker.reference_cache import comparison_device
from mtmc_lsp.verify.worker.reference_commands import inputs_of
from mtmc_lsp.verify.worker.run_target import (
    device_for,
    is_interpreted,
    release_gpu_memory,
    use_one_thread,
)
from mtmc_lsp.verify.worker.use.judgement import checks_of
from mtmc_lsp.verify.worker.use.script import STEPS, Expectation, expectations
from mtmc_lsp.verify.worker.use.steps import Entry
from mtmc_lsp.verify.worker.use.subject import (
    ModuleTensors,
    NotApplicable,
    Subject,
    candidate_subject,
    reference_subject,
)

MOST_ELEMENTS = 1 << 24
"""Limit for the elements of a module's tensors: most steps construct it anew."""
SECONDS = 30.0
"""Time after which a candidate starts no further step."""
TOO_LARGE = "the module is too large to be constructed for each step"


def use_reference(request: UseReferenceRequest) -> UseScript:
    """Choose the steps by using the user's code. The tensors that a candidate needs go to a file."""
    use_one_thread()
    data = request.data
    capture, device = data.call, device_for(data.call, data.case.kind)
    module, inputs = inputs_of(data)
    let_timings_pass()
    try:
        subject = reference_subject(module, data, inputs, device)
    except Exception as error:
        raise user_error(error, capture.workload.target, f"on {data.case.text(data.call.graph)}") from error
    if sum(tensor.numel() for tensor in subject.tensors.state.values()) > MOST_ELEMENTS:
        return UseScript((), skipped=TOO_LARGE)
    expected, subject = expectations(subject, least=TF32_ERROR if capture.graph.allows_tf32 else 0.0)
    tensors = subject.tensors
    shared = {
        "inputs": inputs,
        "state": dict(tensors.state),
        "parameters": list(tensors.parameters),
        "buffers": list(tensors.buffers),
        "persistent": list(tensors.persistent),
        "states": {key: dict(state) for key, state in subject.states.items()},
        "rows": dict(subject.rows),
    }
    export_(shared, data.inputs, in_memory=False)
    plain = [
        {"entries": [_plain(entry) for entry in each.entries], "sensitivity": each.sensitivity} for each in expected
    ]
    export_(plain, request.expected, in_memory=False)
    release_gpu_memory()
    return UseScript(tuple(each.use for each in expected))


def use_candidate(request: UseRequest) -> CandidateAnswer:
    """Run the steps on a candidate; the results go to a file in the scratch folder."""
    data = request.data
    device = device_for(data.call, data.case.kind)
    results = set_up_process()
    release(results)
    shared = import_(data.inputs, device)
    parameters, buffers, persistent = (tuple(shared[name]) for name in ("parameters", "buffers", "persistent"))
    tensors = ModuleTensors(shared["state"], parameters, buffers, persistent)
    let_timings_pass()
    end = time.monotonic() + SECONDS
    try:
        with contextlib.nullcontext() if is_interpreted() else compiling_unshared():
            subject = candidate_subject(
                request.candidate, data, shared["inputs"], device, tensors, shared["states"], shared["rows"]
            )
            outcomes = {use.key: _outcome(subject, use) for use in request.uses if time.monotonic() < end}
    except MtmcError:
        raise
    except Exception as error:  # a class that can be constructed only once in a process
        reason = f"a further module cannot be constructed: {type(error).__name__}: {str(error)[:MAX_ERROR_CHARACTERS]}"
        outcomes = {use.key: {"skipped": reason} for use in request.uses}
    export_(outcomes, results, in_memory=False)
    release_gpu_memory()
    return CandidateAnswer("ran")


def _outcome(subject: Subject, use: Use) -> dict[str, Any]:
    """What a candidate gives in one step, as a mapping that goes through a file."""
    let_timings_pass()
    try:
        return {"entries": [[entry.name, entry.value] for entry in STEPS[use.kind](subject, use)]}
    except NotApplicable as reason:
        return {"skipped": str(reason)}
    except Exception as error:  # whatever the candidate raises
        return {"raised": f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARACTERS]}"}


def judge_use(request: JudgeUseRequest) -> UseChecks:
    """Compare a candidate's results in each step with the reference's."""
    device = comparison_device()
    plain = import_(request.expected, device)
    expected = [
        Expectation(use, [Entry(*fields) for fields in each["entries"]], list(each["sensitivity"]))
        for use, each in zip(request.uses, plain, strict=True)
    ]
    observed = import_(request.results, device)
    let_timings_pass()
    try:
        return UseChecks(tuple(checks_of(expected, observed, request.precision)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TensorSharingFailed(f"the candidate's results are malformed: {type(error).__name__}: {error}") from None


def _plain(entry: Entry) -> list[Any]:
    value = entry.value.detach() if isinstance(entry.value, torch.Tensor) else entry.value
    return [entry.name, value, entry.changed, entry.is_optional]
