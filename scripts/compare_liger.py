"""Time the delivered training kernels beside Liger-Kernel, eager mode and ``torch.compile``, on a GPU.

    pip install liger-kernel
    mtmc bench benchmarks/training --out RESULTS
    python scripts/compare_liger.py RESULTS --out FILE [--filter TEXT] [--seconds S] [--time-limit S]
    python scripts/compare_liger.py --summary FILE

RESULTS is the output of ``mtmc bench``; the code of its versions is read from the store in ``.mtmc`` beside it. All
contenders run in one process on equal inputs: forward and backward pass, interleaved, by the functions that time candidates
in a run. Liger-Kernel's results and gradients are first compared with those of eager mode, and a contender with other
results has no times. FILE gets one JSON line per target and size; started again, the command skips the rows that FILE has.
Exit codes: 1 if a row has an error, 3 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from liger_counterparts import COUNTERPARTS, Counterpart, Function, Liger
from torch._inductor import config as inductor

from mtmc_lsp.app.export import tensor_expression
from mtmc_lsp.app.provenance import current_build
from mtmc_lsp.core.run import KEPT, RunStatus
from mtmc_lsp.core.workload import Workload
from mtmc_lsp.guard.conditions import SUFFIX
from mtmc_lsp.process.module_files import load_file
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.search.store import Store
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.source.workload.directive import parse_directive
from mtmc_lsp.timing.worker.clock import Clock, CudaClock, Run
from mtmc_lsp.timing.worker.sampling import graph_medians, interleaved
from mtmc_lsp.verify.worker.run_target import flatten

ROOT = Path(__file__).resolve().parent.parent
SUITE = ROOT / "benchmarks" / "training"
CONTENDERS = ("eager", "compile", "liger", "ours")
SAME = 0.03
"""Most relative distance (Euclidean norm) of Liger-Kernel's results and gradients from eager mode's: a bfloat16 has 8 bits."""
GRAPH_US = 2000.0
"""Shorter calls are also timed from a CUDA graph, without the host."""

Tensors = dict[str, torch.Tensor]


@dataclass
class Case:
    """A target at certain sizes."""

    problem: str
    sizes: Mapping[str, int]
    workload: Workload
    original: Function
    delivered: ModuleType | None
    """The version of the file that a run delivered; None if the file stays as it was."""
    counterpart: Counterpart
    device: str = "cuda"
    trained: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.trained = tuple(name for name, spec in self.workload.tensors.items() if spec.requires_grad)

    def inputs(self) -> Tensors:
        """The inputs, equal at every call."""
        torch.manual_seed(0)
        made: Tensors = {}
        with torch.device(self.device):
            for name, spec in self.workload.tensors.items():
                # The expression is made from the workload of this repository, not from text of others.
                made[name] = eval(tensor_expression(spec, dict(self.sizes)), {"torch": torch}).detach()
        for name in self.counterpart.zeroed:
            made[name].zero_()
        for name in self.counterpart.equal_halves:
            made[name] = torch.cat((made[name].chunk(2, -1)[0],) * 2, -1)
        return made

    def for_liger(self) -> Tensors:
        """The same inputs in the memory layout that Liger-Kernel prefers."""
        made = self.inputs()
        for name in self.counterpart.rows_first:
            made[name] = made[name].transpose(1, 2).contiguous().transpose(1, 2)
        return made

    def function_of_ours(self) -> Function | None:
        """The delivered version of the target."""
        return None if self.delivered is None else getattr(self.delivered, self.problem.partition("::")[2])

    def kernels_run(self) -> bool | None:
        """Whether the guard of the delivered version takes these calls; None if it has no guard."""
        guard = getattr(self.delivered, self.problem.partition("::")[2] + SUFFIX, None)
        if guard is None:
            return None
        made = self.inputs()
        for name in self.trained:
            made[name].requires_grad_()
        call = inspect.signature(self.original).bind(**made)
        call.apply_defaults()
        return bool(guard(*(call.arguments[name] for name in inspect.signature(guard).parameters)))


class BothPasses:
    """A call with its backward pass. Each contender has its inputs and upstream gradients alone: some overwrite them."""

    def __init__(self, function: Function, inputs: Tensors, trained: Sequence[str]) -> None:
        self._function, self._inputs = function, inputs
        self._leaves = [inputs[name].requires_grad_() for name in trained]
        self._upstream: list[torch.Tensor] = []

    def __call__(self) -> list[torch.Tensor]:
        """The results and the gradients."""
        results = [each for each in flatten(self._function(*self._inputs.values())) if each is not None]
        outputs = [each for each in results if each.requires_grad]
        if not self._upstream:
            generator = torch.Generator(outputs[0].device).manual_seed(1)
            self._upstream = [_upstream(each, generator) for each in outputs]
        gradients = torch.autograd.grad(outputs, self._leaves, self._upstream)
        return [each.detach() for each in (*results, *gradients)]


def _upstream(result: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random numbers for a tensor, 1 for a loss."""
    if result.dim() == 0:
        return torch.ones_like(result)
    return torch.randn(result.shape, generator=generator, device=result.device, dtype=result.dtype)


