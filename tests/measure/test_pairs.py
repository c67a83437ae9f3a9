"""``mtmc verify`` as a user runs it, and what a verdict says where right and wrong cannot be told apart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pairs import HONEST, MODEL, MODEL_NEW, REFERENCE, changed

from mtmc_lsp.capture.client import find_workload, run_capture
from mtmc_lsp.core.results import Verdict, VerdictStatus
from mtmc_lsp.core.worker import Sandbox, Worker
from mtmc_lsp.measure.pair import Pair, PairVerifier
from mtmc_lsp.source.targets import find_target
from tests.cli.runner import mtmc

POINTWISE = """import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    x = tl.load(x_ptr + at, mask=mask)
    tl.store(out_ptr + at, FORMULA, mask=mask)


def fast(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out
"""


@pytest.fixture
def verdict_of(interpreter_worker: Worker, tmp_path: Path) -> Callable[[str, str], tuple[VerdictStatus, str]]:
    """Judges a formula in Triton against one in torch."""

    def judge(own: str, formula: str) -> tuple[VerdictStatus, str]:
        (tmp_path / "pyproject.toml").write_text("[project]\nname = 'user'\n")
        path = tmp_path / "reference.py"
        text = f"import torch\n\n\n# mtmc: x=f32[N,D] N=9 D=20\ndef own(x):\n    return {own}\n"
        path.write_text(text)
        target = find_target(text.encode(), str(path), "own")
        capture = run_capture(find_workload(str(path), text.encode(), target), text.encode(), interpreter_worker, 120)
        source = POINTWISE.replace("FORMULA", formula)
        pair = Pair(capture, text, find_target(source.encode(), str(tmp_path / "candidate.py"), "fast"), source)
        (tmp_path / "candidate.py").write_text(source)
        verifier = PairVerifier(pair, sys.executable, seed=5, workers=(interpreter_worker, interpreter_worker))
        verdict = verifier.verify().verdict
        verifier.close()
        return verdict.status, verdict.reason

    return judge


def test_an_honest_pair_in_two_files_passes_check_by_check(tmp_path: Path) -> None:
    (tmp_path / "reference.py").write_text(REFERENCE)
    (tmp_path / "candidate.py").write_text(HONEST)
    answer = mtmc(tmp_path, "verify", "reference.py::rms", "candidate.py::fast", CUDA_VISIBLE_DEVICES="")
    assert answer.code == 0, answer.out + answer.err
    for check in ("result 0 values", "input x unchanged", "determinism", "kernel's result used", "text: imports"):
        assert check in answer.out
    assert not list(tmp_path.rglob("failures"))


def test_a_kernelbench_pair_gets_the_references_inputs_and_parameters(tmp_path: Path) -> None:
    """The candidate's file needs neither ``get_inputs`` nor our names; its parameters have other values than at its start."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "new.py").write_text(MODEL_NEW)
    (tmp_path / "bad.py").write_text(changed(MODEL_NEW, ("* tl.load(gain_ptr + at % width, mask=mask)", "")))
    good = mtmc(tmp_path, "verify", "model.py", "new.py", "--json", CUDA_VISIBLE_DEVICES="")
    assert good.code == 0, good.document["verdict"]["reason"]
    assert good.document["verdict"]["status"] == "correct"
    bad = mtmc(tmp_path, "verify", "model.py", "bad.py", "--json", "--out", "why.py", CUDA_VISIBLE_DEVICES="")
    assert bad.code == 1
    assert bad.document["verdict"]["status"] == "incorrect"
    rerun = subprocess.run([sys.executable, "why.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert rerun.returncode == 1
    assert "result 0 is wrong" in rerun.stdout


def test_a_failure_becomes_a_small_file_that_shows_it_and_passes_once_mended(tmp_path: Path) -> None:
    (tmp_path / "reference.py").write_text(REFERENCE)
    tail = ("mask = cols < columns", "mask = cols < columns // 16 * 16")
    (tmp_path / "candidate.py").write_text(changed(HONEST, tail))
    answer = mtmc(tmp_path, "verify", "reference.py::rms", "candidate.py::fast", "--json", CUDA_VISIBLE_DEVICES="")
    assert answer.code == 1
    file = answer.document["reproduction"]
    assert len(Path(file).read_text()) < 12_000
    run = [sys.executable, file]
    seen = subprocess.run(run, capture_output=True, text=True, timeout=100)
    assert (seen.returncode, "result 0 is wrong" in seen.stdout) == (1, True), seen.stdout + seen.stderr
    (tmp_path / "candidate.py").write_text(HONEST)
    mended = subprocess.run(run, capture_output=True, text=True, timeout=100)
    assert mended.returncode == 0, mended.stdout + mended.stderr


@pytest.mark.parametrize(
    ("own", "formula", "said"),
    [("x * 1.0", "x * 1.0", "a copy of x"), ("x * 0.0", "x * 0.0", "zeros"), ("x * 0.0 + 1", "x * 0.0 + 1", "mean")],
)  # fmt: skip
def test_a_workload_that_tells_nothing_is_not_certified(own: str, formula: str, said: str, verdict_of) -> None:
    status, reason = verdict_of(own, formula)
    assert said in reason
    assert status is VerdictStatus.UNCERTIFIABLE


@pytest.mark.parametrize(
    ("own", "formula", "what"),
    [
        ("x * 3 - 1", "(x * 3 - 1) * 1.0000002", "exact"),
        ("torch.relu(x)", "tl.where(x > 0, x, 0.0)", "NaN"),
        ("x + 1", "tl.where(x > 1e30, 1e30, x + 1)", "infinite"),
        ("torch.where(x == 0, x, x.sign())", "tl.where(x > 1e-37, 1.0, tl.where(x < -1e-37, -1.0, 0.0))", "denormal"),
    ],
)
def test_what_only_unusual_values_show_is_found(own: str, formula: str, what: str, verdict_of) -> None:
    status, reason = verdict_of(own, formula)
    assert status is VerdictStatus.INCORRECT, reason
    assert what in reason


FAULTS = {
    "writes to the home folder": ("    (__import__('pathlib').Path.home() / 'mtmc-was-here').write_text('x')\n", "PermissionError"),
    "opens a socket": ("    from socket import socket\n    socket()\n", "PermissionError"),
    "ends its process": ("    import os\n    os._exit(3)\n", "exit code 3"),
    "hangs": ("    while True:\n        pass\n", "took longer than"),
    "prints without end": ("    for _ in range(300):\n        print('x' * 1_000_000)\n    raise ValueError('printed')\n", "printed"),
}  # fmt: skip


@pytest.fixture(scope="module")
def locked_pair(
    interpreter_worker: Worker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Verdict]]:
    """Judges candidates in one process that is locked in as ``mtmc verify`` does it."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "pyproject.toml").write_text("[project]\nname = 'user'\n")
    path = folder / "reference.py"
    path.write_text(REFERENCE)
    target = find_target(REFERENCE.encode(), str(path), "rms")
    text = REFERENCE.encode()
    capture = run_capture(find_workload(str(path), text, target), text, interpreter_worker, 120)
    runner = Worker(sys.executable, cwd=str(folder), env={"TRITON_INTERPRET": "1"}, sandbox=Sandbox())

    def judge(source: str) -> Verdict:
        (folder / "candidate.py").write_text(source)
        pair = Pair(capture, REFERENCE, find_target(source.encode(), str(folder / "candidate.py"), "fast"), source)
        workers = (interpreter_worker, runner)
        return PairVerifier(pair, sys.executable, seed=5, workers=workers, run_seconds=20).verify().verdict

    yield judge
    runner.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_a_failed_verification_with_its_reason(
    fault: str, locked_pair: Callable[[str], Verdict], monkeypatch
) -> None:
    """The scan of the text is left out here: it must not be all that stands in the way."""
    monkeypatch.setattr("mtmc_lsp.measure.pair.scan", lambda *_: ())
    lines, said = FAULTS[fault]
    verdict = locked_pair(changed(HONEST, ("    return out\n", lines + "    return out\n")))
    assert verdict.status in (VerdictStatus.RUNTIME_ERROR, VerdictStatus.CRASHED, VerdictStatus.TIMEOUT)
    assert said in verdict.reason
    assert not (Path.home() / "mtmc-was-here").exists()
