"""Write again, as KernelBench files, the versions that `mtmc bench` kept: from its file of results, without searching anew.

    python scripts/export_results.py PROBLEMS RESULTS OUT [--without FILE] [--jobs N]

PROBLEMS is the folder that was given to `mtmc bench`, RESULTS what it wrote: each step's action is there, and what the coder
makes of it is the same on a machine with the same kind of GPU. OUT gets NAME.py and NAME_new.py for each problem with a
version that was kept, as `scripts/compare_kernelbench.py` wants them. What was tuned by measuring is written as it was before
that, since results do not say which choice was the fastest. Problems that are in FILE, which that script wrote, are left out.
The exit code is 1 where one could not be written.
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
from mtmc_lsp.process.priority import cores_of, keep_to, usable_cores


def main() -> int:
    """Write all that were kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--without", type=Path, help="what compare_kernelbench.py wrote: those are left out")
    parser.add_argument("--jobs", type=int, default=1, help="problems at a time")
    options = parser.parse_args()
    if not options.problems.is_dir():
        parser.error(f"{options.problems} is no folder: give the one that `mtmc bench` was given")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: at least one problem at a time")
    try:
        rows = rows_of(options.results)
        done = set(rows_of(options.without)) if options.without else set()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    todo = [row for row in rows.values() if kept(row) and file_name(row) not in done]
    options.out.mkdir(parents=True, exist_ok=True)
    places: SimpleQueue[int] = multiprocessing.SimpleQueue()
    for number in range(options.jobs):
        places.put(number)
    with ProcessPoolExecutor(options.jobs, initializer=settle, initargs=(places, options.jobs)) as pool:
        said = [*pool.map(write, todo, [options.problems] * len(todo), [options.out] * len(todo))]
    for row, wrong in zip(todo, said, strict=True):
        if wrong:
            print(f"{row['problem']}: {wrong}", flush=True)
    written = sum(not wrong for wrong in said)
    print(f"{written} of {len(said)} written")
    return 0 if written == len(said) else 1


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a file of results, by their problem.

    Raises:
        OSError: it cannot be read.
        ValueError: a line of it is none of a result; says which.
    """
    rows = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            rows[str(row["problem"])] = row
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}: not a result with a `problem`") from None
    return rows


def kept(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps that were kept, in order."""
    return [step for step in row.get("steps") or () if step["status"] == StepStatus.ACCEPTED.value]


def file_name(row: dict[str, Any]) -> str:
    """The problem's name as that of a file."""
    return str(row["problem"]).replace("/", "_").replace("::", "__")


def settle(places: SimpleQueue[int], jobs: int) -> None:
    """Take one of the places: a share of the cores, and one of the GPUs."""
    number = places.get()
    keep_to(cores_of(number, jobs, usable_cores()))
    gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]


def write(row: dict[str, Any], problems: Path, out: Path) -> str:
    """Write one problem's pair of files; what went wrong, or nothing."""
    name, _, target = str(row["problem"]).partition("::")
    try:
        path = (problems / f"{name}.py").resolve()
        opened = open_target(Request(path, target or REFERENCE, Settings(), sys.executable))
        with Pipeline(opened) as pipeline:
            capture = pipeline.capture()
        coder = BuiltinCoder()
        version = coder.start(capture, opened.plain.decode())
        actions = [from_json(MacroAction, step["action"]) for step in kept(row)]
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
