"""Time delivered kernels of loops beside kernels that others wrote by hand for the same recurrence, on a GPU.

    pip install fla-core
    mtmc bench benchmarks/loops --out RESULTS               # or benchmarks/loops_cudnn
    python scripts/compare_loops.py RESULTS --out FILE [--filter TEXT] [--seconds S] [--time-limit S]
    python scripts/compare_loops.py --summary FILE

The others are flash-linear-attention, cuDNN's recurrent layers and scans of torch. RESULTS is the output of ``mtmc bench``; the
code of its versions is read from the store in ``.mtmc`` beside it. All contenders run in one process on equal inputs: forward
pass, interleaved, by the functions that time candidates in a run. Results are first compared with those of eager mode, and a
contender with other results has no times. FILE gets one JSON line per target; started again, the command skips the rows that
FILE has.
Exit codes: 1 if a row has an error, 3 without a GPU.
"""

from __future__ import annotations

import inspect
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from compared import (
    Comparison,
    Function,
    Maker,
    Row,
    Tensors,
    Version,
    delivered_us,
    end_of_table,
    guard_of,
    identity,
    made_inputs,
    number,
    ours_text,
    versions,
)
from compared import measured as measured_contenders
from loop_counterparts import COUNTERPARTS, Counterpart

from mtmc_lsp.core.workload import Workload
from mtmc_lsp.timing.worker.clock import Clock, Run

SAME = 0.01
"""Most relative distance (Euclidean norm) of results from those of eager mode: products in TF32 have 11 bits."""
GOALS = (0.7, 1.0)
"""Ratios of times that are counted."""


@dataclass(frozen=True)
class Case:
    """A target at the sizes of its workload."""

    problem: str
    workload: Workload
    original: ModuleType
    """The file of the suite."""
    delivered: ModuleType | None
    """The version of the file that a run delivered; None if the file stays as it was."""
    counterpart: Counterpart
    sizes: Mapping[str, int]
    device: str = "cuda"

    @classmethod
    def of(cls, version: Version, device: str = "cuda") -> Case:
        """The case of a version."""
        counterpart, sizes = COUNTERPARTS[version.problem], version.workload.sizes
        return cls(version.problem, version.workload, version.original, version.delivered, counterpart, sizes, device)

    def inputs(self) -> Tensors:
        """The inputs, equal at every call."""
        return made_inputs(self.workload, self.sizes, self.device)

    def module(self, file: ModuleType) -> Any:
        """The module of the target with equal parameters at every call; None for a function."""
        name = self.workload.target.class_name
        if not name:
            return None
        torch.manual_seed(1)
        options = {each.name: each.constant for each in self.workload.init_arguments}
        return getattr(file, name)(**options).to(self.device).eval().requires_grad_(False)

    def function(self, file: ModuleType) -> Function:
        """The target in a version of its file."""
        module, qualname = self.module(file), self.workload.target.qualname
        function: Function = getattr(file, qualname) if module is None else module
        return function

    def kernels_run(self) -> bool | None:
        """Whether the guard of the delivered version takes these calls; None if it has no guard."""
        guard = None if self.delivered is None else guard_of(self.delivered)
        if guard is None or self.delivered is None:
            return None
        module = self.module(self.delivered)
        first = () if module is None else (module,)
        target = self.function(self.original) if module is None else type(module).forward
        call = inspect.signature(target).bind(*first, **self.inputs())
        call.apply_defaults()
        return bool(guard(*(call.arguments[name] for name in inspect.signature(guard).parameters)))


def measured(case: Case, clock: Clock, seconds: float) -> dict[str, Any]:
    """One row: the contenders' distances from eager mode, times and peaks. A contender that fails has an error instead."""
    others = case.counterpart.contenders

    def of_file(file: ModuleType | None) -> Maker:
        def make() -> Run | None:
            if file is None:
                return None
            function, inputs = case.function(file), case.inputs()
            return lambda: function(**inputs)

        return make

    def of_library(name: str) -> Maker:
        return lambda: others[name].make(case.module(case.original), case.inputs())

    makers = {"eager": of_file(case.original), **{name: of_library(name) for name in others}}
    makers["ours"] = of_file(case.delivered)
    row: dict[str, Any] = {
        "library": case.counterpart.library,
        "others": list(others),
        "rounded": [name for name, other in others.items() if other.is_rounded],
    }
    with torch.no_grad():
        row |= measured_contenders(makers, clock, seconds, SAME, case.device, ("ours", *others))
        row["kernels_run"] = case.kernels_run() if row["ours"].get("us") else None
    return row


def cases(results: Path, folder: Path, pattern: str, device: str = "cuda") -> Iterator[tuple[Case, Row]]:
    """The cases of all problems in a results file that have a counterpart, with the problem's result.

    Args:
        folder: where the delivered versions are written.
    """
    for is_last in (False, True):
        chosen = {name: item.suite for name, item in COUNTERPARTS.items() if item.is_last == is_last}
        for version in versions(results, chosen, pattern, folder):
            yield Case.of(version, device), version.row


def contenders(row: Row) -> list[str]:
    """The contenders of a row."""
    return ["eager", *row["others"], "ours"]


def fastest(row: Row, *, is_rounded: bool) -> float | None:
    """The shortest time of a counterpart.

    Args:
        is_rounded: whether those count that round operands to TF32, which neither eager mode nor a delivered version does.
    """
    names = [name for name in row["others"] if is_rounded or name not in row["rounded"]]
    return min((row[name]["us"] for name in names if row[name].get("us")), default=None)


def summary(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, and the geometric means below it."""
    lines = [
        "| loop | eager us | counterparts us | ours us | fastest / ours | without TF32 | GPU alone us: counterparts; ours |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    gains: dict[tuple[str, bool], list[float]] = {}
    for row in rows:
        target, sizes = identity(row)
        others = ", ".join(f"{_name(row, name)} {number(row[name].get('us')) or '-'}" for name in row["others"])
        graphs = ", ".join(number(row[name].get("graph_us")) or "-" for name in row["others"])
        us = delivered_us(row)
        ratios = []
        for is_rounded in (True, False):
            best = fastest(row, is_rounded=is_rounded)
            ratios.append(f"{best / us:.2f}" if best and us else "")
            if best and us:
                gains.setdefault((row["library"], is_rounded), []).append(best / us)
        lines.append(
            f"| {target.partition('::')[2]} {sizes} | {number(row['eager'].get('us'))} | {row['library']}: {others} "
            f"| {ours_text(row)} | {' | '.join(ratios)} | {graphs}; {number(row['ours'].get('graph_us')) or '-'} |"
        )
    lines.append("")
    for (library, is_rounded), each in gains.items():
        counts = ", ".join(f"{sum(ratio >= goal for ratio in each)} at least {goal}x" for goal in GOALS)
        words = "the fastest" if is_rounded else "the fastest without TF32"
        lines.append(
            f"{library}, {words} / ours: {statistics.geometric_mean(each):.2f}x (geometric mean of {len(each)}); {counts}."
        )
    return "\n".join([*lines, *end_of_table(rows, contenders)])


def _name(row: Row, name: str) -> str:
    return f"{name} (TF32)" if name in row["rounded"] and name != "tf32" else name


def main() -> int:
    """Compare, or show what was compared."""
    comparison = Comparison(
        "compare_loops.py",
        (__doc__ or "").splitlines()[0],
        "benchmarks/loops",
        ("torch", "triton", "fla-core"),
        contenders,
        summary,
    )
    return comparison.run(cases, measured)


if __name__ == "__main__":
    sys.exit(main())
