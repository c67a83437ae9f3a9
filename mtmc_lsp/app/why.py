"""``mtmc why``: whether the kernels of a file run for its workload and for recorded calls, and if not, why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mtmc_lsp.app.target_file import OpenTarget
from mtmc_lsp.capture.client import find_workload
from mtmc_lsp.capture.messages import NO_BACKWARD
from mtmc_lsp.capture.module_paths import module_name
from mtmc_lsp.capture.recorded_calls import RECORDS, RecordedCall, find_record, recorded_workload
from mtmc_lsp.core.errors import Location, RequestError, TargetUnsupported
from mtmc_lsp.core.workload import Capture, Target, Workload, WorkloadSource
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.source.sibling.pair import FilePair
from mtmc_lsp.verify.adapters import kernels_file
from mtmc_lsp.verify.messages import GuardRequest

CALL_SECONDS = 180.0
STANDS_IN = "there is no CUDA GPU here: CPU tensors stood in for those of a GPU"


@dataclass(frozen=True)
class ExplainedCall:
    """One call of the target, and what its guard decides."""

    name: str
    """``the call of the directive (line 3)``, ``12 recorded calls with x=f32[4,16]``."""
    reason: str = ""
    """Why the guard refuses it, as a clause; empty if the kernels run."""
    condition: str = ""
    """The condition that does not hold, as Python."""
    guard: str = ""
    """The guard that refuses."""
    count: int = 0
    """The number of recorded calls; 0 for the workload."""

    @property
    def kernels_run(self) -> bool:
        """Whether the guard accepts the call."""
        return not self.reason


@dataclass(frozen=True)
class GuardReport:
    """The decisions for all known calls of a target."""

    calls: tuple[ExplainedCall, ...]
    notes: tuple[str, ...] = ()

    @property
    def kernels_run(self) -> bool:
        """Whether the kernels run for all of them."""
        return all(call.kernels_run for call in self.calls)


def refuse_calls_without_kernels(target: OpenTarget, capture: Capture) -> None:
    """Refuse to optimise a target for calls that no kernel can serve.

    Raises:
        TargetUnsupported: the workload is on the CPU, or all recorded calls record gradients, which kernels cannot compute.
    """
    workload = capture.workload
    where = Location(str(target.path), workload.line or target.definition.start_line)
    if workload.device == "cpu":
        raise TargetUnsupported(
            f"the workload of {target.qualname} is on the CPU, where its kernels would never run",
            where=where,
            remedy="Leave out device=cpu.",
        )
    record = find_record(workload.target, target.project / FOLDER / RECORDS)
    call = record.typical if record is not None and workload.source is WorkloadSource.RECORDED else None
    if call is not None and call.records_gradients and capture.graph.backward is None:
        notes = (note.removeprefix(NO_BACKWARD) for note in workload.assumed if note.startswith(NO_BACKWARD))
        reason = next(notes, "their backward pass is not supported")
        raise TargetUnsupported(
            f"all recorded calls of {target.qualname} record gradients, for which its kernels would never run: "
            f"{reason}",
            where=where,
            remedy="Call it under torch.no_grad() or torch.inference_mode() and record again, or describe such a call:\n"
            f"    {call.directive}",
        )


def explain_guard(target: OpenTarget) -> GuardReport:
    """Call the target of a file with kernels in every known way, up to its guard.

    Raises:
        RequestError: the file has no kernels for the target, or no call of it is known; the target's code raises.
    """
    if target.plain == target.text:
        raise _without_kernels(target)
    calls: list[ExplainedCall] = []
    stands_in = False
    beside = kernels_file(target.path, target.qualname, FilePair(target.text, target.kernels))
    with Worker(target.python, cwd=str(target.project)) as worker:
        for call, workload, records_gradients in _calls(target):
            request = GuardRequest(
                workload,
                module_name(target.path),
                target.plain.decode(),
                target.text.decode(),
                records_gradients,
                beside,
            )
            answer = worker.call(request, CALL_SECONDS)
            if not answer.has_guard:
                raise _without_kernels(target)
            stands_in |= answer.stands_in
            calls.append(ExplainedCall(call.name, answer.reason, answer.condition, answer.guard, call.count))
    return GuardReport(tuple(calls), (STANDS_IN,) if stands_in else ())


def _without_kernels(target: OpenTarget) -> RequestError:
    return RequestError(
        f"{target.qualname} calls no kernels in this file",
        where=Location(str(target.path), target.definition.start_line),
        remedy=f"Run mtmc optimize {target.path.name}::{target.qualname} --apply.",
    )


def _calls(target: OpenTarget) -> Iterator[tuple[ExplainedCall, Workload, bool]]:
    """Each known call with its workload, and whether it records gradients."""
    definition, records = target.definition, target.project / FOLDER / RECORDS
    workload = find_workload(str(target.path), target.text, definition, records)
    if workload.source is not WorkloadSource.RECORDED:
        yield ExplainedCall(_workload_name(workload)), workload, workload.trains
    record = find_record(definition, records)
    for recorded in record.calls if record is not None else ():
        if not recorded.unusable:
            yield from _recorded(definition, recorded)


def _workload_name(workload: Workload) -> str:
    if workload.source is WorkloadSource.GET_INPUTS:
        return "the call with get_inputs()"
    origin = "directive" if workload.source is WorkloadSource.DIRECTIVE else "annotations"
    return f"the call of the {origin} (line {workload.line})"


def _recorded(target: Target, call: RecordedCall) -> Iterator[tuple[ExplainedCall, Workload, bool]]:
    """The calls of one signature, those that record gradients apart."""
    arguments = call.directive.removeprefix("# mtmc: ")
    for count, records_gradients in ((call.count - call.under_autograd, False), (call.under_autograd, True)):
        if count:
            # The record counts modes and gradients separately. Calls that record gradients are usually those in training mode.
            in_training = call.in_training - (0 if records_gradients else call.under_autograd)
            calls = "1 recorded call" if count == 1 else f"{count} recorded calls"
            yield (
                ExplainedCall(f"{calls} with {arguments}", count=count),
                recorded_workload(target, call, training=in_training >= count),
                records_gradients,
            )
