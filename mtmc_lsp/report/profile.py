"""A target's profile, on a terminal and as a page."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.profile import Profile
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.report.charts import Point, amount, roofline
from mtmc_lsp.report.page import Page, escape, figure, table

SHOWN = 20
"""Operators and kernels that a terminal shows."""
LEAST_SHARE = 0.01
"""Part of all time below which an operator is no point of the plot."""
ROOFLINE = "roofline"


def show_profile(out: Console, name: str, capture: Capture, found: Profile, device: DeviceModel) -> None:
    """The call as a whole, then its operators and kernels."""
    out.print(Text(f"{name}  {_where(capture)}", style="bold"))
    for line in summary_lines(found, device):
        out.print(f"  {line}")
    for note in found.notes:
        out.print(Text(f"  {note}", style="yellow"))
    head, rows = operator_table(found)
    _print(out, head, rows)
    head, rows = kernel_table(found)
    if rows:
        _print(out, head, rows)


def _where(capture: Capture) -> str:
    env = capture.environment
    return f"{env.gpu or 'CPU'}, torch {env.torch}, triton {env.triton}"


def summary_lines(found: Profile, device: DeviceModel) -> list[str]:
    """The call as a whole, in words."""
    work = f"at least {amount(found.work.bytes, 'B')} and {amount(found.work.flops, 'FLOP')} a call"
    if found.device == "cpu":
        return [f"{found.wall_us:.1f} us a call on the CPU, median of {found.calls} or more", work]
    ceilings = "measured" if device.is_calibrated else "data sheet"
    part = f", {found.roofline:.0%} of the roofline ({ceilings})" if found.roofline is not None else ""
    return [
        f"{found.wall_us:.1f} us a call on the host's clock; the GPU computes for {found.gpu_us:.1f} us of it{part}",
        f"{found.launches:.0f} kernels a call; between them the GPU waits for {found.gap_us:.1f} us",
        work,
    ]


def operator_table(found: Profile) -> tuple[list[str], list[list[str]]]:
    """Operators, the most expensive first."""
    on_gpu = found.device == "cuda"
    total = sum(row.gpu_us if on_gpu else row.cpu_us for row in found.operators) or 1.0
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
    for row in found.operators:
        own = row.gpu_us if on_gpu else row.cpu_us
        work = [amount(row.work.bytes, "B"), amount(row.work.flops, "FLOP")] if row.work is not None else ["", ""]
        cells = [row.name, ", ".join(map(str, row.lines)), f"{row.calls:.0f}", f"{own:.1f}", f"{own / total:.0%}"]
        cells += [f"{row.cpu_us:.1f}", *work, "" if row.roofline is None else f"{row.roofline:.0%}"] if on_gpu else work
        rows.append(cells)
    return head, rows


def kernel_table(found: Profile) -> tuple[list[str], list[list[str]]]:
    """Kernels, the most expensive first; empty without a GPU."""
    counted = any(kernel.bytes is not None for kernel in found.kernels)
    head = ["kernel", "launches", "us", *(["bytes", "of memory", "of compute"] if counted else [])]
    rows = []
    for kernel in found.kernels:
        cells = [kernel.name, f"{kernel.calls:.0f}", f"{kernel.us:.1f}"]
        if counted:
            cells.append("" if kernel.bytes is None else amount(kernel.bytes, "B"))
            cells += ["" if part is None else f"{part:.0%}" for part in (kernel.of_memory, kernel.of_compute)]
        rows.append(cells)
    return head, rows


def _print(out: Console, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    shown = Table(*head, box=None, padding=(0, 1))
    for column in shown.columns[2 if head[0] == "operator" else 1 :]:
        column.justify = "right"
    for row in rows[:SHOWN]:
        shown.add_row(*row)
    out.print()
    out.print(shown)
    if len(rows) > SHOWN:
        out.print(Text(f" and {len(rows) - SHOWN} more, see --json", style="dim"))


def profile_page(name: str, capture: Capture, found: Profile, device: DeviceModel) -> Page:
    """The profile as a page, with the whole call and its operators on the roofline."""
    lines = [*summary_lines(found, device), *found.notes]
    sections = [f"<h1>{escape(name)}</h1>", f"<p>{escape(_where(capture))}</p>"]
    sections.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>")
    charts = {}
    points = _points(found)
    if points:
        caption = f"Bytes and operations are what the graph needs, the ceilings are those of {device.title}"
        if found.device == "cpu":
            caption += "; nothing was timed on a GPU, so the points stand on the bound, an estimate"
        sections += ["<h2>Roofline</h2>", figure(ROOFLINE, caption)]
        charts[ROOFLINE] = roofline(points, device)
    for title, (head, rows) in (("Operators", operator_table(found)), ("Kernels", kernel_table(found))):
        if rows:
            sections += [f"<h2>{title}</h2>", table(head, rows, classes=("word", *["number"] * (len(head) - 1)))]
    return Page(f"{name}: profile", "\n".join(sections), charts)


def _points(found: Profile) -> list[Point]:
    """The whole call, and the operators that matter."""
    on_gpu = found.device == "cuda"
    total = sum(row.gpu_us if on_gpu else row.cpu_us for row in found.operators) or 1.0
    points = [Point("whole call", found.work.flops, found.work.bytes, found.gpu_us * 1e-6 if on_gpu else None)]
    for row in found.operators:
        own = row.gpu_us if on_gpu else row.cpu_us
        if row.work is not None and row.work.bytes and own / total >= LEAST_SHARE:
            points.append(Point(row.name, row.work.flops, row.work.bytes, row.gpu_us * 1e-6 if on_gpu else None))
    return points
