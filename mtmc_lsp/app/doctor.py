"""Checks what the tool needs from the machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mtmc_lsp.app.interpreter import LEAST, find_python, install_command, is_recent, query_gpus, versions
from mtmc_lsp.app.messages import WORKS, CompilerProbe, InterpreterProbe, SandboxProbe
from mtmc_lsp.capture.module_paths import project_root
from mtmc_lsp.core.chat import ModelFailed, ModelNotUsable
from mtmc_lsp.core.errors import EnvironmentNotAble
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.settings import LlmSettings, read_settings
from mtmc_lsp.llm.endpoint.client import model_name
from mtmc_lsp.llm.endpoint.endpoint import host_of
from mtmc_lsp.llm.endpoint.probe import list_models, probe_abilities
from mtmc_lsp.process import sandbox
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.search.store import Store

Probe = TypeVar("Probe", InterpreterProbe, CompilerProbe, SandboxProbe)

PROBE = Path(__file__).parent / "worker" / "probe.py"
PROBE_SECONDS = 180.0
SHOWN_MODELS = 8
INTERPRETED = "steps are verified by Triton's interpreter and compiled, never timed"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    """What to do if it is not ok."""
    required: bool = True
    """Whether the tool cannot work without it."""


def check_environment(python: str = "") -> Iterator[Finding]:
    """Check everything the tool needs, in the order in which to fix it. The checks run at once, each in its process."""
    here = Path.cwd() / "x.py"
    interpreter = python or find_python(here, read_settings(here.parent))
    try:
        installed = versions(interpreter)
    except EnvironmentNotAble as error:
        yield Finding("python", False, error.message, error.remedy)
        yield _store(here)
        return
    findings = [Finding("python", True, f"{installed['python']} at {interpreter}")]
    for name in LEAST:
        state = installed[name] or "not installed"
        remedy = f"Run: {install_command(interpreter, name)}"
        findings.append(Finding(name, is_recent(name, installed[name]), state, remedy))
    remedy = f"Run: {interpreter} -m pip install numpy"
    findings.append(Finding("numpy", bool(installed["numpy"]), installed["numpy"] or "not installed", remedy))
    with ThreadPoolExecutor() as pool:
        isolation = pool.submit(_isolation, interpreter)
        can_run = all(finding.ok for finding in findings)
        probes = _Probes.start(pool, interpreter) if can_run else None
        yield from findings
        if probes is not None:
            yield from _triton(probes, interpreter)
        yield isolation.result()
    yield _store(here)
    yield from _model(read_settings(here.parent).llm)


def _model(settings: LlmSettings) -> Iterator[Finding]:
    """Check the language model if one is configured; no user code is sent."""
    model = model_name(settings, os.environ)
    if not (model or os.environ.get("OPENAI_BASE_URL")):
        yield Finding("language model", True, "none configured: --planner llm and --coder llm are off", required=False)
        return
    try:
        offered = list_models(settings, os.environ)
    except (ModelNotUsable, ModelFailed) as error:
        yield Finding("language model", False, error.message, error.remedy, required=False)
        return
    names = ", ".join(offered[:SHOWN_MODELS]) + (", ..." if len(offered) > SHOWN_MODELS else "")
    endpoint = host_of(os.environ)
    if model not in offered:
        detail = f"{endpoint} does not offer {model!r}; it offers: {names or 'none'}"
        remedy = "Set MTMC_LLM_MODEL, or model in [tool.mtmc.llm], to one that it offers."
        yield Finding("language model", False, detail, remedy, required=False)
        return
    try:
        abilities = probe_abilities(model, settings, os.environ)
    except (ModelNotUsable, ModelFailed) as error:
        yield Finding("language model", False, error.message, error.remedy, required=False)
        return
    counted = "it reports token counts" if abilities.counts else "it reports no token counts, so budgets use estimates"
    yield Finding("language model", True, f"{model} at {endpoint}; {counted}", required=False)
    for name, wrong, otherwise in (
        ("structured output", abilities.structured, "tool calls" if not abilities.tools else "reading its text"),
        ("tool calls", abilities.tools, "structured output" if not abilities.structured else "reading its text"),
    ):
        yield Finding(
            name, not wrong, wrong or "works", f"Nothing to do: choices are read by {otherwise}.", required=False
        )


@dataclass(frozen=True)
class _Probes:
    """Processes that import torch, which takes seconds; they run side by side."""

    interpreted: Future[InterpreterProbe | str]
    compiled: Future[CompilerProbe | str]

    @classmethod
    def start(cls, pool: ThreadPoolExecutor, interpreter: str) -> _Probes:
        """Start both."""
        return cls(
            pool.submit(_probe, InterpreterProbe, interpreter, "--interpret"),
            pool.submit(_probe, CompilerProbe, interpreter),
        )


def _triton(probes: _Probes, interpreter: str) -> Iterator[Finding]:
    """Checks that need to run Triton."""
    interpreted = probes.interpreted.result()
    works = interpreted if isinstance(interpreted, str) else interpreted.interpreter
    remedy = "Install the newest triton and numpy that your torch allows."
    yield Finding("Triton's interpreter", works == WORKS, works, remedy)
    compiled = probes.compiled.result()
    compilers, gpu = ({"any": compiled}, "") if isinstance(compiled, str) else (compiled.compilers, compiled.gpu)
    for arch, state in compilers.items():
        remedy = "Reinstall triton; it brings the compilers."
        yield Finding(f"compiler for {arch}", state == WORKS, state, remedy, required=False)
    yield Finding("CUDA GPU", bool(gpu), gpu or f"none: {INTERPRETED}", required=False)
    if gpu:
        tried = _probe(SandboxProbe, interpreter, "--sandbox", sandbox.__file__)
        works, level = (tried, "") if isinstance(tried, str) else (tried.cuda, tried.level)
        detail = level if works == WORKS else f"candidates run without a sandbox, because CUDA fails in it: {works}"
        remedy = "Allow reading and writing of /dev/nvidia* and of /dev/shm."
        yield Finding("isolation with CUDA", works == WORKS, detail, remedy, required=False)
    driver = next(iter(query_gpus("driver_version")), "")
    if driver or gpu:
        remedy = "Update the driver, or install a torch built for it."
        yield Finding("NVIDIA driver", bool(driver and gpu), driver or "unknown", remedy, required=False)
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "")
    remedy = "Install gcc: on a GPU, Triton builds its launchers with it."
    yield Finding("C compiler", bool(compiler), compiler or "none", remedy, required=bool(gpu))


def _probe(kind: type[Probe], interpreter: str, *arguments: str) -> Probe | str:
    """The result of the probe, or the last line of its error output if it fails."""
    command = [interpreter, "-W", "ignore", str(PROBE), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True, stdin=subprocess.DEVNULL
        )
    except subprocess.SubprocessError as error:
        lines = str(getattr(error, "stderr", "") or error).strip().splitlines()
        return lines[-1] if lines else "no answer"
    return from_json(kind, json.loads(done.stdout.strip().splitlines()[-1]))


def _isolation(interpreter: str) -> Finding:
    """Check the sandbox of candidates, in a separate process because a process cannot leave its sandbox."""
    done = subprocess.run(
        [interpreter, "-I", sandbox.__file__], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
    )
    level = done.stdout.strip() or "none"
    remedy = "Use Linux 5.13 or newer with Landlock and seccomp."
    return Finding("isolation of candidates", level.startswith("full"), level, remedy, required=False)


def _store(here: Path) -> Finding:
    folder = project_root(here) / FOLDER
    try:
        Store(folder).close()
    except EnvironmentNotAble as error:
        return Finding("store of runs", False, error.message, error.remedy)
    return Finding("store of runs", True, str(folder))
