"""What the comparisons of delivered versions with other libraries share: versions, inputs, distances, times and rows."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

import torch

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
from mtmc_lsp.timing.worker.sampling import GRAPH_WORTH, graph_medians, interleaved
from mtmc_lsp.verify.worker.run_target import flatten

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
GRAPH_US = 2000.0
"""Shorter calls are also timed from a CUDA graph, without the host."""

Function = Callable[..., Any]
Maker = Callable[[], Run | None]
"""Makes a contender; None if there is none."""
Row = Mapping[str, Any]
Tensors = dict[str, torch.Tensor]


class Compared(Protocol):
    """A target at certain sizes."""

    @property
    def problem(self) -> str:
        """Its file and name."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Its named sizes."""


CaseT = TypeVar("CaseT", bound=Compared)


# Versions and inputs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Version:
    """A target of a suite, and what a run delivered for it."""

    problem: str
    workload: Workload
    original: ModuleType
    """The file of the suite."""
    delivered: ModuleType | None
    """The version of the file that the run delivered; None if the file stays as it was."""
    row: dict[str, Any]
    """The problem's row in the results."""


def versions(results: Path, suites: Mapping[str, Path], pattern: str, folder: Path) -> Iterator[Version]:
    """The versions of the problems that a results file has.

    Args:
        suites: the folder of each problem.
        pattern: only problems with this text in their names.
        folder: where the delivered versions are written.
    """
    rows: dict[str, dict[str, Any]] = {}
    for line in results.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows[row["problem"].rpartition("/")[2]] = row
    with Store(results.resolve().parent / FOLDER) as store:
        for problem, suite in suites.items():
            if problem not in rows or pattern not in problem:
                continue
            row, (path, function) = rows[problem], file_of(problem, suite)
            run = store.result(row["id"]) if "id" in row and RunStatus(row["status"]) in KEPT else None
            delivered = None
            if run is not None:
                copy = folder / f"{path.stem}_{function.replace('.', '_')}.py"
                copy.write_text(run.final.source, encoding="utf-8")
                delivered = load_file(copy)
            yield Version(problem, workload_of(problem, suite), load_file(path), delivered, row)


def file_of(problem: str, suite: Path) -> tuple[Path, str]:
    """The file of a problem and the name of its target."""
    name, _, function = problem.partition("::")
    return suite / f"{name}.py", function


def workload_of(problem: str, suite: Path) -> Workload:
    """The workload in the directive of a problem."""
    path, function = file_of(problem, suite)
    text = path.read_bytes()
    workload = parse_directive(text, find_target(text, str(path), function), str(path))
    assert workload is not None
    return workload


def made_inputs(workload: Workload, sizes: Mapping[str, int], device: str) -> Tensors:
    """The tensors of a workload, equal at every call."""
    torch.manual_seed(0)
    made: Tensors = {}
    with torch.device(device):
        for name, spec in workload.tensors.items():
            # The expression is made from the workload of this repository, not from text of others.
            made[name] = eval(tensor_expression(spec, dict(sizes)), {"torch": torch}).detach()
    return made


def guard_of(delivered: object) -> Function | None:
    """The guard of a delivered version; None if it has none."""
    guards = [value for name, value in vars(delivered).items() if name.endswith(SUFFIX) and callable(value)]
    return guards[0] if guards else None


# Distances and times ----------------------------------------------------------------------------------------------


