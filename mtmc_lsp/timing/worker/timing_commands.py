"""Timing commands: a candidate against its baselines. Runs in a worker on a GPU."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._inductor import config as inductor

from mtmc_lsp.capture.worker.arguments.strided_tensors import shares_elements
from mtmc_lsp.capture.worker.calls import Call, build_call
from mtmc_lsp.core.errors import TensorSharingFailed
from mtmc_lsp.core.workload import Capture, WorkloadSource
from mtmc_lsp.process.gpu_lock import WAITING_ALONE, exclusively, lock_seconds, shared
from mtmc_lsp.process.protocol import NoAnswer
from mtmc_lsp.process.worker.gpu_memory import when_others_need_memory
from mtmc_lsp.process.worker.tensor_ipc import import_
from mtmc_lsp.timing.messages import (
    BaselinesRequest,
    RecompilationsAnswer,
    RecompilationsRequest,
    TimeAnswer,
    TimeRequest,
)
from mtmc_lsp.timing.worker.clock import Clock, CudaClock, Run
from mtmc_lsp.timing.worker.paired_benchmark import Compiled, Contenders, run_paired_benchmark
from mtmc_lsp.timing.worker.slow_original import Original
from mtmc_lsp.timing.worker.timing_integrity import coarsest_epsilon, error_text, rounded_within
from mtmc_lsp.timing.worker.training_call import run_of
from mtmc_lsp.verify.messages import SeparateCandidate
from mtmc_lsp.verify.worker.callers import module_of_candidate, prepared_candidate
from mtmc_lsp.verify.worker.inputs import make_inputs, prepared_call, relocated, reusing
from mtmc_lsp.verify.worker.instances import SharedInstance, instance_of
from mtmc_lsp.verify.worker.run_target import copies, module_of, release_gpu_memory, target_source

MODES = {"compile": "default", "max-autotune": "max-autotune", "reduce-overhead": "reduce-overhead"}
"""Baselines under ``torch.compile`` and their mode."""

_state: dict[str, Any] = {}
make_clock: Callable[[], Clock] = CudaClock
"""Creates the clock; tests replace it."""


def clock_of() -> Clock:
    """The clock, created before any candidate is loaded."""
    if "clock" not in _state:
        _state["clock"] = make_clock()
    clock: Clock = _state["clock"]
    return clock


def device_name() -> str:
    """Where the inputs are: ``cuda``, or ``cpu`` in tests."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def inputs_of(capture: Capture, user_source: str, shared_inputs: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """The user's module and the workload's inputs, created once or imported from the process that shares them."""
    clock_of()
    if "module" not in _state:
        module = module_of(capture, user_source, None)
        if shared_inputs:
            with contextlib.suppress(TensorSharingFailed):
                # Copy each tensor: shared tensors are views of one allocation, which torch.compile treats differently.
                _state["inputs"], _state["module"] = copies(import_(shared_inputs, device_name())), module
    if "module" not in _state:
        user_values = capture.workload.source is WorkloadSource.GET_INPUTS
        call = build_call(
            module,
            capture.workload,
            device_name(),
            capture.workload.sizes,
            values=user_values,
            construct=reusing(capture),
        )
        distribution = "given" if user_values else "normal"
        _state["inputs"] = make_inputs(capture, call, capture.graph.sizes, distribution, 0, device_name())
        _state["module"] = module
    return _state["module"], _state["inputs"]


def eager_version(capture: Capture, user_source: str) -> tuple[Call, list[Any]]:
    """The user's code on the workload's inputs."""
    module, inputs = inputs_of(capture, user_source)
    return prepared_call(module, capture, inputs, device_name())


Version = tuple[Call, list[Any]]
"""The call of a version of the user's file, and its arguments."""


def candidate_of(capture: Capture, user_source: str, source: str) -> Run:
    """The call of a version of the user's file on the workload's inputs."""
    return bound_version(capture, version_of(capture, user_source, source))


def bound_version(capture: Capture, version: Version) -> Run:
    """One call of a version on the workload's inputs, with its backward pass if the target is trained."""
    return run_of(capture, *version, _state["inputs"])


