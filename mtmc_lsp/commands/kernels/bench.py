"""``mtmc bench --suite tritonbench-g PATH``: existing kernels, each file with its own test."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mtmc_lsp.core.errors import RequestError

if TYPE_CHECKING:
    from mtmc_lsp.app.bench.suite import Problem
    from mtmc_lsp.app.bench.tritonbench import KernelProblem
    from mtmc_lsp.core.settings import Settings


def bench_kernels(
    path: Path,
    out: Path,
    settings: Settings,
    *,
    python: str,
    pattern: str,
    limit: int | None,
    shard: str,
    jobs: int,
    seconds: float,
    total: float | None,
    fresh: bool,
    as_json: bool,
) -> int:
    """Optimise every file of TritonBench-G, and show what came of them.

    Args:
        seconds: most seconds of one file.
        total: seconds after which the command ends; files that are not finished have no result.
    """
    from mtmc_lsp.app.bench.suite import parse_shard
    from mtmc_lsp.app.bench.tritonbench import kernel_problems
    from mtmc_lsp.app.bench.tritonbench_summary import summarise_kernels
    from mtmc_lsp.app.interpreter import checked_python, find_python
    from mtmc_lsp.report.console import console
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.kernels.bench import show_kernel_bench

    problems = [problem for problem in kernel_problems(path) if pattern in problem.name]
    part = parse_shard(shard)
    problems = problems[part.index - 1 :: part.count][:limit]
    if not problems:
        raise RequestError("no problem is left", remedy="Change --filter or --shard.")
    interpreter = checked_python(python or find_python(problems[0].file, settings))
    deadline = time.monotonic() + total if total is not None else math.inf
    _solve(problems, out, settings, interpreter, jobs, seconds, deadline, fresh=fresh)
    names = {problem.name for problem in problems}
    records = [record for record in read_lines(out) if record["problem"] in names]
    if len(records) < len(problems):
        left = len(problems) - len(records)
        print(
            f"{left} of {len(problems)} files have no result yet; the same command goes on with them", file=sys.stderr
        )
    summary = summarise_kernels(records)
    if as_json:
        print(document(summary=asdict(summary), results=str(out)))
    else:
        show_kernel_bench(console(), summary, records)
    return 0 if summary.read == summary.files else 1


def _solve(
    problems: Sequence[KernelProblem],
    out: Path,
    settings: Settings,
    python: str,
    jobs: int,
    seconds: float,
    deadline: float,
    *,
    fresh: bool,
) -> None:
    from mtmc_lsp.app.bench.runner import visible_devices
    from mtmc_lsp.app.bench.tritonbench import solve_kernels
    from mtmc_lsp.app.calibrate import calibrate_first
    from mtmc_lsp.app.provenance import current_build
    from mtmc_lsp.process.fork_server import INTERPRETER_ENV, ForkServer

    known = set() if fresh else {record["problem"] for record in read_lines(out)}
    left = [problem for problem in problems if problem.name not in known]
    build = asdict(current_build())
    delivered = out.with_suffix(".delivered")

    fork_server = ForkServer(python, INTERPRETER_ENV, preload=True)
    compiling_server = ForkServer(python, preload=True)

    def solve(problem: KernelProblem) -> dict[str, object] | None:
        record = solve_kernels(
            problem,
            settings,
            python,
            seconds,
            delivered,
            deadline=deadline,
            fork_server=fork_server,
            compiling_server=compiling_server,
        )
        return record.to_json() if record is not None else None

    with fork_server, compiling_server, ThreadPoolExecutor(jobs) as pool, out.open("a", encoding="utf-8") as stream:
        calibrate_first(python, visible_devices()[:1], compiling_server)
        pending = [pool.submit(solve, problem) for problem in left]
        for number, done in enumerate(as_completed(pending), 1):
            record = done.result()
            if record is None:
                continue
            stream.write(json.dumps({**record, "build": build}) + "\n")
            stream.flush()
            outcome = ", ".join(dict.fromkeys(map(str, record["applied"]))) if record["applied"] else ""  # type: ignore[call-overload]
            outcome = outcome or str(record["reason"]) or str(record["status"])
            seconds_text = f"{record['wall_seconds']} s"
            print(f"[{number}/{len(left)}] {record['problem']}  {seconds_text}  {outcome}"[:160], file=sys.stderr)


def run_tests(checkout: Path, problems: Sequence[Problem], out: Path, python: str) -> bool:
    """Run the tests of TritonBench-T with what was delivered, and write a line for each beside the results.

    Returns:
        Whether no test of a changed file fails.
    """
    from mtmc_lsp.app.bench.tritonbench_torch import evaluate

    rows = []
    with out.with_suffix(".tests.jsonl").open("w", encoding="utf-8") as stream:
        for row in evaluate(checkout, problems, out, python):
            rows.append(row)
            stream.write(json.dumps(row) + "\n")
            stream.flush()
    for row in rows:
        if not row["call"] or row["execution"] is not True:
            print(f"{row['problem']}: its test {'runs' if row['call'] else 'fails'}: {row['why']}", file=sys.stderr)
    changed = sum(bool(row["changed"]) for row in rows)
    calls, correct = sum(bool(row["call"]) for row in rows), sum(row["execution"] is True for row in rows)
    kept = sum(row["execution"] is True and bool(row["changed"]) for row in rows)
    varying = sum(row["execution"] is None and bool(row["call"]) for row in rows)
    print(
        f"tests of {len(rows)} files as delivered ({changed} changed): {calls} run, {correct} give the results of the original"
        f" ({kept} of the changed ones), {varying} vary with the seed",
        file=sys.stderr,
    )
    return all(row["call"] and row["execution"] is not False for row in rows if row["changed"])


def read_lines(path: Path) -> list[dict[str, object]]:
    """The newest record of each file; lines that an interrupted run did not finish are ignored."""
    records: dict[str, dict[str, object]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        records[str(record["problem"])] = record
    return list(records.values())
