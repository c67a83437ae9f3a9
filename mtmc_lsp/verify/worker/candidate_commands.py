"""Runs a candidate on the inputs of a case, in the candidate process. Runs in workers."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from time import monotonic, process_time
from typing import Any

import torch

from mtmc_lsp.capture.worker.arguments.strided_tensors import laid_out, shares_elements
from mtmc_lsp.capture.worker.calls import Call
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.guard.worker.observed_calls import guards_of, observe
from mtmc_lsp.process.gpu_lock import let_timings_pass
from mtmc_lsp.process.worker.kernel_compilation import compiling_unshared
from mtmc_lsp.process.worker.scratch import hide_variables, scratch_folder
from mtmc_lsp.process.worker.tensor_ipc import export_, import_, release
from mtmc_lsp.process.worker_process import RESULTS
from mtmc_lsp.verify.cases import ALIASED, SLICED, UNALIGNED, Case
from mtmc_lsp.verify.messages import (
    STORED,
    STORED_AFTER,
    CallPlan,
    CandidateAnswer,
    CandidateRequest,
    CandidateSource,
    Surroundings,
)
from mtmc_lsp.verify.sizes.case_sizes import LOOP_OPERATIONS, loop_operations
from mtmc_lsp.verify.worker.callers import Prepare, changed_by_loading, load_candidate, state_after_loading
from mtmc_lsp.verify.worker.interpreter import grids, prepare_interpreter
from mtmc_lsp.verify.worker.interpreter.lane_operations import programs
from mtmc_lsp.verify.worker.interpreter.stand_in import replace as replace_unseen
from mtmc_lsp.verify.worker.interpreter.stores import Stores
from mtmc_lsp.verify.worker.observation.determinism import differing
from mtmc_lsp.verify.worker.observation.failures import failure
from mtmc_lsp.verify.worker.observation.host_reads import HostReads
from mtmc_lsp.verify.worker.observation.kept_results import KeptResults, calls_until_reuse
from mtmc_lsp.verify.worker.observation.kept_state import kept_state, lengthen, move_forward
from mtmc_lsp.verify.worker.observation.library_work import LibraryWork
from mtmc_lsp.verify.worker.observation.process_changes import ProcessChanges
from mtmc_lsp.verify.worker.observation.process_reads import reads_of_process, watch_reads
from mtmc_lsp.verify.worker.observation.threads import ThreadWatch
from mtmc_lsp.verify.worker.run_target import (
    LaunchCount,
    copies,
    device_for,
    is_interpreted,
    outcome,
    poison_new_memory,
    release_gpu_memory,
    run_case,
    settled,
    snapshots,
    use_one_thread,
)
from mtmc_lsp.verify.worker.surroundings import current
from mtmc_lsp.verify.worker.surroundings.stand_in_gpu import describe_gpu
from mtmc_lsp.verify.worker.values.float8 import reversed_and_scaled
from mtmc_lsp.verify.worker.values.layouts import other_layout

JUDGED_CALL = CallPlan()
"""One call without repeats, for a long loop that the guard refuses: the user's code runs there, not the version."""
LEAST_REPEATS = 4
"""Repeats that are made even after their time is over, if as many are requested."""
OBSERVED_CALLS = 4
"""Calls during which kept state is observed: one may leave it as it was, as a set of addresses where memory is used again."""
OTHER_SCALE = 0.5
HOST_PART = 0.5
"""A call that converts this part of its largest input to an array or a list may compute its results with NumPy or Python."""
MOST_KERNELS, UNUSED_SECONDS = 8, 2.0
"""Limits for calls without one of the kernels: the number of kernels, and the processor time of all these calls."""
REUSE_SECONDS = 8.0
"""Processor time for the calls that use up a memory for results."""
OVERWRITTEN = "a later call changes the results of an earlier one"


def set_up_process(*, fills_memory: bool = True) -> str:
    """Prepare this process for calls of a candidate; returns the path for its results.

    Args:
        fills_memory: whether new memory is filled with NaN.
    """
    hide_variables()
    if fills_memory and not current.is_program():
        poison_new_memory()
    if is_interpreted():
        if not current.is_program():
            use_one_thread()
        prepare_interpreter(replace_unseen)
        grids.current.refuses_races = True
        backend = "cuda" if current.has_gpu_names() else "cpu"
        describe_gpu(replace_unseen, current.streams(), backend=backend)
    folder = scratch_folder()
    assert folder is not None
    return os.path.join(folder, RESULTS)


