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

import inspect
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from compared import (
    BENCHMARKS,
    Comparison,
    Function,
    Tensors,
    delivered_us,
    distance,
    end_of_table,
    guard_of,
    identity,
    made_inputs,
    number,
    ours_text,
    versions,
)
from compared import measured as measured_contenders
from liger_counterparts import COUNTERPARTS, Counterpart, Liger
from torch._inductor import config as inductor

from mtmc_lsp.core.workload import Workload
from mtmc_lsp.timing.worker.clock import Clock, Run
from mtmc_lsp.verify.worker.run_target import flatten

__all__ = ["BothPasses", "Case", "cases", "distance", "measured", "summary"]

SUITE = BENCHMARKS / "training"
CONTENDERS = ("eager", "compile", "liger", "ours")
SAME = 0.03
"""Most relative distance (Euclidean norm) of Liger-Kernel's results and gradients from eager mode's: a bfloat16 has 8 bits."""


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
        made = made_inputs(self.workload, self.sizes, self.device)
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
        guard = None if self.delivered is None else guard_of(self.delivered)
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


def measured(case: Case, liger: Callable[[], Any], clock: Clock, seconds: float) -> dict[str, Any]:
    """One row: the contenders' distances from eager mode, times and peaks. A contender that fails has an error instead."""

    def maker(name: str) -> Callable[[], Run | None]:
        return lambda: _contender(case, name, liger)

    row: dict[str, Any] = {}
    row |= measured_contenders({name: maker(name) for name in CONTENDERS}, clock, seconds, SAME, case.device)
    if row["eager"].get("us"):
        row["kernels_run"] = case.kernels_run() if row["ours"].get("us") else None
    return row


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


def cases(results: Path, folder: Path, pattern: str, device: str = "cuda") -> Iterator[tuple[Case, dict[str, Any]]]:
    """The cases of all problems in a results file that have a counterpart, with the problem's result.

    Args:
        folder: where the delivered versions are written.
    """
    for version in versions(results, dict.fromkeys(COUNTERPARTS, SUITE), pattern, folder):
        problem, counterpart = version.problem, COUNTERPARTS[version.problem]
        original = getattr(version.original, problem.partition("::")[2])
        for changes in counterpart.sizes:
            sizes = {**version.workload.sizes, **changes}
            case = Case(problem, sizes, version.workload, original, version.delivered, counterpart, device)
            yield case, version.row


def best_of_others(row: Mapping[str, Any]) -> float | None:
    """The shortest time of eager mode, ``torch.compile`` and Liger-Kernel."""
    return min((row[name]["us"] for name in CONTENDERS[:3] if row[name].get("us")), default=None)


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table, and the geometric means below it."""
    lines = [
        "| target | eager us | compile us | Liger us | ours us | over best | GPU alone us: eager, compile, Liger, ours |"
    ]
    lines[0] += " peak MiB: eager, compile, Liger, ours |"
    lines.append("|---|---|---|---|---|---|---|---|")
    gains: dict[str, list[float]] = {name: [] for name in (*CONTENDERS[:3], "best")}
    for row in rows:
        times = [*(number(row[name].get("us")) for name in CONTENDERS[:3]), ours_text(row)]
        us, best = delivered_us(row), best_of_others(row)
        if us and best:
            gains["best"].append(best / us)
            for name in CONTENDERS[:3]:
                if row[name].get("us"):
                    gains[name].append(row[name]["us"] / us)
        target, sizes = identity(row)
        graphs = ", ".join(number(row[name].get("graph_us")) or "-" for name in CONTENDERS)
        peaks = ", ".join(number(_mib(row[name].get("peak_bytes"))) or "-" for name in CONTENDERS)
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
    return "\n".join([*lines, *end_of_table(rows, lambda row: CONTENDERS)])


def _mib(value: int | None) -> float | None:
    return None if value is None else value / 2**20


def main() -> int:
    """Compare, or show what was compared."""
    comparison = Comparison(
        "compare_liger.py",
        (__doc__ or "").splitlines()[0],
        "benchmarks/training",
        ("torch", "triton", "liger-kernel"),
        lambda row: CONTENDERS,
        summary,
    )
    return comparison.run(cases, lambda case, clock, seconds: measured(case, Liger, clock, seconds))


if __name__ == "__main__":
    sys.exit(main())
