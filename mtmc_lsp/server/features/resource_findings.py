"""Findings about the registers of compiled kernels: spills, and few warps on a multiprocessor."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from mtmc_lsp.compile.occupancy import occupancy
from mtmc_lsp.core.results import KernelReport
from mtmc_lsp.core.run import KernelLaunch
from mtmc_lsp.source.lint.finding import Finding, Severity

if TYPE_CHECKING:
    from mtmc_lsp.source.triton.launch_sites import LaunchForm

SPILLS, OCCUPANCY = "register-spills", "low-occupancy"
LEAST_SPILLS = 32
"""Bytes of each thread: fewer cost nothing that a measurement shows."""
LOW_OCCUPANCY = 0.25
"""With fewer warps, loads of others do not hide the time that a load takes."""


def resource_findings(
    location_forms: Sequence[tuple[LaunchForm, list[KernelReport]]], products: Collection[str]
) -> Iterator[Finding]:
    """Findings about the registers of all launch forms of one source location.

    Args:
        products: kernels with products of matrices, which run well with few warps.
    """
    compiled = [(form, [report for report in reports if not report.error]) for form, reports in location_forms]
    if not compiled or not all(reports for _, reports in compiled):
        # An autotuner may choose a form that is not known.
        return
    spilling = [[report for report in reports if (report.spills or 0) >= LEAST_SPILLS] for _, reports in compiled]
    form = compiled[0][0]
    if all(spilling):
        worst = max((report for reports in spilling for report in reports), key=lambda report: report.spills or 0)
        message = (
            f"{described(form.launch, 'num_warps')} spills {worst.spills} bytes of each thread to memory on {worst.arch}"
            f"{_every(compiled)}; use smaller blocks or more warps"
        )
        yield Finding(SPILLS, Severity.HINT, form.start, form.end, message)
        return
    low = [[report for report in reports if _is_low(report)] for _, reports in compiled]
    if all(low) and form.launch.kernel not in products:
        worst = min((report for reports in low for report in reports), key=lambda report: report.occupancy or 0.0)
        without_shared = occupancy(worst.registers or 0, 0, form.launch.num_warps, worst.arch)
        is_shared = without_shared is not None and without_shared > (worst.occupancy or 0.0)
        cause = f"{worst.shared_bytes} bytes of shared memory" if is_shared else f"{worst.registers} registers"
        message = (
            f"{described(form.launch, 'num_warps')} runs at {worst.occupancy:.0%} of the warps that {worst.arch} can hold, "
            f"because of {cause}{_every(compiled)}; use smaller blocks or more warps"
        )
        yield Finding(OCCUPANCY, Severity.HINT, form.start, form.end, message)


def _is_low(report: KernelReport) -> bool:
    return report.occupancy is not None and report.occupancy < LOW_OCCUPANCY


def _every(forms: Sequence[object]) -> str:
    return f", like all {len(forms)} configurations" if len(forms) > 1 else ""


def described(launch: KernelLaunch, option: Literal["num_warps", "num_stages"]) -> str:
    """A launch with its block sizes and one option: ``add_kernel with BLOCK=1024, num_warps=4``."""
    sizes = {
        name: v for name, v in launch.constexprs.items() if isinstance(v, int) and not isinstance(v, bool) and v > 1
    }
    parameters = ", ".join(f"{name}={value}" for name, value in {**sizes, option: getattr(launch, option)}.items())
    return f"{launch.kernel} with {parameters}"
