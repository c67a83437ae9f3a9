"""The check before delivery: the guard of a version accepts the call that the user makes."""

from __future__ import annotations

from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.results import Check, CheckStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.worker_pool import WorkerPool
from mtmc_lsp.verify.adapters import Adapter
from mtmc_lsp.verify.candidate_process import CandidateProcess
from mtmc_lsp.verify.case_runner import STOPS
from mtmc_lsp.verify.messages import LoadRequest

GUARD_ACCEPTS = "guard accepts the workload"
REFUSED = "the guard refuses the workload's own call, so no kernel would run: {reason}"


def delivery_check(
    candidate: Adapter, capture: Capture, process: CandidateProcess, pool: WorkerPool, seconds: float
) -> tuple[Check, ...]:
    """Call the candidate's file, as it is delivered, up to its guard.

    The call has the workload's sizes, strides, containers, mode and decorators.

    The cases of the verification call the target's body, with tensors in the graph's layout, and under the interpreter with
    smaller sizes.

    Args:
        capture: of the target.
        seconds: time limit.

    Returns:
        One check; none for a candidate without a guard.
    """
    request = candidate.guarded_call
    if request is None:
        return ()
    load = LoadRequest(capture, request.user_source, (request.source,))
    try:
        # The kernels that a file imports are known only to the request itself.
        if pool.has_gpu and request.kernels is None:
            pool.call_unlocked(process, load, seconds)
        answer = pool.call(process, request, seconds)
    except MtmcError as error:
        if error.kind in STOPS:
            raise
        # The first case reports what is wrong with the candidate.
        return (Check(GUARD_ACCEPTS, CheckStatus.SKIPPED, "", error.message),)
    if not answer.has_guard:
        return ()
    return (Check(GUARD_ACCEPTS, CheckStatus.FAILED if answer.reason else CheckStatus.PASSED, "", answer.reason),)
