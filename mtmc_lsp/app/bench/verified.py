"""KernelBench-Verified (github.com/facebookresearch/kernel_bench_verified): its evaluation of what ``mtmc bench`` delivered.

The suite's problems are solved like any others, with TF32 allowed as in the suite's baselines. Each file that got faster is
exported, and the suite's evaluator judges the export: five random inputs, four hidden distributions, its timer, its peak memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import mtmc_lsp
from mtmc_lsp.app.bench.runner import append_result, read_results
from mtmc_lsp.app.bench.suite import Problem
from mtmc_lsp.app.export import kernelbench
from mtmc_lsp.core.errors import EnvironmentNotAble, Location, RequestError
from mtmc_lsp.core.run import RunStatus
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.search.store import Store

PROBLEMS, EVALUATOR, HIDDEN = "KernelBench", "src/eval.py", "hidden_tests"
"""Parts of a copy of the suite."""
SETTING = '\n\n\ntorch.set_float32_matmul_precision("high")\n'
"""The line that is appended to each problem: the suite's baselines run with TF32, and practitioners set it in their files."""
JUDGE = Path(mtmc_lsp.__file__).parent / "app" / "worker" / "kernelbench_verified.py"
SECONDS = 1800.0
"""The time limit of one evaluation; `torch.compile` may take minutes."""
DEVICE = "cuda:0"


def check_copy(checkout: Path) -> None:
    """Check that a folder is a copy of the suite.

    Raises:
        RequestError: a part is missing.
    """
    missing = [part for part in (EVALUATOR, PROBLEMS, HIDDEN) if not (checkout / part).exists()]
    if missing:
        raise RequestError(
            f"this is no copy of KernelBench-Verified: it has no {missing[0]}",
            where=Location(str(checkout)),
            remedy="git clone https://github.com/facebookresearch/kernel_bench_verified, and name that folder.",
        )


def check_gpu(gpus: str) -> None:
    """Check that the suite's evaluation can run here.

    Args:
        gpus: the names of this machine's GPUs; empty without one.

    Raises:
        EnvironmentNotAble: there is no GPU.
    """
    if not gpus:
        raise EnvironmentNotAble(
            "KernelBench-Verified cannot run without a CUDA GPU: its checks, its hidden inputs, its timer and its memory "
            "figures all use one",
            remedy="Run this on a machine with a GPU. Here, `mtmc bench FOLDER/KernelBench` verifies versions by Triton's "
            "interpreter and compiles them.",
        )


def write_problems(checkout: Path, folder: Path) -> Path:
    """Write the suite's problems, with TF32 allowed, to a folder that ``mtmc bench`` reads; returns it."""
    for file in sorted((checkout / PROBLEMS).glob("level*/*.py")):
        target = folder / file.parent.name / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_text(encoding="utf-8").rstrip() + SETTING
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")
    return folder


def evaluate(
    checkout: Path,
    problems: Sequence[Problem],
    results: Path,
    out: Path,
    python: str,
    *,
    device: str = DEVICE,
) -> Iterator[dict[str, Any]]:
    """The evaluation of each problem that ``mtmc bench`` answered, one after another; lines of ``out`` are not made again.

    Args:
        results: the file of ``mtmc bench``; its runs are in the store beside it.
        out: the file of evaluations; exported files go into a folder beside it.
    """
    records = {str(record["problem"]): record for record in read_results(results)}
    present = {str(row["problem"]): row for row in read_results(out)}
    with Store(results.resolve().parent / FOLDER) as store:
        for problem in problems:
            record = records.get(problem.name, {})
            row: dict[str, Any] = {"problem": problem.name, "level": problem.level, "delivered": False}
            if record.get("status") == RunStatus.IMPROVED.value:
                run = store.result(str(record["id"]))
                text = kernelbench(run) if run is not None else ""
                key = hashlib.sha256(f"{record['key']}\n{text}".encode()).hexdigest()[:20]
                row |= {"delivered": True, "key": key}
                if present.get(problem.name, {}).get("key") == key:
                    yield present[problem.name]
                    continue
                exported = (out.with_suffix(".exported") / problem.name).resolve().with_suffix(".py")
                exported.parent.mkdir(parents=True, exist_ok=True)
                exported.write_text(text, encoding="utf-8")
                row |= _judged(checkout, problem, exported, python, device)
            if present.get(problem.name) != row:
                append_result(out, row)
            yield row


