"""TritonBench-T: its PyTorch functions as targets, with the inputs of their tests as workloads."""

from __future__ import annotations

from pathlib import Path

from mtmc_lsp.app.bench.tritonbench import SEPARATOR
from mtmc_lsp.app.bench.tritonbench_inputs import recorded_calls
from mtmc_lsp.capture.recorded_calls import merge_records
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.workload import Target, TargetKind
from mtmc_lsp.process.fork_server import INTERPRETER_ENV
from mtmc_lsp.source.targets import find_targets
from mtmc_lsp.source.triton.drivers import find_driver

FOLDERS = ("data/TritonBench_T_v1", "TritonBench_T_v1", ".")


def write_problems(path: Path, folder: Path, python: str) -> tuple[list[Path], dict[str, str]]:
    """Write each function with a directive for the inputs of its test to a folder that ``mtmc bench`` reads.

    Returns:
        The written files, and why the others were left out, by name.

    Raises:
        RequestError: the path holds no files of the suite.
    """
    source = next((path / name for name in FOLDERS if any((path / name).glob("*.py"))), None)
    files = sorted(source.glob("*.py")) if source is not None else []
    if not any(SEPARATOR in file.read_text(encoding="utf-8") for file in files):
        raise RequestError(
            f"{path} holds no files of TritonBench-T",
            remedy="Name a copy of github.com/thunlp/TritonBench, or its folder data/TritonBench_T_v1.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    written, left_out = [], dict[str, str]()
    for file in files:
        target = folder / file.name
        if not target.exists():
            problem = _write(file, target, python)
            if problem:
                left_out[file.stem] = problem
                continue
        written.append(target)
    return written, left_out


def _write(file: Path, to: Path, python: str) -> str:
    """Write one problem; returns why that is not possible, empty if it is."""
    text = file.read_text(encoding="utf-8")
    functions = [t for t in find_targets(text.encode(), str(file)) if t.kind is TargetKind.FUNCTION]
    code = text.split(SEPARATOR)[0]
    own = [target for target in functions if target.end_line <= code.count("\n") + 1]
    driver = find_driver(text.encode(), str(file), [target.qualname for target in own])
    if driver is None or not own:
        return "no test calls a function of the file"
    recorded = recorded_calls("record_test", file, [driver.qualname], driver.qualname, python, INTERPRETER_ENV)
    if isinstance(recorded, str):
        return recorded
    targets = {item.qualname: item for item in merge_records([recorded])}
    called = [target for target in own if target.qualname in targets]
    if not called:
        return "its test calls no function with tensors"
    # The last one is the function that the file is about; those before are its parts.
    chosen: Target = called[-1]
    call = targets[chosen.qualname].typical
    if call is None or call.unusable:
        return call.unusable if call is not None else "its calls cannot be repeated"
    lines = code.splitlines(keepends=True)
    lines.insert(chosen.start_line - 1, f"{call.directive}\n")
    to.write_text("".join(lines).rstrip() + "\n", encoding="utf-8")
    return ""