def distance(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest relative distance (Euclidean norm) of some tensors; infinite if they differ in number or shape."""
    if [each.shape for each in results] != [each.shape for each in expected]:
        return math.inf
    distances = [0.0]
    for ours, theirs in zip(results, expected, strict=True):
        norm = float(torch.linalg.vector_norm(theirs, dtype=torch.float32))
        apart = float(torch.linalg.vector_norm(ours.float() - theirs.float()))
        distances.append(apart / norm if norm else apart)
    # A NaN is not less than a limit.
    return max(math.inf if math.isnan(each) else each for each in distances)


def measured(
    makers: Mapping[str, Maker],
    clock: Clock,
    seconds: float,
    same: float,
    device: str,
    candidates: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """The contenders' distances from eager mode, times and peaks. A contender that fails has an error instead.

    Args:
        makers: of the contenders; the first one is eager mode.
        same: most relative distance from the results of eager mode.
        candidates: contenders; the first one that works counts. Others that are far slower than it are called a few times only.
    """
    runs: dict[str, Run] = {}
    entries: dict[str, dict[str, Any]] = {name: {} for name in makers}
    eager = next(iter(makers))
    expected: list[torch.Tensor] = []
    for name, make in makers.items():
        try:
            run = make()
            if run is None:
                continue
            results = [each for each in flatten(run()) if isinstance(each, torch.Tensor)]
            if name == eager:
                expected = results
            elif expected:
                entries[name]["distance"] = apart = distance(results, expected)
                if apart > same:
                    raise ArithmeticError(f"its results differ from those of eager mode: {apart:.3g}")
            del results
            for _ in range(2):
                run()
            runs[name] = run
        except Exception as error:  # a contender may fail in any way; the others are still compared
            text = str(error).splitlines()[0] if str(error) else ""
            entries[name]["error"] = f"{type(error).__name__}: {text}"[:300]
            _release(device)
    expected.clear()
    _release(device)
    if eager in runs:
        try:
            candidate = next((name for name in candidates if name in runs), "")
            times = median_times(runs, clock, seconds, candidate)
        except RuntimeError as error:  # such as too little memory for all contenders
            times = {eager: {"error": f"{type(error).__name__} while the contenders were timed"}}
        for name, time_of in times.items():
            entries[name] |= time_of
    return entries


def median_times(
    runs: Mapping[str, Run], clock: Clock, seconds: float, candidate: str = ""
) -> dict[str, dict[str, Any]]:
    """Median times and peaks of some contenders, in interleaved samples.

    Args:
        candidate: a contender. Others that are far slower than it are called a few times only, and not from a CUDA graph.
    """
    roles = {name: "candidate" if name == candidate else name for name in runs}
    sampled = interleaved(clock, {roles[name]: run for name, run in runs.items()}, seconds)
    samples = {name: sampled[role] for name, role in roles.items()}
    medians = {name: statistics.median(device for device, _ in values) for name, values in samples.items()}
    least = min(medians.values())
    short = {name: run for name, run in runs.items() if not candidate or medians[name] <= GRAPH_WORTH * least}
    graphs = graph_medians(clock, short) if least < GRAPH_US else {}
    return {
        name: {
            "us": medians[name],
            "graph_us": graphs.get(name),
            "peak_bytes": clock.peak_bytes(run)[1],
            "samples": len(samples[name]),
        }
        for name, run in runs.items()
    }


def _release(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()


# Rows -------------------------------------------------------------------------------------------------------------


def identity(row: Row) -> tuple[str, str]:
    """What a row is about."""
    return row["problem"], " ".join(f"{name}={value}" for name, value in row["sizes"].items())


def delivered_us(row: Row) -> float | None:
    """The time of the file that the user has: eager mode's if nothing was delivered."""
    us: float | None = row["ours"].get("us") or row["eager"].get("us")
    return us


def ours_text(row: Row) -> str:
    """The time of the delivered version for a table, or why there is none."""
    if not row["ours"].get("us"):
        return "failed" if row["ours"].get("error") else "not delivered"
    return number(row["ours"]["us"]) + (" (original code)" if row["kernels_run"] is False else "")


def number(value: float | None) -> str:
    """A number for a table; empty if there is none."""
    return "" if value is None else f"{value:.0f}"


def end_of_table(rows: Sequence[Row], names: Callable[[Row], Sequence[str]]) -> list[str]:
    """The lines below a table: errors of the contenders, commits and versions."""
    errors = [(*identity(row), name, row[name]["error"]) for row in rows for name in names(row) if "error" in row[name]]
    facts = sorted({json.dumps({key: row[key] for key in ("commit", "gpu", "versions")}) for row in rows})
    return [*(f"{target} {sizes}, {name}: {error}" for target, sizes, name, error in errors), *facts]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of an output; none if it does not exist."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def provenance(packages: Iterable[str]) -> dict[str, Any]:
    """The commit, the GPU and the versions of those packages that are installed."""
    installed = {each.metadata["Name"] for each in importlib.metadata.distributions()}
    found = {name: importlib.metadata.version(name) for name in packages if name in installed}
    gpu = torch.cuda.get_device_name()
    return {"commit": current_build().commit, "gpu": gpu, "versions": found | {"python": sys.version.split()[0]}}


@dataclass(frozen=True)
class Comparison:
    """The parts of a command that differ between comparisons."""

    script: str
    """The file name of the command."""
    title: str
    suite: str
    """The folder that ``mtmc bench`` runs on."""
    packages: Sequence[str]
    names: Callable[[Row], Sequence[str]]
    """The contenders of a row."""
    summary: Callable[[Sequence[Row]], str]

    def run(
        self,
        cases: Callable[[Path, Path, str], Iterable[tuple[CaseT, Row]]],
        measure: Callable[[CaseT, Clock, float], Row],
    ) -> int:
        """Compare, or show what was compared; returns the exit code.

        Args:
            cases: from a results file, a folder for the delivered versions and a part of names to cases with their results.
            measure: makes a row.
        """
        parser = argparse.ArgumentParser(prog=self.script, description=self.title)
        parser.add_argument("results", type=Path, nargs="?", help=f"output of `mtmc bench {self.suite}`")
        parser.add_argument("--out", type=Path, help="file of JSON lines")
        parser.add_argument("--filter", default="", help="only targets with this text in their names")
        parser.add_argument("--seconds", type=float, default=2.0, help="seconds of samples for a row")
        parser.add_argument("--time-limit", type=float, default=math.inf, help="no row begins after so many seconds")
        parser.add_argument("--summary", type=Path, help="only print the table of this output")
        options = parser.parse_args()
        if options.summary is not None:
            print(self.summary(rows_of(options.summary)))
            return 0
        if options.results is None or options.out is None:
            parser.error("RESULTS and --out are needed, or --summary FILE")
        if not torch.cuda.is_available():
            print(f"{self.script} needs a CUDA GPU", file=sys.stderr)
            return 3
        began, facts, clock = time.monotonic(), provenance(self.packages), CudaClock()
        done = {identity(row) for row in rows_of(options.out)}
        with tempfile.TemporaryDirectory() as folder, options.out.open("a", encoding="utf-8") as out:
            for case, result in cases(options.results, Path(folder), options.filter):
                head = {"problem": case.problem, "sizes": dict(case.sizes)}
                if identity(head) in done or time.monotonic() - began > options.time_limit:
                    continue
                row = {**head, **facts, "bench_commit": result.get("commit"), "status": result.get("status")}
                row |= measure(case, clock, options.seconds)
                out.write(json.dumps(row) + "\n")
                out.flush()
                times = {name: round(row[name].get("us", 0)) for name in self.names(row)}
                print(*identity(head), times, flush=True)
        rows = rows_of(options.out)
        print(self.summary(rows))
        return int(any("error" in row[name] for row in rows for name in self.names(row)))
