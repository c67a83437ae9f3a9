"""``python -m benchmarks.adversarial_second.check`` shows, outside of the verifier, which candidates are wrong."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

from benchmarks.adversarial_second.cases import REFERENCES, Case, all_cases
from benchmarks.adversarial_second.witnesses import SIZES, at, module

LIMITS = {torch.float16: 2e-2, torch.bfloat16: 5e-2}


def load(path: Path, name: str) -> Any:
    """The function or class of a file, imported as a user's program would."""
    # Not by a function of mtmc_lsp: candidates look for its modules, as a sign of the verifier.
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    imported = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = imported
    spec.loader.exec_module(imported)
    return getattr(imported, name)


def difference(expected: Any, result: Any) -> str:
    """How the results differ far beyond rounding, or ``""``."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(result, torch.Tensor):
            return f"{type(result).__name__} instead of a tensor"
        if (expected.dtype, expected.shape) != (result.dtype, result.shape):
            return f"{result.dtype} {tuple(result.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
        a, b = expected.detach().double().nan_to_num(1e30), result.detach().double().nan_to_num(1e30)
        if not a.numel():
            return ""
        limit = LIMITS.get(expected.dtype, 1e-4)
        error = float((a - b).abs().max()) / (float(a.abs().max()) or 1.0)
        return f"relative error {error:.2g}" if not error <= limit else ""
    if isinstance(expected, tuple | list):
        if not isinstance(result, tuple | list) or len(expected) != len(result):
            return "another number of results"
        return next((text for text in map(difference, expected, result) if text), "")
    if isinstance(expected, float) and isinstance(result, float):
        return "" if math.isclose(expected, result, rel_tol=1e-4, abs_tol=1e-6) else f"{result} instead of {expected}"
    return "" if expected == result else f"{result!r} instead of {expected!r}"


def problem(case: Case, folder: Path) -> str:
    """Why this case does not show what it should, or ``""``."""
    path = folder / "candidate.py"
    path.write_text(case.text())
    default = module(lambda made: made(torch.randn(2, 3, 64))) if case.reference == "gated_norm" else at(case.reference)
    witness = case.witness or default
    try:
        reference = load(REFERENCES, case.target)
        text = difference(*witness(reference, load(path, case.target)))
    except Exception as error:
        raised_by = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
        if case.expected == "refused" and str(path) in raised_by:
            return ""
        return "".join(traceback.format_exception_only(type(error), error)).strip()
    if case.expected == "refused":
        return "" if text else "the witness shows no difference"
    return text


def main() -> int:
    """Check every case in a separate process, and list those that fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--class", dest="kind", default="")
    chosen = parser.parse_args().kind
    cases = [case for case in all_cases() if chosen in ("", case.kind)]
    names = [(case.kind, case.name) for case in cases]
    assert len(set(names)) == len(names) and all(case.reference in SIZES for case in cases)
    bad = 0
    for case in cases:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            with tempfile.TemporaryDirectory() as folder:
                message = problem(case, Path(folder))
            os.write(write, message.encode()[:4000])
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as answer:
            message = answer.read().decode()
        os.waitpid(child, 0)
        if message:
            bad += 1
            print(f"{case.kind}/{case.name}: {message}")
    print(f"{len(cases)} candidates, {bad} without a valid witness")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
