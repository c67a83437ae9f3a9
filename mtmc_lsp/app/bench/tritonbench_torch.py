"""TritonBench-T: its PyTorch functions as targets with the inputs of their tests, and its tests on what is delivered.

The tests return their results; few of them print. So the delivered functions run in the test, and its results are compared with
those of the original functions, which is stricter than the suite's comparison of printed text.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtmc_lsp.app.bench.runner import read_results
from mtmc_lsp.app.bench.suite import Problem
from mtmc_lsp.app.bench.tritonbench import SEPARATOR
from mtmc_lsp.capture.recorded_calls import RecordedCall, merge_records
from mtmc_lsp.core.errors import MtmcError, RequestError
from mtmc_lsp.core.workload import Target, TargetKind
from mtmc_lsp.kernels.messages import CallInputs, SuiteCall, SuiteRecordRequest, SuiteTestRequest
from mtmc_lsp.process.fork_server import HIDDEN_GPU, INTERPRETER_ENV, ForkServer, likely_variables
from mtmc_lsp.process.gpu_lock import lock_folder
from mtmc_lsp.process.messages import StartRequest
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.process.protocol import GpuLock
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.search.store import Store
from mtmc_lsp.source.targets import find_targets
from mtmc_lsp.source.triton.drivers import find_driver, without_driver_calls

FOLDERS = ("data/TritonBench_T_v1", "TritonBench_T_v1", ".")
RECORD_SECONDS = TEST_SECONDS = 120.0
PREFERRED = tuple(CallInputs)
"""Inputs that describe more values come first."""


@dataclass(frozen=True)
class _File:
    """A file of the suite, divided into functions and test."""

    path: Path
    text: str
    test: str
    """The name of the function that tests the others."""
    functions: tuple[Target, ...]

    @property
    def code(self) -> str:
        """The text before the test."""
        return self.text.split(SEPARATOR)[0]


def suite_files(path: Path) -> list[Path]:
    """The files of the suite in a copy of its repository, or in its folder of files.

    Raises:
        RequestError: there are none.
    """
    source = next((path / name for name in FOLDERS if any((path / name).glob("*.py"))), None)
    files = sorted(source.glob("*.py")) if source is not None else []
    files = [file for file in files if SEPARATOR in file.read_text(encoding="utf-8")]
    if not files:
        raise RequestError(
            f"{path} holds no files of TritonBench-T",
            remedy="Name a copy of github.com/thunlp/TritonBench, or its folder data/TritonBench_T_v1.",
        )
    return files


def write_problems(path: Path, folder: Path, python: str) -> tuple[list[Path], dict[str, str]]:
    """Write each function with the inputs of its test to a folder that ``mtmc bench`` reads.

    Inputs are a directive with shapes, and with the ranges of the test where the function needs them; where it needs the values
    themselves, ``get_inputs`` returns them.

    Returns:
        The written files, and why the others were left out, by name.

    Raises:
        RequestError: the path holds no files of the suite.
    """
    files = suite_files(path)
    folder.mkdir(parents=True, exist_ok=True)
    written, left_out = [], dict[str, str]()
    with ForkServer(python, {**INTERPRETER_ENV, **HIDDEN_GPU}, preload=True) as server:
        for file in files:
            target = folder / file.name
            if not target.exists():
                try:
                    text = _problem(_read(file), python, server)
                except MtmcError as error:
                    left_out[file.stem] = error.message
                    continue
                target.write_text(text, encoding="utf-8")
            written.append(target)
    return written, left_out


def _read(file: Path) -> _File:
    text = file.read_text(encoding="utf-8")
    functions = [t for t in find_targets(text.encode(), str(file)) if t.kind is TargetKind.FUNCTION]
    lines = text.split(SEPARATOR)[0].count("\n") + 1
    own = tuple(target for target in functions if target.end_line <= lines)
    driver = find_driver(text.encode(), str(file), [target.qualname for target in own])
    if driver is None or not own:
        raise RequestError("no test calls a function of the file")
    return _File(file, text, driver.qualname, own)


def _problem(file: _File, python: str, server: ForkServer) -> str:
    """The text of one problem.

    Raises:
        MtmcError: the test calls no function with inputs that can be made again.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file.path.name
        copy.write_bytes(without_driver_calls(file.text.encode(), [file.test]))
        with Worker(python, cwd=folder, env={**INTERPRETER_ENV, **HIDDEN_GPU}, fork_server=server) as worker:
            answer = worker.call(SuiteRecordRequest(str(copy), file.test), RECORD_SECONDS)
    called = [target for target in file.functions if any(call.qualname == target.qualname for call in answer.calls)]
    if not called:
        raise RequestError(answer.problem or "its test calls no function with tensors")
    # The last one is the function that the file is about; those before are its parts.
    chosen = called[-1]
    calls = [call for call in answer.calls if call.qualname == chosen.qualname]
    calls.sort(key=lambda call: PREFERRED.index(call.inputs))
    problems = []
    for call in calls:
        recorded = _recorded(call)
        if call.inputs is not CallInputs.VALUES and not recorded.unusable:
            return _with_directive(file.code, chosen, recorded.directive)
        if call.values:
            return _with_inputs(file.code, chosen, call.values)
        problems.append(
            recorded.unusable or "its inputs need the values of the test, which are no positional arguments"
        )
    raise RequestError(problems[0])


