"""Opens a kernel that is already in a file: its launcher, its workload and its reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtmc_lsp.app.target_file import OpenTarget
from mtmc_lsp.capture.client import find_workload
from mtmc_lsp.capture.recorded_calls import RECORDS
from mtmc_lsp.capture.recorded_launches import LAUNCHES, RecordedKernel, find_launches, launch_workloads
from mtmc_lsp.core.errors import Location, NoWorkload, RequestError
from mtmc_lsp.core.workload import Target, TargetKind, Workload, WorkloadSource
from mtmc_lsp.kernels.repairs.site import sites_of
from mtmc_lsp.kernels.sizes import elements_of
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.source.blocks import without_blocks
from mtmc_lsp.source.syntax import line_of
from mtmc_lsp.source.targets import find_target, find_targets
from mtmc_lsp.source.triton.drivers import find_driver
from mtmc_lsp.source.workload.directive import parse_directive, reference_name


class NoLauncher(RequestError):
    """Nothing in the file launches a kernel."""


@dataclass(frozen=True)
class KernelTarget:
    """A launcher with its kernels, its workload and its reference."""

    opened: OpenTarget
    launcher: Target
    workload: Workload
    reference: Workload | None
    """Of the function with the expected results; None if the file names none."""
    observed: Workload | None = None
    """A workload with smaller tensors, for observation; None if they follow from the named sizes of ``workload``."""

    @property
    def observed_workload(self) -> Workload:
        """The workload that cases are derived from."""
        return self.observed or self.workload


def open_kernel(opened: OpenTarget) -> KernelTarget:
    """The launcher, the workload and the reference of a kernel, or of the function that launches it.

    Raises:
        RequestError: nothing launches the kernel, or the reference does not exist or takes other arguments.
        NoWorkload: neither the launcher nor the reference has example inputs.
    """
    path, text = str(opened.path), opened.text
    launcher = _launcher(opened)
    if launcher is None:
        return _launched(opened) or _driven(opened, _driver(opened, opened.definition.qualname))
    name = reference_name(text, launcher, path) or reference_name(text, opened.definition, path)
    reference = None
    if name:
        try:
            reference = find_target(text, path, name)
        except RequestError:
            raise RequestError(
                f"the directive names the reference {name}, which the file does not define",
                where=Location(path, launcher.start_line),
                remedy="Name a PyTorch function of the same file: # mtmc: reference=NAME.",
            ) from None
    records = opened.project / FOLDER / RECORDS
    workload = parse_directive(text, launcher, path)
    if workload is None and reference is not None:
        described = find_workload(path, text, reference, records)
        return KernelTarget(opened, launcher, _for_target(described, launcher, text), described)
    if workload is None:
        try:
            workload = find_workload(path, text, launcher, records)
        except NoWorkload:
            if reference is not None:
                raise
            launched = _launched(opened)
            driver = None if launched is not None else _driver(opened, launcher.qualname)
            if launched is None and driver is None:
                raise
            return launched or _driven(opened, driver)
    expected = _for_target(workload, reference, text) if reference is not None else None
    return KernelTarget(opened, launcher, workload, expected)


def _launched(opened: OpenTarget) -> KernelTarget | None:
    """A kernel with its recorded launches: the most frequent one is timed, the one with the smallest tensors is observed.

    Raises:
        NoWorkload: no recorded launch can be repeated.
    """
    target = opened.definition
    if target.kind is not TargetKind.KERNEL:
        return None
    recorded = find_launches(target, opened.project / FOLDER / LAUNCHES)
    if recorded is None:
        return None
    workloads = launch_workloads(target, recorded)
    if not workloads:
        raise _not_repeatable(opened, recorded)
    smallest = min(workloads, key=lambda workload: elements_of(workload, {}))
    return KernelTarget(opened, target, workloads[0], None, smallest)


def _not_repeatable(opened: OpenTarget, recorded: RecordedKernel) -> NoWorkload:
    return NoWorkload(
        f"none of the {recorded.count} recorded launches of {recorded.qualname} can be repeated: "
        f"{recorded.launches[0].unusable}",
        where=Location(str(opened.path), opened.definition.start_line),
        remedy="Write a function that launches it, with a directive such as # mtmc: x=f32[M,N] M=64 N=1024.",
    )


def _driver(opened: OpenTarget, name: str) -> Target | None:
    """The function without parameters that calls a launcher or a kernel: a test, a benchmark or a main function."""
    last = name.rpartition(".")[2]
    names = {name.partition(".")[0], last}
    return find_driver(opened.text, str(opened.path), names)


def _driven(opened: OpenTarget, driver: Target | None) -> KernelTarget:
    if driver is None:
        definition = opened.definition
        raise NoLauncher(
            f"no function of the file launches {definition.qualname}",
            where=Location(str(opened.path), definition.start_line),
            remedy="Write a function that launches it, with a directive such as # mtmc: x=f32[M,N] M=64 N=1024,\n"
            "  or record its launches: mtmc record -- python your_program.py",
        )
    assumed = (f"the inputs are those of {driver.qualname}, which calls the kernel",)
    return KernelTarget(opened, driver, Workload(driver, WorkloadSource.SCRIPT, assumed=assumed), None)


def _launcher(opened: OpenTarget) -> Target | None:
    """The function that launches the kernel; None if no function that can be a target does."""
    definition, path = opened.definition, str(opened.path)
    if definition.kind is TargetKind.FUNCTION:
        return definition
    if definition.kind is not TargetKind.KERNEL:
        raise RequestError(
            f"{definition.qualname} is no kernel and no function",
            where=Location(path, definition.start_line),
            remedy="Name a @triton.jit kernel, or the function that launches it.",
        )
    sites = sites_of(path, opened.text, [definition.qualname.rpartition(".")[2]])
    lines = [line_of(launch.call) for site in sites for launch in site.launches]
    functions = [item for item in find_targets(opened.text, path) if item.kind is TargetKind.FUNCTION]
    launching = [item for item in functions if any(item.start_line <= line <= item.end_line for line in lines)]
    described = [item for item in launching if parse_directive(opened.text, item, path) is not None]
    return next(iter(described or launching), None)


def _for_target(workload: Workload, target: Target, text: bytes) -> Workload:
    """The workload with another target, whose parameters get the arguments by position.

    Raises:
        RequestError: the other target takes another number of arguments.
    """
    from mtmc_lsp.source.workload.signatures import signature_of

    signature = signature_of(text, target)
    names = [parameter.name for parameter in signature.parameters] if signature is not None else []
    by_name = {argument.name for argument in workload.arguments}
    if by_name <= set(names):
        return replace(workload, target=target)
    if len(names) < len(workload.arguments):
        raise RequestError(
            f"{target.qualname} takes {len(names)} arguments, and {workload.target.qualname} takes "
            f"{len(workload.arguments)}",
            where=Location(target.path, target.start_line),
            remedy="Give both the same parameters.",
        )
    arguments = tuple(replace(argument, name=name) for argument, name in zip(workload.arguments, names, strict=False))
    return replace(workload, target=target, arguments=arguments)


def is_kernel_target(opened: OpenTarget) -> bool:
    """Whether a target is a kernel, or a function that launches kernels of its file: the kernels are what is optimised."""
    return bool(kernels_of(opened))


def kernels_of(opened: OpenTarget) -> tuple[str, ...]:
    """The kernel that a target is, or those of its file that it launches; empty for other targets."""
    definition = opened.definition
    if definition.kind is TargetKind.KERNEL:
        return (opened.qualname.rpartition(".")[2],)
    if definition.kind is not TargetKind.FUNCTION:
        return ()
    # Generated kernels belong to their targets.
    text = without_blocks(opened.text, marked_imports=True)
    lines = range(definition.start_line, definition.end_line + 1)
    sites = sites_of(str(opened.path), opened.text)
    names = {site.kernel.name for site in sites_of(str(opened.path), text)}
    own = (site for site in sites if site.kernel.name in names)
    return tuple(site.kernel.name for site in own if any(line_of(launch.call) in lines for launch in site.launches))
