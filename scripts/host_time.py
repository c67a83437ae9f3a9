"""Measure the host's time of generated code on a CPU: nothing is compiled, and kernels are not run.

    python scripts/snapshot_code.py capture GRAPHS FILE::NAME ...    # once: needs torch, takes minutes
    python scripts/host_time.py GRAPHS [--filter TEXT] [--steps N] [--profile] [--out FILE]

Each stored graph is optimised by the greedy search with the roofline planner, the built-in coder and a fake measurer that keeps
every fusion, as for an H200. The last version runs on CPU tensors of 8 to 128 elements a dimension, so that torch's operators
take little more than their fixed time. Everything that the host does in a call runs as on a GPU, with three differences: a
launch ends where Triton's launcher would call the driver, the allocator is that of the CPU, and the backward pass runs in the
thread of the caller. On the host of a GPU, the driver adds some microseconds to each launch.

``launches`` counts kernels, ``calls`` the operations of torch that stay in both passes (without views and allocations),
``eager calls`` those of eager mode, ``tensors`` the allocations in both passes, and ``bytecodes`` the instructions of Python in
a call, torch's included. These numbers do not depend on the machine. The other columns are microseconds a call, the least mean
of many short batches: the whole call with its backward pass, the same by eager mode on the same tensors, and the parts of the
generated code, each measured alone. ``autograd`` is the rest of the call: ``torch.autograd.Function``, the engine, and saved
tensors. Compare columns of one machine that does nothing else.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from snapshot_code import DEVICES, NO_LIMIT_SECONDS, FakeMeasurer, load

from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.ir.regions import VIEWS
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.search.components import Events, Limits, SearchComponents
from mtmc_lsp.search.greedy import GreedySearch

LARGEST = (8, 32, 128)
"""The largest sizes of a dimension that has a name: the first that the guard accepts."""
BATCH_SECONDS, BATCHES = 0.01, 60
COLUMNS = (
    "launches",
    "calls",
    "eager calls",
    "tensors",
    "bytecodes",
    "call",
    "eager",
    "guard",
    "forward",
    "backward",
    "launch",
    "autograd",
)
ALLOCATIONS = frozenset("empty new_empty empty_like empty_strided new_empty_strided lift_fresh _reshape_alias".split())
"""Operations of torch that launch nothing, besides views."""
KEPT = (ActionKind.FUSE,)
"""Actions that the fake measurer finds faster. Others need a measurement."""


def rendered(captured: Capture, source: str, steps: int) -> str:
    """The file after the steps of a search that keeps each fusion."""
    kept = [source]

    def on_step(step: Any) -> None:
        if step.candidate is not None and step.action.kind in KEPT:
            kept.append(step.candidate.source)

    measurer = FakeMeasurer(DEVICES["h200"], "all", measured=False)
    parts = SearchComponents(
        RooflinePlanner(), BuiltinCoder(DEVICES["h200"]), measurer, False, Limits(NO_LIMIT_SECONDS, steps)
    )
    GreedySearch(captured, source, parts, Events(on_step=on_step)).run("host time", "")
    return kept[-1]


# In the process that measures ------------------------------------------------------------------------------------


def without_driver() -> None:
    """Let Triton launch on a GPU that is not there: a launch does everything but the call of the driver."""
    from triton.compiler import CompiledKernel
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    class Kernel(CompiledKernel):  # type: ignore[misc]
        """A compiled kernel that was loaded and does nothing."""

        def __init__(self) -> None:
            self.module, self.function, self.name, self.src = 1, 1, "kernel", None
            self.packed_metadata, self._run = (), lambda *_: None

        def __del__(self) -> None:
            """Unload nothing."""

    driver._active = SimpleNamespace(get_current_stream=lambda device: 0, get_current_device=lambda: 0)
    JITFunction.run = lambda self, *arguments, grid, warmup, **named: Kernel()


def least_us(run: Callable[[], Any]) -> float:
    """Microseconds of a call: the least mean of many batches."""
    began = time.perf_counter()
    run()
    count = max(1, int(BATCH_SECONDS / max(time.perf_counter() - began, 1e-6)))
    for _ in range(count):
        run()
    means = []
    for _ in range(BATCHES):
        began = time.perf_counter()
        for _ in range(count):
            run()
        means.append((time.perf_counter() - began) / count)
    return min(means) * 1e6


def count_calls(run: Callable[[], Any]) -> tuple[int, int]:
    """The operations of torch below autograd that a call makes without views and allocations, and the allocations."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counted: list[str] = []
    allocated: list[str] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.__name__.partition(".")[0]
            if name.startswith(("empty", "new_empty")):
                allocated.append(name)
            elif not func.is_view and name not in VIEWS | ALLOCATIONS:
                counted.append(name)
            return func(*args, **(kwargs or {}))

    with Counting():
        run()
    return len(counted), len(allocated)


