"""Runs versions of kernels on the GPU, and compares their results with those of the file as it stands. Runs in workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.core.workload import WorkloadSource
from mtmc_lsp.kernels.messages import (
    NOT_RUN,
    VARIES,
    CaseTrace,
    Configs,
    Fault,
    FaultKind,
    KernelCheckRequest,
    LaunchWork,
    TraceAnswer,
    TraceCase,
)
from mtmc_lsp.kernels.worker.autotuners import (
    MOST_CONFIGS,
    TOO_LARGE,
    autotuners,
    direct_launches,
    most_configs,
    only_config,
    with_first_config,
)
from mtmc_lsp.kernels.worker.launch_call import case_call
from mtmc_lsp.kernels.worker.launch_record import launch_of
from mtmc_lsp.kernels.worker.results import difference, tensors_of
from mtmc_lsp.process.gpu_lock import let_timings_pass, unshared
from mtmc_lsp.process.worker.host_numbers import DrawingUnshared
from mtmc_lsp.process.worker.kernel_compilation import (
    compile_ahead,
    compile_seconds,
    compiling_unshared,
    passing_at_launches,
    share_kernels,
)
from mtmc_lsp.process.worker.threads import one_thread
from mtmc_lsp.timing.worker.timing_commands import device_name
from mtmc_lsp.verify.worker.interpreter import prepare_interpreter
from mtmc_lsp.verify.worker.run_target import is_interpreted

NEW = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
"""Functions that create tensors without values."""

_modules: dict[str, ModuleType] = {}
_expected: dict[tuple[str, str], list[torch.Tensor]] = {}
_first: dict[tuple[str, str], int] = {}
"""The configuration with which the file as it stands computed them."""


def check(request: KernelCheckRequest) -> TraceAnswer:
    """Run a version on each case, once for each of the chosen configurations of its autotuners, and compare the results."""
    if is_interpreted():
        prepare_interpreter()
    with one_thread():
        try:
            module = _module(request, request.source)
        except Exception as error:  # the user's code raises anything
            return TraceAnswer((), f"{type(error).__name__}: {error}")
        before = compile_seconds[0]
        traces = tuple(_checked(module, request, case) for case in request.cases)
    return TraceAnswer(traces, compile_seconds=compile_seconds[0] - before)


def _module(request: KernelCheckRequest, text: str) -> ModuleType:
    if text not in _modules:
        name = f"checked_kernels_{len(_modules)}"
        _modules[text] = load_user_module(request.workload.target.path, text, name)
        share_kernels(_modules[text])
    return _modules[text]


def _checked(module: ModuleType, request: KernelCheckRequest, case: TraceCase) -> CaseTrace:
    launches: list[LaunchWork] = []
    try:
        expected = _original(request, case, launches if request.source == request.original else [])
    except Exception as error:  # the user's code raises anything
        _raise_if_lost(error)
        if request.source != request.original:
            return CaseTrace(case, refusal=NOT_RUN)
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return CaseTrace(case, (Fault(FaultKind.RAISES, 0, "", text),))
    if request.source == request.original:
        return CaseTrace(case, (), launches=tuple(launches))
    numbers = [0] if request.configs is Configs.FIRST else _other_configs(module, _module(request, request.original))
    if len(numbers) > 1 and not is_interpreted():
        compile_ahead(lambda: _results(module, request, case), numbers)
    problem = ""
    for number in numbers:
        let_timings_pass()
        launches.clear()
        kernel = ""
        try:
            with only_config([module], number), recording(launches):
                results = _results(module, request, case)
                if direct_launches(module):
                    # The first launch only compiles what later ones launch directly.
                    results = _results(module, request, case)
        except Exception as error:  # the user's code raises anything
            _raise_if_lost(error)
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            if type(error).__name__ in TOO_LARGE and most_configs([module]) > 1:
                # The autotuner leaves such configurations out: another one is the first.
                is_left = request.configs is Configs.FIRST and number + 1 < most_configs([module])
                numbers += [number + 1] if is_left else []
                continue
            return CaseTrace(case, (Fault(FaultKind.RAISES, 0, kernel, problem),))
        problem = ""
        kernel = launches[-1].launch.kernel if launches else ""
        with unshared():
            detail = difference(results, expected)
        if detail and _varies(request, case):
            return CaseTrace(case, refusal=VARIES)
        if detail:
            suffix = f" with configuration {number + 1}" if number else ""
            return CaseTrace(case, (Fault(FaultKind.WRONG_VALUES, 0, kernel, f"{detail} on the GPU{suffix}"),))
    if problem and request.configs is Configs.FIRST:
        return CaseTrace(case, (Fault(FaultKind.RAISES, 0, "", problem),))
    return CaseTrace(case, (), launches=tuple(launches))


def _varies(request: KernelCheckRequest, case: TraceCase) -> bool:
    """Whether the file as it stands computes something else in a second run."""
    module = _module(request, request.original)
    with only_config([module], _first[request.original, str(case)]):
        again = _results(module, request, case)
    return bool(difference(again, _expected[request.original, str(case)]))


def _raise_if_lost(error: Exception) -> None:
    """Raise an error after which this process cannot use the GPU any more."""
    if "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError":
        raise error


def _original(request: KernelCheckRequest, case: TraceCase, launches: list[LaunchWork]) -> list[torch.Tensor]:
    key = (request.original, str(case))
    if key not in _expected or request.source == request.original:
        module = _module(request, request.original)

        def run() -> list[torch.Tensor]:
            launches.clear()
            with recording(launches):
                return [tensor.detach().cpu() for tensor in _results(module, request, case)]

        _first[key], _expected[key] = with_first_config([module], run)
    return _expected[key]


def _results(module: ModuleType, request: KernelCheckRequest, case: TraceCase) -> list[torch.Tensor]:
    """The results of a call, and its arguments after it."""
    call = case_call(module, request.workload, device_name(), case)
    # A test of the file may call backward().
    zero_indices = ZeroIndices() if request.has_zero_indices else contextlib.nullcontext()
    with (
        poisoned(),
        zero_indices,
        compiling_unshared(),
        DrawingUnshared(),
        passing_at_launches(),
        torch.set_grad_enabled(request.workload.source is WorkloadSource.SCRIPT),
    ):
        returned = call.run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return [tensor.cpu() for tensor in tensors_of([*tree_leaves(returned), *call.values])]


class ZeroIndices(TorchFunctionMode):  # type: ignore[misc]
    """Fills new integer tensors with zero."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        is_new = getattr(function, "__name__", "") in NEW and isinstance(result, torch.Tensor)
        return result.zero_() if is_new and not result.is_floating_point() and not result.is_complex() else result


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill new tensors with NaN: elements that no kernel writes are not compared."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


