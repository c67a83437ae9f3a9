"""``mtmc profile FILE::KERNEL``: what a kernel reads, writes and computes, and what it needs on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from mtmc_lsp.app.kernels.opening import kernels_of
from mtmc_lsp.app.kernels.session import COMPILE_SECONDS, COMPILE_SLACK, KernelSession
from mtmc_lsp.app.target_file import OpenTarget
from mtmc_lsp.capture.module_paths import module_name
from mtmc_lsp.compile.messages import CompileRequest
from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.results import KernelReport
from mtmc_lsp.kernels.messages import Access, CaseTrace, KernelCompileRequest, LaunchWork, TraceCase
from mtmc_lsp.kernels.reading import KernelReading, read_kernels
from mtmc_lsp.kernels.sizes import elements_of
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.source.outline import Outliner
from mtmc_lsp.source.syntax import parse
from mtmc_lsp.source.triton.launch_sites import launch_forms

MOST_FORMS = 4
"""Forms of a launch that are compiled: those with the largest blocks."""
MOST_PROGRAMS = 256
"""Program instances of each grid that run; the others are taken to do the same on average."""
MOST_BYTES = 16e9
"""Limit for the arguments: their memory is reserved and only touched in part."""


@dataclass(frozen=True)
class KernelProfile:
    """A launcher's kernels at the sizes of its workload."""

    launcher: str
    """The function whose call was observed; empty if none was."""
    sizes: Mapping[str, int]
    readings: tuple[KernelReading, ...]
    trace: CaseTrace | None
    """Of a call on the workload; None without example inputs."""
    reports: tuple[KernelReport, ...]
    """Registers, spills and shared memory for each architecture."""
    assumed: Mapping[str, object] = field(default_factory=dict)
    """Compile-time constants with usual values, because neither example inputs nor the file tell them."""
    problem: str = ""
    """Why the call on the workload was not observed; empty if it was, or without example inputs."""

    def accesses_of(self, kernel: str) -> list[Access]:
        """The accesses of a kernel, by line."""
        return [access for access in (self.trace.accesses if self.trace else ()) if access.kernel == kernel]

    def launches_of(self, kernel: str) -> list[LaunchWork]:
        """The launches of a kernel in one call."""
        return [work for work in (self.trace.launches if self.trace else ()) if work.launch.kernel == kernel]


def profile_kernel(session: KernelSession) -> KernelProfile:
    """Observe a sample of the programs at the workload's sizes, and compile the kernels for the project's architectures.

    Raises:
        RequestError: the call raises on the workload, launches no kernel, or is too large.
    """
    target, opened = session.target, session.target.opened
    where = Location(str(opened.path), target.launcher.start_line)
    sizes = dict(target.workload.sizes)
    if 4 * elements_of(target.workload, sizes) > MOST_BYTES:
        raise RequestError("the workload is too large to be observed", where=where, remedy="Make its sizes smaller.")
    traces = session.trace(opened.text, [TraceCase(sizes)], most_programs=MOST_PROGRAMS)
    trace = traces[0]
    raised = next((fault for fault in trace.faults if fault.kind.value == "raises"), None)
    if raised is not None:
        raise RequestError(
            f"{target.launcher.qualname} raises on its workload: {raised.detail}",
            where=where,
            remedy="Change the workload.",
        )
    if trace.refusal:
        return replace(read_profile(opened), problem=trace.refusal)
    if not trace.launches:
        raise RequestError(
            f"{target.launcher.qualname} launches no kernel on its workload",
            where=where,
            remedy="Name the function that launches the kernel.",
        )
    launches = tuple({repr(work.launch): work.launch for work in trace.launches}.values())
    text, path = opened.text.decode(), str(opened.path)
    request = CompileRequest(path, module_name(opened.path), text, launches, opened.settings.archs, COMPILE_SECONDS)
    report = session.compile(request)
    names = tuple(dict.fromkeys(launch.kernel for launch in launches))
    return KernelProfile(
        target.launcher.qualname, sizes, tuple(read_kernels(path, opened.text, names)), trace, report.kernels
    )


def read_profile(opened: OpenTarget, worker: Worker | None = None) -> KernelProfile:
    """Kernels without example inputs: their operations by the text, compiled in the forms that the file launches or tunes.

    Args:
        worker: a worker that has imported the package already; None for a new one.

    Raises:
        RequestError: the file defines no such kernel.
    """
    path, names = str(opened.path), kernels_of(opened)
    readings = tuple(read_kernels(path, opened.text, names)) if names else ()
    if not readings:
        raise RequestError(
            f"{opened.qualname} is no Triton kernel",
            where=Location(path, opened.definition.start_line),
            remedy="Name a @triton.jit kernel, or the function that launches it.",
        )
    outline = Outliner(path).outline(opened.text, parse(opened.text))
    known, guessed = launch_forms(outline, path), launch_forms(outline, path, assumes=True)
    forms = []
    for name in names:
        own = [form for form in known if form.launch.kernel == name][:MOST_FORMS]
        forms += own or [form for form in guessed if form.launch.kernel == name][-1:]
    launches = tuple(form.launch for form in forms)
    reports: tuple[KernelReport, ...] = ()
    if launches:
        request = CompileRequest(
            path, module_name(opened.path), opened.text.decode(), launches, opened.settings.archs[:1], COMPILE_SECONDS
        )
        with nullcontext(worker) if worker is not None else Worker(opened.python, cwd=str(opened.project)) as used:
            reports = used.call(KernelCompileRequest(request), COMPILE_SECONDS + COMPILE_SLACK).kernels
    assumed = {item: form.launch.constexprs[item] for form in forms for item in form.assumed}
    return KernelProfile("", {}, readings, None, reports, assumed)
