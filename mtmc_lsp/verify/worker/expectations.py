"""The expected results of a case: the reference's results, and a float64 oracle that determines the permitted error.

Runs in workers.
"""

from __future__ import annotations

from typing import Any

import torch

from mtmc_lsp.core.dtypes import TOLERANCE
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.worker.gpu_memory import leaving_room, return_idle_memory
from mtmc_lsp.verify.cases import AUTOGRAD, FORWARD, VALUES, Case
from mtmc_lsp.verify.error_limits import FACTORS, Draws
from mtmc_lsp.verify.worker.comparison.distances import PIECE
from mtmc_lsp.verify.worker.oracle_runs import tf32
from mtmc_lsp.verify.worker.oracle_runs.limits import Attempt, oracle_of
from mtmc_lsp.verify.worker.oracle_runs.runs import CaseRuns
from mtmc_lsp.verify.worker.oracle_runs.tensors import ResultKey, dtype_name


def expected_of(
    module: Any,
    capture: Capture,
    inputs: dict[str, torch.Tensor],
    device: str,
    case: Case,
    *,
    is_first: bool = False,
    wanted: Draws = Draws.ALL,
    attempt: Attempt | None = None,
    known: dict[str, Any] | None = None,
    defers_oracle: bool = False,
) -> dict[str, Any]:
    """The reference's results on a case's inputs, and the oracle's.

    Args:
        wanted: the draws of rounding. Where fewer than all are wanted, those are made that do more than permit larger errors.
        attempt: the last attempt for the same case and inputs with fewer draws, whose runs are used; it becomes this one.
        known: the entries of :func:`run_case` for the same case and inputs, if that run was made before.
        defers_oracle: whether to leave out the oracle.

    Returns:
        The entries of :func:`run_case`, and: ``oracle`` and ``oracle_after``, the same in float64; ``sensitivity``, by result
        (or by name of a changed input), how far rounding of inputs and operations moves the oracle; ``conditioning``, how far
        rounding of inputs alone does; ``ill_conditioned``, by result, the facts about a reference result far from the oracle;
        ``zeros``, by gradient, where it is 0 whatever rounding does; ``ties``, by result, the fields of :class:`Ties` of an
        integer result that an index of a score decides; ``has_oracle``, whether float64 fitted into memory; ``is_deferred``,
        whether the oracle was left out; ``draws``, those that were made; ``omits_draws``, whether draws are left out that may
        permit larger errors.
    """
    earlier = attempt.runs if attempt is not None else None
    runs = earlier or CaseRuns(module, capture, inputs, device, case, known)
    reference, kind = runs.reference, case.kind
    # Without a float64 oracle, the reference's results are the only ones to compare with.
    defaults: dict[str, Any] = {
        "oracle": reference["results"],
        "oracle_after": reference["after"],
        "sensitivity": {},
        "conditioning": {},
        "ties": {},
        "ill_conditioned": {},
        "zeros": {},
        "has_oracle": True,
        "is_deferred": False,
        "omits_draws": False,
        "draws": int(Draws.ALL),
    }
    if kind not in (VALUES, FORWARD) and (kind != AUTOGRAD or capture.uses_random):
        return {**reference, **defaults}
    if case.has_oracle and defers_oracle:
        return {**reference, **defaults, "is_deferred": True}
    if case.has_oracle:
        try:
            # A trial of the version may need the memory of the user's code at the same time.
            with leaving_room():
                entries = oracle_of(runs, is_first=is_first, wanted=wanted, attempt=attempt)
            found = {**reference, **defaults, **entries}
            return {**found, "oracle": _stored(found["oracle"], reference["results"])}
        except torch.OutOfMemoryError:
            if is_first:
                tf32.assume(runs)
        # Here the exception no longer holds the tensors of the run.
        return_idle_memory(ran_out=True)
    return {**reference, **defaults, "sensitivity": _sensitivity_without_oracle(runs), "has_oracle": False}


def _stored(oracle: list[Any], results: list[Any]) -> list[Any]:
    """The oracle's results as they are kept: very large ones of 16 bits in float32, whose rounding is 2^-16 of theirs."""
    return [
        exact.float()
        if isinstance(exact, torch.Tensor)
        and isinstance(result, torch.Tensor)
        and exact.dtype == torch.float64
        and result.dtype in (torch.bfloat16, torch.float16)
        and exact.numel() > PIECE
        else exact
        for exact, result in zip(oracle, results, strict=False)
    ] + oracle[len(results) :]


def _sensitivity_without_oracle(runs: CaseRuns) -> dict[ResultKey, float]:
    """By result: the error that gives the dtype's tolerance when multiplied by the factor, or the error of TF32 if larger."""
    errors = {}
    for i, result in runs.expected.items():
        dtype = dtype_name(result)
        if dtype in TOLERANCE:
            uses_tf32 = dtype == "float32" and runs.capture.graph.runs_tf32
            errors[i] = max(TOLERANCE[dtype] / FACTORS["budget"], tf32.TF32_ERROR if uses_tf32 else 0.0)
    return errors
