"""Runs a candidate under NVIDIA's ``compute-sanitizer`` and turns its report into checks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mtmc_lsp.core.errors import EnvironmentNotAble
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.results import Check, CheckStatus
from mtmc_lsp.process.fork_server import ENTRY
from mtmc_lsp.process.protocol import encode_request
from mtmc_lsp.process.worker_process import CACHE_VARIABLES, SCRATCH, Sandbox
from mtmc_lsp.verify.messages import CandidateRequest

PROGRAM = "compute-sanitizer"
DEFAULT_FOLDER = "/usr/local/cuda/bin"
TOOLS = ("memcheck", "initcheck", "racecheck")
"""Accesses beyond memory, reads of memory that nobody wrote, and races in shared memory."""
SECONDS = 600.0
"""Time limit for one tool: kernels take up to a hundred times as long."""
REMEDY = "Install NVIDIA's CUDA toolkit (or the package cuda-sanitizer), put compute-sanitizer on PATH, or leave out --sanitize."
NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Torch's memory pool would be one allocation, within which no access is out of bounds."""
MAX_SHOWN = 3
"""Errors that a message quotes in full."""


@dataclass(frozen=True)
class Finding:
    """One error of a report."""

    title: str
    kernel: str = ""
    line: str = ""
    """File and line, if the kernel has line numbers."""
    address: str = ""

    @property
    def text(self) -> str:
        """The error in one line."""
        where = f" in {self.kernel}" if self.kernel else ""
        return (
            f"{self.title}{where}{f' ({self.line})' if self.line else ''}{f', {self.address}' if self.address else ''}"
        )


def find_sanitizer() -> str:
    """The program's path.

    Raises:
        EnvironmentNotAble: it is not installed.
    """
    path = shutil.which(PROGRAM) or shutil.which(PROGRAM, path=DEFAULT_FOLDER)
    if path is None:
        raise EnvironmentNotAble(f"--sanitize needs {PROGRAM}, which is not installed", remedy=REMEDY)
    return path