def _recorded(call: SuiteCall) -> RecordedCall:
    record = {"path": "", "qualname": call.qualname, "others": 0, "traced": 0, "calls": [json.loads(call.record)]}
    return merge_records([[record]])[0].calls[0]


def _with_directive(code: str, target: Target, directive: str) -> str:
    lines = code.splitlines(keepends=True)
    lines.insert(target.start_line - 1, f"{directive}\n")
    return "".join(lines).rstrip() + "\n"


def _with_inputs(code: str, target: Target, values: Sequence[str]) -> str:
    """The code with ``get_inputs`` directly below the function."""
    lines = code.splitlines(keepends=True)
    items = "".join(f"        {value},\n" for value in values)
    lines.insert(target.end_line, f"\n\ndef get_inputs():\n    return [\n{items}    ]\n\n\n")
    return "".join(lines).rstrip() + "\n"


def evaluate(path: Path, problems: Sequence[Problem], results: Path, python: str) -> Iterator[dict[str, Any]]:
    """Run each file's test with what was delivered; a file that stays as it was, or was refused, is delivered unchanged.

    Args:
        path: a copy of the suite.
        results: the file of ``mtmc bench``; delivered files go into a folder beside it.

    Yields:
        For each problem whether its file changed, ``call`` (the test runs) and ``execution`` (its results are those of the
        original; None if these vary).
    """
    records = {str(record["problem"]): record for record in read_results(results)}
    files = {file.name: file for file in suite_files(path)}
    folder = results.resolve().with_suffix(".delivered")
    folder.mkdir(parents=True, exist_ok=True)
    with (
        ForkServer(python, likely_variables(), preload=True) as server,
        Store(results.resolve().parent / FOLDER) as store,
    ):
        for problem in problems:
            record = records.get(problem.name, {})
            run = store.result(str(record["id"])) if record.get("id") else None
            is_changed = run is not None and bool(run.final.diff)
            row: dict[str, Any] = {
                "problem": problem.name,
                "status": record.get("status", "not_run"),
                "changed": is_changed,
            }
            file = _read(files[problem.path.name])
            code = run.final.source if run is not None and is_changed else problem.path.read_text(encoding="utf-8")
            yield {**row, **_judged(file, code, folder, python, server)}


def _judged(file: _File, code: str, folder: Path, python: str, server: ForkServer) -> Mapping[str, Any]:
    """The answer of a process that runs the test with both files."""
    delivered = folder / file.path.name
    text = code.rstrip() + f"\n\n{SEPARATOR}\n" + file.text.partition(SEPARATOR)[2]
    delivered.write_bytes(without_driver_calls(text.encode(), [file.test]))
    with tempfile.TemporaryDirectory() as temporary:
        original = Path(temporary) / file.path.name
        original.write_bytes(without_driver_calls(file.text.encode(), [file.test]))
        with Worker(python, cwd=temporary, env=likely_variables(), fork_server=server) as worker:
            try:
                gpu = worker.call(StartRequest(gpu=True), TEST_SECONDS).gpu
                lock = GpuLock(gpu, lock_folder(gpu)) if gpu else None
                request = SuiteTestRequest(str(original), str(delivered), file.test)
                answer = worker.call(request, TEST_SECONDS, lock)
            except MtmcError as error:
                return {"call": False, "execution": False, "why": error.message}
    return {"call": answer.runs, "execution": answer.equal, "why": answer.detail}
