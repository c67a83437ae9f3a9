"""A target's profile for the terminal and as a page."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.profile import Profile
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.report.charts import amount
from mtmc_lsp.report.console import show, show_table
from mtmc_lsp.report.page import Page, escape, figure, table
from mtmc_lsp.report.roofline_chart import Point, roofline

MAX_ROWS = 20
"""Maximum number of operators or kernels shown in the terminal."""
MIN_SHARE = 0.01
"""Minimum share of the total time for an operator to appear in the plot."""
ROOFLINE = "roofline"


def show_profile(out: Console, name: str, capture: Capture, profile: Profile, device: DeviceModel) -> None:
    """Show the summary, the operators and the kernels."""
    out.print(Text(f"{name}  {_where(capture)}", style="bold"))
    for line in summary_lines(profile, device):
        show(out, line, indent=2)
    for note in profile.notes:
        show(out, note, style="yellow", indent=2)
    head, rows = operator_table(profile)
    _print(out, head, rows)
    head, rows = kernel_table(profile)
    if rows:
        _print(out, head, rows)


def _where(capture: Capture) -> str:
    env = capture.environment
    return f"{env.gpu or 'CPU'}, torch {env.torch}, triton {env.triton}"


def summary_lines(profile: Profile, device: DeviceModel) -> list[str]:
    """Summary of one call."""
    work = f"at least {amount(profile.work.bytes, 'B')} and {amount(profile.work.flops, 'FLOP')} per call"
    if profile.device == "cpu":
        return [f"{profile.wall_us:.1f} us per call on the CPU, median of at least {profile.calls} calls", work]
    ceilings = "measured" if device.is_calibrated else "data sheet"
    part = f", {profile.roofline:.0%} of the roofline ({ceilings})" if profile.roofline is not None else ""
    return [
        f"{profile.wall_us:.1f} us per call by the host clock; the GPU is busy for {profile.gpu_us:.1f} us{part}",
        f"{profile.launches:.0f} kernels per call; the GPU is idle for {profile.gap_us:.1f} us between them",
        work,
    ]


def operator_table(profile: Profile) -> tuple[list[str], list[list[str]]]:
    """Operators, most expensive first."""
    on_gpu = profile.device == "cuda"
    total = sum(row.gpu_us if on_gpu else row.cpu_us for row in profile.operators) or 1.0
    head = [
        "operator",
        "lines",
        "calls",
        "GPU us" if on_gpu else "CPU us",
        "share",
        "host us",
        "bytes",
        "operations",
        "roofline",
    ]
    if not on_gpu:
        del head[5], head[-1]
    rows = []
    for row in profile.operators:
        time_us = row.gpu_us if on_gpu else row.cpu_us
        work = [amount(row.work.bytes, "B"), amount(row.work.flops, "FLOP")] if row.work is not None else ["", ""]
        cells = [
            row.name,
            ", ".join(map(str, row.lines)),
            f"{row.calls:.0f}",
            f"{time_us:.1f}",
            f"{time_us / total:.0%}",
        ]
        cells += [f"{row.cpu_us:.1f}", *work, "" if row.roofline is None else f"{row.roofline:.0%}"] if on_gpu else work
        rows.append(cells)
    return head, rows


def kernel_table(profile: Profile) -> tuple[list[str], list[list[str]]]:
    """Kernels, most expensive first; empty without a GPU."""
    has_counters = any(kernel.bytes is not None for kernel in profile.kernels)
    head = ["kernel", "launches", "us", *(["bytes", "of memory", "of compute"] if has_counters else [])]
    rows = []
    for kernel in profile.kernels:
        cells = [kernel.name, f"{kernel.calls:.0f}", f"{kernel.us:.1f}"]
        if has_counters:
            cells.append("" if kernel.bytes is None else amount(kernel.bytes, "B"))
            cells += ["" if part is None else f"{part:.0%}" for part in (kernel.of_memory, kernel.of_compute)]
        rows.append(cells)
    return head, rows


def _print(out: Console, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    grid = Table(*head, box=None, padding=(0, 1))
    for column in grid.columns[2 if head[0] == "operator" else 1 :]:
        column.justify = "right"
    for row in rows[:MAX_ROWS]:
        grid.add_row(*row)
    out.print()
    show_table(out, grid)
    if len(rows) > MAX_ROWS:
        out.print(Text(f" and {len(rows) - MAX_ROWS} more, see --json", style="dim"))


def profile_page(name: str, capture: Capture, profile: Profile, device: DeviceModel) -> Page:
    """The profile as a page, with the call and its operators in a roofline plot."""
    lines = [*summary_lines(profile, device), *profile.notes]
    sections = [f"<h1>{escape(name)}</h1>", f"<p>{escape(_where(capture))}</p>"]
    sections.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>")
    charts = {}
    points = _points(profile)
    if points:
        caption = f"Bytes and operations are computed from the graph; the ceilings are those of {device.title}"
        if profile.device == "cpu":
            caption += "; nothing was timed on a GPU, so the points are estimates at the bound"
        sections += ["<h2>Roofline</h2>", figure(ROOFLINE, caption)]
        charts[ROOFLINE] = roofline(points, device)
    for title, (head, rows) in (("Operators", operator_table(profile)), ("Kernels", kernel_table(profile))):
        if rows:
            sections += [f"<h2>{title}</h2>", table(head, rows, classes=("word", *["number"] * (len(head) - 1)))]
    return Page(f"{name}: profile", "\n".join(sections), charts)


def _points(profile: Profile) -> list[Point]:
    """The whole call, and the operators above the minimum share."""
    on_gpu = profile.device == "cuda"
    total = sum(row.gpu_us if on_gpu else row.cpu_us for row in profile.operators) or 1.0
    points = [Point("whole call", profile.work.flops, profile.work.bytes, profile.gpu_us * 1e-6 if on_gpu else None)]
    for row in profile.operators:
        time_us = row.gpu_us if on_gpu else row.cpu_us
        if row.work is not None and row.work.bytes and time_us / total >= MIN_SHARE:
            points.append(Point(row.name, row.work.flops, row.work.bytes, row.gpu_us * 1e-6 if on_gpu else None))
    return points