class Sanitizer:
    """Runs requests to a candidate's process under each tool, in the same sandbox."""

    def __init__(self, program: str, python: str, cwd: str, *, gpu: bool, seconds: float = SECONDS) -> None:
        """Set the program and the limits.

        Args:
            program: the path of ``compute-sanitizer``.
            gpu: whether the process needs a GPU's devices.
            seconds: limit for one tool.
        """
        self._program, self._python, self._cwd, self._gpu, self._seconds = program, python, cwd, gpu, seconds

    def checks(self, requests: Sequence[CandidateRequest], case: str, hidden: str = "") -> Iterator[Check]:
        """One check for each tool, up to the first that fails.

        Args:
            hidden: a folder that the candidate must not read.

        Raises:
            EnvironmentNotAble: the program observed no kernel.
        """
        for tool in TOOLS:
            wrong = self._wrong(tool, requests, hidden)
            status = CheckStatus.FAILED if wrong else CheckStatus.PASSED
            yield Check(f"{PROGRAM} {tool}", status, case, wrong)
            if wrong:
                return

    def _wrong(self, tool: str, requests: Sequence[CandidateRequest], hidden: str) -> str:
        # The candidate cannot write to the folder of the report.
        with tempfile.TemporaryDirectory(prefix="mtmc-report-") as folder, tempfile.TemporaryDirectory() as scratch:
            file, report = Path(folder, "requests"), Path(folder, "report")
            file.write_bytes(b"".join(encode_request(r.command, to_json(r)) for r in requests))
            code = self._run(tool, file, report, scratch, hidden)
            if code is None:
                return f"it took longer than {self._seconds:.0f} s under {tool}"
            text = report.read_text(encoding="utf-8", errors="replace") if report.exists() else ""
        return error_in_report(tool, text, code)

    def _run(self, tool: str, file: Path, report: Path, scratch: str, hidden: str) -> int | None:
        """The exit code; ``None`` after the time limit."""
        sandbox = asdict(replace(Sandbox(hidden=hidden, gpu=self._gpu, programs=True), writable=(scratch,)))
        command = [self._program, "--tool", tool, "--log-file", str(report), "--target-processes", "application-only"]
        command += [self._python, str(ENTRY), "--once", str(file), "--sandbox", json.dumps(sandbox)]
        env = {**os.environ, **NO_CACHE, **dict.fromkeys(CACHE_VARIABLES, scratch), SCRATCH: scratch}
        env |= {"PYTHONDONTWRITEBYTECODE": "1"} if self._gpu else {"TRITON_INTERPRET": "1"}
        process = subprocess.Popen(
            command,
            cwd=self._cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(self._seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def error_in_report(tool: str, report: str, code: int) -> str:
    """The errors in a report as text; empty without errors.

    Raises:
        EnvironmentNotAble: the program observed no kernel.
    """
    errors = findings(report)
    # Failed GPU calls after the first error are its consequences.
    first = [f for f in errors if not f.title.startswith("Program hit")] or errors
    if first:
        shown = "; ".join(dict.fromkeys(f.text for f in first[:MAX_SHOWN]))
        return f"{shown}{f'; {len(first)} errors in all' if len(first) > 1 else ''}"
    if "SUMMARY" not in report or "before first instrumented API call" in report:
        last = report.strip().splitlines()[-1:] or ["no report"]
        raise EnvironmentNotAble(
            f"{PROGRAM} {tool} observed no kernel (exit code {code}): {last[0].strip('= ')}",
            remedy="Check that compute-sanitizer works on another CUDA program, or leave out --sanitize.",
        )
    if code:
        return f"the candidate failed under {tool} (exit code {code}), although it runs without it"
    return ""


RECORD = re.compile(r"^=========\s(?P<title>\S.*)$")
DETAIL = re.compile(r"^=========\s{2,}(?P<text>\S.*)$")
ERRORS = (
    "Invalid ",
    "Uninitialized ",
    "Misaligned ",
    "Program hit ",
    "Barrier error",
    "Race reported",
    "Fatal",
    "Potential ",
)
"""Beginnings of errors, after the severity. Other lines are about the program itself."""
LOCATIONS = (
    re.compile(r"at (?P<kernel>[^+\s]+?)(?:\(.*\))?\+0x[0-9a-f]+(?: in (?P<line>\S+:\d+))?"),
    re.compile(r"at 0x[0-9a-f]+ in (?P<line>\S+:\d+):(?P<kernel>[^\s(]+)"),
    re.compile(r"at 0x[0-9a-f]+ in (?P<kernel>[^\s(]+)"),
)
"""Formats of newer and older versions."""
ADDRESS = re.compile(r"(?:Address|Access (?:to|at)) 0x[0-9a-f]+.*")


def findings(report: str) -> list[Finding]:
    """The errors of a report, in order."""
    errors: list[Finding] = []
    open_record = False
    for line in report.splitlines():
        record, detail = RECORD.match(line), DETAIL.match(line)
        if record:
            title = record["title"].removeprefix("ERROR: ").removeprefix("Error: ")
            open_record = title.startswith(ERRORS)
            if open_record:
                errors.append(_with_detail(Finding(title), title))
        elif detail and open_record:
            if detail["text"].startswith("Saved host backtrace"):
                open_record = False
                continue
            errors[-1] = _with_detail(errors[-1], detail["text"])
    return errors


def _with_detail(finding: Finding, text: str) -> Finding:
    if not finding.kernel:
        for pattern in LOCATIONS:
            match = pattern.search(text)
            if match:
                return replace(finding, kernel=match["kernel"], line=match.groupdict().get("line") or "")
    match = ADDRESS.search(text)
    if match:
        return replace(finding, address=match[0])
    if finding.address and text.startswith("and is "):
        return replace(finding, address=f"{finding.address} {text}")
    return finding
