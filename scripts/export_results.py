"""Export the accepted versions of a `mtmc bench` run as KernelBench files, from its results and without a new search.

    python scripts/export_results.py PROBLEMS RESULTS OUT [--without FILE] [--jobs N]

PROBLEMS is the folder that was passed to `mtmc bench`, and RESULTS its output. The results contain the action of each step, and
the coder generates the same code for it on a machine with the same kind of GPU. OUT receives NAME.py and NAME_new.py for each
problem with an accepted version, as `scripts/compare_kernelbench.py` expects. Autotuned choices are exported as before
autotuning, because results do not contain which choice was fastest. Problems in FILE, an output of that script, are skipped.
The exit code is 1 if a problem could not be exported.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from mtmc_lsp.app.export import REFERENCE, kernelbench, kernelbench_reference
from mtmc_lsp.app.pipeline import Pipeline
from mtmc_lsp.app.target_file import Request, open_target
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import SCHEMA, Final, RunResult, RunStatus, Step, StepStatus
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.process.priority import cores_for_job, limit_to_cores, usable_cores


def main() -> int:
    """Export all problems with an accepted version."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--without", type=Path, help="output of compare_kernelbench.py; its problems are skipped")
    parser.add_argument("--jobs", type=int, default=1, help="number of problems to export in parallel")
    options = parser.parse_args()
    if not options.problems.is_dir():
        parser.error(f"{options.problems} is not a folder: use the one that was passed to `mtmc bench`")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: must be at least 1")
    try:
        rows = rows_of(options.results)
        excluded = set(rows_of(options.without)) if options.without else set()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    selected = [row for row in rows.values() if accepted_steps(row) and file_name(row) not in excluded]
    options.out.mkdir(parents=True, exist_ok=True)
    slots: SimpleQueue[int] = multiprocessing.SimpleQueue()
    for number in range(options.jobs):
        slots.put(number)
    with ProcessPoolExecutor(options.jobs, initializer=init_worker, initargs=(slots, options.jobs)) as pool:
        errors = [*pool.map(write, selected, [options.problems] * len(selected), [options.out] * len(selected))]
    for row, error_message in zip(selected, errors, strict=True):
        if error_message:
            print(f"{row['problem']}: {error_message}", flush=True)
    written = sum(not error_message for error_message in errors)
    print(f"{written} of {len(errors)} written")
    return 0 if written == len(errors) else 1


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    """Rows of a results file by problem.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a result; the message says which.
    """
    rows = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            rows[str(row["problem"])] = row
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}: not a result with a `problem`") from None
    return rows


def accepted_steps(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The accepted steps, in order."""
    return [step for step in row.get("steps") or () if step["status"] == StepStatus.ACCEPTED.value]


def file_name(row: dict[str, Any]) -> str:
    """The problem's name as a file name."""
    return str(row["problem"]).replace("/", "_").replace("::", "__")


def init_worker(slots: SimpleQueue[int], jobs: int) -> None:
    """Reserve a slot for this worker process: a share of the CPU cores, and one of the GPUs."""
    number = slots.get()
    limit_to_cores(cores_for_job(number, jobs, usable_cores()))
    gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]


def write(row: dict[str, Any], problems: Path, out: Path) -> str:
    """Write the pair of files for one problem; return an error message, empty on success."""
    name, _, target = str(row["problem"]).partition("::")
    try:
        path = (problems / f"{name}.py").resolve()
        opened = open_target(Request(path, target or REFERENCE, Settings(), sys.executable))
        with Pipeline(opened) as pipeline:
            capture = pipeline.capture()
        coder = BuiltinCoder()
        version = coder.start(capture, opened.plain.decode())
        actions = [from_json(MacroAction, step["action"]) for step in accepted_steps(row)]
        for action in actions:
            if "variants" not in action.params:
                version = coder.write(capture, version, action)
    except (MtmcError, CannotCode) as error:
        return str(error)
    step = Step(1, actions[-1], StepStatus.ACCEPTED, "", "", version)
    final = Final(version.source, "", None, None)
    status, source_hash = RunStatus.IMPROVED, opened.source_hash
    result = RunResult(
        SCHEMA,
        "",
        opened.definition,
        capture.workload,
        capture.environment,
        (),
        (step,),
        final,
        status,
        0.0,
        source_hash,
    )
    (out / f"{file_name(row)}.py").write_text(kernelbench_reference(result), encoding="utf-8")
    (out / f"{file_name(row)}_new.py").write_text(kernelbench(result), encoding="utf-8")
    return ""


if __name__ == "__main__":
    sys.exit(main())
