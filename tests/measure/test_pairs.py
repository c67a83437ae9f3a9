"""``mtmc verify`` as a user runs it, and what a verdict says where right and wrong cannot be told apart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pairs import HONEST, MODEL, MODEL_NEW, REFERENCE, changed

from mtmc_lsp.core.results import Verdict, VerdictStatus
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
def verdict_of(judge: Callable[..., Verdict]) -> Callable[[str, str], tuple[VerdictStatus, str]]:
    """Judges a formula in Triton against one in torch."""

    def formulas(own: str, formula: str) -> tuple[VerdictStatus, str]:
        text = f"import torch\n\n\n# mtmc: x=f32[N,D] N=9 D=20\ndef own(x):\n    return {own}\n"
        verdict = judge(text, "own", POINTWISE.replace("FORMULA", formula), "fast")
        return verdict.status, verdict.reason

    return formulas


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


RUN_SECONDS = 20.0
FAULTS = {
    "writes to the home folder": ("    (__import__('pathlib').Path.home() / 'mtmc-was-here').write_text('x')\n", "PermissionError"),
    "opens a socket": ("    from socket import socket\n    socket()\n", "PermissionError"),
    "ends its process": ("    import os\n    os._exit(3)\n", "exit code 3"),
    "hangs": ("    while True:\n        pass\n", "took longer than"),
    "prints 1 GB": ("    for _ in range(1000):\n        print('x' * 1_000_000)\n    raise ValueError('printed')\n", "printed"),
    "crashes": ("    import os, signal\n    os.kill(os.getpid(), signal.SIGSEGV)\n", "SIGSEGV"),
    "forks": ("    import os\n    os.fork()\n", "start no processes"),
    "starts a program": ("    import subprocess\n    subprocess.run(['sleep', '60'])\n", "start no processes"),
    "takes all memory": ("    held = [bytearray(1 << 28) for _ in range(1000)]\n", "out of memory"),
    "takes all memory in tensors": ("    held = [torch.ones(1 << 26) for _ in range(1000)]\n", "memory"),
    "fills the disk": ("    import os\n    open(os.environ['MTMC_SCRATCH'] + '/x', 'wb').truncate(1 << 40)\n", "File too large"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_a_failed_verification_with_its_reason(
    fault: str, judge: Callable[..., Verdict], monkeypatch
) -> None:
    """The scan of the text is left out here: it must not be all that stands in the way."""
    monkeypatch.setattr("mtmc_lsp.measure.pair.scan", lambda *_: ())
    lines, said = FAULTS[fault]
    text = changed(HONEST, ("    return out\n", lines + "    return out\n"))
    verdict = judge(REFERENCE, "rms", text, "fast", memory_bytes=3 << 30, run_seconds=RUN_SECONDS)
    assert verdict.status in (VerdictStatus.RUNTIME_ERROR, VerdictStatus.CRASHED, VerdictStatus.TIMEOUT)
    assert said in verdict.reason
    assert not (Path.home() / "mtmc-was-here").exists()
