"""Times versions of kernels that are already in a file, on a GPU, against the file as it stands. Runs in workers."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import torch

from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.core.workload import WorkloadSource
from mtmc_lsp.kernels.messages import ROW_METHOD, KernelTimeRequest
from mtmc_lsp.kernels.worker.autotuners import direct_launches, short_benchmarks, with_first_config
from mtmc_lsp.kernels.worker.launch_call import kernel_call
from mtmc_lsp.process.gpu_lock import WAITING_ALONE, exclusively, let_timings_pass, lock_seconds
from mtmc_lsp.process.worker.host_numbers import DrawingUnshared
from mtmc_lsp.process.worker.kernel_compilation import (
    compile_ahead,
    compiling_unshared,
    passing_at_launches,
    share_kernels,
)
from mtmc_lsp.timing.messages import TimeAnswer
from mtmc_lsp.timing.worker.clock import Run
from mtmc_lsp.timing.worker.paired_benchmark import (
    HOST_SHARE,
    SMALL_US,
    Contenders,
    check_plausible,
    summarise,
)
from mtmc_lsp.timing.worker.sampling import ROW_US, graph_medians, in_rows, interleaved, warm
from mtmc_lsp.timing.worker.timing_commands import clock_of, device_name

_modules: dict[str, Any] = {}
_compiled: set[tuple[str, str]] = set()
"""Texts that this process timed, each with the function that was called: their kernels are compiled."""


def time_kernels(request: KernelTimeRequest) -> TimeAnswer:
    """Sample the call of a version, of the file as it stands and of the version before, interleaved in random order."""
    clock = clock_of()
    seed = 0
    with torch.no_grad():
        texts = {"candidate": request.source, "eager": request.original, "previous": request.previous}
        loaded = {text: _run(request, text, seed) for text in dict.fromkeys(texts.values()) if text}
        runs = {name: loaded[text] for name, text in texts.items() if text}
        runs["control"] = runs["candidate"]
        for text, run in loaded.items():
            if _is_new(request, text):
                compile_ahead(run)
            # What was not compiled ahead is compiled while others may time.
            with compiling_unshared():
                with_first_config([*_modules.values()], run)
            _compiled.add((text, request.workload.target.qualname))
            let_timings_pass()
        waited = lock_seconds[WAITING_ALONE]
        with exclusively():
            began = time.monotonic()
            # Autotuners measure their configurations: what others compute meanwhile would decide which one they choose.
            with short_benchmarks():
                for run in runs.values():
                    run()
            rival = "previous" if request.previous else "eager"
            samples = interleaved(clock, runs, request.seconds, rival, is_final=True)
            median, host = (statistics.median(sample[i] for sample in samples["candidate"]) for i in (0, 1))
            batch = warm(clock, runs["candidate"], median)
            contenders = {name: run for name, run in runs.items() if name != "control"}
            is_launched = median < SMALL_US or host > HOST_SHARE * median
            graphs = graph_medians(clock, contenders) if is_launched else {}
            # Of longer calls, the flush before them hides a small part of the host's time.
            rows = in_rows(clock, runs, rival) if is_launched and median < ROW_US else {}
            ended = time.monotonic()
        peaks = {name: clock.peak_bytes(run)[1] for name, run in contenders.items()}
    check_plausible(median, batch, request.least_us)
    setup = Contenders(runs["candidate"], runs["eager"], {}, previous=runs.get("previous"), bound_us=request.bound_us)
    method = f"{clock.method}, contenders interleaved in random order, medians"
    timing = replace(summarise(samples, graphs, setup, peaks), warm_us=batch.event_us / batch.calls, method=method)
    if rows:
        by_rows = replace(summarise(rows, graphs, setup, peaks), warm_us=timing.warm_us, method=ROW_METHOD)
        timing = replace(timing, rows=by_rows)
    return TimeAnswer(timing, (began, ended), lock_seconds[WAITING_ALONE] - waited)


def _run(request: KernelTimeRequest, text: str, seed: int) -> Run:
    """One call of the launcher in a text; of a test in the file, the launches of its kernels alone."""
    if text not in _modules:
        path = request.workload.target.path
        _modules[text] = load_user_module(path, text, f"timed_kernels_{len(_modules)}")
        share_kernels(_modules[text])
    call = kernel_call(_modules[text], request.workload, device_name(), request.workload.sizes, seed)
    if request.workload.source is not WorkloadSource.SCRIPT:
        return call.bound()
    launches: list[Callable[[], Any]] = []

    def run() -> None:
        launches.clear()
        with recording_launches(launches, direct_launches(_modules[text])):
            call.run()

    # A version differs in one kernel, as a rule, and the test may take long: it does not run a further time to compile ahead.
    with torch.enable_grad(), DrawingUnshared(), passing_at_launches(), compiling_unshared():
        with_first_config([_modules[text]], run)
    return lambda: [launch() for launch in launches]


def _is_new(request: KernelTimeRequest, text: str) -> bool:
    return (text, request.workload.target.qualname) not in _compiled


@contextlib.contextmanager
def recording_launches(launches: list[Callable[[], Any]], helpers: Collection[type[Any]] = ()) -> Iterator[None]:
    """Note each launch of a kernel, with its arguments, so that it can be repeated without the code around it.

    Args:
        helpers: classes whose method ``launch`` launches kernels.
    """
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    kinds = [(kind, "run") for kind in (JITFunction, Autotuner, Heuristics, InterpretedFunction)]
    kinds += [(kind, "launch") for kind in helpers]
    originals = [getattr(kind, name) for kind, name in kinds]
    depth = [0]

    def recorded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            # An autotuner runs heuristics, which run the kernel: only the outermost one is a launch of the author's.
            if not depth[0]:
                launches.append(lambda: getattr(self, name)(*args, **kwargs))
            depth[0] += 1
            try:
                return original(self, *args, **kwargs)
            finally:
                depth[0] -= 1

        return run

    for (kind, name), original in zip(kinds, originals, strict=True):
        setattr(kind, name, recorded(name, original))
    try:
        yield
    finally:
        for (kind, name), original in zip(kinds, originals, strict=True):
            setattr(kind, name, original)