def run_candidate(request: CandidateRequest) -> CandidateAnswer:
    """Run the planned calls; the results of the judged call go to a file in the scratch folder."""
    data = request.data
    if request.candidate.separate is not None:
        watch_reads()
        current.enter(request.calls.surroundings, request.candidate.separate.target.path, data.case.seed)
    device = device_for(data.call, data.case.kind)
    # Filled memory counts as initialised, and would hide errors from initcheck.
    results = set_up_process(fills_memory=not request.calls.is_sanitized)
    threads = ThreadWatch()
    programs.faults.clear()
    try:
        module, prepare = load_candidate(request.candidate, data)
    except Exception as error:
        return failure("compile_error", error, request.candidate)
    let_timings_pass()
    release(results)
    inputs = import_(data.inputs, device)
    if not data.case.layout:
        inputs = {name: _with_graph_layout(data.call, name, t, data.case) for name, t in inputs.items()}

    def prepare_another() -> Prepare:
        return load_candidate(request.candidate, data, constructs=True)[1]

    try:
        in_order = grids.in_order(request.calls.order, data.case.seed)
        with in_order if is_interpreted() else compiling_unshared():
            # Created here, because what replaces attributes of Triton above is no change by the candidate.
            calls = _Calls(
                module, prepare, prepare_another, data.call, data.case, device, inputs, request.candidate, threads
            )
            run, answer = calls.run(request.calls)
    except MtmcError:
        raise
    except Exception as error:
        # The candidate may also catch this exception.
        return _fault() or failure("runtime_error", error, request.candidate)
    fault = _fault()
    if fault is not None:
        return fault
    del calls, inputs
    export_(run, results, in_memory=data.shares_memory)
    del run
    release_gpu_memory()
    waiting = tuple(sorted(grids.current.waiting))
    return CandidateAnswer("ran", threads=threads.left(), reads=reads_of_process(), waiting=waiting, **answer)


def _fault() -> CandidateAnswer | None:
    """The answer if a kernel accessed memory wrongly, which its results need not show."""
    return CandidateAnswer("incorrect", fault=programs.faults[0]) if programs.faults else None