def _judged(checkout: Path, problem: Problem, exported: Path, python: str, device: str) -> dict[str, Any]:
    """The evaluator's answer on an exported file, from a process of the suite's interpreter."""
    level, number = problem.level.removeprefix("level"), Path(problem.name).name.split("_")[0]
    request = {
        "checkout": str(checkout.resolve()),
        "reference": str((checkout / PROBLEMS / problem.name).resolve()) + ".py",
        "exported": str(exported),
        "level": int(level),
        "number": int(number),
        "device": device,
    }
    with tempfile.TemporaryDirectory(prefix="mtmc-verified-") as folder:
        question, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        question.write_text(json.dumps(request), encoding="utf-8")
        command = [python, str(JUDGE), str(question), str(answer)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=folder, env=_environment()
            )
        except subprocess.TimeoutExpired:
            return {"correct": None, "why": f"the evaluation took longer than {SECONDS:.0f} s"}
        if not answer.exists():
            lines = done.stderr.strip().splitlines()[-1:] or [f"the evaluation ended with exit code {done.returncode}"]
            return {"correct": None, "why": lines[0]}
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return result


def _environment() -> Mapping[str, str]:
    """The environment without what would change the suite's tolerance."""
    return {name: value for name, value in os.environ.items() if name != "KB_FP32_TOL"}


# The summary ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerifiedScore:
    """The problems of a level, as the suite's evaluator judges them. A file that stays as it was counts as eager."""

    level: str
    problems: int
    delivered: int
    correct: int
    """Delivered files that passed all checks."""
    over_eager: float | None
    """Geometric mean of the speedups over eager mode of the correct files and those that stayed as they were."""
    over_best: float | None
    """The same over the faster of eager mode and `torch.compile`; without files that stayed as they were."""
    slower: int
    """Correct delivered files that are slower than the faster of both."""
    memory: float | None
    """Geometric mean of eager mode's peak memory relative to the file's."""


def scores(rows: Sequence[Mapping[str, Any]]) -> list[VerifiedScore]:
    """The scores of all problems, then of each level."""
    levels = sorted({str(row["level"]) for row in rows})
    groups = [("all", list(rows)), *((level, [row for row in rows if row["level"] == level]) for level in levels)]
    return [_score(level, group) for level, group in groups]


def _score(level: str, rows: Sequence[Mapping[str, Any]]) -> VerifiedScore:
    delivered = [row for row in rows if row["delivered"]]
    correct = [row for row in delivered if row["correct"] and row.get("ms")]
    unchanged = [1.0] * (len(rows) - len(delivered))
    over_best = [min(_times(row)) / row["ms"] for row in correct]
    return VerifiedScore(
        level,
        len(rows),
        len(delivered),
        sum(bool(row["correct"]) for row in delivered),
        _mean([row["baselines"]["eager"]["ms"] / row["ms"] for row in correct] + unchanged),
        _mean(over_best),
        sum(ratio < 1.0 for ratio in over_best),
        _mean([row["baselines"]["eager"]["bytes"] / row["bytes"] for row in correct if row.get("bytes")] + unchanged),
    )


def _times(row: Mapping[str, Any]) -> list[float]:
    return [baseline["ms"] for baseline in row["baselines"].values() if baseline["ms"]]


def _mean(ratios: Sequence[float]) -> float | None:
    """The geometric mean; None without ratios."""
    return geometric_mean(ratios) if ratios else None