@contextlib.contextmanager
def restored_inputs(capture: Capture, user_source: str) -> Iterator[None]:
    """Restore the inputs that calls of the target change."""
    inputs = inputs_of(capture, user_source)[1]
    changed = {mutation.input for mutation in capture.graph.mutations} & inputs.keys()
    saved = {name: inputs[name].clone() for name in changed}
    try:
        yield
    finally:
        for name, value in saved.items():
            # Expanded and overlapping tensors cannot be written, so nothing can have changed them.
            if not shares_elements(value.shape, inputs[name].stride()):
                inputs[name].copy_(value)


def keep_prepared(versions: Mapping[str, Version]) -> None:
    """Keep loaded versions, by the text of their file, for the next request; those of an earlier one are dropped."""
    _state["prepared"] = dict(versions)


def is_prepared(source: str) -> bool:
    """Whether a version was prepared, and so called before."""
    return source in _state.get("prepared", {})


@when_others_need_memory
def drop_prepared() -> None:
    """Drop loaded versions, and the inputs unless compiled baselines are bound to them; the next request creates both again."""
    _state.pop("prepared", None)
    _state.pop("original", None)
    if "compiled" not in _state:
        _state.pop("inputs", None)
        _state.pop("module", None)


def version_of(capture: Capture, user_source: str, source: str) -> Version:
    """A version of the user's file; loaded unless it was prepared."""
    if is_prepared(source):
        version: Version = _state["prepared"].pop(source)
        return version
    inputs = inputs_of(capture, user_source)[1]
    return prepared_call(module_of(capture, user_source, source), capture, inputs, device_name())


def _separate(capture: Capture, user_source: str, source: str, candidate: SeparateCandidate) -> tuple[Call, list[Any]]:
    """A candidate in a separate file, on the workload's inputs and with the reference's parameters."""
    inputs = inputs_of(capture, user_source)[1]
    module = module_of_candidate(candidate.target, source)
    shared = SharedInstance(functools.partial(instance_of, replaced=()))
    return prepared_candidate(
        module, capture, inputs, device_name(), target=candidate.target, init=candidate.init, shared=shared
    )


def _compiled(capture: Capture, user_source: str, name: str) -> Compiled:
    """The user's code compiled by ``torch.compile``, cached."""
    compiled: dict[str, Compiled] = _state.setdefault("compiled", {})
    if name not in compiled:
        module, inputs = inputs_of(capture, user_source)
        call, values = prepared_call(module, capture, inputs, device_name())
        began = time.perf_counter()
        # A process pool takes longer to start than it saves, its idle processes would disturb timings, and on an H200 some
        # networks failed to compile with it inside the sandbox.
        inductor.compile_threads = 1
        try:
            compiled_call = replace(call, function=torch.compile(call.function, mode=MODES[name]))
            _state[f"{name} call"] = compiled_call
            run = bound_version(capture, (compiled_call, values))
            for _ in range(3):
                run()
            if device_name() == "cuda":
                torch.cuda.synchronize()
            compiled[name] = Compiled(run, "", time.perf_counter() - began)
        except (
            Exception
        ) as error:  # user code under a compiler may raise anything; the baseline is then omitted with a note
            compiled[name] = Compiled(None, f"torch.compile failed: {error_text(error)}")
    return compiled[name]


def compile_baselines(request: BaselinesRequest) -> NoAnswer:
    """Compile the user's code in advance, so that the first timing does not wait for it.

    Locks the GPU only during computation: compiling takes about a minute, during which others can verify and time.
    """
    capture = request.capture
    user_source = target_source(request.user_source, capture)

    def lock() -> contextlib.AbstractContextManager[None]:
        return _computing(request.gpu, request.lock_folder)

    with torch.no_grad():
        with lock():
            inputs_of(capture, user_source, request.inputs)
        for name in request.baselines:
            # max-autotune benchmarks on the GPU during the whole compilation.
            with lock() if name == "max-autotune" else running_within(lock):
                _compiled(capture, user_source, name)
    release_gpu_memory()
    return NoAnswer()