class _Calls:
    """The calls of one candidate on one case, all on the same module instance."""

    def __init__(
        self,
        module: Any,
        prepare: Prepare,
        prepare_another: Callable[[], Prepare],
        capture: Capture,
        case: Case,
        device: str,
        inputs: dict[str, torch.Tensor],
        candidate: CandidateSource,
        threads: ThreadWatch,
    ) -> None:
        self._module, self._prepare, self._capture, self._case = module, prepare, capture, case
        self._prepare_another = prepare_another
        self._device, self._inputs, self._candidate, self._threads = device, inputs, candidate, threads
        self._changes = ProcessChanges() if candidate.separate is not None else None
        self._kept: KeptResults | None = None
        self._reads: HostReads | None = None
        self._changed_state: set[str] = set()
        self._prepared: Call | None = None
        arguments = {item.name for item in capture.graph.inputs if item.kind is InputKind.ARGUMENT}
        self._arguments = [name for name in inputs if name in arguments]
        # Parameters and buffers stay the same tensors; only their contents are restored.
        parameters = copies({name: tensor for name, tensor in inputs.items() if name not in arguments})
        # `data` is no view, so that it can be detached in place.
        self._parameters = {name: tensor.data for name, tensor in parameters.items()}

    def run(self, plan: CallPlan) -> tuple[dict[str, Any], dict[str, Any]]:
        """The judged call, and what was observed of all calls."""
        all_launches, launches = LaunchCount(current.note_launch), LaunchCount()
        refusal = self._refusal() if self._may_be_slow_original(plan) else ""
        whole, plan = plan, JUDGED_CALL if refusal else plan
        tensors = self._fresh()
        self._kept = KeptResults() if plan.keeps_results else None
        with all_launches.counting():
            if plan.adds_instance and plan.surroundings is not Surroundings.VERIFICATION:
                self._call_another_instance()
            if plan.changes_contents:
                self._call_on_other_contents(tensors)
            with launches.counting():
                run, sample = self._judged_call(tensors, plan)
            first_results = run["results"] if plan.counts_library and self._device == "cpu" else []
            # Later calls must not change these results, nor the module's tensors that all calls share.
            judged = run if self._device == "cuda" else snapshots(run)
            del run
            plan = whole if launches.count else plan
            differing_results, repeats = self._repeat(judged, plan)
            interference = self._interference(judged, plan) if not differing_results else ""
        uses_kernels, unused = True, list[str]()
        if plan.disables_kernels and launches.count:
            with LaunchCount().counting(executes=False):
                uses_kernels = not self._gives(judged)
            if uses_kernels and is_interpreted() and self._candidate.separate is not None:
                unused = self._unused(judged, launches.kernels)
        counted = self._library_operations(first_results) if plan.counts_library else {}
        observed = {
            "interference": interference if plan.keeps_results else None,
            **counted,
            "counts": tuple(self._deciding_counts(judged) if plan.moves_counts and not interference else ()),
            "launches": launches.count,
            "all_launches": all_launches.count,
            # On a GPU, autograd's threads launch the kernels of a backward pass, and torch lets their streams wait.
            "other_threads": self._threads.others(all_launches.threads) if is_interpreted() else 0,
            "streams": current.unordered_launches(),
            "differing": tuple(sorted(differing_results)) if repeats else None,
            "uses_kernels": uses_kernels,
            "unused_kernels": tuple(unused),
            "refusal": "" if launches.count else refusal or self._refusal(),
        }
        # A later call sees the state that the first one changed.
        changed = self._changed_state.union(
            changed_by_loading, self._changes.replaced(self._module) if self._changes else ()
        )
        return {**judged, "changed_state": sorted(changed), **sample.pop("masks")}, {**observed, **sample}

    def _judged_call(self, tensors: dict[str, torch.Tensor], plan: CallPlan) -> tuple[dict[str, Any], dict[str, Any]]:
        """The call that is judged; ``masks`` of what its sample of programs stored, and what else is known of the sample."""
        if not plan.sample_seconds:
            return self._call(tensors), {"masks": {}}
        sampled = grids.sampled(plan.sample_seconds, plan.whole_seconds, must_compare=plan.must_compare)
        try:
            with sampled as stores:
                run = self._call(tensors)
        except Exception:
            # The candidate may check its results itself.
            if not (plan.must_compare and stores.is_partial):
                raise
            return self._call_of_all_programs(stores)
        if plan.must_compare and stores.reason:
            return self._call_of_all_programs(stores)
        stored = {i: mask for i, result in enumerate(run["results"]) if (mask := stores.mask(result)) is not None}
        changed = {name: mask for name, value in run["after"].items() if (mask := stores.mask(value)) is not None}
        sample = {
            "programs": tuple(stores.launches),
            "program_seconds": stores.seconds,
            "uncompared": stores.reason,
            "unread": stores.unread if stores.reason else "",
        }
        return run, {"masks": {STORED: stored, STORED_AFTER: changed}, **sample}

    def _call_of_all_programs(self, stores: Stores) -> tuple[dict[str, Any], dict[str, Any]]:
        """The judged call after a sample whose results cannot be compared."""
        run = self._call(self._fresh())
        return run, {"masks": {}, "program_seconds": stores.seconds, "needs_all_programs": True}

    def _call(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        padding = current.advance()
        run = self._launch(tensors, before=self._inputs)
        if self._kept is not None:
            self._kept.keep(run["results"], tensors, padding)
        return settled(run, self._device)

    def _launch(self, tensors: dict[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Call the candidate, without waiting for the GPU; ``before`` are the values of the inputs that may change."""
        case, mode = self._case, contextlib.nullcontext()
        run = run_case(
            self._module,
            self._capture,
            tensors,
            self._device,
            mode,
            case.seed,
            case.kind,
            self._prepare_call,
            before=before,
        )
        self._changed_state.update(run["changed_state"])
        return run

    def _prepare_call(self, *arguments: Any) -> tuple[Call, list[Any]]:
        self._prepared, values = self._prepare(*arguments)
        function = self._prepared.function
        if current.is_program():
            # No frame of ours may be between the program and the candidate.
            return replace(self._prepared, function=functools.partial(current.call, function)), values
        function = functools.partial(self._threads.call, function)
        if self._reads is not None:
            function = functools.partial(self._reads.call, function)
        if grids.current.stores is not None:
            function = functools.partial(grids.watched, function)
        return replace(self._prepared, function=functools.partial(current.call, function)), values

    def _interference(self, judged: dict[str, Any], plan: CallPlan) -> str:
        """How a call on other contents, or of another instance, and earlier results disturb each other; empty if they do not."""
        if self._kept is None:
            return ""
        self._call_on_other_contents(self._fresh())
        if self._kept.is_overwritten():
            return OVERWRITTEN
        self._kept.overwrite()
        if not self._gives(judged):
            return "writing into an earlier result changes later results"
        if not plan.adds_instance or self._prepared is None or self._prepared.instance is None:
            return ""
        first, prepared = self._prepare, self._prepared
        try:
            self._call_another_instance()
            if not self._gives(judged):
                return "the results change when another instance with other parameters was called"
            self._prepare = self._prepare_another()
            return "" if self._gives(judged) else "a second instance with the same parameters gives other results"
        finally:
            self._prepare, self._prepared = first, prepared

    def _call_another_instance(self) -> None:
        """Call a new instance with other parameters."""
        first, prepared = self._prepare, self._prepared
        self._prepare = self._prepare_another()
        self._call_on_other_contents(self._fresh(), parameters=True)
        self._prepare, self._prepared = first, prepared

    def _fresh(self) -> dict[str, torch.Tensor]:
        """The inputs, with the arguments in new tensors."""
        self._restore(self._parameters, self._parameters)
        arguments = copies({name: self._inputs[name] for name in self._arguments})
        if self._case.layout in (ALIASED, SLICED, UNALIGNED):
            # In a file, tensors that are the same in the reference process are separate, and each begins at an aligned address.
            arguments = other_layout(arguments, self._arguments, self._case.layout)
        return {**current.placed(arguments), **self._parameters}

    def _restore(self, tensors: dict[str, torch.Tensor], names: Iterable[str]) -> None:
        written = []
        with torch.no_grad():
            for name in names:
                if tensors[name].grad_fn is not None and name in self._parameters:
                    # A buffer that the last call wrote depends on that call.
                    tensors[name].detach_()
                if not _shares_elements(tensors[name]):
                    written.append(name)
            if written:
                # One launch for many tensors.
                torch._foreach_copy_([tensors[name] for name in written], [self._inputs[name] for name in written])

    def _call_on_other_contents(self, tensors: dict[str, torch.Tensor], *, parameters: bool = False) -> None:
        """Call the candidate on the same tensors with other floating-point values, then restore the contents.

        Halving and reversing the values keeps them in their range, so the code should accept them.

        Args:
            parameters: whether parameters are other tensors with other values, too, which then keep these values.
        """
        if parameters:
            tensors = {**tensors, **copies({name: self._inputs[name] for name in self._parameters})}
        self._change_contents(tensors, (*self._arguments, *(self._parameters if parameters else ())))
        # The code may reject such values. The call on the inputs themselves then shows other errors. Nothing reads the results.
        with contextlib.suppress(Exception):
            self._launch(tensors, before={})
        if not parameters:
            self._restore(tensors, tensors)

    def _change_contents(self, tensors: dict[str, torch.Tensor], names: Iterable[str]) -> None:
        for name in names:
            value = tensors[name]
            if value.is_floating_point() and value.numel() and not _shares_elements(value):
                value.copy_(reversed_and_scaled(value, OTHER_SCALE))

    def _repeat(self, judged: dict[str, Any], plan: CallPlan) -> tuple[set[int], int]:
        """Which results differ between calls on equal inputs, and the number of these calls."""
        differing_results = set[int]()
        end = monotonic() + plan.repeat_seconds
        repeats = 0
        while repeats < plan.repeats and (repeats < LEAST_REPEATS or monotonic() < end):
            differing_results |= differing(outcome(judged), outcome(self._call(self._fresh())))
            repeats += 1
        return differing_results, repeats

    def _deciding_counts(self, judged: dict[str, Any]) -> list[str]:
        """The names of counts that change the results when they are as after many calls."""
        instance = self._prepared.instance if self._prepared is not None else None
        if self._kept is not None:
            self._kept.accept()
        before = kept_state(self._module, instance)
        changed = set[str]()
        for _ in range(OBSERVED_CALLS):
            self._call(self._fresh())
            after = kept_state(self._module, instance)
            changed |= {name for name, value in after.items() if before.get(name, value) != value}
            before = after
        loaded = state_after_loading.get(self._module, {})
        # Calls on equal inputs add no entries for other shapes.
        grown = {name for name, value in loaded.items() if before.get(name, value) != value} - changed
        if not changed and not grown:
            return []
        move_forward(self._module, instance, changed)
        lengthen(self._module, grown)
        # Numbers of a generator are small and large in turn.
        is_same = self._gives(judged) and self._gives(judged)
        # Memory for results in turn is used again after many calls.
        is_separate = self._kept is None or not self._kept.is_overwritten()
        return sorted(changed | grown) if not (is_same and is_separate) else []

    def _may_be_slow_original(self, plan: CallPlan) -> bool:
        """Whether each call is a long loop of the user's code if the guard refuses it."""
        is_long = loop_operations(self._capture.graph, self._case.sizes) > LOOP_OPERATIONS
        return is_long and self._candidate.separate is None and not plan.disables_kernels

    def _refusal(self) -> str:
        """Why the guard refuses the call; empty if there is no guard."""
        if self._candidate.separate is not None:
            return ""
        guards = guards_of(self._candidate.text, self._capture.workload.target.qualname)
        decisions = observe(self._module, guards, lambda: self._call(self._fresh())) if guards else []
        return next((item.reason for item in decisions if item.reason), "")

    def _library_operations(self, first: list[Any]) -> dict[str, Any]:
        """What torch does in one more call: arithmetic operations, and reads of contents in Python.

        Args:
            first: the results of the judged call. If later ones are in the same memory, calls go on until it is used up.
        """
        work, reads = LibraryWork(), HostReads()
        self._reads = reads
        try:
            with LaunchCount().counting(), work:
                run = self._launch(self._fresh(), before={})
        except Exception:  # the judged call reports errors
            return {}
        finally:
            self._reads = None
        largest = max((t.numel() for t in self._inputs.values() if t.is_floating_point()), default=0)
        is_on_host = largest and reads.converted >= HOST_PART * largest
        observed = {"library_operations": math.inf if is_on_host else work.operations, "host_reads": reads.count}
        calls = calls_until_reuse(first, run["results"])
        return {**observed, "interference": self._reuse(first, calls)} if calls else observed

    def _reuse(self, first: list[Any], calls: int) -> str:
        """How calls that put their results into one memory in turn disturb an earlier result; empty if they do not."""
        kept, end = KeptResults(), process_time() + REUSE_SECONDS
        kept.keep(first, {})
        for _ in range(calls):
            if process_time() > end:
                break
            tensors = self._fresh()
            self._change_contents(tensors, self._arguments)
            kept.keep(self._launch(tensors, before={})["results"], {})
        return OVERWRITTEN if kept.is_overwritten() else ""

    def _unused(self, judged: dict[str, Any], kernels: Collection[str]) -> list[str]:
        """The kernels without which the results are the same, tried one at a time.

        The others may wait forever for what a kernel would store, so their time is limited.
        """
        if not 1 < len(kernels) <= MOST_KERNELS:
            return []
        unused = []
        with grids.within(UNUSED_SECONDS):
            for name in sorted(kernels):
                with LaunchCount().counting(disabled=name):
                    unused += [name] if self._gives(judged) else []
        return unused

    def _gives(self, judged: dict[str, Any]) -> bool:
        """Whether one more call gives the same results."""
        try:
            return not differing(outcome(judged), outcome(self._call(self._fresh())))
        except Exception:  # any error that missing results cause
            return False


def _with_graph_layout(capture: Capture, name: str, tensor: torch.Tensor, case: Case) -> torch.Tensor:
    kind = next(item.type for item in capture.graph.inputs if item.name == name)
    strides = [size.value(case.sizes) for size in kind.stride]
    return tensor if list(tensor.stride()) == strides or not tensor.numel() else laid_out(tensor, strides)


def _shares_elements(tensor: torch.Tensor) -> bool:
    return shares_elements(tensor.shape, tensor.stride())
