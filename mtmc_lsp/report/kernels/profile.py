"""What ``mtmc profile FILE::KERNEL`` shows in a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtmc_lsp.app.kernels.profile import KernelProfile
from mtmc_lsp.kernels.messages import Access
from mtmc_lsp.kernels.reading import KernelReading, OperationKind
from mtmc_lsp.report.charts import amount
from mtmc_lsp.report.console import show, show_table

WITHOUT_INPUTS = (
    "read from its text: bytes and access patterns need example inputs above its launcher, as in "
    "# mtmc: x=f32[M,N] M=64 N=1024"
)
WORK = (OperationKind.PRODUCT, OperationKind.REDUCTION, OperationKind.LOOP)


def show_kernel_profile(out: Console, profile: KernelProfile) -> None:
    """Show each kernel: its work at the workload's sizes, its accesses by line, its resources for each architecture."""
    sizes = ", ".join(f"{name}={value}" for name, value in profile.sizes.items())
    for reading in profile.readings:
        launches, accesses = profile.launches_of(reading.name), profile.accesses_of(reading.name)
        heading = f"{reading.name}, launched by {profile.launcher}" if profile.launcher else reading.name
        out.print(Text(f"{heading}{f' with {sizes}' if sizes else ''}", style="bold"))
        for work in launches:
            grid = " x ".join(map(str, work.grid))
            show(out, f"grid {grid}, {work.launch.num_warps} warps: {_constants(work.launch.constexprs)}", indent=2)
        if profile.trace is None:
            reason = f"the call on the example inputs was not observed: {profile.problem}"
            _show_text(out, reading, reason if profile.problem else WITHOUT_INPUTS)
            _show_reports(out, profile, reading)
            continue
        moved, operations = sum(a.bytes for a in accesses), sum(work.operations for work in launches)
        intensity = f", {operations / moved:.1f} FLOP/B" if moved else ""
        show(out, f"{amount(moved, 'B')} accessed and {amount(operations, 'FLOP')}{intensity} per call", indent=2)
        ran, programs = sum(work.ran for work in launches), sum(work.programs for work in launches)
        if ran < programs:
            show(out, f"estimated from {ran} of {programs} program instances", style="dim", indent=2)
        out.print()
        show_table(out, _access_table(reading, accesses))
        for operation in reading.operations:
            if operation.kind in WORK:
                show(out, f"line {operation.line}: {operation.kind.value}, {operation.text}", indent=2, style="dim")
        _show_reports(out, profile, reading)


def _show_text(out: Console, reading: KernelReading, reason: str) -> None:
    """The accesses as they are written, for a kernel that was not observed."""
    show(out, reason, style="dim", indent=2)
    table = Table("line", "", "tensor", "mask", "offset", box=None, padding=(0, 1))
    for operation in reading.operations:
        if operation.kind in (OperationKind.LOAD, OperationKind.STORE, OperationKind.ATOMIC):
            mask = "yes" if operation.mask else "no"
            table.add_row(str(operation.line), operation.kind.value, operation.tensor, mask, operation.index)
    show_table(out, table)
    for operation in reading.operations:
        if operation.kind in WORK:
            show(out, f"line {operation.line}: {operation.kind.value}, {operation.text}", indent=2, style="dim")


def _show_reports(out: Console, profile: KernelProfile, reading: KernelReading) -> None:
    if profile.reports and profile.assumed:
        show(out, f"compiled with usual values: {_constants(profile.assumed)}", indent=2, style="dim")
    for report in profile.reports:
        if report.kernel == reading.name:
            show(out, f"{report.arch}: {report.error or report.summary}", indent=2)


def _constants(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _access_table(reading: KernelReading, accesses: list[Access]) -> Table:
    table = Table("line", "", "tensor", "pattern", "mask", "bytes", "offset", box=None, padding=(0, 1))
    table.columns[5].justify = "right"
    for access in accesses:
        operation = reading.at(access.line, OperationKind(access.operation))
        index = operation.index if operation is not None else ""
        mask = "yes" if access.is_masked else "no"
        moved = amount(access.bytes, "B")
        table.add_row(str(access.line), access.operation, access.tensor, access.pattern, mask, moved, index)
    return table