def count_bytecodes(run: Callable[[], Any]) -> int:
    """The instructions that Python executes in a call."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return count


class Recorded:
    """The calls of a function of the generated code, with the arguments of the last one."""

    def __init__(self, module: Any, name: str) -> None:
        """Replace the function until :meth:`restore`."""
        self._module, self._name, self.function = module, name, getattr(module, name)
        self.count, self.arguments, self.named = 0, (), {}
        setattr(module, name, self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.count, self.arguments, self.named = self.count + 1, arguments, named
        return self.function(*arguments, **named)

    def restore(self) -> None:
        """Put the function back."""
        setattr(self._module, self._name, self.function)

    def us(self) -> float:
        """Microseconds of its call; 0 if there was none."""
        import torch

        if not self.count:
            return 0.0
        with torch.no_grad():
            return least_us(lambda: self.function(*self.arguments, **self.named))


@contextmanager
def kept_tables(module: Any) -> Iterator[None]:
    """Let the functions for tables return what they keep: while operations are counted they would compute it again."""
    functions = {name: each for name, each in vars(module).items() if name.endswith("_tables") and callable(each)}
    kept = {}
    for name, function in functions.items():
        tables = list(getattr(module, f"_{name.upper()}").values())
        kept[name] = function if not tables else lambda *_, tables=tables: tables[-1]
    vars(module).update(kept)
    try:
        yield
    finally:
        vars(module).update(functions)


def measure(captured: Capture, user: str, text: str, largest: int, *, profile: bool) -> dict[str, float]:
    """The columns of a target; none if the guard refuses these sizes."""
    import torch

    from mtmc_lsp.capture.worker.calls import build_call
    from mtmc_lsp.capture.worker.user_module import load_user_module
    from mtmc_lsp.timing.worker.training_call import run_of
    from mtmc_lsp.verify.worker.inputs import make_inputs, prepared_call
    from mtmc_lsp.verify.worker.interpreter.source import on_cpu

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    fixed = {name: size for name, size in captured.workload.sizes.items() if name not in captured.graph.sizes}
    sizes = {name: min(size, largest) for name, size in captured.graph.sizes.items()} | fixed
    path = captured.workload.target.path
    original = load_user_module(path, user, "host_time_original")
    version = load_user_module(path, on_cpu(text, user), "host_time_version")
    call = build_call(original, captured.workload, "cpu", sizes, values=False)
    inputs = make_inputs(captured, call, sizes, "normal", 0, "cpu")
    runs = {}
    for name, module in (("eager", original), ("call", version)):
        prepared, values = prepared_call(module, captured, inputs, "cpu")
        if not captured.workload.autocast:
            prepared = replace(prepared, mode=None)  # its context makes a CPU stand in for a GPU
        runs[name] = run_of(captured, prepared, values, inputs)
    guard_name = next(name for name in vars(version) if name.endswith("_fits"))
    base = guard_name.removesuffix("_fits")
    is_trained = hasattr(version, f"{base}_forward")
    names = {
        "guard": guard_name,
        "forward": f"{base}_forward" if is_trained else f"{base}_launch",
        "backward": f"{base}_backward",
    }
    recorded = {part: Recorded(version, name) for part, name in names.items() if hasattr(version, name)}
    direct = version._DirectLaunches
    launches, launch = [], direct.launch
    direct.launch = lambda self, *arguments: (launches.append((self, arguments)), launch(self, *arguments))
    runs["call"]()
    direct.launch = launch
    if not launches:
        return {}
    result = {"launches": float(len(launches)), "eager calls": float(count_calls(runs["eager"])[0])}
    for part in recorded.values():
        part.restore()
    result["calls"] = result["tensors"] = 0.0
    with kept_tables(version), torch.no_grad():
        for part in (recorded[name] for name in ("forward", "backward") if name in recorded):
            if part.count:
                counts = count_calls(lambda part=part: part.function(*part.arguments, **part.named))  # type: ignore[misc]
                result["calls"] += counts[0]
                result["tensors"] += counts[1]
    runs["call"]()  # after the counting, which changes what guards and launches keep
    result["bytecodes"] = float(count_bytecodes(runs["call"]))
    result |= {part: item.us() for part, item in recorded.items()}
    result["launch"] = least_us(lambda: [launch(kernel, *arguments) for kernel, arguments in launches])
    result |= {name: least_us(run) for name, run in runs.items()}
    result["autograd"] = result["call"] - sum(result.get(part, 0.0) for part in names)
    if profile:
        calls = 2000
        profiler = cProfile.Profile()
        with profiler:
            for _ in range(calls):
                runs["call"]()
        print(f"{calls} calls of {captured.workload.target.qualname}")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    return result


def main(arguments: Sequence[str]) -> int:
    """Measure the graphs of a folder; returns the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("graphs", type=Path, help="folder of `snapshot_code.py capture`, or one of its files")
    parser.add_argument("--filter", default="", help="only targets whose names contain this")
    parser.add_argument("--steps", type=int, default=8, help="most steps of a search")
    parser.add_argument("--code", type=Path, help="write the generated files into this folder")
    parser.add_argument("--profile", action="store_true", help="also print the functions that take most time")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args(arguments)
    if options.graphs.is_file():
        captured, source = load(options.graphs)
        text = rendered(captured, source, options.steps)
        if options.code is not None:
            options.code.mkdir(parents=True, exist_ok=True)
            (options.code / f"{options.graphs.stem}.py").write_text(text, encoding="utf-8")
        without_driver()
        results = (measure(captured, source, text, largest, profile=options.profile) for largest in LARGEST)
        found = next(filter(None, results), None)
        if found is None:
            raise SystemExit("the guard refuses small sizes")
        print(json.dumps(found))
        return 0
    table: dict[str, dict[str, float]] = {}
    print(f"{'target':40}" + "".join(f"{name:>12}" for name in COLUMNS))
    for path in sorted(options.graphs.glob("*.json")):
        if path.name == "failed.json" or options.filter not in path.stem:
            continue
        command = [sys.executable, __file__, str(path), "--steps", str(options.steps)]
        command += ["--profile"] if options.profile else []
        command += ["--code", str(options.code)] if options.code is not None else []
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        *words, last = process.stdout.splitlines() or [""]
        if process.returncode:
            print(f"{path.stem:40}{process.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        table[path.stem] = json.loads(last)
        row = "".join(f"{table[path.stem].get(name, 0.0):12.1f}" for name in COLUMNS)
        print("\n".join([*words, f"{path.stem:40}{row}"]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