def distance(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest relative distance of the results and gradients; infinite if they differ in number or shape."""
    if [each.shape for each in results] != [each.shape for each in expected]:
        return math.inf
    distances = [0.0]
    for ours, theirs in zip(results, expected, strict=True):
        norm = float(torch.linalg.vector_norm(theirs, dtype=torch.float32))
        apart = float(torch.linalg.vector_norm(ours.float() - theirs.float()))
        distances.append(apart / norm if norm else apart)
    # A NaN is not less than a limit.
    return max(math.inf if math.isnan(each) else each for each in distances)


def measured(case: Case, liger: Callable[[], Any], clock: Clock, seconds: float) -> dict[str, Any]:
    """One row: the contenders' distances from eager mode, times and peaks. A contender that fails has an error instead."""
    runs: dict[str, Run] = {}
    row: dict[str, Any] = {name: {} for name in CONTENDERS}
    expected: list[torch.Tensor] = []
    for name in CONTENDERS:
        try:
            run = _contender(case, name, liger)
            if run is None:
                continue
            results = run()
            if name == "eager":
                expected = results
            elif expected:
                row[name]["distance"] = apart = distance(results, expected)
                if apart > SAME:
                    raise ArithmeticError(f"its results differ from those of eager mode: {apart:.3g}")
            del results
            for _ in range(2):
                run()
            runs[name] = run
        except Exception as error:  # a contender may fail in any way; the others are still compared
            row[name]["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
            _release(case.device)
    expected.clear()
    _release(case.device)
    if "eager" in runs:
        try:
            times = _times(runs, clock, seconds)
        except RuntimeError as error:  # such as too little memory for all contenders
            times = {"eager": {"error": f"{type(error).__name__} while the contenders were timed"}}
        for name, time_of in times.items():
            row[name] |= time_of
        row["kernels_run"] = case.kernels_run() if "ours" in runs else None
    return row


def _times(runs: Mapping[str, Run], clock: Clock, seconds: float) -> dict[str, dict[str, Any]]:
    """Median times and peaks of the contenders."""
    samples = interleaved(clock, runs, seconds)
    medians = {name: statistics.median(device for device, _ in values) for name, values in samples.items()}
    graphs = graph_medians(clock, runs) if min(medians.values()) < GRAPH_US else {}
    return {
        name: {
            "us": medians[name],
            "graph_us": graphs.get(name),
            "peak_bytes": clock.peak_bytes(run)[1],
            "samples": len(samples[name]),
        }
        for name, run in runs.items()
    }


def _contender(case: Case, name: str, liger: Callable[[], Any]) -> Run | None:
    if name == "eager":
        return BothPasses(case.original, case.inputs(), case.trained)
    if name == "compile":
        torch._dynamo.reset()
        inductor.compile_threads = 1
        return BothPasses(torch.compile(case.original), case.inputs(), case.trained)
    if name == "liger":
        return BothPasses(case.counterpart.call(liger()), case.for_liger(), case.trained)
    ours = case.function_of_ours()
    return None if ours is None else BothPasses(ours, case.inputs(), case.trained)


def _release(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()


def cases(results: Path, folder: Path, pattern: str, device: str = "cuda") -> Iterator[tuple[Case, dict[str, Any]]]:
    """The cases of all problems in a results file that have a counterpart, with the problem's result.

    Args:
        folder: where the delivered versions are written.
    """
    rows: dict[str, dict[str, Any]] = {}
    for line in results.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows[row["problem"].rpartition("/")[2]] = row
    with Store(results.resolve().parent / FOLDER) as store:
        for problem, counterpart in COUNTERPARTS.items():
            if problem not in rows or pattern not in problem:
                continue
            row = rows[problem]
            name, _, function = problem.partition("::")
            path = SUITE / f"{name}.py"
            text = path.read_bytes()
            workload = parse_directive(text, find_target(text, str(path), function), str(path))
            assert workload is not None
            run = store.result(row["id"]) if "id" in row and RunStatus(row["status"]) in KEPT else None
            delivered = None
            if run is not None:
                copy = folder / f"{name}_{function}.py"
                copy.write_text(run.final.source, encoding="utf-8")
                delivered = load_file(copy)
            original = getattr(load_file(path), function)
            for changes in counterpart.sizes:
                sizes = {**workload.sizes, **changes}
                yield Case(problem, sizes, workload, original, delivered, counterpart, device), row


def identity(row: Mapping[str, Any]) -> tuple[str, str]:
    """What a row is about."""
    return row["problem"], " ".join(f"{name}={value}" for name, value in row["sizes"].items())


def best_of_others(row: Mapping[str, Any]) -> float | None:
    """The shortest time of eager mode, ``torch.compile`` and Liger-Kernel."""
    return min((row[name]["us"] for name in CONTENDERS[:3] if row[name].get("us")), default=None)


def delivered_us(row: Mapping[str, Any]) -> float | None:
    """The time of the file that the user has: eager mode's if nothing was delivered."""
    us: float | None = row["ours"].get("us") or row["eager"].get("us")
    return us


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table, and the geometric means below it."""
    lines = [
        "| target | eager us | compile us | Liger us | ours us | over best | GPU alone us: eager, compile, Liger, ours |"
    ]
    lines[0] += " peak MiB: eager, compile, Liger, ours |"
    lines.append("|---|---|---|---|---|---|---|---|")
    gains: dict[str, list[float]] = {name: [] for name in (*CONTENDERS[:3], "best")}
    for row in rows:
        times = [_number(row[name].get("us")) for name in CONTENDERS]
        us, best = delivered_us(row), best_of_others(row)
        if us and best:
            gains["best"].append(best / us)
            for name in CONTENDERS[:3]:
                if row[name].get("us"):
                    gains[name].append(row[name]["us"] / us)
        target, sizes = identity(row)
        if not row["ours"].get("us"):
            times[-1] = "not delivered" if not row["ours"].get("error") else "failed"
        elif row["kernels_run"] is False:
            times[-1] += " (original code)"
        graphs = ", ".join(_number(row[name].get("graph_us")) or "-" for name in CONTENDERS)
        peaks = ", ".join(_number(_mib(row[name].get("peak_bytes"))) or "-" for name in CONTENDERS)
        ratio = f"{best / us:.2f}" if us and best else ""
        lines.append(f"| {target.partition('::')[2]} {sizes} | {' | '.join(times)} | {ratio} | {graphs} | {peaks} |")
    lines.append("")
    for name, ratios in gains.items():
        if ratios:
            over = "the best of the others" if name == "best" else name
            least = sum(each >= 1 for each in ratios)
            lines.append(
                f"As delivered, over {over}: {statistics.geometric_mean(ratios):.2f}x (geometric mean of {len(ratios)}); "
                f"{least} at least 1.0x."
            )
    errors = [(identity(row), name, row[name]["error"]) for row in rows for name in CONTENDERS if "error" in row[name]]
    lines += [f"{target} {sizes}, {name}: {error}" for (target, sizes), name, error in errors]
    versions = sorted({json.dumps({key: row[key] for key in ("commit", "gpu", "versions")}) for row in rows})
    return "\n".join([*lines, *versions])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _mib(value: int | None) -> float | None:
    return None if value is None else value / 2**20


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of an output; none if it does not exist."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def provenance() -> dict[str, Any]:
    """The commit, the GPU and the versions of the libraries."""
    packages = ("torch", "triton", "liger-kernel")
    versions = {name: importlib.metadata.version(name) for name in packages}
    gpu = torch.cuda.get_device_name()
    return {"commit": current_build().commit, "gpu": gpu, "versions": versions | {"python": sys.version.split()[0]}}


def main() -> int:
    """Compare, or show what was compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="?", help="output of `mtmc bench benchmarks/training`")
    parser.add_argument("--out", type=Path, help="file of JSON lines")
    parser.add_argument("--filter", default="", help="only targets with this text in their names")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of samples for a row")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="no row begins after so many seconds")
    parser.add_argument("--summary", type=Path, help="only print the table of this output")
    options = parser.parse_args()
    if options.summary is not None:
        print(summary(rows_of(options.summary)))
        return 0
    if options.results is None or options.out is None:
        parser.error("RESULTS and --out are needed, or --summary FILE")
    if not torch.cuda.is_available():
        print("compare_liger.py needs a CUDA GPU", file=sys.stderr)
        return 3
    began, facts, clock = time.monotonic(), provenance(), CudaClock()
    done = {identity(row) for row in rows_of(options.out)}
    with tempfile.TemporaryDirectory() as folder, options.out.open("a", encoding="utf-8") as out:
        for case, result in cases(options.results, Path(folder), options.filter):
            head = {"problem": case.problem, "sizes": dict(case.sizes)}
            if identity(head) in done or time.monotonic() - began > options.time_limit:
                continue
            row = {**head, **facts, "bench_commit": result.get("commit"), "status": result.get("status")}
            row |= measured(case, Liger, clock, options.seconds)
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(*identity(head), {name: round(row[name].get("us", 0)) for name in CONTENDERS}, flush=True)
    rows = rows_of(options.out)
    print(summary(rows))
    return int(any("error" in row[name] for row in rows for name in CONTENDERS))


if __name__ == "__main__":
    sys.exit(main())
