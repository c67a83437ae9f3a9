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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mtmc_lsp.core.errors import EnvironmentNotAble
from mtmc_lsp.core.results import Check, CheckStatus
from mtmc_lsp.process.fork_server import ENTRY
from mtmc_lsp.process.worker_process import CACHE_VARIABLES, SCRATCH, Sandbox

PROGRAM = "compute-sanitizer"
USUAL_PLACE = "/usr/local/cuda/bin"
TOOLS = ("memcheck", "initcheck", "racecheck")
"""Accesses beyond memory, reads of memory that nobody wrote, and races in shared memory."""
SECONDS = 600.0
"""For one tool: kernels take up to a hundred times as long."""
REMEDY = "Install NVIDIA's CUDA toolkit (or the package cuda-sanitizer), put compute-sanitizer on PATH, or leave out --sanitize."
NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Else torch's pool is one allocation, within which nothing is out of bounds."""
SHOWN = 3
"""Errors that are told in full."""


@dataclass(frozen=True)
class Finding:
    """One error of a report."""

    title: str
    kernel: str = ""
    place: str = ""
    """File and line, where the kernel has line numbers."""
    address: str = ""

    @property
    def text(self) -> str:
        """The error in one line."""
        where = f" in {self.kernel}" if self.kernel else ""
        return f"{self.title}{where}{f' ({self.place})' if self.place else ''}{f', {self.address}' if self.address else ''}"


def find_sanitizer() -> str:
    """The program's path.

    Raises:
        EnvironmentNotAble: it is not installed.
    """
    found = shutil.which(PROGRAM) or shutil.which(PROGRAM, path=USUAL_PLACE)
    if found is None:
        raise EnvironmentNotAble(f"--sanitize needs {PROGRAM}, which is not installed", remedy=REMEDY)
    return found


class Sanitizer:
    """Runs requests to a candidate's process under each tool, locked in as ever."""

    def __init__(self, program: str, python: str, cwd: str, *, gpu: bool, seconds: float = SECONDS) -> None:
        """Note what is run.

        Args:
            program: the path of ``compute-sanitizer``.
            python: the user's interpreter.
            cwd: the candidate's project.
            gpu: whether the process needs a GPU's devices.
            seconds: limit for one tool.
        """
        self._program, self._python, self._cwd, self._gpu, self._seconds = program, python, cwd, gpu, seconds

    def checks(self, requests: Sequence[Mapping[str, object]], case: str, hidden: str = "") -> Iterator[Check]:
        """One check for each tool, up to the first that fails.

        Args:
            requests: of the command ``measure.pair``.
            case: what they are about, in words.
            hidden: a folder that the candidate may not read.

        Raises:
            EnvironmentNotAble: the program did not look at anything.
        """
        for tool in TOOLS:
            wrong = self._wrong(tool, requests, hidden)
            status = CheckStatus.FAILED if wrong else CheckStatus.PASSED
            yield Check(f"{PROGRAM} {tool}", status, case, wrong)
            if wrong:
                return

    def _wrong(self, tool: str, requests: Sequence[Mapping[str, object]], hidden: str) -> str:
        # The report lies where the candidate cannot write.
        with tempfile.TemporaryDirectory(prefix="mtmc-report-") as kept, tempfile.TemporaryDirectory() as scratch:
            lines = [json.dumps({"command": "measure.pair", "request": {**r, "sanitized": True}}) for r in requests]
            asked, report = Path(kept, "requests"), Path(kept, "report")
            asked.write_text("\n".join(lines), encoding="utf-8")
            code = self._run(tool, asked, report, scratch, hidden)
            if code is None:
                return f"it took longer than {self._seconds:.0f} s under {tool}"
            text = report.read_text(encoding="utf-8", errors="replace") if report.exists() else ""
        return judged(tool, text, code)

    def _run(self, tool: str, asked: Path, report: Path, scratch: str, hidden: str) -> int | None:
        """The exit code; ``None`` where it took too long."""
        sandbox = asdict(replace(Sandbox(hidden=hidden, gpu=self._gpu, programs=True), writable=(scratch,)))
        command = [self._program, "--tool", tool, "--log-file", str(report), "--target-processes", "application-only"]
        command += [self._python, str(ENTRY), "--once", str(asked), "--sandbox", json.dumps(sandbox)]
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


def judged(tool: str, report: str, code: int) -> str:
    """What is wrong according to a report; empty where nothing is.

    Raises:
        EnvironmentNotAble: the program did not look at anything.
    """
    found = findings(report)
    # What follows from an error on the GPU says nothing new.
    first = [f for f in found if not f.title.startswith("Program hit")] or found
    if first:
        shown = "; ".join(dict.fromkeys(f.text for f in first[:SHOWN]))
        return f"{shown}{f'; {len(first)} errors in all' if len(first) > 1 else ''}"
    if "SUMMARY" not in report or "before first instrumented API call" in report:
        said = report.strip().splitlines()[-1:] or ["no report"]
        raise EnvironmentNotAble(
            f"{PROGRAM} {tool} did not look at any kernel (exit code {code}): {said[0].strip('= ')}",
            remedy="See whether compute-sanitizer runs on a CUDA program here, or leave out --sanitize.",
        )
    if code:
        return f"the candidate failed under {tool} (exit code {code}), although it runs without"
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
"""How errors begin, after a severity; all else that the program says is about itself."""
PLACES = (
    re.compile(r"at (?P<kernel>[^+\s]+?)(?:\(.*\))?\+0x[0-9a-f]+(?: in (?P<place>\S+:\d+))?"),
    re.compile(r"at 0x[0-9a-f]+ in (?P<place>\S+:\d+):(?P<kernel>[^\s(]+)"),
    re.compile(r"at 0x[0-9a-f]+ in (?P<kernel>[^\s(]+)"),
)
"""Of newer and older versions."""
ADDRESS = re.compile(r"(?:Address|Access (?:to|at)) 0x[0-9a-f]+.*")


def findings(report: str) -> list[Finding]:
    """The errors of a report, in its order."""
    found: list[Finding] = []
    open_record = False
    for line in report.splitlines():
        record, detail = RECORD.match(line), DETAIL.match(line)
        if record:
            title = record["title"].removeprefix("ERROR: ").removeprefix("Error: ")
            open_record = title.startswith(ERRORS)
            if open_record:
                found.append(_placed(Finding(title), title))
        elif detail and open_record:
            if detail["text"].startswith("Saved host backtrace"):
                open_record = False
                continue
            found[-1] = _placed(found[-1], detail["text"])
    return found


def _placed(finding: Finding, text: str) -> Finding:
    if not finding.kernel:
        for pattern in PLACES:
            match = pattern.search(text)
            if match:
                return replace(finding, kernel=match["kernel"], place=match.groupdict().get("place") or "")
    match = ADDRESS.search(text)
    if match:
        return replace(finding, address=match[0])
    if finding.address and text.startswith("and is "):
        return replace(finding, address=f"{finding.address} {text}")
    return finding
