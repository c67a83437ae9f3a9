"""Which errors fail one step, and which end the run."""

from __future__ import annotations

from mtmc_lsp.core.chat import ModelNotUsable
from mtmc_lsp.core.errors import FailureKind, MtmcError, RequestError, WorkerFailed


def failure_reason(error: MtmcError) -> str:
    """Why a step failed: what happened, where, and what to do.

    Raises:
        MtmcError: ``error``, if it is not the fault of the step: the user's code is wrong, the run was cancelled, another
            program killed a process, or no model can be asked. The steps so far are stored, and the run can be resumed.
    """
    if isinstance(error, (RequestError, ModelNotUsable)) or (
        isinstance(error, WorkerFailed) and error.kind in (FailureKind.CANCELLED, FailureKind.KILLED)
    ):
        raise error
    where = f" ({error.where})" if error.where else ""
    remedy = f". {error.remedy}" if error.remedy else ""
    return f"{error.message}{where}{remedy}"