def count_recompilations(request: RecompilationsRequest) -> RecompilationsAnswer:
    """Call the user's code under ``torch.compile`` at other sizes, on inputs of these sizes."""
    from torch._dynamo.utils import counters

    capture = request.capture
    user_source = target_source(request.user_source, capture)
    with torch.no_grad():
        _compiled(capture, user_source, "compile")
        compiled_call: Call = _state["compile call"]
        module = inputs_of(capture, user_source)[0]
        eager = eager_version(capture, user_source)[0]
        before, seconds = counters["stats"]["unique_graphs"], 0.0
        for sizes in request.sizes:
            inputs = make_inputs(capture, eager, sizes, "normal", 0, device_name())
            values = prepared_call(module, capture, inputs, device_name())[1]
            graphs, began = counters["stats"]["unique_graphs"], time.perf_counter()
            run_of(capture, compiled_call, values, inputs)()
            if counters["stats"]["unique_graphs"] > graphs:
                seconds += time.perf_counter() - began
    release_gpu_memory()
    return RecompilationsAnswer(counters["stats"]["unique_graphs"] - before, seconds)


@contextlib.contextmanager
def _computing(gpu: str, locks: str) -> Iterator[None]:
    """Hold the GPU lock, if there is a GPU, until all launched work has finished."""
    if not gpu:
        yield
        return
    with shared(gpu, locks):
        yield
        torch.cuda.synchronize()


@contextlib.contextmanager
def running_within(lock: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Hold a lock while graphs from ``torch.compile`` run, but not while they are compiled.

    Eager parts run without the lock. If this torch version has no ``CompiledFxGraph``, the lock is held throughout.
    """
    try:
        from torch._inductor.output_code import CompiledFxGraph
    except ImportError:
        with lock():
            yield
        return
    original_call = CompiledFxGraph.__call__

    def locked(graph: CompiledFxGraph, inputs: Sequence[Any]) -> Any:
        with lock():
            return original_call(graph, inputs)

    CompiledFxGraph.__call__ = locked
    try:
        yield
    finally:
        CompiledFxGraph.__call__ = original_call


def time_candidate(request: TimeRequest) -> TimeAnswer:
    """Time a candidate against eager mode, ``torch.compile`` and the previous version."""
    capture = request.capture
    user_source = target_source(request.user_source, capture)
    with torch.no_grad():
        inputs = inputs_of(capture, user_source)[1]
        # Before the candidate is loaded, so that it cannot affect its baselines.
        compiled = {name: _compiled(capture, user_source, name) for name in request.baselines}
        separate = request.separate
        candidate_call = (
            _separate(capture, user_source, request.source, separate)
            if separate
            else version_of(capture, user_source, request.source)
        )
        eager = eager_version(capture, user_source)
        setup = Contenders(
            candidate=bound_version(capture, candidate_call),
            eager=bound_version(capture, eager),
            inputs=inputs,
            original=_state.setdefault("original", Original()),
            relocated=lambda: [
                item for call, _ in (candidate_call, eager) for item in relocated(call.instance, capture, inputs)
            ],
            compiled=compiled,
            previous=candidate_of(capture, user_source, request.previous) if request.previous else None,
            random=capture.uses_random,
            tolerance=rounded_within(capture.graph),
            epsilon=coarsest_epsilon(capture.graph),
            bound_us=request.bound_us,
            least_us=request.least_us,
            ends_when_clear=request.ends_when_clear,
        )
        window, waited = list[float](), lock_seconds[WAITING_ALONE]
        timing = run_paired_benchmark(setup, clock_of(), request.seconds, _alone(window))
    release_gpu_memory()
    return TimeAnswer(timing, (window[0], window[1]), lock_seconds[WAITING_ALONE] - waited)


@contextlib.contextmanager
def _alone(window: list[float]) -> Iterator[None]:
    """Use the GPU alone, and add the times at which that begins and ends."""
    with exclusively():
        window.append(time.monotonic())
        yield
        window.append(time.monotonic())