# Autotuners ----------------------------------------------------------------------------------------------------------


def _other_configs(module: ModuleType, original: ModuleType) -> list[int]:
    """The numbers of the configurations that the file as it stands does not have, without the first one."""
    before = {name: set(map(str, tuner.configs)) for name, tuner in autotuners(original).items()}
    new = {
        number
        for name, tuner in autotuners(module).items()
        for number, config in enumerate(tuner.configs)
        if number and str(config) not in before.get(name, ())
    }
    return sorted(new)[:MOST_CONFIGS]


@contextlib.contextmanager
def recording(launches: list[LaunchWork]) -> Iterator[None]:
    """Note the launches of kernels; of an autotuner, the last one, with what it chose."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    originals = {kind: kind.run for kind in (JITFunction, InterpretedFunction, Autotuner)}
    in_tuner: list[LaunchWork | None] = []

    def launched(original: Any) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(Exception):
                work = _work(self, args, kwargs)
                if in_tuner:
                    in_tuner[-1] = work
                else:
                    launches.append(work)
            return original(self, *args, **kwargs)

        return run

    def tuned(original: Any) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            in_tuner.append(None)
            try:
                return original(self, *args, **kwargs)
            finally:
                work = in_tuner.pop()
                if work is not None:
                    launches.append(work)

        return run

    for kind, original in originals.items():
        setattr(kind, "run", (tuned if kind is Autotuner else launched)(original))  # noqa: B010
    try:
        yield
    finally:
        for kind, original in originals.items():
            setattr(kind, "run", original)  # noqa: B010


def _work(kernel: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> LaunchWork:
    names = list(kernel.arg_names)
    if hasattr(kernel, "params"):
        constants = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
    else:
        constants = [name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    grid = kwargs.get("grid")
    grid = grid(values) if callable(grid) else grid
    grid = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    sizes = tuple(int(size) for size in grid) + (1,) * (3 - len(grid))
    programs = sizes[0] * sizes[1] * sizes[2]
    described = SimpleNamespace(fn=kernel.fn, constexprs=constants)
    launch = launch_of(kernel.fn.__name__, described, values, kwargs)
    numbers = {name: value for name, value in values.items() if type(value) is int and name in names}
    return LaunchWork(launch, sizes, programs, programs, 0.0, numbers)
